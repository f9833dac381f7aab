"""Legal plans of a global batch on a machine, ranked by predicted step time: the solver behind `plan`."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from maxtext_lite.analysis.step_time import StepModel, StepTime, flops_of_example
from maxtext_lite.batching.devices import Device
from maxtext_lite.batching.ledger import MemoryEstimate
from maxtext_lite.batching.plan import BatchPlan, refusals, resolve, row_slots
from maxtext_lite.batching.table import aligned
from maxtext_lite.batching.topology import (
    MESH_AXES,
    MESH_KEYS,
    MeshSizes,
    PipelineShape,
    Topology,
    mesh_key,
    mesh_text,
    model_dimensions,
    topology_violations,
)
from maxtext_lite.config import Config, Refusal, UserError
from maxtext_lite.config.errors import bytes_text, divisors, number_text, settings_of
from maxtext_lite.config.keys import REMAT_POLICIES
from maxtext_lite.config.load import Origin, defaults_of
from maxtext_lite.config.rules import rule_violations

_REMAT = "remat_policy"
_OFFLOAD = "optimizer_memory_host_offload"
_PIECES = "num_pipeline_microbatches"
_PER = "per_device_batch_size"
_STEPS = "gradient_accumulation_steps"
CHOSEN_KEYS = (*MESH_KEYS, _PIECES, _REMAT, _OFFLOAD)
"""Keys chosen along with the two that split a batch, unless the user states them."""
_MOST_DOUBLINGS = 3
"""Doublings of the pipeline microbatches, from one per stage; after these under a ninth of the ticks is idle."""

Plan = Callable[[Config], BatchPlan]
"""`make_plan` for a machine; raises UserError."""


@dataclasses.dataclass(frozen=True)
class RankedPlan:
    """A legal plan that fits, and its predicted time.

    Attributes:
      keys: the chosen config keys, including those of the batch.
    """

    keys: Mapping[str, Any]
    config: Config
    plan: BatchPlan
    time: StepTime

    @property
    def settings(self) -> list[str]:
        """The chosen keys as `key=value`."""
        return settings_of(self.keys)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.plan.tokens_per_step / self.time.seconds

    def to_json(self) -> dict[str, Any]:
        """All figures; times in seconds, memory in bytes per device."""
        plan = self.plan
        return {
            "keys": dict(item.split("=", 1) for item in self.settings),
            "mesh": dict(plan.mesh),
            _PER: float(plan.per_device_batch_size),
            _STEPS: plan.gradient_accumulation_steps,
            _PIECES: plan.num_pipeline_microbatches,
            _REMAT: self.config.remat_policy,
            _OFFLOAD: self.config.optimizer_memory_host_offload,
            "memory": plan.memory.total,
            **dataclasses.asdict(self.time),
            "tokens_per_second": self.tokens_per_second,
        }


def is_open(config: Config, key: str) -> bool:
    """Whether the user left a key open, both in their files and on the command line."""
    origin = config.origins.get(key)
    return isinstance(origin, Origin) and origin.is_default


_RANKED = ("mesh", "per device", "A", "pieces", "remat_policy", "GB", "min ms", "matmul", "memory", "collectives",
           "host", "bubble", "max tokens/s", "max MFU")  # fmt: skip


def format_ranking(ranked: Sequence[RankedPlan]) -> str:
    """Ranked plans, one a line: the chosen keys, planned memory per device, and the shortest time of a step."""
    left = {0, _RANKED.index("remat_policy")}
    return "\n".join(aligned([_RANKED, *map(_ranked_row, ranked)], {*range(len(_RANKED))} - left))


def _ranked_row(ranked: RankedPlan) -> tuple[str, ...]:
    plan = ranked.plan
    time = ranked.time
    parts = (time.seconds, time.matmul_seconds, time.memory_seconds, time.collectives_seconds, time.host_seconds)
    return (
        mesh_text(plan.mesh, "all mesh axes 1"),
        number_text(plan.per_device_batch_size),
        str(plan.gradient_accumulation_steps),
        str(plan.num_pipeline_microbatches),
        ranked.config.remat_policy + ", optimizer offloaded" * ranked.config.optimizer_memory_host_offload,
        f"{plan.memory.total / 1e9:.1f}",
        *(f"{1e3 * seconds:,.1f}" for seconds in (*parts, time.bubble_seconds)),
        f"{ranked.tokens_per_second:,.0f}",
        f"{time.mfu:.1%}",
    )


class _Unpredictable(UserError):
    """The figures of a device do not suffice to predict a step."""


def rank(config: Config, topology: Topology, device: Device, plan_of: Plan, *, most: int = 10) -> list[RankedPlan]:
    """The `most` plans with the shortest predicted steps among those that are legal and fit, the best first.

    Args:
      plan_of: makes plans that know the memory of a device.
    Raises:
      UserError: the choice would change the training; nothing is legal; nothing fits (the message names the nearest);
        or the device's figures do not suffice (the message names the fewest micro-batches that fit).
    """
    check_machine(config, topology)
    _check_training_is_stated(config, topology, plan_of)
    try:
        return _fastest(config, topology, device, plan_of, most)
    except _Unpredictable as error:
        near: list[str] = []
        with contextlib.suppress(UserError):
            near = [" ".join(settings_of(_fewest_micro_batches(config, topology, plan_of)))]
        raise UserError(str(Refusal("", str(error), tuple(near)))) from None


def choose(config: Config, topology: Topology, device: Device | None, plan_of: Plan) -> tuple[dict[str, Any], str]:
    """The keys of the fastest plan that fits, and in words why it was chosen. Without enough figures of the device it
    is the plan with the fewest micro-batches.

    Args:
      plan_of: makes plans that know the memory of a device, if it is known.
    Raises:
      UserError: as in `rank`, except that no figures are needed.
    """
    check_machine(config, topology)
    _check_training_is_stated(config, topology, plan_of)
    if device is not None:
        with contextlib.suppress(_Unpredictable):
            return dict(_fastest(config, topology, device, plan_of, 1)[0].keys), "predicted to be the fastest"
    return _fewest_micro_batches(config, topology, plan_of), "the fewest micro-batches"


def _fastest(config: Config, topology: Topology, device: Device, plan_of: Plan, most: int) -> list[RankedPlan]:
    """The plans of `rank`.

    Meshes, and then the splits of a mesh, are looked at in the order of their lower bounds, until these are no longer
    below the slowest plan to be returned. A mesh on which the parameters, the optimizer state and the gradients of one
    micro-batch alone do not fit has no split that does.
    """
    device = device.in_hosts(topology.num_devices, topology.num_hosts)
    variants = list(_variants(config, device))
    leanest = variants[-1]
    found: list[RankedPlan] = []
    tried: list[tuple[int, _Mesh]] = []

    def is_too_slow(seconds: float) -> bool:
        return len(found) >= most and seconds >= found[-1].time.seconds

    for mesh in sorted(_legal_meshes(config, topology, device), key=lambda mesh: mesh.bound):
        if is_too_slow(mesh.bound):
            break
        held = plan_of(mesh.config).memory
        least_bytes = 0
        if held.limit is not None and held.without_batch > held.limit:
            least_bytes = plan_of(mesh.config.model_copy(update=leanest)).memory.without_batch
        tried.append((least_bytes, mesh))
        if held.limit is not None and least_bytes > held.limit:
            continue
        timed: list[tuple[StepTime, dict[str, Any]]] = []
        for split in _splits(config, topology, device, mesh, held):
            if is_too_slow(split.least_seconds):
                break
            chosen = config.model_copy(update={**split.keys, **leanest})
            if not isinstance(resolve(chosen, topology), list) and plan_of(chosen).memory.fits:
                for keys in variants:
                    timed.append((split.time(config.model_copy(update=keys)), {**split.keys, **keys}))
        for time, keys in sorted(timed, key=lambda each: each[0].seconds):
            if is_too_slow(time.seconds):
                break
            chosen = config.model_copy(update=keys)
            plan = plan_of(chosen)
            if plan.memory.fits and not any(rule_violations(chosen, defaults_of(type(chosen)))):
                found.append(RankedPlan(_stated(config, chosen, plan), chosen, plan, time))
                found.sort(key=lambda each: each.time.seconds)
                del found[most:]
    if not found:
        none = "no mesh and batch that the config leaves open are legal on these devices."
        raise _refusal(config, plan_of, _nearest_to_fit(config, topology, tried, leanest, plan_of), none)
    return found


def _fewest_micro_batches(config: Config, topology: Topology, plan_of: Plan) -> dict[str, Any]:
    """The keys of the plan with the fewest micro-batches that fits, on the config's own mesh."""
    nearest: tuple[Config, BatchPlan] | None = None
    for chosen, plan in _on_own_mesh(config, topology, plan_of):
        if plan.memory.fits:
            return _stated(config, chosen, plan)
        if nearest is None or plan.memory.total < nearest[1].memory.total:
            nearest = chosen, plan
    raise _refusal(config, plan_of, nearest, "no number of micro-batches is legal on these devices.")


