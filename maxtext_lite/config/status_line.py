"""Says where a run is once nothing has been printed for a while, on the first host."""

import contextlib
import threading
import time
from collections.abc import Callable, Generator

from maxtext_lite.config.phases import Phase, PhaseClock, phases
from maxtext_lite.console import complain

_WORK: dict[Phase, str] = {
    "compile": "compiling the train step",
    "reading": "waiting for the data of step {}",
    "step": "step {}",
    "rollout": "sampling and judging responses for step {}",
    "save": "saving step {}",
    "evaluation": "evaluating after step {}",
    "end": "ending",
}


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
        """A context, or a decorator, in which the thread runs."""
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
        work, step, seconds = self._watched.work
        if work == "start-up":
            is_read = "data" in self._watched.start_up
            what = (
                "loading or initializing the model" if is_read else "opening the run, reading and tokenizing its data"
            )
        else:
            what = _WORK[work].format(step)
        return f"{what}: {seconds:,.0f} s so far"


status_line = StatusLine()
"""The status line of this process."""
