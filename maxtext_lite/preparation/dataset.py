"""Preparation of a whole dataset, or of one share of it, by several processes, and the display of its progress."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.tokenizer import Tokenizer, load_tokenizer
from maxtext_lite.preparation.journal import Journal, Outcome
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.preparation.shards import Entry, Workshop, document_reader, run_task
from maxtext_lite.preparation.tasks import Task, find_inputs, split_into_tasks

_MEGABYTE = 2**20
_SECONDS_BETWEEN_LINES = 30.0


def prepare_dataset(
    config: PrepareConfig,
    *,
    tokenizer: Tokenizer | None = None,
    share: tuple[int, int] = (0, 1),
    say: Callable[[str], None] = lambda line: None,
) -> Outcome | None:
    """Writes a prepared dataset, or continues one. Its bytes depend only on the config and the inputs.

    Args:
      tokenizer: the config's, if it is already loaded; it is then used in this process, with all its threads.
      share: (i, n): only tasks i, i + n, i + 2 n ...; several processes may each do one share at once.
      say: called with the progress.
    Returns:
      The dataset; None if tasks of other shares are not done yet.
    Raises:
      UserError: an input, the tokenizer or the output is invalid, or another process writes to the output.
    """
    encoder = TextEncoder(config, tokenizer or load_tokenizer(config))
    files = find_inputs(config.input)
    tasks = split_into_tasks(files, task_bytes=config.task_megabytes * _MEGABYTE, field=config.field)
    journal = Journal(config, files, tasks, encoder)
    if journal.is_complete():
        say(f"{config.output} is complete: it was prepared from these inputs before")
        return journal.outcome()
    number, of = share
    with journal.hold(shared=of > 1):
        done = range(len(tasks)) if journal.is_complete() else journal.done()  # another process may have just finished
        todo = [task for task in tasks[number::of] if task.number not in done]
        progress = Progress(todo, say=say, before=len(tasks[number::of]) - len(todo))
        if tokenizer:
            reader = document_reader(config, encoder)
            running = (run_task(task, journal.workshop, reader) for task in todo)
        else:
            running = run_in_processes(todo, journal.workshop, config, encoder)
        with progress:
            for entry in running:
                journal.record(entry)
                progress.add(entry)
        if todo:
            say(progress.text())
        return journal.finish()


def run_in_processes(
    tasks: Sequence[Task], workshop: Workshop, config: PrepareConfig, encoder: TextEncoder
) -> Iterator[Entry]:
    """Executes tasks in `num_workers` processes, each with a single thread; the result does not depend on their number.

    Raises:
      UserError: from a task.
      RuntimeError: a worker was killed.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    num_workers = config.num_workers if config.num_workers > 0 else cores
    not_ours = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), _begin_worker, (workshop, config, encoder)
    )
    try:
        for future in as_completed([executor.submit(_run_in_worker, task) for task in tasks]):
            yield future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker of prepare was killed, as happens where the memory is full: set fewer num_workers. The same "
            "command continues from here."
        ) from None
    except BaseException:  # the others would first finish their tasks, which nobody records
        for worker in set(multiprocessing.active_children()) - not_ours:
            worker.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _begin_worker(workshop: Workshop, config: PrepareConfig, encoder: TextEncoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent decides
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _of_worker.extend((workshop, document_reader(config, encoder)))


_of_worker: list[Any] = []


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_in_worker(task: Task) -> Entry:
    return run_task(task, *_of_worker)


class Progress:
    """Counts finished work and shows it within its context: a bar on a terminal, otherwise a line at times.

    Args:
      tasks: the tasks to do; before: the number of tasks done earlier.
      say: called with lines if there is no terminal.
    """

    def __init__(self, tasks: Sequence[Task], *, say: Callable[[str], None], before: int) -> None:
        self._sizes = {task.number: task.num_bytes for task in tasks}
        self._num_bytes = max(sum(self._sizes.values()), 1)
        self._say = say
        self._bytes_done = 0
        self._tasks_done = 0
        self._tokens = 0
        self._cpu_seconds = 0.0
        self._start = self._said = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._bar: Any = None
        if before:
            say(f"{before} of {before + len(tasks)} tasks were already done; continuing with the others")

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %  {task.description}"))
            self._bar = self._stack.enter_context(Bar(*columns))
            self._bar.add_task("", total=self._num_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, entry: Entry) -> None:
        """Counts and shows a finished task."""
        self._cpu_seconds += entry.cpu_seconds
        self._bytes_done += self._sizes[entry.number]
        self._tasks_done += 1
        self._tokens += entry.shard.tokens if entry.shard else 0
        if self._bar is not None:
            self._bar.update(0, completed=self._bytes_done, description=self.text())
        elif time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            self._say(self.text())

    def text(self) -> str:
        """`3 of 17 tasks, 12,345,678 tokens, 1,234,567 tokens/s/core, about 2 minutes left`."""
        parts = [f"{self._tasks_done} of {len(self._sizes)} tasks", f"{self._tokens:,} tokens"]
        if self._cpu_seconds:
            parts.append(f"{self._tokens / self._cpu_seconds:,.0f} tokens/s/core")
        if 0 < self._bytes_done < self._num_bytes:
            seconds = (time.monotonic() - self._start) * (self._num_bytes / self._bytes_done - 1)
            left = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
            parts.append(f"about {left} left")
        return ", ".join(parts)
