"""The train step compiled ahead of time: parameter layout, collectives, memory and FLOPs."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from importlib import metadata
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from maxtext_lite.analysis.described import assumed_of, topology_devices
from maxtext_lite.analysis.hlo import (
    MEMORY_SPACES,
    Collective,
    Module,
    ProgramWork,
    collectives,
    known_or_0,
    parse,
    work,
)
from maxtext_lite.analysis.step_time import Roofline, roofline
from maxtext_lite.batching import BatchPlan, make_plan, scaled_optimizer
from maxtext_lite.batching.devices import device_of_kind
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import bytes_text
from maxtext_lite.config.kernels import Accelerator
from maxtext_lite.data import example_shape
from maxtext_lite.models.experts import FURTHER_ROUNDS
from maxtext_lite.parallel import Tree, accelerator_of, simulated_devices, start_devices
from maxtext_lite.training.compile import Executables, ProgramMemory
from maxtext_lite.training.local_updates import LocalUpdates
from maxtext_lite.training.optimizer import learning_rate_schedule
from maxtext_lite.training.state import TrainState, abstract_state, make_parts
from maxtext_lite.training.step import make_train_step
from maxtext_lite.training.synchronise import make_synchronise


class ParameterLayout(NamedTuple):
    """The layout of a parameter.

    Attributes:
      name: its path, such as layers.mlp.up.
      shape: of the whole array; with local updates its first dim is the replicas.
      axes: the logical axis of each dim.
      partition_spec: for each dim, the mesh axes of size > 1 that shard it.
      bytes_per_device: of one device's shard.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    partition_spec: tuple[tuple[str, ...], ...]
    bytes_per_device: int


class Traffic(NamedTuple):
    """Total traffic of one kind of collective over one set of mesh axes.

    Attributes:
      operations: collectives in the program.
      times: executions of all of them; NaN, like the bytes, if a loop's trip count is unknown.
      async_times: executions that can overlap with other work.
      bytes: on one device, of the outputs (for a reduce-scatter: the inputs) of all executions.
      bytes_by_dtype: the same, by HLO dtype; None if they are unknown.
      sent_bytes: what one device sends over links, in a ring; NaN also between slices.
    """

    kind: str
    axes: tuple[str, ...]
    operations: int
    times: float
    async_times: float
    bytes: float
    bytes_by_dtype: dict[str, float] | None
    sent_bytes: float


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled train step of a run's last stage and, with local updates, the synchronization of the replicas.

    Attributes:
      plan: of the run.
      compiled: the executable; it can run if the devices are attached.
      module: its HLO.
      state_bytes: bytes per device of `params`, frozen ones included, `opt_state` with the average and, with local
        updates, `outer`.
      collectives: of one step, the most bytes first.
      synchronization: collectives of one synchronization, every `diloco_sync_period` steps; None without local updates.
      work: of one device and step: matmuls, kernels, memory traffic, the compiler's cycles.
      roofline: the least time of this work.
      model_flops: of the whole step on all devices: forward and backward, without recomputation.
      assumed: what is assumed about a machine that is not attached, in words.
    """

    plan: BatchPlan
    compiled: Compiled
    module: Module
    compile_seconds: float
    mesh: Mesh
    parameters: tuple[ParameterLayout, ...]
    state_bytes: dict[str, int]
    collectives: tuple[Traffic, ...]
    synchronization: tuple[Traffic, ...] | None
    memory: ProgramMemory
    work: ProgramWork
    roofline: Roofline
    model_flops: float
    assumed: tuple[str, ...] = ()

    @property
    def device_kind(self) -> str:
        """jax's name for the devices."""
        return str(self.mesh.devices.flat[0].device_kind)

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends over links in a step; NaN if any is unknown or goes between slices."""
        return sum(row.sent_bytes for row in self.collectives)

    @property
    def compiler_seconds(self) -> float:
        """The compiler's estimated cycles as time; NaN if it estimates none or the clock is unknown."""
        device = device_of_kind(self.device_kind)
        return self.work.cycles / ((device and device.clock_hz) or math.nan)

    @property
    def versions(self) -> dict[str, str]:
        """Versions of jax, jaxlib and, if it compiled the program, libtpu."""
        names = ["jax", "jaxlib"] + ["libtpu"] * (self.mesh.devices.flat[0].platform == "tpu")
        return {name: metadata.version(name) for name in names}


