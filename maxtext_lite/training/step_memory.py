"""The device memory of a step, planned, compiled and measured; and the changes to a config that make it fit."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Generator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax

from maxtext_lite.batching import BatchPlan, MemoryEstimate
from maxtext_lite.batching.ledger import bytes_text
from maxtext_lite.batching.memory_ladder import LADDER_KEYS, next_rung
from maxtext_lite.batching.ranking import CHOSEN_KEYS
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.bucket import reaching
from maxtext_lite.parallel import start_devices, value_of_host
from maxtext_lite.training.run_files import run_directory, write_json

_FILE = "memory.json"


class OutOfMemory(Exception):
    """A train step does not fit on a device; raised on all hosts if the compiler finds it."""


@contextlib.contextmanager
def raising_out_of_memory() -> Generator[None]:
    """A block that raises `OutOfMemory` in place of the runtime's error."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(str(error).splitlines()[0]) from error


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The changes to a config: the split of its batch, where that was left open, and reductions so that it fits.

    Attributes:
      asked: the config's values of the keys that may change, as texts, and the devices; the changes apply to these
        only.
      rungs: for each change, its keys with their values, as texts.
    """

    asked: Mapping[str, str]
    rungs: tuple[Mapping[str, str], ...] = ()

    @classmethod
    def of(cls, config: Config, device_memory_gb: float | None) -> "Ladder":
        """The ladder stored in the run directory, if it is for this config on these devices; otherwise without rungs.

        All hosts call it.
        """
        devices = start_devices()
        here = {"devices": f"{len(devices)} x {devices[0].device_kind}", "device_memory_gb": str(device_memory_gb)}
        asked = {name: str(getattr(config, name)) for name in (*LADDER_KEYS, *CHOSEN_KEYS, "global_batch_size")} | here
        rungs: list[dict[str, str]] = []
        if jax.process_index() == 0:
            path = run_directory(config) / _FILE
            # A file cut short by a kill, or with something else in it, counts as none: the run descends its ladder
            # again. An unreadable directory, or one in place of the file, is refused when the run is opened.
            absent = FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError
            damaged = ValueError, KeyError, TypeError, RecursionError
            with reaching(path, "base_output_directory"), contextlib.suppress(*absent, *damaged):
                saved = json.loads(path.read_text(encoding="utf-8"))
                rungs = saved["rungs"] if saved["asked"] == asked else []
        return cls(asked, tuple(value_of_host(0, rungs)))

    def applied(self, config: Config) -> Config:
        """The config with the changes."""
        changed = {name: text for rung in self.rungs for name, text in rung.items()}
        return config.model_copy(update={name: _value(name, text) for name, text in changed.items()})

    def lowered(self, config: Config, plan: BatchPlan, plan_of: Callable[[Config], BatchPlan]) -> "Ladder":
        """The ladder with the next rung.

        Args:
          config, plan: those that did not fit.
          plan_of: as of `next_rung`.
        Raises:
          UserError: there is nothing left to lower.
        """
        rung = next_rung(config, plan, plan_of)
        if rung is None:
            raise UserError(
                f"per_device_batch_size={float(plan.per_device_batch_size):g} with remat_policy={config.remat_policy} "
                f"and num_vocab_tiling={config.num_vocab_tiling} does not fit on a device, and nothing is left to "
                f"lower: parameters and optimizer state take {bytes_text(plan.memory.held)}. Nearest that works: more "
                "devices, over which ici_fsdp_parallelism=-1 shards them."
            )
        return self.with_rung(rung)

    def with_rung(self, rung: Mapping[str, object]) -> "Ladder":
        """The ladder with another change: these values of some keys."""
        return dataclasses.replace(self, rungs=(*self.rungs, {name: str(value) for name, value in rung.items()}))

    @property
    def newest(self) -> str:
        """The latest change as key=value words."""
        return " ".join(f"{name}={text}" for name, text in self.rungs[-1].items() if text)


def _value(name: str, text: str) -> object:
    if name.startswith("remat"):
        return text
    if text in ("True", "False"):
        return text == "True"
    return Fraction(text) if name.startswith("per_device") else int(text)


class StepMemory:
    """Bytes per device of a run's train step at its target batch, planned and actual.

    Attributes:
      compiled: by XLA's account; None before it is known.
      measured: the peak of a device up to the end of the first step; None where devices do not report it.
      ladder: None in reinforcement learning.
    """

    def __init__(self, planned: MemoryEstimate):
        self._planned = planned
        self.compiled: int | None = None
        self.measured: int | None = None
        self.ladder: Ladder | None = None

    @property
    def beside_plan(self) -> str:
        """A clause on the compiled step's memory beside the plan's; "" where it is unknown."""
        error = _error(self._planned.total, self.compiled)
        if self.compiled is None or error is None:
            return ""
        planned = bytes_text(self._planned.total)
        return f"; it holds {bytes_text(self.compiled)} of a device, and {planned} by the plan ({error:+.0%})"

    def write(self, directory: Path) -> None:
        """Writes memory.json.

        Raises:
          UserError: it cannot be written.
        """
        found: dict[str, Any] = {"planned_bytes": self._planned.total, "limit_bytes": self._planned.limit}
        for name, size in (("compiled", self.compiled), ("measured", self.measured)):
            found |= {f"{name}_bytes": size, f"error_of_plan_to_{name}": _error(self._planned.total, size)}
        if self.ladder:
            found |= {"asked": dict(self.ladder.asked), "rungs": [dict(rung) for rung in self.ladder.rungs]}
        write_json(directory / _FILE, found)


def _error(planned: int, found: int | None) -> float | None:
    return None if not found else planned / found - 1


def peak_memory_bytes() -> int | None:
    """The peak of this process's devices so far; None where they do not report it, such as CPUs."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)
