"""The phases of this process: their seconds, their observers, and a line printed after a long silence."""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from maxtext_lite.console import complain

Phase = Literal["start-up", "compile", "reading", "step", "rollout", "save", "evaluation", "end"]
"""The work of a process; "end" follows the last of it."""

EXIT_HANGS = 76
"""The exit code of a run that hangs or has lost a process."""


class Observer:
    """An observer of this process; the methods here do nothing."""

    def enter(self, phase: Phase, step: int) -> None:
        """Called when a phase of a step begins."""

    def advance(self) -> None:
        """Called at places that all processes of a run pass in the same order."""

    def before_joining(self, process: int) -> Mapping[str, Any]:
        """Called before the processes of a run join; returns arguments for `jax.distributed.initialize`."""
        del process
        return {}

    def after_joining(self, process: int, num_processes: int) -> None:
        """Called once all processes of a run have joined."""

    def failed(self, error: BaseException) -> None:
        """Called when this process ends with an unexpected error, which another process may have caused."""

    def finish(self, code: int, reason: str) -> None:
        """Called when this process ends with this exit code; of a failure, with its error message."""


observers: list[Observer] = []
"""The observers of this process."""


_AT_IMPORT = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970 by a clock that nobody sets; the system's own may jump in the middle of a run."""
    return _AT_IMPORT + time.monotonic()


class PhaseClock:
    """A clock that adds up seconds by phase; exactly one phase runs at a time.

    Attributes:
      began: the start, in seconds since 1970.
      start_up: seconds from `began` to the first step, by part; see `mark`.
    """

    def __init__(self, clock: Callable[[], float] = now, observers: Sequence[Observer] = observers):
        self._clock, self._observers = clock, observers
        self._is_fresh = False
        self.restart()

    def restart(self, began: float | None = None) -> None:
        """Resets to start-up; with `began`, such as the start of the process, the next `begin` keeps that time."""
        self._is_fresh = began is not None
        self.began = self._since = self._marked = self._clock() if began is None else began
        self.start_up: dict[str, float] = {}
        self._phase: Phase = "start-up"
        self._seconds: dict[Phase, float] = {}
        self._work: tuple[Phase, int, float] = ("start-up", 0, self.began)
        self._report("start-up")

    def begin(self) -> None:
        """Starts the account of one run of a process that does several."""
        if not self._is_fresh:
            self.restart()
        self._is_fresh = False

    def enter(self, phase: Phase, step: int = 0) -> None:
        """Begins a phase of this step."""
        if phase != self._phase:
            self._seconds, self._phase, self._since = self.seconds, phase, self._clock()
        if (phase, step) != self._work[:2]:
            self._work = phase, step, self._clock()
        self._report(phase, step)

    def advance(self) -> None:
        """Reports that this process reached a point in the program that all reach in the same order."""
        for observer in self._observers:
            observer.advance()

    @property
    def work(self) -> tuple[Phase, int, float]:
        """The phase, its step, and the seconds since this phase of this step began."""
        phase, step, since = self._work
        return phase, step, self._clock() - since

    def mark(self, part: str) -> None:
        """Books the time since the last mark, or since `began`, to this part of the start-up."""
        now = self._clock()
        self.start_up[part] = self.start_up.get(part, 0.0) + now - self._marked
        self._marked = now
        if self._phase == "start-up":
            self._work = ("start-up", 0, now)

    def fold(self) -> None:
        """Books all time so far as start-up: its steps were not the run's own."""
        spent = sum(self.seconds.values())
        self._phase, self._since = "start-up", self._clock()
        self._seconds = {"start-up": spent}
        self._work = ("start-up", 0, self._since)
        self._report("start-up")

    @property
    def seconds(self) -> dict[Phase, float]:
        """Seconds of each phase so far."""
        found = dict(self._seconds)
        found[self._phase] = found.get(self._phase, 0.0) + self._clock() - self._since
        return found

    def _report(self, phase: Phase, step: int = 0) -> None:
        for observer in self._observers:
            observer.enter(phase, step)


def process_start() -> float:
    """The start of this process in seconds since 1970; now, if the system does not tell."""
    try:
        words = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return now() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(words[19]) / 100
    except (OSError, AttributeError, ValueError, IndexError):
        return now()


phases = PhaseClock()
"""The clock of this process."""


_WORK: dict[Phase, str] = {
    "compile": "compiling the train step",
    "reading": "waiting for the data of step {}",
    "step": "taking step {}",
    "rollout": "sampling and judging responses for step {}",
    "save": "saving step {}",
    "evaluation": "evaluating after step {}",
    "end": "ending",
}
_WORK_BEFORE_DATA = "opening the run, reading and tokenizing its data"
_WORK_AFTER_DATA = "loading or initializing the model"


class StatusLine:
    """One timer thread that prints a line after `seconds` of silence, and after as many more.

    Args:
      doing: what the command does, if it has no phases.

    Attributes:
      say: prints a line; by default on stderr, which no output of a command is read from.
      is_first: this process is the one that prints; False until the processes of the run know each other.
    """

    def __init__(self, seconds: float = 30.0, watched: PhaseClock = phases, doing: str = ""):
        self._seconds, self._watched, self._doing = seconds, watched, doing
        self._began = self._printed = time.monotonic()
        self.say: Callable[[str], object] = complain
        self.is_first = False

    def printed(self) -> None:
        """Records that something has been printed."""
        self._printed = time.monotonic()

    @contextlib.contextmanager
    def shown(self) -> Generator[None]:
        """A context, or a decorator, that runs the thread."""
        over = threading.Event()
        self.printed()
        thread = threading.Thread(target=self._watch, args=(over,), name="status line", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.say, self.is_first = complain, False

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(self._printed + self._seconds - time.monotonic()):
            if time.monotonic() < self._printed + self._seconds:
                continue
            if self.is_first:
                self.say(self._where())
            self.printed()

    def _where(self) -> str:
        if self._doing:
            return f"{self._doing}: {time.monotonic() - self._began:,.0f} s so far"
        phase, step, seconds = self._watched.work
        what = _WORK.get(phase, _WORK_BEFORE_DATA).format(step)
        if phase == "start-up" and "data" in self._watched.start_up:
            what = _WORK_AFTER_DATA
        return f"{what}: {seconds:,.0f} s so far"


status_line = StatusLine()
"""The status line of this process."""
