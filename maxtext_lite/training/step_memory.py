"""memory.json of a run: the device memory of a step, planned, compiled and measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxtext_lite.config.errors import bytes_text
from maxtext_lite.training.arrays import Record
from maxtext_lite.training.checkpoint import Counts
from maxtext_lite.training.hooks import Hook
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.run_files import write_json
from maxtext_lite.training.state import TrainState


class MemoryHook(Hook):
    """Keeps memory.json of a run, on the first host."""

    def start(self, run: TrainingRun[Any], state: TrainState, counts: Counts, say: Callable[[str], None]) -> None:
        self._run = run
        planned = run.plan.memory
        self._memory = StepMemory(planned.total if planned.is_known else None, planned.limit)

        def write() -> None:
            self._memory.write(run.files.directory)
            run.files.upload()

        run.failures.on_first_host(run.directory, write)

    def after_compile(self, num_bytes: int) -> str:
        self._memory.compiled = num_bytes
        self._write()
        return self._memory.beside_plan

    def written(self, record: Record) -> None:
        peak = record.get("peak_memory_bytes")
        if peak is not None and self._memory.measured is None:
            self._memory.measured = peak
            self._write()

    def _write(self) -> None:
        if self._run.is_first:
            with self._run.failures.of_writing(self._run.directory):
                self._memory.write(self._run.files.directory)


class StepMemory:
    """Bytes per device of a run's train step at its target batch, planned and actual.

    Attributes:
      compiled: by XLA's account; None before it is known.
      measured: the peak of a device up to the end of the first step; None where devices do not report it.
    Args:
      planned: by the plan.
      limit: those of a device; None: unknown.
    """

    def __init__(self, planned: int | None, limit: int | None):
        self._planned, self._limit = planned, limit
        self.compiled: int | None = None
        self.measured: int | None = None

    @property
    def beside_plan(self) -> str:
        """A clause on the compiled step's memory beside the plan's; "" where it is unknown."""
        error = _error(self._planned, self.compiled)
        if self._planned is None or self.compiled is None or error is None:
            return ""
        planned = bytes_text(self._planned)
        return f"; it holds {bytes_text(self.compiled)} of a device, and {planned} by the plan ({error:+.0%})"

    def write(self, directory: Path) -> None:
        """Writes memory.json.

        Raises:
          UserError: it cannot be written.
        """
        found: dict[str, Any] = {"planned_bytes": self._planned, "limit_bytes": self._limit}
        for name, size in (("compiled", self.compiled), ("measured", self.measured)):
            found |= {f"{name}_bytes": size, f"error_of_plan_to_{name}": _error(self._planned, size)}
        write_json(directory / "memory.json", found)


def _error(planned: int | None, found: int | None) -> float | None:
    return None if planned is None or not found else planned / found - 1
