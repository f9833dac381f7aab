"""What this process spends its time on: the seconds of each phase, from its start on; the watchdog is told of each."""

import time
from collections.abc import Callable
from pathlib import Path

from maxtext_lite.process.progress import Phase
from maxtext_lite.process.watchdog import Watchdog, watchdog

_AT_IMPORT = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970 by a clock that nobody sets; the system's own may jump in the middle of a run."""
    return _AT_IMPORT + time.monotonic()


class PhaseClock:
    """Adds up the seconds of phases, one of which there is at any time.

    Attributes:
      began: when it started, in seconds since 1970.
      start_up: seconds from then to the first step, by what they went to; see `mark`.
    """

    def __init__(self, clock: Callable[[], float] = now, watched: Watchdog = watchdog):
        self._clock, self._watched = clock, watched
        self._is_fresh = False
        self.restart()

    def restart(self, began: float | None = None) -> None:
        """Starts over, in start-up; at `began`, such as the process's own start, for whoever is the next to `begin`."""
        self._is_fresh = began is not None
        self.began = self._since = self._marked = self._clock() if began is None else began
        self.start_up: dict[str, float] = {}
        self._phase: Phase = "start-up"
        self._seconds: dict[Phase, float] = {}

    def begin(self) -> None:
        """Something begins that is accounted for by itself, such as a run in a process of many."""
        if not self._is_fresh:
            self.restart()
        self._is_fresh = False

    def enter(self, phase: Phase, step: int = 0) -> None:
        """A phase begins, of this step."""
        if phase != self._phase:
            self._seconds, self._phase, self._since = self.seconds, phase, self._clock()
        self._watched.enter(phase, step)

    def mark(self, part: str) -> None:
        """What passed since the last mark, or the beginning, went to this part of the start-up."""
        now = self._clock()
        self.start_up[part] = self.start_up.get(part, 0.0) + now - self._marked
        self._marked = now

    def fold(self) -> None:
        """What was spent up to now was start-up: its steps were none of the run's own."""
        spent = sum(self.seconds.values())
        self._phase, self._since = "start-up", self._clock()
        self._seconds = {"start-up": spent}

    @property
    def seconds(self) -> dict[Phase, float]:
        """Of each phase that there was, up to now."""
        found = dict(self._seconds)
        found[self._phase] = found.get(self._phase, 0.0) + self._clock() - self._since
        return found


def process_start() -> float:
    """When this process started, in seconds since 1970; where the system does not say, now."""
    try:
        words = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return now() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(words[19]) / 100
    except (OSError, AttributeError, ValueError, IndexError):
        return now()


phases = PhaseClock()
"""Those of this process."""
