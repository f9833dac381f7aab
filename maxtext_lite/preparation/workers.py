"""Tasks executed by several processes, or by this one; the result does not depend on their number."""

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from maxtext_lite.config import UserError
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.tokenizer import load_tokenizer
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.preparation.reading import DocumentReader
from maxtext_lite.preparation.shards import Entry, Workshop, document_reader, run_task
from maxtext_lite.preparation.tasks import Task


class Made(NamedTuple):
    """A finished task, and the CPU time that it took."""

    entry: Entry
    cpu_seconds: float


def run_here(tasks: Sequence[Task], workshop: Workshop, config: PrepareConfig, encoder: TextEncoder) -> Iterator[Made]:
    """Executes tasks in this process, one after the other; the tokenizer's library may use several threads."""
    reader = document_reader(config, encoder)
    for task in tasks:
        yield _run(task, workshop, reader)


def run_in_processes(
    tasks: Sequence[Task], workshop: Workshop, config: PrepareConfig, fingerprint: str, *, num_workers: int
) -> Iterator[Made]:
    """Executes tasks in several processes, each with its own tokenizer and a single thread.

    Args:
      fingerprint: the tokenizer's, which each worker must find.
    Raises:
      UserError: from a task.
      RuntimeError: a worker was killed.
    """
    not_ours = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), _begin_worker, (workshop, config, fingerprint)
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


def _run(task: Task, workshop: Workshop, reader: DocumentReader) -> Made:
    start = time.process_time()
    entry = run_task(task, workshop, reader)
    return Made(entry, time.process_time() - start)


_of_worker: list[tuple[Workshop, PrepareConfig, str]] = []


def _begin_worker(workshop: Workshop, config: PrepareConfig, fingerprint: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent decides
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _of_worker.append((workshop, config, fingerprint))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_in_worker(task: Task) -> Made:
    return _run(task, _of_worker[0][0], _reader())


@functools.cache
def _reader() -> DocumentReader:
    """The reader of this worker."""
    _, config, fingerprint = _of_worker[0]
    tokenizer = load_tokenizer(config)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"tokenizer_path={config.tokenizer_path!r} has changed since prepare began.")
    return document_reader(config, TextEncoder(config, tokenizer))
