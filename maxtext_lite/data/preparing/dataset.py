"""A dataset prepared from beginning to end, or one share of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from maxtext_lite.data.preparing.journal import Journal, Outcome
from maxtext_lite.data.preparing.keys import PrepareConfig
from maxtext_lite.data.preparing.progress import Progress
from maxtext_lite.data.preparing.tasks import cut, find_inputs
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
    """Writes a prepared dataset, or goes on with it. Its bytes depend on the config and the inputs alone.

    Args:
      tokenizer: that of the config, where it is loaded already: it is used in this process, with all its threads.
      share: (i, n): of the tasks, i, i + n, i + 2 n ... alone; several processes may each do one at once.
      say: is told how far it is.
    Returns:
      The dataset; None where tasks of other shares are not done yet.
    Raises:
      UserError: an input, the tokenizer or the output is not what it must be, or another prepare writes there.
    """
    here = tokenizer is not None
    tokenizer = tokenizer or load_tokenizer(config)
    files = find_inputs(config.input)
    tasks = cut(files, task_bytes=config.task_megabytes * _MEGABYTE, field=config.field)
    journal = Journal(config, files, tasks, tokenizer)
    if journal.is_complete():
        say(f"{config.output} is complete: it was prepared from these inputs before")
        return journal.outcome()
    number, of = share
    with journal.hold(shared=of > 1):
        done = range(len(tasks)) if journal.is_complete() else journal.done()  # another may just have ended
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
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
