"""The arithmetic of batch sizes: what follows from a config and a machine, and every rule that may be broken."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar, cast

from maxtext_lite.batching.batch import Batch, SampledBatch, derive_batch, not_whole, stated_batch
from maxtext_lite.batching.length import RunLength, derive_length, epochs_violation
from maxtext_lite.batching.pipeline_shape import num_repeats
from maxtext_lite.batching.rampup import RampupBatchManager, make_rampup, only_stage
from maxtext_lite.batching.scaling import OptimizerScaling, scale_optimizer, scaling_violations
from maxtext_lite.batching.topology import (
    MOST_DEVICES,
    MeshSizes,
    Scope,
    Topology,
    mesh_changes,
    mesh_key,
    model_dimensions,
    resolve_mesh,
    stated_axes,
    topology_violations,
)
from maxtext_lite.config import BatchConfig, Config
from maxtext_lite.config.errors import any_of, number_text, unwhole_text, value_text
from maxtext_lite.config.kernels import KERNELS, token_multiple
from maxtext_lite.config.violation import Violation, divisors_of, multiples

T = TypeVar("T")
_ROUNDED = Fraction(1, 1000)


@dataclass(frozen=True)
class Loading:
    """How one step's examples are read.

    Attributes:
      factor: expansion_factor_real_data, with -1 resolved to 1.
      loading_hosts: the hosts that read; the others contribute only empty slots.
      loads_per_step: loads that make one step; 1 unless the factor is below 1.
    """

    factor: Fraction
    loading_hosts: tuple[int, ...]
    loads_per_step: int

    def global_batch_to_load(self, global_batch_to_train: int) -> int:
        """Row slots of one load over all hosts: batch x factor, rounded up to a whole slot, which then stays empty."""
        return -(-global_batch_to_train * self.factor.numerator // self.factor.denominator)

    def examples_per_loading_host(self, global_batch_to_train: int) -> Fraction:
        """Examples that one loading host reads in one load; a fraction where the shares of hosts differ by one."""
        return Fraction(global_batch_to_train, len(self.loading_hosts) * self.loads_per_step)


@dataclass(frozen=True)
class Sizes:
    """Everything that follows from a legal config, a machine and the data.

    Attributes:
      diloco_num_replicas: None where local updates are off.
      length: None where num_epochs states it and the number of examples is unknown.
      sampled: the batch of a run that samples its examples, on whose training devices these sizes are; None in others.
    """

    topology: Topology
    mesh: MeshSizes
    batch: Batch
    eval_per_device_batch_size: Fraction
    eval_batch_examples: int
    num_pipeline_stages: int
    num_pipeline_microbatches: int
    num_pipeline_repeats: int
    loading: Loading
    rampup: RampupBatchManager | None
    scaling: OptimizerScaling
    diloco_num_replicas: int | None
    length: RunLength | None
    sampled: SampledBatch | None = None


def derive_sizes(
    config: Config, topology: Topology, num_examples: int | None = None, sampled: SampledBatch | None = None
) -> Sizes | list[Violation]:
    """The sizes, or every rule that is broken.

    Args:
      num_examples: training examples in the data, where known.
      sampled: the batch of a run whose config has no use for the keys of batches.
    """
    broken = topology_violations(topology)
    if any(not 1 <= number <= MOST_DEVICES for number in (topology.num_devices, topology.num_hosts)):
        return broken

    def legal(part: T | Violation | list[Violation]) -> T | None:
        if isinstance(part, Violation | list):
            broken.extend([part] if isinstance(part, Violation) else cast("list[Violation]", part))
            return None
        return part

    num_devices = topology.num_devices
    mesh = legal(resolve_mesh(config, num_devices))
    batch = sampled.trained if sampled else legal(derive_batch(config, num_devices))
    eval_size = legal(_eval_size(config, num_devices))
    loading = legal(loading_hosts(config, topology.num_hosts))
    ramp = make_rampup(config, batch or stated_batch(config, num_devices), num_devices)
    rampup = legal(ramp)
    axes = mesh or stated_axes(config)
    replicas = legal(_diloco_replicas(config, axes.total["data"]))
    epochs = epochs_violation(config, num_examples)
    length = epochs
    if batch and not isinstance(ramp, list) and not epochs:
        length = derive_length(config, rampup.all_stages if rampup else (only_stage(batch),), num_examples)
    run_length = legal(length)
    broken.extend(scaling_violations(config, batch))
    broken.extend(_model_violations(config, axes, num_devices))
    broken.extend(_context_violations(config, axes.total["context"]))
    broken.extend(_pipeline_violations(config, axes.total["stage"], axes.total["context"]))
    if broken or not (mesh and batch and loading):
        return broken
    stages, pieces = mesh.total["stage"], config.num_pipeline_microbatches
    per_eval = eval_size or batch.per_device_batch_size
    return Sizes(
        topology,
        mesh,
        batch,
        eval_per_device_batch_size=per_eval,
        eval_batch_examples=int(per_eval * num_devices),
        num_pipeline_stages=stages,
        num_pipeline_microbatches=stages if pieces == -1 else pieces,
        num_pipeline_repeats=num_repeats(config, stages),
        loading=loading,
        rampup=rampup,
        scaling=scale_optimizer(config, batch.global_batch_to_train),
        diloco_num_replicas=replicas,
        length=run_length,
        sampled=sampled,
    )


def loading_hosts(config: BatchConfig, num_hosts: int) -> Loading | Violation:
    """The loading hosts, or why the factor does not suit this number of hosts."""
    key, stated = "expansion_factor_real_data", config.expansion_factor_real_data
    factor = Fraction(1) if stated == -1 else stated
    if factor < 1:
        if factor.numerator == 1:
            return Loading(factor, tuple(range(num_hosts)), factor.denominator)
        loads = 1 / factor
        return Violation(
            key,
            f"{key}={number_text(factor)} is 1/x = {unwhole_text(loads)} loads per step, not a whole number.",
            (Fraction(1, int(loads) + 1), Fraction(1, int(loads))),
        )
    hosts = num_hosts / factor
    if hosts.denominator == 1:
        return Loading(factor, tuple(range(int(hosts))), 1)
    is_rounded = abs(hosts - round(hosts)) < _ROUNDED and hosts > 1
    meant = Fraction(num_hosts, round(hosts)) if is_rounded else None  # 2.6667 on 8 hosts is 8/3
    return Violation(
        key,
        f"{key}={number_text(factor)}: {num_hosts} hosts / {number_text(factor)} = "
        f"{unwhole_text(hosts)} loading hosts, not a whole number.",
        (meant,) if meant else (divisors_of(key, num_hosts, factor),),
    )


def _eval_size(config: BatchConfig, num_devices: int) -> Fraction | Violation:
    per_device = config.eval_per_device_batch_size
    if (per_device * num_devices).denominator != 1:
        return not_whole("eval_per_device_batch_size", per_device, num_devices)
    return per_device


def _diloco_replicas(config: Config, data_axis: int) -> int | Violation | None:
    """The copies of the model that local updates train; None where local updates are off."""
    key, replicas = "diloco_num_replicas", config.diloco_num_replicas
    if not config.enable_diloco:
        return None
    if replicas == -1:
        return data_axis
    if replicas % data_axis == 0:
        return replicas
    message = f"{key}={replicas} is not a multiple of the data axis, {data_axis}: each part has equally many."
    return Violation(key, message, (multiples(key, data_axis, replicas), -1))


def _model_violations(config: Config, mesh: MeshSizes, num_devices: int) -> list[Violation]:
    broken: list[Violation] = []
    for axis in ("fsdp", "tensor", "context", "expert"):
        # The context and expert axes split further what fsdp splits of a weight.
        together = ("fsdp", "context", "expert") if axis == "fsdp" else (axis,)
        shards = math.prod(mesh.total[each] for each in together)
        if shards == 1:
            continue
        chunks = 2 if axis == "context" else 1  # an early and a late one, which balances causal attention
        parts = shards * chunks
        uneven = {key: size for key, size in model_dimensions(config, axis).items() if size % parts}
        if not uneven:
            continue
        scopes: tuple[tuple[Scope, Mapping[str, int]], ...] = (("ici", mesh.ici), ("dcn", mesh.dcn))
        sizes = {mesh_key(name, each): scope[each] for each in together for name, scope in scopes if scope[each] > 1}
        key, size = next(iter(sizes.items()))
        how = " x ".join(
            f"{name}=-1, the remaining {part}," if getattr(config, name) == -1 else f"{name}={part}"
            for name, part in sizes.items()
        )
        if chunks > 1:
            how += f" x {chunks} chunks"
        if parts != size:
            how += f" = {parts}"
        named = any_of([f"{name}={dimension}" for name, dimension in uneven.items()])
        common = math.gcd(*model_dimensions(config, axis).values())
        near = [
            mesh_changes(config, num_devices, name, part, common // (parts // part)) for name, part in sizes.items()
        ]
        if axis == "context":  # unlike the model's dims, the length is free to choose
            near.insert(0, multiples("max_target_length", parts, config.max_target_length))
        broken.append(Violation(key, f"{how} does not divide {named}.", tuple(near), f"{axis} divides the model"))
    return broken


def _context_violations(config: Config, num_shards: int) -> list[Violation]:
    """Refuses what context shards cannot run."""
    if num_shards == 1:
        return []
    broken: list[Violation] = []
    key, kernel = "attention", config.attention
    unit = token_multiple("splash", num_shards)
    if kernel == "splash" and config.max_target_length % unit:
        length = "max_target_length"
        message = (
            f"{key}={kernel} needs {length}={config.max_target_length} to be a multiple of {unit}, "
            f"128 for each of 2 chunks on {num_shards} context shards."
        )
        near = multiples(length, unit, config.max_target_length)
        broken.append(Violation(key, message, (near, "auto"), rule="a kernel for shards"))
    if kernel != "auto" and not KERNELS[kernel].context_shards:
        message = f"{key}={kernel} does not work on {num_shards} context shards, whose tokens are laid out in chunks."
        broken.append(Violation(key, message, ("auto",), rule="a kernel for shards"))
    key, pieces = "num_vocab_tiling", config.num_vocab_tiling
    tokens, rest = divmod(config.max_target_length, num_shards)
    if not rest and tokens % pieces:
        message = f"{key}={pieces} does not divide the {tokens} tokens of each of {num_shards} context shards."
        broken.append(Violation(key, message, (divisors_of(key, tokens, pieces),), rule="tiles of a shard"))
    return broken


_WITHOUT_STAGES: Mapping[str, tuple[object, ...]] = {
    "num_pipeline_microbatches": (1, -1),
    "num_layers_per_pipeline_stage": (1,),
    "num_pipeline_repeats": (-1,),
    "pipeline_schedule": ("gpipe",),
}
"""Values that the pipeline's keys may have without a pipeline."""


