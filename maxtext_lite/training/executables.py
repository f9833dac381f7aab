"""The train step's executables, one for each batch shape of a run; the next is compiled before it is needed."""

import concurrent.futures
import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jax.stages import Compiled, Wrapped

from maxtext_lite.batching import BatchPlan, BatchStage
from maxtext_lite.config import UserError
from maxtext_lite.config.errors import bytes_text
from maxtext_lite.console.leaving import abandon
from maxtext_lite.data import field_dtype
from maxtext_lite.parallel import exchange, sharding
from maxtext_lite.training.compilation_cache import num_found
from maxtext_lite.training.program_memory import ProgramMemory
from maxtext_lite.training.state import StepParts, abstract_state
from maxtext_lite.training.step import TRAIN_BATCH_AXES


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


class Built(NamedTuple):
    """An executable.

    Attributes:
      tracing, compiling: in seconds.
      kept: compiled by an earlier process: see `compilation_cache`.
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

    def __init__(self, train_step: Wrapped, parts: StepParts, plan: BatchPlan, *, example: tuple[int, Sequence[str]]):
        self._step, self._parts, self._plan, self._mesh = train_step, parts, plan, parts.mesh
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
        for following in stages[stages.index(stage) + 1 :][:1]:
            self.request(following)

    def of(self, stage: BatchStage) -> Built:
        """The compiled step of a stage, once it is ready. All hosts call it.

        Raises:
          OutOfMemory: on all hosts, if it does not fit on the devices of one.
        """
        self.request(stage)
        compiling, problem = self._compiled[self.slots(stage)], None
        try:
            compiling.result()
        except OutOfMemory as error:
            problem = [str(error), error.share]
        if problems := [each for each in exchange(problem) if each is not None]:
            raise OutOfMemory(*problems[0])
        return compiling.result()

    def close(self) -> None:
        """Cancels compilations that have not begun; a command does not wait for one that has."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        abandon(self._compiled.values())

    def _compile(self, slots: int) -> Built:
        num_tokens, fields = self._example
        sizes = (self._plan.gradient_accumulation_steps, slots, num_tokens)
        where = sharding(self._mesh, TRAIN_BATCH_AXES)
        batch = {name: jax.ShapeDtypeStruct(sizes, field_dtype(name), sharding=where) for name in fields}
        number = None
        if self._plan.ramps_accumulation:
            number = jax.ShapeDtypeStruct((), "int32", sharding=sharding(self._mesh))
        started, before = time.perf_counter(), num_found()
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
