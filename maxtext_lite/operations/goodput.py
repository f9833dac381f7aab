"""goodput.json of a run directory, written every second of the run."""

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
    """Accounts for a run's time over this start and earlier ones; the first host writes goodput.json."""

    def __init__(self, clock: PhaseClock = phases) -> None:
        self._clock = clock
        self._path: Path | None = None
        self._earlier: list[Start] = []
        self._written = 0.0
        self._first_step = 0
        self._last_step = 0

    def opened(self, run: TrainingRun) -> None:
        if not run.is_first:
            return
        self._path = run.files.directory / FILE
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._earlier = starts_of(json.loads(self._path.read_bytes()))
        if not self._earlier:  # on a later start, one that ends early shows as time between two others
            self._write()

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        self._earlier = [start.before(counts.step) for start in self._earlier]  # later steps were lost
        self._first_step = counts.step
        self._last_step = counts.step

    def entries(self, step: int) -> dict[str, float]:
        self._last_step = max(step, self._last_step)
        seconds = spent(self._starts())
        return {"run_seconds": sum(seconds.values()), "training_seconds": seconds["training"]}

    def written(self, record: Record) -> None:
        self._last_step = max(record["step"], self._last_step)
        if time.monotonic() - self._written > _EVERY_SECONDS:
            self._write()

    def saved(self) -> str:
        self._write()
        return goodput_text(self._starts())

    def close(self) -> None:
        with contextlib.suppress(UserError):  # after the last step it has been written
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        if self._path is not None:
            starts = [dataclasses.asdict(start) for start in self._starts()]
            with writing(self._path), replacing(self._path) as partial:
                partial.write_text(json.dumps({"starts": starts}, indent=1) + "\n", encoding="utf-8")

    def _starts(self) -> list[Start]:
        """The earlier starts, and this one up to now."""
        clock = self._clock
        last = self._last_step
        seconds = {phase: round(each, 3) for phase, each in clock.seconds.items()}
        ended = clock.began + sum(clock.seconds.values())
        return [*self._earlier, Start(round(clock.began, 3), round(ended, 3), self._first_step, last, last, seconds)]
