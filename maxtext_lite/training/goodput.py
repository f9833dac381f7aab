"""goodput.json of a run directory, written during the run, so that a kill loses a second at most."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path

from maxtext_lite.config.whole_file import replacing
from maxtext_lite.process.phases import PhaseClock, phases
from maxtext_lite.reporting.goodput import Start, goodput_text, spent, starts_of
from maxtext_lite.training.failures import Failures

FILE = "goodput.json"
_EVERY_SECONDS = 1.0


class Goodput:
    """The accounting of a run's time over this start and earlier ones.

    Args:
      directory: of goodput.json.
    """

    def __init__(self, directory: Path, failures: Failures, clock: PhaseClock = phases):
        self._path, self._failures, self._clock = directory / FILE, failures, clock
        found: object = None
        with contextlib.suppress(FileNotFoundError, ValueError):
            found = json.loads(self._path.read_text(encoding="utf-8"))
        self._before, self._written = starts_of(found), 0.0
        self._first = self._last = 0
        if not self._before:  # on a later start, one that ends early shows as time between two others
            self.write()

    def resume(self, step: int) -> None:
        """Continues from a step: steps after it in earlier starts were lost."""
        self._before = [start.before(step) for start in self._before]
        self._first = self._last = step

    def note(self, record: Mapping[str, object]) -> None:
        """Notes a line of metrics.jsonl, and writes the file if that is a second ago."""
        step = record["step"]
        assert isinstance(step, int)
        self._last = max(step, self._last)
        if time.monotonic() - self._written > _EVERY_SECONDS:
            self.write()

    def record(self, step: int) -> dict[str, float]:
        """The run's time since its first start, and the part spent on steps that count; `step` is the newest."""
        self._last = max(step, self._last)
        seconds = spent(self._starts)
        return {"run_seconds": sum(seconds.values()), "training_seconds": seconds["training"]}

    def write(self) -> None:
        """Writes all starts, with this one up to now."""
        with self._failures.of_writing(self._path), replacing(self._path) as partial:
            text = json.dumps({"starts": [dataclasses.asdict(start) for start in self._starts]}, indent=1)
            partial.write_text(f"{text}\n", encoding="utf-8")
        self._written = time.monotonic()

    def close(self) -> str:
        """Writes for the last time; returns a summary of the time."""
        self.write()
        return goodput_text(self._starts)

    @property
    def _starts(self) -> list[Start]:
        clock, last = self._clock, self._last
        now = {name: round(seconds, 3) for name, seconds in clock.seconds.items()}
        ended = clock.began + sum(clock.seconds.values())
        return [*self._before, Start(round(clock.began, 3), round(ended, 3), self._first, last, last, now)]