def _on_own_mesh(config: Config, topology: Topology, plan_of: Plan) -> Iterator[tuple[Config, BatchPlan]]:
    """The legal plans on the config's own mesh, those with the fewest micro-batches first."""
    for steps in divisors(config.stated_global_batch):
        chosen = config.model_copy(update={_STEPS: steps})
        if not isinstance(resolve(chosen, topology), list):
            yield chosen, plan_of(chosen)


def check_machine(config: Config, topology: Topology) -> None:
    """Refuses devices and hosts that no batch has a plan for.

    Raises:
      UserError: with every problem of the machine.
    """
    if topology_violations(topology):
        one_each = {_PER: Fraction(1), _STEPS: 1, "global_batch_size": 0, "global_batch_tokens": 0}
        raise UserError(map(str, refusals(config.model_copy(update=one_each), topology)))


def _check_training_is_stated(config: Config, topology: Topology, plan_of: Plan) -> None:
    """Raises UserError where batches or replicas are open: a choice may change nothing but time and memory."""
    data = mesh_key("ici", "data")
    replicas = "diloco_num_replicas"
    data_stated = not is_open(config, data) and -1 not in (getattr(config, data), config.dcn_data_parallelism)
    replicas_open = config.enable_diloco and config.diloco_num_replicas == -1 and not data_stated
    if not config.enable_rampup_batch_size and not replicas_open:
        return
    plans: list[BatchPlan] = []
    with contextlib.suppress(UserError):
        plans += [plan for _, plan in _on_own_mesh(config, topology, plan_of)]
    own = next((plan for plan in plans if plan.memory.fits), plans[0] if plans else None)
    problems: list[Refusal] = []
    if config.enable_rampup_batch_size:
        message = f"enable_rampup_batch_size=true: the batches of a ramp follow from {_PER} and {_STEPS}, both open."
        near = [] if own is None else [f"{_STEPS}={own.gradient_accumulation_steps}"]
        problems.append(Refusal("", message, (*near, "enable_rampup_batch_size=false")))
    if replicas_open:
        message = f"{replicas}=-1: the number of replicas follows from the data axis, which is open."
        problems.append(Refusal(replicas, message, (1 if own is None else own.diloco_num_replicas,)))
    raise UserError(map(str, problems))


