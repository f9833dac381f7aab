"""What follows the work of this process from its start, before jax is imported; a command adds the watchdog."""

from collections.abc import Mapping
from typing import Any, Literal

Phase = Literal["start-up", "compile", "reading", "step", "rollout", "save", "evaluation", "end"]
"""The work of a process; "end" follows the last of it."""

EXIT_HANGS = 76
"""The exit code of a run that hangs, or in which a process has vanished."""


class Observer:
    """An observer of this process; the methods here do nothing."""

    def enter(self, phase: Phase, step: int) -> None:
        """Called when a phase of a step begins."""

    def advance(self) -> None:
        """Called at places that all processes of a run pass in the same order."""

    def seconds_to_join(self, seconds: float) -> float:
        """How long to wait for the other processes of a run at its start, at most `seconds`."""
        return seconds

    def before_joining(self, process: int) -> Mapping[str, Any]:
        """Called before the processes of a run join; returns arguments for `jax.distributed.initialize`."""
        del process
        return {}

    def after_joining(self, process: int, num_processes: int) -> None:
        """Called once all processes of a run have joined."""

    def failed(self, error: BaseException) -> None:
        """Called when this process ends with an unexpected error, whose cause may be another process."""

    def finish(self, code: int) -> None:
        """Called when this process ends with this exit code."""


observers: list[Observer] = []
"""The observers of this process."""