def _pipeline_violations(config: Config, num_stages: int, context: int) -> list[Violation]:
    if num_stages == 1:
        no_effect = "has no effect with 1 pipeline stage (ici_pipeline_parallelism x dcn_pipeline_parallelism)."
        return [
            Violation(key, f"{key}={value} {no_effect}", plain[:1])
            for key, plain in _WITHOUT_STAGES.items()
            if (value := getattr(config, key)) not in plain
        ]
    key, pieces = "num_pipeline_microbatches", config.num_pipeline_microbatches
    broken: list[Violation] = []
    if pieces != -1 and pieces % num_stages:
        message = f"{key}={pieces} is not a multiple of the {num_stages} pipeline stages."
        broken.append(Violation(key, message, (multiples(key, num_stages, pieces),)))
    if config.num_stacked_layers > 0:  # otherwise first_num_dense_layers is refused
        broken.extend(_layer_violations(config, num_stages))
    if config.pipeline_schedule == "1f1b":
        broken.extend(_schedule_violations(config, num_stages, context))
    return broken


def _schedule_violations(config: Config, num_stages: int, context: int) -> list[Violation]:
    """What pipeline_schedule=1f1b requires: a micro-batch passes the stages once, and they can share its tokens."""
    key = "pipeline_schedule"
    broken: list[Violation] = []
    layers, at_once = config.num_stacked_layers, config.num_layers_per_pipeline_stage
    if layers > num_stages * at_once and layers % (num_stages * at_once) == 0:
        once = {"num_layers_per_pipeline_stage": layers // num_stages}
        if config.num_pipeline_repeats not in (-1, 1):
            once["num_pipeline_repeats"] = 1
        message = (
            f"{key}=1f1b passes the stages once, but {layers} layers on {num_stages} stages with "
            f"num_layers_per_pipeline_stage={at_once} go round {layers // (num_stages * at_once)} times."
        )
        broken.append(Violation(key, message, (once, "gpipe"), rule="1f1b rounds"))
    tokens, parts = config.max_target_length, num_stages * context * max(config.num_vocab_tiling, 1)
    if tokens % parts:
        tiles = f" x num_vocab_tiling={config.num_vocab_tiling}" if config.num_vocab_tiling > 1 else ""
        shards = f" x {context} context shards" if context > 1 else ""
        message = (
            f"max_target_length={tokens} is not a multiple of {num_stages} pipeline stages{shards}{tiles}, between "
            f"which {key}=1f1b splits the tokens of a microbatch for the loss."
        )
        near = multiples("max_target_length", parts, tokens)
        broken.append(Violation("max_target_length", message, (near,), rule="1f1b tokens"))
    return broken


def _layer_violations(config: Config, num_stages: int) -> list[Violation]:
    """Refuses layers that do not divide equally over the stages, each with whole periods of the layer patterns."""
    layers, at_once = config.num_stacked_layers, config.num_layers_per_pipeline_stage
    key, repeats = "num_layers_per_pipeline_stage", config.num_pipeline_repeats
    first = config.first_num_dense_layers  # these run before the pipeline
    rounds, rest = divmod(layers, num_stages * at_once)
    named = f"base_num_decoder_layers={layers + first}" + (f" - first_num_dense_layers={first}" if first else "")
    if rest:
        near = divisors_of(key, layers // num_stages, at_once)
        if layers % num_stages:
            unit = num_stages * at_once * max(repeats, 1)
            key, near = "base_num_decoder_layers", multiples("base_num_decoder_layers", unit, layers, offset=first)
        product = f"{num_stages} pipeline stages x num_layers_per_pipeline_stage={at_once}"
        message = f"{named} is not a multiple of {product}."
        return [Violation(key, message, (near,), rule="layers")]
    if repeats not in (-1, rounds):
        key = "num_pipeline_repeats"
        message = (
            f"{key}={repeats} x {num_stages} pipeline stages x num_layers_per_pipeline_stage={at_once} = "
            f"{repeats * num_stages * at_once} layers, but {named}."
        )
        return [Violation(key, message, (rounds,), rule="layers")]
    patterns = {"layer_pattern": config.pattern, "mlp_pattern": config.mlp_kinds}
    for name, pattern in patterns.items():
        period = len(pattern)
        if at_once % period and len(set(pattern)) > 1:
            message = (
                f"{key}={at_once} is not a multiple of the {period} layers of "
                f"{name}={value_text(getattr(config, name))}, which every pipeline stage has in this order."
            )
            unit = math.lcm(*(len(pattern) for pattern in patterns.values() if len(set(pattern)) > 1))
            return [Violation(key, message, (multiples(key, unit, at_once),), rule="layers")]
    return []
