"""What a step holds on a device, planned, compiled and measured; and what was changed in a config so that it fits."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# jax declares some of its functions in part.

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
    """A train step does not fit on a device; on all hosts, where the compiler finds it."""


@contextlib.contextmanager
def raising_out_of_memory() -> Generator[None]:
    """What is done inside raises `OutOfMemory` in the place of the runtime's error."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(str(error).splitlines()[0]) from error


@dataclasses.dataclass(frozen=True)
class Ladder:
    """What is changed in a config: how its batch is split, where that was left open, and what did not fit.

    Attributes:
      asked: values of the config's keys that may be changed, as texts, and the devices: of another config, or on
        other devices, what was changed says nothing.
      rungs: for each change, its keys with their values, as texts.
    """

    asked: Mapping[str, str]
    rungs: tuple[Mapping[str, str], ...] = ()

    @classmethod
    def of(cls, config: Config, device_memory_gb: float | None) -> "Ladder":
        """That of the run directory, where it is about this config on these devices; else one without rungs.

        All hosts call it.
        """
        devices = start_devices()
        here = {"devices": f"{len(devices)} x {devices[0].device_kind}", "device_memory_gb": str(device_memory_gb)}
        asked = {name: str(getattr(config, name)) for name in (*LADDER_KEYS, *CHOSEN_KEYS, "global_batch_size")} | here
        rungs: list[dict[str, str]] = []
        if jax.process_index() == 0:
            path = run_directory(config) / _FILE
            # What a kill left half written is as good as none: the run goes down its ladder once more. A directory that
            # cannot be read is refused when the run is opened.
            absent = FileNotFoundError, NotADirectoryError, PermissionError
            with reaching(path, "base_output_directory"), contextlib.suppress(*absent, ValueError, KeyError):
                saved = json.loads(path.read_text(encoding="utf-8"))
                rungs = saved["rungs"] if saved["asked"] == asked else []
        return cls(asked, tuple(value_of_host(0, rungs)))

    def applied(self, config: Config) -> Config:
        """The config with what was changed."""
        changed = {name: text for rung in self.rungs for name, text in rung.items()}
        return config.model_copy(update={name: _value(name, text) for name, text in changed.items()})

    def lowered(self, config: Config, plan: BatchPlan, plan_of: Callable[[Config], BatchPlan]) -> "Ladder":
        """With one rung more.

        Args:
          config: that did not fit, and its plan; `plan_of` as `next_rung` takes it.
        Raises:
          UserError: there is nothing left to change.
        """
        rung = next_rung(config, plan, plan_of)
        if rung is None:
            raise UserError(
                f"per_device_batch_size={float(plan.per_device_batch_size):g} with remat_policy={config.remat_policy} "
                f"and num_vocab_tiling={config.num_vocab_tiling} does not fit on a device, and nothing is left to "
                f"lower: parameters and optimizer state take {bytes_text(plan.memory.held)}. Nearest that works: more "
                "devices, which ici_fsdp_parallelism=-1 shares them out over."
            )
        return self.with_rung(rung)

    def with_rung(self, rung: Mapping[str, object]) -> "Ladder":
        """With these values of some keys, the last of its changes."""
        return dataclasses.replace(self, rungs=(*self.rungs, {name: str(value) for name, value in rung.items()}))

    @property
    def newest(self) -> str:
        """The last change, as key=value words."""
        return " ".join(f"{name}={text}" for name, text in self.rungs[-1].items() if text)


def _value(name: str, text: str) -> object:
    if name.startswith("remat"):
        return text
    if text in ("True", "False"):
        return text == "True"
    return Fraction(text) if name.startswith("per_device") else int(text)


class StepMemory:
    """Bytes per device of a run's train step at its target batch: what was planned beside what came of it.

    Attributes:
      compiled: by XLA; None before it is known.
      measured: the most that a device held up to the end of the first step; None where devices do not say.
      ladder: see `Ladder`; None in reinforcement learning.
    """

    def __init__(self, planned: MemoryEstimate):
        self._planned = planned
        self.compiled: int | None = None
        self.measured: int | None = None
        self.ladder: Ladder | None = None

    @property
    def beside_plan(self) -> str:
        """The compiled step's memory and the plan's, to follow in a sentence; nothing where it is not known."""
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
    """The most that one of this process's devices has held so far; None where they do not say, as CPUs do not."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)
