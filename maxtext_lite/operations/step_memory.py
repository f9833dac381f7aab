"""memory.json of a run: the device memory of a step, planned, compiled and measured."""

from collections.abc import Callable
from typing import Any

from maxtext_lite.config.errors import bytes_text, writing
from maxtext_lite.training.arrays import Record
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.hooks import Hook
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.run_files import write_json
from maxtext_lite.training.state import TrainState


class MemoryHook(Hook):
    """Keeps a run's memory.json on the first host: a device's bytes for the train step at the target batch.

    Attributes:
      compiled: by XLA's account; None before it is known.
      measured: the peak of a device up to the end of the first step; None where devices do not report it.
    """

    def __init__(self) -> None:
        self.compiled: int | None = None
        self.measured: int | None = None

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        self._run = run
        memory = run.plan.memory
        self._planned = memory.total if memory.is_known else None
        self._write()
        if run.is_first:
            with writing(run.directory):
                run.files.upload()

    def after_compile(self, num_bytes: int) -> str:
        self.compiled = num_bytes
        self._write()
        if not num_bytes or self._planned is None:
            return ""
        return f"; it needs {bytes_text(num_bytes)} per device (planned: {bytes_text(self._planned)})"

    def written(self, record: Record) -> None:
        peak = record.get("peak_memory_bytes")
        if peak is not None and self.measured is None:
            self.measured = peak
            self._write()

    def _write(self) -> None:
        if not self._run.is_first:
            return
        found: dict[str, Any] = {"planned_bytes": self._planned, "limit_bytes": self._run.plan.memory.limit}
        for name, size in (("compiled", self.compiled), ("measured", self.measured)):
            error = None if self._planned is None or not size else self._planned / size - 1
            found |= {f"{name}_bytes": size, f"error_of_plan_to_{name}": error}
        write_json(self._run.files.directory / "memory.json", found)
