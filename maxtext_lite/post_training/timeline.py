"""The timeline of a step: its phases, and how much they overlap."""

import contextlib
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple


class Phase(NamedTuple):
    """An interval of work.

    Attributes:
      name: rollout, reward or train.
      chunk: the number of its chunk in the batch.
      start, stop: seconds since the step began.
    """

    name: str
    chunk: int
    start: float
    stop: float


class Timeline:
    """The phases of one step; several threads may add to it."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._phases: list[Phase] = []

    @contextlib.contextmanager
    def phase(self, name: str, chunk: int) -> Generator[None, None, None]:
        """A block that is a phase, unless it raises."""
        start = time.perf_counter() - self._began
        yield
        with self._lock:
            self._phases.append(Phase(name, chunk, start, time.perf_counter() - self._began))

    @property
    def phases(self) -> list[Phase]:
        """All phases in the order of their starts."""
        with self._lock:
            return sorted(self._phases, key=lambda phase: (phase.start, phase.stop))

    def record(self) -> dict[str, float]:
        """The entries in metrics.jsonl: seconds of each kind of phase, and the share of training beside a rollout."""
        phases = self.phases
        of: dict[str, list[tuple[float, float]]] = {"rollout": [], "reward": [], "train": []}
        for phase in phases:
            of[phase.name].append((phase.start, phase.stop))
        seconds = {f"{name}_seconds": busy_seconds(stretches) for name, stretches in of.items()}
        beside = shared_seconds(of["rollout"], of["train"])
        return {**seconds, "overlap_fraction": beside / seconds["train_seconds"] if seconds["train_seconds"] else 0.0}

    def to_json(self) -> list[list[Any]]:
        """[name, chunk, start, stop] of each phase, rounded to microseconds."""
        return [[p.name, p.chunk, round(p.start, 6), round(p.stop, 6)] for p in self.phases]


def merged(stretches: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of the intervals as disjoint intervals, in order."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def busy_seconds(stretches: Sequence[tuple[float, float]]) -> float:
    """The length of the union of the intervals, in seconds."""
    return sum(stop - start for start, stop in merged(stretches))


def shared_seconds(ones: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """The length of the intersection of the two unions, in seconds."""
    return sum(
        max(0.0, min(stop, other_stop) - max(start, other_start))
        for start, stop in merged(ones)
        for other_start, other_stop in merged(others)
    )