def compile_for(
    config: Config,
    *,
    num_devices: int | None = None,
    num_hosts: int = 1,
    topology: str | None,
    num_slices: int | None = None,
) -> Program:
    """`compile_program` for N simulated CPU devices, a machine by name (attached or not), or the attached devices.

    Raises:
      UserError: the config cannot be planned or compiled for that machine, or the step does not fit on it.
    """
    # The length of the data only changes constants of the schedule.
    if config.num_epochs:
        config = config.model_copy(update={"num_epochs": Fraction(0), "steps": 10**6, "last_batch": "drop"})
    plan = None
    assumed = ()
    if num_devices is not None:
        plan = _plan(config, num_devices, num_hosts, "cpu", "cpu")  # refuses before any device is started
        devices: Sequence[Any] = simulated_devices(num_devices)
    elif topology is not None:
        devices = topology_devices(topology, num_slices)
        assumed = assumed_of(topology)
        num_hosts = len({device.process_index for device in devices})
    else:
        devices = start_devices()
        num_hosts = jax.process_count()
    kind = devices[0].device_kind
    plan = plan or _plan(config, len(devices), num_hosts, accelerator_of(devices[0]), kind)
    try:
        return dataclasses.replace(compile_program(config, plan, devices), assumed=assumed)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = str(error).strip().split("\n")[0][:300].rstrip(".")
        raise UserError(
            f"the step does not fit on a {kind}, by its compiler: {why}. The plan's estimate is "
            f"{bytes_text(plan.memory.total)}; remat_policy=full, a smaller per_device_batch_size or more devices on "
            "fsdp need less."
        ) from None


def _plan(
    config: Config, num_devices: int, num_hosts: int, platform: Literal["cpu"] | Accelerator, device_kind: str
) -> BatchPlan:
    device = device_of_kind(device_kind)
    memory_gb = None if device is None else device.memory_bytes / 1e9
    return make_plan(
        config, num_devices=num_devices, num_hosts=num_hosts, platform=platform, device_memory_gb=memory_gb
    )


def compile_program(config: Config, plan: BatchPlan, devices: Sequence[Any]) -> Program:
    """Lowers and compiles the train step for these devices, which need not be attached; allocates nothing.

    The schedule's constants assume a run of `plan.steps` steps; the data are not read.

    Raises:
      UserError: the config requires a kernel that does not run on these devices.
    """
    parts = make_parts(config, plan, devices)
    mesh = parts.mesh
    decoder = parts.decoder
    local = parts.local
    step = make_train_step(parts, learning_rate_schedule(scaled_optimizer(config, plan), last=plan.steps))
    state = abstract_state(parts)
    stage = plan.stages[-1]
    with contextlib.closing(Executables(step, parts, plan, example=example_shape(config))) as executables:
        built = executables.of(stage)
    compiled = built.step
    seconds = built.tracing + built.compiling
    synchronization = None
    if local:
        with jax.set_mesh(mesh):
            synchronise: Any = make_synchronise(parts).lower(state).compile()
        synchronization = total_traffic(collectives(synchronise.as_text()), mesh)
    # With a ramp of the accumulation, the trip count of the loop over micro-batches is unknown to XLA.
    # Tokens are assumed to be routed evenly over experts.
    open_trips = stage.gradient_accumulation_steps if plan.ramps_accumulation else math.nan
    text = compiled.as_text()
    assert text is not None
    module = parse(text, trips_where_unknown=open_trips, not_run=FURTHER_ROUNDS)
    done = work(module, memory_spaces=MEMORY_SPACES[devices[0].platform])
    traffic = total_traffic(collectives(module), mesh)
    model_flops = plan.flops_per_example * stage.global_batch_to_train
    return Program(
        plan=plan,
        compiled=compiled,
        module=module,
        compile_seconds=seconds,
        mesh=mesh,
        parameters=(
            *parameter_layouts(state.frozen, decoder.frozen(decoder.axes), None),
            *parameter_layouts(state.params, decoder.trained(decoder.axes), local),
        ),
        state_bytes=state_bytes(state),
        collectives=traffic,
        synchronization=synchronization,
        memory=ProgramMemory.of(compiled),
        work=done,
        roofline=_roofline(devices[0].device_kind, config, done, traffic, model_flops / mesh.size),
        model_flops=model_flops,
    )


