"""The compiled programs of a run, kept for its next start in jax's persistent compilation cache.

Tested with jax 0.10.2 to 0.12, in which `LRUCache` is private.
"""

import concurrent.futures
import contextlib
import hashlib
import math
import platform
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax._src.lru_cache import LRUCache
from jax.sharding import Mesh
from jax.stages import Compiled, Wrapped

from maxtext_lite.batching import BatchPlan, BatchStage
from maxtext_lite.config import RunConfig, UserError
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import bytes_text
from maxtext_lite.config.whole_file import replacing
from maxtext_lite.console import abandon
from maxtext_lite.data import field_dtype
from maxtext_lite.parallel import sharding
from maxtext_lite.training.run_files import run_directory
from maxtext_lite.training.state import StepContext, abstract_state
from maxtext_lite.training.step import TRAIN_BATCH_AXES

DIRECTORY = ".compiled"
_WHERE = "jax_compilation_cache_dir"
_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_CPU = Path("/proc/cpuinfo")

_found: Counter[int] = Counter()
_put = LRUCache.put


def keep_compiled(config: RunConfig) -> None:
    """Has jax keep programs that take a second or more to compile, below the base directory.

    To be called in a command, before anything is compiled. A directory set by the user (JAX_COMPILATION_CACHE_DIR)
    stays, and JAX_ENABLE_COMPILATION_CACHE=false turns the cache off. A run in a bucket keeps nothing.
    """
    if (kept := _directory(config)) is not None:
        jax.config.update(_WHERE, str(kept))
    jax.monitoring.register_event_listener(_note)
    LRUCache.put = _put_whole


@contextlib.contextmanager
def reading_compiled(config: RunConfig) -> Iterator[None]:
    """Lets jax use the programs that `keep_compiled` kept, but keep no others: only the run's stay."""
    before: dict[str, Any] = {name: getattr(jax.config, name) for name in (_WHERE, _LEAST_SECONDS)}
    if (kept := _directory(config)) is not None and kept.is_dir():  # jax would make it
        jax.config.update(_WHERE, str(kept))
    jax.config.update(_LEAST_SECONDS, math.inf)
    jax.monitoring.register_event_listener(_note)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _directory(config: RunConfig) -> Path | None:
    """Where programs are kept below the base directory; None if the user has set a place, or for a bucket."""
    base = run_directory(config).parent
    if is_bucket(base) or getattr(jax.config, _WHERE) is not None:
        return None
    return base.absolute() / DIRECTORY / _processor()


def num_found() -> int:
    """The number of programs that this thread has found in the cache so far."""
    return _found[threading.get_ident()]


def _put_whole(self: LRUCache, key: str, value: bytes) -> None:
    """Writes an entry atomically: jax never replaces one, so each start would compile what a kill has cut short."""
    entry = Path(str(self.path)) / f"{key}-cache"
    if self.eviction_enabled or not entry.parent.is_dir():  # jax keeps a file beside each entry, or writes to a bucket
        _put(self, key, value)
    elif not entry.exists():
        with replacing(entry) as partial:
            partial.write_bytes(value)


def _note(event: str, **_: object) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _found[threading.get_ident()] += 1


def _processor() -> str:
    """A name for this machine's instruction set: a program that XLA compiles for one CPU may crash on another."""
    lines = _CPU.read_text(encoding="utf-8").splitlines() if _CPU.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes per device by XLA's `memory_analysis()`.

    Attributes:
      arguments: for a train step, state and batch.
      outputs: new state and metrics; `aliased` bytes of them reuse arguments.
      temporaries: everything else the program allocates.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    generated_code: int

    @classmethod
    def of(cls, compiled: Compiled) -> "ProgramMemory":
        """The memory of an executable."""
        stats: Any = compiled.memory_analysis()
        held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        # On a TPU temp_size_in_bytes exceeds what is allocated: programs compile that would not fit by it.
        allocated = getattr(stats, "total_allocation_bytes", 0)  # since jax 0.11
        return cls(
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporaries=allocated - held if allocated else stats.temp_size_in_bytes,
            generated_code=stats.generated_code_size_in_bytes,
        )

    @property
    def total(self) -> int:
        """Bytes at the program's peak."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.generated_code


@contextlib.contextmanager
def as_default_device(mesh: Mesh) -> Iterator[None]:
    """Makes a device that is not attached jax's default device, while a program is traced and lowered for it.

    tokamax reads compute capability, cores and kind from the default device, which otherwise is this process's CPU.
    Nothing can be computed meanwhile. The default device is thread-local. No effect on attached devices.
    """
    device = mesh.devices.flat[0]
    if device in jax.devices():
        yield
    else:
        with jax.default_device(device):
            yield


class OutOfMemory(UserError):
    """A train step does not fit on a device.

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