def _stated(config: Config, chosen: Config, plan: BatchPlan) -> dict[str, Any]:
    """The keys that differ between a plan's config and the requested one."""
    changed = {key: value for key in CHOSEN_KEYS if (value := getattr(chosen, key)) != getattr(config, key)}
    return {_PER: plan.per_device_batch_size, _STEPS: plan.gradient_accumulation_steps, **changed}


class _Mesh(NamedTuple):
    """A legal mesh.

    Attributes:
      keys: the mesh keys that the config leaves open.
      config: legal on it.
      plan: of that config.
      bound: seconds that no step on it is below.
    """

    keys: Mapping[str, int]
    config: Config
    plan: BatchPlan
    bound: float


class _Split(NamedTuple):
    """An accumulation and a number of pipeline microbatches that may be legal on a mesh.

    Attributes:
      time: of a step with the remat policy of a config.
      least_seconds: seconds that no step is below, whatever is recomputed or offloaded.
    """

    keys: Mapping[str, Any]
    time: Callable[[Config], StepTime]
    least_seconds: float


def _variants(config: Config, device: Device) -> Iterator[dict[str, Any]]:
    """Values of the open keys that change only time and memory, without offloading to a host whose rate is unknown.

    The last one needs the least memory.
    """
    policies = [{_REMAT: policy} for policy in ("none", *REMAT_POLICIES)] if is_open(config, _REMAT) else [{}]
    offloads = [{_OFFLOAD: False}, {_OFFLOAD: True}] if is_open(config, _OFFLOAD) else [{}]
    for policy, offload in itertools.product(policies, offloads):
        uses_host = offload.get(_OFFLOAD) or "offloaded" in policy.get(_REMAT, "")
        if device.host_bytes_per_second is not None or not uses_host:
            yield {**policy, **offload}


def _legal_meshes(config: Config, topology: Topology, device: Device) -> Iterator[_Mesh]:
    flops = flops_of_example(config)
    for mesh in _meshes(config, topology.num_devices):
        for keys in _split_keys(config, mesh):
            changed = config.model_copy(update=keys)
            plan = resolve(changed, topology)
            if not isinstance(plan, list):
                model = _model(changed, plan, device, None, flops)
                yield _Mesh(mesh, changed, plan, model.bound(config.stated_global_batch))
                break
            if any(refusal.key in MESH_KEYS for refusal in plan):  # the mesh itself is illegal
                break


