"""goodput.json of a run directory, written during the run, so that a kill loses a second at most."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import writing
from maxtext_lite.config.phases import PhaseClock, phases
from maxtext_lite.config.whole_file import replacing
from maxtext_lite.operations.goodput_records import Start, goodput_text, spent, starts_of
from maxtext_lite.training.arrays import Record
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.hooks import Hook
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState

FILE = "goodput.json"
_EVERY_SECONDS = 1.0


class GoodputHook(Hook):
    """Keeps goodput.json of a run, on the first host."""

    def __init__(self) -> None:
        self._goodput: Goodput | None = None
        self._has_started = False

    def opened(self, run: TrainingRun) -> None:
        if run.is_first:
            self._goodput = Goodput(run.files.directory)

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        if self._goodput:
            self._goodput.resume(counts.step)
        self._has_started = True

    def entries(self, step: int) -> dict[str, float]:
        return self._goodput.record(step) if self._goodput else {}

    def written(self, record: Record) -> None:
        if self._goodput:
            self._goodput.note(record)

    def saved(self) -> str:
        return self._goodput.close() if self._goodput else ""

    def close(self) -> None:
        if self._goodput and self._has_started:
            with contextlib.suppress(UserError):  # after the last step it has been written
                self._goodput.write()


class Goodput:
    """The accounting of a run's time over this start and earlier ones.

    Args:
      directory: of goodput.json.
    """

    def __init__(self, directory: Path, clock: PhaseClock = phases):
        self._path, self._clock = directory / FILE, clock
        found: object = None
        self._content = self._read()
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(self._content or b"null")
        self._before, self._written = starts_of(found), 0.0
        self._first = self._last = 0
        if not self._before:  # on a later start, one that ends early shows as time between two others
            self.write()

    def resume(self, step: int) -> None:
        """Continues from a step: steps after it in earlier starts were lost."""
        self._before = [start.before(step) for start in self._before]
        self._first = self._last = step

    def note(self, record: Record) -> None:
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
        """Writes all starts, with this one up to now, unless another run has taken over the directory and the file."""
        self._written = time.monotonic()
        with writing(self._path):
            if self._read() not in (None, self._content):
                return
            text = json.dumps({"starts": [dataclasses.asdict(start) for start in self._starts]}, indent=1)
            content = f"{text}\n".encode()
            with replacing(self._path) as partial:
                partial.write_bytes(content)
            self._content = content

    def close(self) -> str:
        """Writes for the last time; returns a summary of the time."""
        self.write()
        return goodput_text(self._starts)

    def _read(self) -> bytes | None:
        """The content of the file; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return self._path.read_bytes()
        return None

    @property
    def _starts(self) -> list[Start]:
        clock, last = self._clock, self._last
        now = {name: round(seconds, 3) for name, seconds in clock.seconds.items()}
        ended = clock.began + sum(clock.seconds.values())
        return [*self._before, Start(round(clock.began, 3), round(ended, 3), self._first, last, last, now)]
