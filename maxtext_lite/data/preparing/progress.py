"""The progress of `prepare`: a bar if stdout is a terminal, otherwise an occasional line."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from maxtext_lite.data.preparing.tasks import Task
from maxtext_lite.data.preparing.workers import Made

_SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Counts finished work, and shows it within its context.

    Args:
      tasks: the tasks to do; before: the number of tasks done earlier.
      say: called with lines if there is no terminal.
    """

    def __init__(self, tasks: Sequence[Task], *, say: Callable[[str], None], before: int) -> None:
        self._sizes = {task.number: task.num_bytes for task in tasks}
        self._num_bytes, self._tasks = max(sum(self._sizes.values()), 1), len(tasks)
        self._say = say
        self._done = self._tasks_done = self._tokens = self._tokens_done = 0
        self._cpu_seconds = 0.0
        self._start = self._said = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._bar: Any = None
        if before:
            say(f"{before} of {before + self._tasks} tasks were already done; continuing with the others")

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

    def made(self, made: Made) -> None:
        """Counts and shows finished work."""
        self._tokens += made.tokens
        self._cpu_seconds += made.cpu_seconds
        if made.entry is not None:
            self._done += self._sizes[made.entry.number]
            self._tasks_done += 1
            self._tokens_done += made.entry.shard.tokens if made.entry.shard else 0
        if self._bar is not None:
            self._bar.update(0, completed=self._done, description=self.text())
        elif time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            self._say(self.text())

    def text(self) -> str:
        """`3 of 17 tasks, 12,345,678 tokens, 1,234,567 tokens/s/core, about 2 minutes left`."""
        parts = [f"{self._tasks_done} of {self._tasks} tasks", f"{self._tokens:,} tokens"]
        if self._cpu_seconds:
            parts.append(f"{self._tokens / self._cpu_seconds:,.0f} tokens/s/core")
        if self._tokens_done and self._done < self._num_bytes:
            expected = self._tokens_done / self._done * self._num_bytes
            seconds = (time.monotonic() - self._start) * max(expected / self._tokens - 1, 0)
            left = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
            parts.append(f"about {left} left")
        return ", ".join(parts)