def _roofline(
    device_kind: str, config: Config, done: ProgramWork, traffic: Sequence[Traffic], model_flops: float
) -> Roofline:
    flops = dict(done.matmul_flops)
    if done.kernel_flops:  # in the dtype of the activations
        name = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[config.dtype]
        flops[name] = flops.get(name, 0.0) + done.kernel_flops
    return roofline(
        device_of_kind(device_kind),
        dtype=config.dtype,
        model_flops=model_flops,
        matmul_flops=flops,
        memory_bytes=done.memory_bytes,
        sent_bytes=sum(row.sent_bytes for row in traffic),
    )


def parameter_layouts(params: Tree, axes_tree: Tree, local: LocalUpdates | None) -> Iterable[ParameterLayout]:
    """The layout of each parameter of an abstract state; `axes_tree` has the logical axes of each."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    all_axes = jax.tree.leaves(axes_tree, is_leaf=lambda node: isinstance(node, tuple))
    for (path, leaf), axes in zip(leaves, all_axes, strict=True):
        sizes = leaf.sharding.mesh.shape
        split: list[tuple[str, ...]] = []
        for entry in leaf.sharding.spec:
            names = (entry,) if isinstance(entry, str) else entry or ()
            split.append(tuple(axis for axis in names if sizes[axis] > 1))
        split += [()] * (leaf.ndim - len(split))
        yield ParameterLayout(
            name=".".join(str(entry.key) for entry in path),
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype),
            axes=(("replica",) if local else ()) + tuple(axes),
            partition_spec=tuple(split),
            bytes_per_device=bytes_per_device(leaf),
        )


def bytes_per_device(leaf: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Bytes of one device's shard of an array, which may be abstract."""
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize


def state_bytes(state: TrainState) -> dict[str, int]:
    """Bytes per device of each part of a state, which may be abstract. Frozen parameters count as params."""
    parts = {
        "params": (state.frozen, state.params),
        "opt_state": (state.opt_state, state.average),
        "outer": state.outer,
    }
    return {name: sum(map(bytes_per_device, jax.tree.leaves(part))) for name, part in parts.items()}


def total_traffic(found: Sequence[Collective], mesh: Mesh) -> tuple[Traffic, ...]:
    """The collectives of a program, added up by kind and mesh axes, the most bytes first."""
    together: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in found:
        together.setdefault((collective.kind, collective.axes(mesh)), []).append(collective)
    rows = [_traffic(kind, axes, members) for (kind, axes), members in together.items()]
    return tuple(sorted(rows, key=lambda row: (-known_or_0(row.bytes), row.kind, row.axes)))


def _traffic(kind: str, axes: tuple[str, ...], members: Sequence[Collective]) -> Traffic:
    by_dtype: dict[str, float] = {}
    for member in members:
        for dtype, size in member.payload.items():
            by_dtype[dtype] = by_dtype.get(dtype, 0) + size * member.times
    times = sum(member.times for member in members)
    is_known = not math.isnan(times)
    return Traffic(
        kind,
        axes,
        operations=len(members),
        times=times,
        async_times=sum(member.times for member in members if member.is_async) if is_known else math.nan,
        bytes=sum(by_dtype.values()) if is_known else math.nan,
        bytes_by_dtype=dict(by_dtype) if is_known else None,
        sent_bytes=sum(float(member.sent_bytes * member.times) for member in members),
    )
