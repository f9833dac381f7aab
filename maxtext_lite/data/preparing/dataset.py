"""Preparation of a whole dataset, or of one share of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from maxtext_lite.data.preparing.journal import Journal, Outcome
from maxtext_lite.data.preparing.keys import PrepareConfig
from maxtext_lite.data.preparing.progress import Progress
from maxtext_lite.data.preparing.tasks import find_inputs, split_into_tasks
from maxtext_lite.data.preparing.workers import run_here, run_in_processes
from maxtext_lite.data.tokenizer import Tokenizer, load_tokenizer

_MEGABYTE = 2**20


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
    here = tokenizer is not None
    tokenizer = tokenizer or load_tokenizer(config)
    files = find_inputs(config.input)
    tasks = split_into_tasks(files, task_bytes=config.task_megabytes * _MEGABYTE, field=config.field)
    journal = Journal(config, files, tasks, tokenizer)
    if journal.is_complete():
        say(f"{config.output} is complete: it was prepared from these inputs before")
        return journal.outcome()
    number, of = share
    with journal.hold(shared=of > 1):
        done = range(len(tasks)) if journal.is_complete() else journal.done()  # another process may have just finished
        todo = [task for task in tasks[number::of] if task.number not in done]
        progress = Progress(todo, say=say, before=len(tasks[number::of]) - len(todo))
        if here:
            running = run_here(todo, journal.workshop, config, tokenizer)
        else:
            num_workers = config.num_workers if config.num_workers > 0 else _cores()
            fingerprint = tokenizer.fingerprint
            running = run_in_processes(todo, journal.workshop, config, fingerprint, num_workers=num_workers)
        with progress:
            for made in running:
                if made.entry is not None:
                    journal.record(made.entry)
                progress.made(made)
        if todo:
            say(progress.text())
        return journal.finish()


def _cores() -> int:
    """Cores available to this process."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