class Built(NamedTuple):
    """An executable.

    Attributes:
      tracing, compiling: in seconds.
      kept: compiled by an earlier process: see `compile`.
    """

    step: Compiled
    tracing: float
    compiling: float
    kept: bool

    @property
    def how(self) -> str:
        """How long it took, as part of a sentence."""
        kept = ", with what an earlier start had compiled" if self.kept else ""
        return f"in {self.compiling:.1f} s after {self.tracing:.1f} s of tracing{kept}"


class Executables:
    """The train step, compiled for each batch shape in a background thread.

    Args:
      train_step: made by `step.make_train_step` from the parts.
      example: the number of tokens of an example, and the names of its arrays.
    """

    def __init__(self, train_step: Wrapped, parts: StepContext, plan: BatchPlan, *, example: tuple[int, Sequence[str]]):
        self._step = train_step
        self._parts = parts
        self._plan = plan
        self._mesh = parts.mesh
        self._example = example
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._compiled: dict[int, concurrent.futures.Future[Built]] = {}

    def slots(self, stage: BatchStage) -> int:
        """Row slots of a stage's micro-batches. Each number has its own executable; accumulation is an argument."""
        return self._plan.slots_for(stage.micro_batch_to_train)

    def request(self, stage: BatchStage) -> None:
        """Starts to compile for a stage in the background, unless it has already."""
        slots = self.slots(stage)
        if slots not in self._compiled:
            self._compiled[slots] = self._thread.submit(self._compile, slots)

    def request_after(self, stage: BatchStage) -> None:
        """`request` for the next stage, if there is one."""
        stages = self._plan.stages
        later = stages[stages.index(stage) + 1 :]
        if following := [each for each in later if each.num_steps != 0]:
            self.request(following[0])

    def of(self, stage: BatchStage) -> Built:
        """The compiled step of a stage, once it is ready.

        Raises:
          OutOfMemory: it does not fit on the devices.
        """
        self.request(stage)
        return self._compiled[self.slots(stage)].result()

    def close(self) -> None:
        """Cancels compilations that have not begun; a command does not wait for one that has."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        abandon(self._compiled.values())

    def _compile(self, slots: int) -> Built:
        num_tokens, fields = self._example
        sizes = (self._plan.array_micro_batches(slots), slots, num_tokens)
        where = sharding(self._mesh, TRAIN_BATCH_AXES)
        batch = {name: jax.ShapeDtypeStruct(sizes, field_dtype(name), sharding=where) for name in fields}
        number = None
        if self._plan.ramps_accumulation:
            number = jax.ShapeDtypeStruct((), "int32", sharding=sharding(self._mesh))
        started = time.perf_counter()
        before = num_found()
        # Thread-local in jax: the main thread's settings do not apply here.
        precision = jax.default_matmul_precision(self._parts.config.matmul_precision)
        with jax.set_mesh(self._mesh), as_default_device(self._mesh), precision:
            lowered = self._step.lower(abstract_state(self._parts), batch, number)
        traced = time.perf_counter()
        with jax.set_mesh(self._mesh), raising_out_of_memory():
            compiled = lowered.compile()
        compiled_at = time.perf_counter()
        limit = self._plan.memory.limit
        if limit is not None and (needed := ProgramMemory.of(compiled).total) > limit:
            said = f"the compiled train step needs {bytes_text(needed)} of a device's {bytes_text(limit)}"
            raise OutOfMemory(said, limit / needed)
        return Built(compiled, traced - started, compiled_at - traced, num_found() > before)
