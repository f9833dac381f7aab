"""The device memory of a step, planned, compiled and measured; and what is said of a step that does not fit."""

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax

from maxtext_lite.batching import BatchPlan, MemoryEstimate
from maxtext_lite.config import Config, UserError, registry
from maxtext_lite.config.errors import bytes_text, settings_of
from maxtext_lite.training.run_files import write_json


class OutOfMemory(UserError):
    """A train step does not fit on a device; raised on all hosts if the compiler finds it.

    Attributes:
      share: the part of what it needs that a device has, where both are known.
    """

    def __init__(self, message: str, share: float | None = None):
        super().__init__(message)
        self.share = share


@contextlib.contextmanager
def raising_out_of_memory() -> Generator[None]:
    """A block that raises `OutOfMemory` in place of the runtime's error."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(str(error).splitlines()[0]) from error


def refusal_of(error: OutOfMemory, config: Config, plan: BatchPlan, plan_of: Callable[[Config], BatchPlan]) -> str:
    """The error with the nearest step that fits and makes the same updates."""
    keys: dict[str, object] = {}
    if registry.is_installed("choose", "smaller_step"):
        keys = registry.load("choose", "smaller_step")(config, plan, plan_of, error.share)
    near = " ".join(settings_of({name: value for name, value in keys.items() if value != getattr(config, name)}))
    if not near:
        held = bytes_text(plan.memory.held)
        near = f"more devices to shard over, as parameters and optimizer state take {held} of each"
    rows = f"{float(plan.per_device_batch_size):g}"
    return f"per_device_batch_size={rows}: {error}. Nearest that works: {near}."


class StepMemory:
    """Bytes per device of a run's train step at its target batch, planned and actual.

    Attributes:
      compiled: by XLA's account; None before it is known.
      measured: the peak of a device up to the end of the first step; None where devices do not report it.
    """

    def __init__(self, planned: MemoryEstimate):
        self._planned = planned.total if planned.is_known else None
        self._limit = planned.limit
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


def peak_memory_bytes() -> int | None:
    """The peak of this process's devices so far; None where they do not report it, such as CPUs."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)