def _split_keys(config: Config, mesh: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """The keys of a mesh with every accumulation and number of pipeline microbatches."""
    key = mesh_key("ici", "stage")
    stages = mesh.get(key, getattr(config, key)) * max(config.dcn_pipeline_parallelism, 1)
    for steps in divisors(config.stated_global_batch):
        for pieces in microbatch_choices(config, stages):
            yield {**mesh, _STEPS: steps, **pieces}


def _splits(config: Config, topology: Topology, device: Device, mesh: _Mesh, held: MemoryEstimate) -> list[_Split]:
    """The splits of a mesh, in the order of their lower bounds."""
    batch = config.stated_global_batch
    plan = mesh.plan
    model = _model(mesh.config, plan, device, held, flops_of_example(config))
    found: list[_Split] = []
    for keys in _split_keys(config, mesh.keys):
        steps = keys[_STEPS]
        number = keys.get(_PIECES, plan.num_pipeline_microbatches)
        rows = row_slots(batch // steps, plan.layout_shards, topology.num_hosts, number) * config.rows_per_example
        shape = PipelineShape(plan.num_pipeline_stages, number, plan.num_pipeline_repeats, steps)
        time = functools.partial(model.step, rows=rows, examples=batch, shape=shape)
        found.append(_Split(keys, time, model.least(rows, batch, shape).seconds))
    return sorted(found, key=lambda split: split.least_seconds)


def _model(config: Config, plan: BatchPlan, device: Device, held: MemoryEstimate | None, flops: float) -> StepModel:
    mesh = MeshSizes(plan.ici_mesh, plan.dcn_mesh)
    try:
        return StepModel(config, mesh, device, held, flops=flops)
    except ValueError as error:
        raise _Unpredictable(f"--device={device.name}: {error}, so no step can be predicted.") from None


def _meshes(config: Config, num_devices: int) -> Iterator[dict[str, int]]:
    """Sizes of the open axes within a slice. Their product is the number of devices left by the stated axes."""
    keys = {axis: key for axis in MESH_AXES if is_open(config, key := mesh_key("ici", axis))}
    stated = [getattr(config, key) for key in MESH_KEYS if key not in keys.values()]
    rest = num_devices // math.prod(size for size in stated if size > 0)

    def below(left: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        if not axes and (left == 1 or -1 in stated):
            yield {}
        for size in divisors(left) if axes and left else ():
            if _dimension(config, axes[0]) % size == 0:
                yield from ({keys[axes[0]]: size, **others} for others in below(left // size, axes[1:]))

    return below(rest, [*keys])


def _dimension(config: Config, axis: str) -> int:
    """What the size of an axis must divide in every legal plan; 0, which all sizes divide, for `data`."""
    if axis == "data":
        return 0
    return config.num_stacked_layers if axis == "stage" else math.gcd(*model_dimensions(config, axis).values())


def microbatch_choices(config: Config, stages: int) -> list[dict[str, int]]:
    """Candidate numbers of pipeline microbatches; no choice without a pipeline, or if the user states them."""
    if stages <= 1 or not is_open(config, _PIECES):
        return [{}]
    return [{_PIECES: stages * 2**power} for power in range(_MOST_DOUBLINGS + 1)]


def _nearest_to_fit(
    config: Config, topology: Topology, tried: list[tuple[int, _Mesh]], leanest: Mapping[str, Any], plan_of: Plan
) -> tuple[Config, BatchPlan] | None:
    """The legal plan that needs the least memory.

    Args:
      tried: meshes, each with bytes that no plan of it is below.
    """
    nearest: tuple[Config, BatchPlan] | None = None
    for least_bytes, mesh in sorted(tried, key=lambda each: each[0]):
        if nearest and least_bytes >= nearest[1].memory.total:
            break
        for keys in _split_keys(config, mesh.keys):
            chosen = config.model_copy(update={**keys, **leanest})
            if not isinstance(resolve(chosen, topology), list):
                plan = plan_of(chosen)
                if nearest is None or plan.memory.total < nearest[1].memory.total:
                    nearest = chosen, plan
    return nearest


def _refusal(config: Config, plan_of: Plan, nearest: tuple[Config, BatchPlan] | None, none: str) -> UserError:
    """Why nothing is chosen: the legal plan that comes nearest to fitting, or `none` where no plan is legal.

    Raises:
      UserError: of one micro-batch, where no plan is legal.
    """
    if nearest is None:
        plan_of(config.model_copy(update={_STEPS: 1}))  # raises the specific refusal
        return UserError(none)
    chosen, plan = nearest
    total = plan.memory.total
    limit = plan.memory.limit or 0
    said = " ".join(settings_of(_stated(config, chosen, plan)))
    return UserError(
        f"no legal plan fits into the {bytes_text(limit)} of a device. What comes nearest, {said}, needs "
        f"{bytes_text(total)}: {bytes_text(total - limit)} too much."
    )
