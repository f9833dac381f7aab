"""The plan of a run: every batch size and what follows from it, its table and its JSON, without the machine."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from maxtext_lite.batching.batch import Batch, SampledBatch, derive_batch, not_whole, stated_batch
from maxtext_lite.batching.ledger import PARTS, MemoryEstimate
from maxtext_lite.batching.parameters import count_parameters, flops_per_example, master_bytes
from maxtext_lite.batching.pipeline_shape import SCHEDULES, PipelineShape, Schedule, num_repeats
from maxtext_lite.batching.schedule import (
    BatchStage,
    OptimizerScaling,
    RampupBatchManager,
    RunLength,
    derive_length,
    json_number,
    make_rampup,
    only_stage,
    scale_optimizer,
    scaling_violations,
    scaling_warnings,
    stage_at,
)
from maxtext_lite.batching.topology import (
    CHUNKS,
    MOST_DEVICES,
    SPLIT_TOGETHER,
    MeshSizes,
    Scope,
    Topology,
    mesh_changes,
    mesh_key,
    mesh_text,
    model_dimensions,
    resolve_mesh,
    splits_residual,
    stated_axes,
    topology_violations,
)
from maxtext_lite.config import BatchConfig, Config, Refusal, UserError, registry, remat_of
from maxtext_lite.config.errors import (
    any_of,
    bytes_text,
    counted,
    nearest_clause,
    number_text,
    rounded_text,
    short_text,
    unwhole_text,
    value_text,
)
from maxtext_lite.config.kernels import (
    Accelerator,
    KernelChoice,
    Platform,
    kernel_named,
    planned_kernel,
    token_multiple,
)
from maxtext_lite.config.keys import ATTENTION_KINDS
from maxtext_lite.config.load import defaults_of, read_config
from maxtext_lite.config.rules import rule_violations
from maxtext_lite.config.violation import (
    Change,
    Number,
    Violation,
    changed_config,
    divisors_around,
    multiples_around,
    suggest,
    violates,
)


@dataclass(frozen=True)
class ScheduleCost:
    """What a pipeline schedule costs: the share of ticks that a stage waits, and activations in bytes if estimated."""

    bubble_fraction: Fraction
    activations: int | None

    def to_json(self) -> dict[str, object]:
        """The fields by name."""
        cost: dict[str, object] = {"bubble_fraction": json_number(self.bubble_fraction)}
        if self.activations is not None:
            cost["activations"] = self.activations
        return cost


@dataclass(frozen=True, kw_only=True)
class BatchPlan(Batch):
    """The batch of a run on a machine and all that follows from it: plan.json, under the same names. Exact.

    Attributes:
      num_devices, num_hosts: those that train.
      ici_mesh, dcn_mesh: size of each mesh axis (stage, data, fsdp, expert, context, tensor) within and across slices.
      loading_hosts: the hosts that read; the others contribute only empty slots.
      expansion_factor_real_data: with -1 resolved to 1.
      num_examples: training examples in the data; None where unknown.
      length: the steps of the run and the examples of each.
      scaling: the optimizer's settings for this batch.
      rampup: the ramp, or None.
      diloco_num_replicas: copies of local updates; None where they are off, as is diloco_sync_period.
      rows_per_example: rows of max_target_length tokens in an example: two in DPO, otherwise one.
      attention_kernel: the kernel that `attention` selects on these devices.
      rl: the batches of reinforcement learning; None in other runs. With it an example is a pair of a prompt and a
        response, num_devices counts the trainer's devices, and num_examples counts prompts.
      flops_per_example: of all its rows, by the model: forward and backward, without recomputation. `make_plan` adds
        this and the fields below.
      memory: of a step on one device, where it is estimated.
      pipeline_schedules: cost of every schedule that suits this pipeline; empty without a pipeline.
      warnings: what works but is probably a mistake.
    """

    num_devices: int
    num_hosts: int
    ici_mesh: Mapping[str, int]
    dcn_mesh: Mapping[str, int]
    loading_hosts: tuple[int, ...]
    expansion_factor_real_data: Fraction
    max_target_length: int
    rows_per_example: int
    eval_per_device_batch_size: Fraction
    num_pipeline_stages: int
    num_pipeline_microbatches: int
    num_pipeline_repeats: int
    pipeline_schedule: Schedule
    num_examples: int | None
    length: RunLength
    scaling: OptimizerScaling
    rampup: RampupBatchManager | None
    diloco_num_replicas: int | None
    diloco_sync_period: int | None
    attention_kernel: KernelChoice
    rl: SampledBatch | None
    flops_per_example: float = 0.0
    memory: MemoryEstimate = field(default_factory=lambda: MemoryEstimate((), None))
    pipeline_schedules: Mapping[Schedule, ScheduleCost] = field(default_factory=dict[Schedule, ScheduleCost])
    warnings: tuple[str, ...] = ()

    @cached_property
    def mesh(self) -> Mapping[str, int]:
        """The size of each mesh axis: ici_mesh x dcn_mesh."""
        return MeshSizes(self.ici_mesh, self.dcn_mesh).total

    @property
    def batch_shards(self) -> int:
        """Parts into which the rows of a micro-batch are split over devices: data x fsdp x expert."""
        return self.mesh["data"] * self.mesh["fsdp"] * self.mesh["expert"]

    @property
    def layout_shards(self) -> int:
        """Equal shares of a micro-batch's rows: batch shards, or with local updates replicas x fsdp x expert."""
        return layout_shards(self.mesh, self.diloco_num_replicas)

    def slots_for(self, examples: int) -> int:
        """Row slots for `examples` rows in one pass: a multiple of layout shards, hosts and pipeline microbatches."""
        return row_slots(examples, self.layout_shards, self.num_hosts, self.num_pipeline_microbatches)

    @property
    def micro_batch_slots(self) -> int:
        """Rows in the arrays of one micro-batch: its examples and its empty slots."""
        return self.slots_for(self.micro_batch_to_train)

    @property
    def empty_slots_per_micro_batch(self) -> int:
        """Slots of a micro-batch without an example; every shard has equally many slots."""
        return self.micro_batch_slots - self.micro_batch_to_train

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of max_target_length tokens in one micro-batch, empty slots included."""
        return self.rows_per_example * self.micro_batch_slots

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all rows of a step's examples."""
        return self.global_batch_to_train * self.rows_per_example * self.max_target_length

    @property
    def global_batch_to_load(self) -> int:
        """Row slots of one load over all hosts: batch x factor, rounded up to a whole slot, which then stays empty."""
        return math.ceil(self.global_batch_to_train * self.expansion_factor_real_data)

    @property
    def loads_per_step(self) -> int:
        """Loads that make one step; 1 unless the expansion factor is below 1."""
        return math.ceil(1 / self.expansion_factor_real_data)

    @property
    def examples_per_loading_host(self) -> Fraction:
        """Examples that one host reads in one load; a fraction where the shares of hosts differ by one."""
        return Fraction(self.global_batch_to_train, len(self.loading_hosts) * self.loads_per_step)

    @property
    def eval_batch_examples(self) -> int:
        """Examples of one evaluation batch."""
        return int(self.eval_per_device_batch_size * self.num_devices)

    @property
    def eval_batch_slots(self) -> int:
        """Rows in the arrays of one evaluation batch, `eval_batch_examples` of them examples."""
        return self.slots_for(self.eval_batch_examples)

    @property
    def pipeline_shape(self) -> PipelineShape:
        """The pipeline, and the work of one step at the target batch."""
        return PipelineShape(
            self.num_pipeline_stages,
            self.num_pipeline_microbatches,
            self.num_pipeline_repeats,
            self.gradient_accumulation_steps,
        )

    @property
    def pipeline_microbatch_size(self) -> int:
        """Examples of the largest pipeline microbatch."""
        return -(-self.micro_batch_to_train // self.num_pipeline_microbatches)

    @property
    def pipeline_bubble_fraction(self) -> Fraction:
        """The share of its ticks that a stage waits under the configured schedule."""
        return self.pipeline_shape.bubble_fraction(self.pipeline_schedule)

    def flops_of_step(self, stage: BatchStage) -> float:
        """`flops_per_example` of all examples of a step of a stage."""
        return self.flops_per_example * stage.global_batch_to_train

    @property
    def stages(self) -> tuple[BatchStage, ...]:
        """All stages of the run, the target's last; a single one without a ramp."""
        return self.length.stages

    @property
    def ramps_accumulation(self) -> bool:
        """Whether the number of micro-batches changes during the run; the target's is then the largest."""
        return any(stage.gradient_accumulation_steps != self.gradient_accumulation_steps for stage in self.stages)

    def stage_at(self, examples_seen: int) -> BatchStage:
        """The batch sizes of the next step once `examples_seen` examples have been consumed.

        Raises:
          ValueError: examples_seen is negative.
        """
        return stage_at(self.stages, examples_seen)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run, stated or derived from num_epochs; where it resumes, with those done."""
        return self.length.steps

    @property
    def total_examples(self) -> int:
        """Examples of the whole run, including a short last batch."""
        return self.length.total_examples

    @property
    def steps_per_epoch(self) -> Fraction | None:
        """Steps of the target batch in one pass over the data; None where its size is unknown."""
        if self.num_examples is None:
            return None
        examples = self.num_examples * (1 if self.rl is None else self.rl.examples_per_entry)
        return Fraction(examples, self.global_batch_to_train)

    @property
    def epochs(self) -> Fraction | None:
        """Passes over the data in the whole run; None where its size is unknown."""
        if self.steps_per_epoch is None:
            return None
        return self.total_examples / (self.steps_per_epoch * self.global_batch_to_train)

    def period_steps(self, stated: int | Fraction) -> int:
        """The steps between two events with a period as stated: steps, or below 1 a part of an epoch."""
        if stated >= 1 or stated == -1:
            return int(stated)
        assert self.steps_per_epoch is not None, "a run knows the number of its examples"
        return max(1, round(stated * self.steps_per_epoch))

    def schedule_end(self, unit: Literal["steps", "examples", "tokens"], step: int, examples_seen: int) -> float:
        """The position at which the schedule of a run ends, in steps of the target batch: at the end of the run.

        Args:
          unit: `schedule_unit`.
          step, examples_seen: done so far; the result is the same after each step of a run.
        """
        last, examples = self.length.end_after(step, examples_seen)
        return float(last) if unit == "steps" else examples / self.global_batch_to_train

    @property
    def last_batch_examples(self) -> int | None:
        """Examples of the last step where it is short (last_batch=train); None where all batches are whole."""
        return (self.length.short_batch_examples or None) if self.length.trains_short_batch else None

    @property
    def dropped_examples(self) -> int:
        """Examples at the end of the epochs that fill no batch and are not trained on (last_batch=drop)."""
        return 0 if self.length.trains_short_batch else self.length.short_batch_examples

    @property
    def learning_rate(self) -> float:
        """The peak learning rate as configured, without `learning_rate_multiplier`."""
        return self.scaling.configured["learning_rate"]

    @property
    def learning_rate_multiplier(self) -> float:
        """The factor by which the batch scales the learning rate."""
        return self.scaling.learning_rate_multiplier

    @property
    def adam_b1(self) -> float:
        """The decay of the first moment, scaled where scale_adam_with_batch is set."""
        return self.scaling.scaled["adam_b1"]

    @property
    def adam_b2(self) -> float:
        """The decay of the second moment, scaled where scale_adam_with_batch is set."""
        return self.scaling.scaled["adam_b2"]

    @property
    def adam_eps(self) -> float:
        """Adam's epsilon, scaled where scale_adam_with_batch is set."""
        return self.scaling.scaled["adam_eps"]

    def to_json(self) -> dict[str, object]:
        """The keys of plan.json, with fractions as numbers."""
        names = (
            "num_devices", "num_hosts", "mesh", "per_device_batch_size", "micro_batch_to_train",
            "empty_slots_per_micro_batch", "gradient_accumulation_steps", "global_batch_to_train",
            "global_batch_to_load", "loads_per_step", "loading_hosts", "examples_per_loading_host", "rows_per_example",
            "tokens_per_step", "eval_per_device_batch_size", "eval_batch_examples", "num_pipeline_stages",
            "num_pipeline_microbatches", "num_pipeline_repeats", "pipeline_schedule", "pipeline_microbatch_size",
            "pipeline_bubble_fraction", "steps", "epochs", "steps_per_epoch", "num_examples", "total_examples",
            "last_batch_examples", "dropped_examples", "learning_rate", "learning_rate_multiplier", "adam_b1",
            "adam_b2", "adam_eps", "diloco_num_replicas", "diloco_sync_period",
        )  # fmt: skip
        found = {name: json_number(getattr(self, name)) for name in names}
        found["loading_hosts"] = list(self.loading_hosts)
        found["rampup"] = None if self.rampup is None else self.rampup.to_json()
        found["pipeline_schedules"] = {name: cost.to_json() for name, cost in self.pipeline_schedules.items()}
        if self.memory.is_known:
            found["memory"] = self.memory.to_json()
        found["attention_kernel"] = self.attention_kernel.to_json()
        if self.rl is not None:
            found["rl"] = self.rl.to_json()
        step, examples_seen = self.length.done
        if step:
            resumed: dict[str, object] = {"step": step, "examples_seen": examples_seen}
            if self.rampup is not None:
                resumed["stages_ahead"] = [stage.to_json() for stage in self.length.stages_ahead]
            found["resumed"] = resumed
        found["warnings"] = list(self.warnings)
        return found


def layout_shards(mesh: Mapping[str, int], diloco_num_replicas: int | None) -> int:
    """The equal parts into which the rows of a micro-batch are split; see `BatchPlan.layout_shards`."""
    copies = mesh["data"] if diloco_num_replicas is None else diloco_num_replicas
    return copies * mesh["fsdp"] * mesh["expert"]


def row_slots(examples: int, layout_shards: int, num_hosts: int, num_pipeline_microbatches: int) -> int:
    """Slots for `examples` rows, so that all shards, hosts and pipeline microbatches have equally many."""
    pieces = num_pipeline_microbatches
    unit = math.lcm(layout_shards, num_hosts // math.gcd(num_hosts, pieces))
    return pieces * unit * -(-examples // (pieces * unit))


# ---- From a config and a machine to a plan, or the rules that they break --------------------------------------------

T = TypeVar("T")
_ROUNDED = Fraction(1, 1000)


def resolve(config: Config, topology: Topology, num_examples: int | None = None) -> BatchPlan | list[Violation]:
    """The plan of a config on a machine, without what `make_plan` adds, or every broken rule.

    Args:
      num_examples: training examples in the data; if unknown, the length of a run of num_epochs is unknown too.
    """
    if config.run_kind == "train":
        return _derive_plan(config, topology, num_examples, None)
    if broken := topology_violations(topology):
        return broken
    sampled: SampledBatch | list[Violation] = registry.load("batch", config.run_kind)(config, topology)
    if isinstance(sampled, list):
        return sampled
    return _derive_plan(config, sampled.training_part(topology), num_examples, sampled)


def _derive_plan(
    config: Config, topology: Topology, num_examples: int | None, sampled: SampledBatch | None
) -> BatchPlan | list[Violation]:
    """The plan, or every broken rule.

    Args:
      sampled: the batch of a run whose config has no use for the keys of batches, and no length in epochs.
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
    readers = legal(loading_hosts(config, topology.num_hosts))
    ramp = make_rampup(config, batch or stated_batch(config, num_devices), num_devices)
    rampup = legal(ramp)
    stages = None
    if batch and not isinstance(ramp, list):
        stages = rampup.all_stages if rampup else (only_stage(batch),)
    length = legal(derive_length(config, stages, None if sampled else num_examples))
    axes = mesh or stated_axes(config)
    replicas = legal(_diloco_replicas(config, axes.total["data"]))
    broken.extend(scaling_violations(config, batch))
    broken.extend(_model_violations(config, axes, num_devices))
    broken.extend(_context_violations(config, axes.total["context"]))
    broken.extend(_pipeline_violations(config, axes.total["stage"], axes.total["context"]))
    if broken or not (mesh and batch and readers and length):
        return broken
    num_stages, pieces = mesh.total["stage"], config.num_pipeline_microbatches
    return BatchPlan(
        per_device_batch_size=batch.per_device_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        micro_batch_to_train=batch.micro_batch_to_train,
        num_devices=num_devices,
        num_hosts=topology.num_hosts,
        ici_mesh=mesh.ici,
        dcn_mesh=mesh.dcn,
        loading_hosts=readers,
        expansion_factor_real_data=_expansion_factor(config),
        max_target_length=config.max_target_length,
        rows_per_example=config.rows_per_example,
        eval_per_device_batch_size=eval_size or batch.per_device_batch_size,
        num_pipeline_stages=num_stages,
        num_pipeline_microbatches=num_stages if pieces == -1 else pieces,
        num_pipeline_repeats=num_repeats(config, num_stages),
        pipeline_schedule=config.pipeline_schedule,
        num_examples=num_examples,
        length=length,
        scaling=scale_optimizer(config, batch.global_batch_to_train),
        rampup=rampup,
        diloco_num_replicas=replicas,
        diloco_sync_period=None if replicas is None else config.diloco_sync_period,
        attention_kernel=planned_kernel(config, topology.accelerator, mesh.total["context"]),
        rl=sampled,
    )


def _expansion_factor(config: BatchConfig) -> Fraction:
    stated = config.expansion_factor_real_data
    return Fraction(1) if stated == -1 else stated


def loading_hosts(config: BatchConfig, num_hosts: int) -> tuple[int, ...] | Violation:
    """The hosts that read, or why expansion_factor_real_data does not suit this number of hosts."""
    key, factor = "expansion_factor_real_data", _expansion_factor(config)
    if factor < 1:
        if factor.numerator == 1:
            return tuple(range(num_hosts))
        loads = 1 / factor
        return Violation(
            key,
            f"{key}={number_text(factor)} is 1/x = {unwhole_text(loads)} loads per step, not a whole number.",
            (Fraction(1, int(loads) + 1), Fraction(1, int(loads))),
        )
    hosts = num_hosts / factor
    if hosts.denominator == 1:
        return tuple(range(int(hosts)))
    is_rounded = abs(hosts - round(hosts)) < _ROUNDED and hosts > 1
    meant = Fraction(num_hosts, round(hosts)) if is_rounded else None  # 2.6667 on 8 hosts is 8/3
    return Violation(
        key,
        f"{key}={number_text(factor)}: {num_hosts} hosts / {number_text(factor)} = "
        f"{unwhole_text(hosts)} loading hosts, not a whole number.",
        (meant,) if meant else tuple(divisors_around(num_hosts, factor)),
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
    return Violation(key, message, (*multiples_around(data_axis, replicas), -1))


def _model_violations(config: Config, mesh: MeshSizes, num_devices: int) -> list[Violation]:
    broken: list[Violation] = []
    for axis, together in SPLIT_TOGETHER.items():
        shards = math.prod(mesh.total[each] for each in together)
        if shards == 1:
            continue
        chunks = CHUNKS[axis]
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
        near: list[Change] = []
        if axis == "context":  # unlike the model's dims, the length is free to choose
            unit = shards * math.lcm(chunks, max(config.num_vocab_tiling, 1))
            near += _lengths(multiples_around(unit, config.max_target_length))
        for name, part in sizes.items():
            near += mesh_changes(config, num_devices, name, part)
        broken.append(Violation(key, f"{how} does not divide {named}.", tuple(near), f"{axis} divides the model"))
    return broken


def _lengths(tokens: Iterable[Number]) -> list[Change]:
    return [{"max_target_length": each} for each in tokens]


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
        near = _lengths(multiples_around(unit, config.max_target_length))
        broken.append(Violation(key, message, (*near, "auto"), rule="a kernel for shards"))
    if kernel != "auto" and not kernel_named(kernel).context_shards:
        message = f"{key}={kernel} does not work on {num_shards} context shards, whose tokens are laid out in chunks."
        broken.append(Violation(key, message, ("auto",), rule="a kernel for shards"))
    foreign = [kind for kind in config.pattern if kind not in ATTENTION_KINDS]
    if foreign:
        rule = f"has {foreign[0]}, which needs whole examples, not their parts on {num_shards} context shards"
        attention = ",".join("global" if kind in foreign else kind for kind in config.pattern)
        broken.append(violates(config, "layer_pattern", rule, attention))
    key, pieces = "num_vocab_tiling", config.num_vocab_tiling
    tokens, rest = divmod(config.max_target_length, num_shards)
    if not rest and tokens % pieces:
        message = f"{key}={pieces} does not divide the {tokens} tokens of each of {num_shards} context shards."
        broken.append(Violation(key, message, tuple(divisors_around(tokens, pieces)), rule="tiles of a shard"))
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
        broken.append(Violation(key, message, tuple(multiples_around(num_stages, pieces))))
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
        near = multiples_around(parts, tokens)
        broken.append(Violation("max_target_length", message, tuple(near), rule="1f1b tokens"))
    return broken


def _layer_violations(config: Config, num_stages: int) -> list[Violation]:
    """Refuses layers that do not divide equally over the stages, each with whole periods of the layer patterns."""
    layers, at_once = config.num_stacked_layers, config.num_layers_per_pipeline_stage
    key, repeats = "num_layers_per_pipeline_stage", config.num_pipeline_repeats
    first = config.first_num_dense_layers  # these run before the pipeline
    rounds, rest = divmod(layers, num_stages * at_once)
    named = f"base_num_decoder_layers={layers + first}" + (f" - first_num_dense_layers={first}" if first else "")
    if rest:
        near = divisors_around(layers // num_stages, at_once)
        if layers % num_stages:
            unit = num_stages * at_once * max(repeats, 1)
            key, near = "base_num_decoder_layers", multiples_around(unit, layers, offset=first)
        product = f"{num_stages} pipeline stages x num_layers_per_pipeline_stage={at_once}"
        message = f"{named} is not a multiple of {product}."
        return [Violation(key, message, tuple(near), rule="layers")]
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
            return [Violation(key, message, tuple(multiples_around(unit, at_once)), rule="layers")]
    return []


def refusals(
    config: Config, topology: Topology, num_examples: int | None = None, wrong: Sequence[Refusal] = ()
) -> list[Refusal]:
    """One refusal, with what would work, for each wrong value and each broken rule.

    Args:
      num_examples: training examples in the data, where known.
      wrong: wrong values, in place of which the config has the defaults.
    """

    def violations(change: Change) -> list[Violation]:
        machine: dict[str, Any] = {key: change[key] for key in ("num_devices", "num_hosts") if key in change}
        changed = changed_config(config, {key: value for key, value in change.items() if key not in machine})
        broken = [*rule_violations(changed, defaults_of(type(config)))]
        said = {violation.message for violation in broken}
        outcome = resolve(changed, replace(topology, **machine), num_examples)
        if isinstance(outcome, list):
            broken += [violation for violation in outcome if violation.message not in said]
        return broken

    return suggest(violations, wrong)


_MOST_EXAMPLES = 2**62  # example ids are 64-bit integers


def make_plan(
    config: Config,
    *,
    num_devices: int,
    num_hosts: int = 1,
    num_examples: int | None = None,
    device_memory_gb: float | None = None,
    platform: Platform | Accelerator = "gpu",
) -> BatchPlan:
    """The plan of a config on a machine.

    Args:
      num_devices: every device of the mesh.
      num_hosts: hosts (processes), each with equally many devices.
      num_examples: training examples in the data; if unknown, `epochs` is None and num_epochs cannot be planned.
      device_memory_gb: memory of a device in GB (1e9 bytes), to compare the estimate with.
      platform: what the devices are, or an Accelerator where more is known; it decides the attention kernel and thereby
        the memory.
    Raises:
      UserError: with every broken rule, each naming values that work.
    """
    problems = _data_and_memory_refusals(config, num_examples, device_memory_gb)
    topology = Topology(num_devices, num_hosts, Accelerator.planned(platform))
    if problems:
        raise UserError(map(str, [*problems, *refusals(config, topology)]))
    plan = _resolve_or_raise(config, topology, num_examples)
    plan = _with_costs(config, plan, topology.accelerator, device_memory_gb)
    return replace(plan, warnings=tuple(_warnings(config, plan, topology.accelerator)))


def plan_batch(
    config: Config, *, num_devices: int, num_hosts: int = 1, platform: Platform | Accelerator = "gpu"
) -> BatchPlan:
    """The plan of a config whose data are not open yet, as of `resolve`; num_epochs gives it no length.

    Raises:
      UserError: with every broken rule, each naming values that work.
    """
    return _resolve_or_raise(config, Topology(num_devices, num_hosts, Accelerator.planned(platform)), None)


def _resolve_or_raise(config: Config, topology: Topology, num_examples: int | None) -> BatchPlan:
    plan = resolve(config, topology, num_examples)
    if isinstance(plan, list):
        raise UserError(map(str, refusals(config, topology, num_examples)))
    return plan


def _data_and_memory_refusals(
    config: Config, num_examples: int | None, device_memory_gb: float | None
) -> list[Refusal]:
    problems: list[Refusal] = []
    if num_examples is None and config.num_epochs:
        message = (
            f"num_epochs={number_text(config.num_epochs)} gives no steps without the number of training examples. "
            "Give num_examples to make_plan, or --examples N to the command plan."
        )
        problems.append(Refusal("num_epochs", message))
    if num_examples is not None and num_examples < 1:
        problems.append(Refusal("", f"num_examples={value_text(num_examples)}: there is no training example."))
    if num_examples is not None and num_examples > _MOST_EXAMPLES:
        message = f"num_examples={value_text(num_examples)} is more than the {_MOST_EXAMPLES} that are numbered."
        problems.append(Refusal("", message, (_MOST_EXAMPLES,)))
    if device_memory_gb is not None and not 0 < device_memory_gb * 1e9 < math.inf:
        problems.append(Refusal("", f"device_memory_gb={value_text(device_memory_gb)} must be above 0.", (1,)))
    return problems


def _with_costs(config: Config, plan: BatchPlan, accelerator: Accelerator, memory_gb: float | None) -> BatchPlan:
    """The plan with the FLOPs and memory of a step and the cost of each schedule, as far as what estimates is there."""
    rows, pieces = plan.rows_per_micro_batch, plan.num_pipeline_microbatches
    memory = MemoryEstimate((), None if memory_gb is None else int(memory_gb * 1e9))
    if registry.is_installed("estimate", "memory"):
        estimate: Callable[..., MemoryEstimate] = registry.load("estimate", "memory")
        accumulation, replicas = plan.gradient_accumulation_steps, plan.diloco_num_replicas
        memory = estimate(config, plan.mesh, rows, accumulation, pieces, memory_gb, replicas, accelerator)
        if plan.rl is not None:
            memory = plan.rl.with_sampling(memory, config, plan.mesh)
    costs: dict[Schedule, ScheduleCost] = {}
    for schedule in SCHEDULES if plan.num_pipeline_stages > 1 else ():
        if schedule == "1f1b" and plan.num_pipeline_repeats > 1:
            continue
        activations = None
        if registry.is_installed("estimate", "activations"):
            activations = registry.load("estimate", "activations")(
                config, plan.mesh, rows, pieces, schedule, accelerator
            )
        costs[schedule] = ScheduleCost(plan.pipeline_shape.bubble_fraction(schedule), activations)
    flops = flops_per_example(config, config.max_target_length) * config.rows_per_example
    return replace(plan, flops_per_example=flops, memory=memory, pipeline_schedules=costs)


def resumed(config: Config, plan: BatchPlan, *, step: int, examples_seen: int) -> BatchPlan:
    """The plan of a run's start after `step` steps that consumed `examples_seen` examples: its length is the run's.

    Args:
      plan: of the same config, machine and data.
    """
    after = replace(plan, length=replace(plan.length, done=(step, examples_seen)))
    of_length = tuple(_length_warnings(config, plan))
    others = (warning for warning in plan.warnings if warning not in of_length)
    return replace(after, warnings=(*others, *_length_warnings(config, after)))


def load_plan(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    num_devices: int,
    num_hosts: int = 1,
    num_examples: int | Callable[[Config], int] | None = None,
    device_memory_gb: float | None = None,
    platform: Platform | Accelerator = "gpu",
) -> tuple[Config, BatchPlan]:
    """`load_config` and `make_plan` in one, so that the problems of both are reported together.

    Args:
      num_examples: training examples in the data, or a function that counts them. It is called only if num_epochs needs
        it and nothing else is wrong.
    Raises:
      UserError: with every problem of the config and of its plan.
    """
    topology = Topology(num_devices, num_hosts, Accelerator.planned(platform))
    reading = read_config(path, overrides)
    config = reading.config
    known = 1 if callable(num_examples) else num_examples  # it is counted once nothing else is wrong
    problems = _data_and_memory_refusals(config, known, device_memory_gb)
    usable = None if problems or callable(num_examples) else num_examples
    if refused := [*problems, *reading.refused(refusals(config, topology, usable, reading.wrong))]:
        raise UserError(str(refusal) for refusal in refused)
    if callable(num_examples):
        num_examples = num_examples(config) if config.num_epochs else None
    plan = make_plan(
        config,
        num_devices=num_devices,
        num_hosts=num_hosts,
        num_examples=num_examples,
        device_memory_gb=device_memory_gb,
        platform=platform,
    )
    return config, plan


def scaled_optimizer(config: Config, plan: BatchPlan) -> Config:
    """The config with learning rate and Adam's settings as its plan scaled them, and scaling turned off."""
    unscaled = {"learning_rate_scaling": "none", "scale_adam_with_batch": False}
    return config.model_copy(update={**plan.scaling.scaled, **unscaled})


_LARGEST_TUNING_RATE, _LARGE_MODEL_RATE, _LARGE_MODEL = 1e-3, 3e-3, 10**9


def _warnings(config: Config, plan: BatchPlan, accelerator: Accelerator) -> Iterator[str]:
    """What works but is probably a mistake."""
    yield from scaling_warnings(config, plan.scaling)
    yield from _rate_warnings(config, plan)
    yield from _diloco_warnings(plan)
    if registry.is_installed("estimate", "evaluation"):
        yield from registry.load("estimate", "evaluation")(config, plan, accelerator)
    micro, pieces = plan.micro_batch_to_train, plan.num_pipeline_microbatches
    if micro % pieces:
        yield (
            f"num_pipeline_microbatches={pieces} does not divide the micro-batch of {micro} examples: "
            f"{plan.empty_slots_per_micro_batch} of {plan.micro_batch_slots} slots stay empty."
        )
    total = plan.global_batch_to_train
    if plan.loads_per_step > total:
        yield (
            f"expansion_factor_real_data={number_text(plan.expansion_factor_real_data)} reads the "
            f"{counted(total, 'example')} of a step in {plan.loads_per_step:,} loads; the others are empty."
            f"{nearest_clause([Fraction(1, total)])}"
        )
    if not splits_residual(config, plan.mesh):
        yield (
            f"max_target_length={config.max_target_length} is not a multiple of {plan.mesh['context']} context x "
            f"{plan.mesh['tensor']} tensor shards: every device of a tensor group holds all activations between blocks."
        )
    if not config.master_weights and (saved := master_bytes(config, plan.mesh, plan.diloco_num_replicas)):
        yield (
            f"master_weights=false with weight_dtype={config.weight_dtype}: an update smaller than 2^-9 of its weight "
            "is rounded away, and so is the sum of many such updates; this saves 4 bytes per parameter, "
            f"{bytes_text(saved)} per device."
        )
    if plan.rl is not None:
        yield from plan.rl.memory_warnings(plan.memory)
    else:
        works = "lower per_device_batch_size, raise gradient_accumulation_steps, or set remat_policy=full."
        yield from plan.memory.warnings(works)
    yield from _kernel_warnings(config, plan)
    if plan.rl is not None:
        yield from plan.rl.warnings(config, plan.num_examples)
    yield from _length_warnings(config, plan)


def _rate_warnings(config: Config, plan: BatchPlan) -> Iterator[str]:
    """A warning of a learning rate that destroys a pretrained model, or at which a large one does not train."""
    rate = plan.scaling.scaled["learning_rate"]
    if config.optimizer not in ("adamw", "adafactor", "lion"):  # others have rates of another size
        return
    if config.load_parameters_path and rate > _LARGEST_TUNING_RATE:
        what = "a pretrained model: fine-tuning takes 1e-6 to 1e-4, with LoRA up to 1e-3"
    elif rate >= _LARGE_MODEL_RATE and (total := count_parameters(config).total) >= _LARGE_MODEL:
        what = f"{total / 1e9:.1f} billion parameters: most models of this size take 1e-4 to 1e-3"
    else:
        return
    yield f"learning_rate={rate:g} is high for {what}."


def _length_warnings(config: Config, plan: BatchPlan) -> Iterator[str]:
    """The warnings that depend on where the run ends."""
    total, period = plan.global_batch_to_train, plan.diloco_sync_period
    # A schedule that counts examples or tokens counts them in steps of the target batch.
    schedule = Fraction(plan.steps) if config.schedule_unit == "steps" else Fraction(plan.total_examples, total)
    if config.warmup_steps > schedule:
        shown = f"steps={plan.steps}"
        if schedule != plan.steps:
            shown += f", which are {rounded_text(float(schedule))} at the target of {total} examples"
        yield f"warmup_steps={number_text(config.warmup_steps)} is more than {shown}: the run ends in the warm-up."
    ramp_steps = plan.length.stages_ahead[-1].first_step - 1
    if plan.rampup and ramp_steps > plan.steps:
        yield (
            f"the ramp takes {ramp_steps} steps, more than steps={plan.steps}: the target "
            f"per_device_batch_size={number_text(plan.per_device_batch_size)} is not reached."
        )
    if period is not None and (unsynchronised := plan.steps % period):
        yield (
            f"steps={plan.steps} is not a multiple of diloco_sync_period={period}: the last {unsynchronised} "
            f"step{'' if unsynchronised == 1 else 's'} are not in the synchronised parameters."
        )


def _diloco_warnings(plan: BatchPlan) -> Iterator[str]:
    replicas = plan.diloco_num_replicas
    if replicas is None:
        return
    smallest = min(stage.micro_batch_to_train for stage in plan.stages)
    slots = plan.slots_for(smallest)
    idle = replicas - -(-smallest * replicas // slots)  # examples fill the first slots, replica after replica
    if idle:
        yield (
            f"a micro-batch of {smallest} example{'' if smallest == 1 else 's'} in {slots} slots leaves {idle} of "
            f"{replicas} DiLoCo replicas without one: raise per_device_batch_size or lower diloco_num_replicas."
        )


def _kernel_warnings(config: Config, plan: BatchPlan) -> Iterator[str]:
    kernel, remat = plan.attention_kernel.name, remat_of(config)
    if config.balance_attention and plan.layout_shards == (plan.diloco_num_replicas or 1):
        yield "balance_attention=true changes nothing: no shard of the batch waits for another."
    elif config.balance_attention and not kernel_named(kernel).skips_documents:
        yield (
            f"balance_attention=true makes no step shorter with attention={kernel}, which takes equally long for every "
            "row, whatever documents it contains."
        )
    if kernel.startswith("cudnn") and remat and "context" in (*remat.saved, *remat.offloaded):
        yield (
            f"attention={kernel} keeps no context, because jax's call of cuDNN does not name it: with "
            f"remat_policy={config.remat_policy} the backward pass computes it again."
        )


_MOST_STAGES = 12


def format_plan(plan: BatchPlan, more: Sequence[tuple[str, str]] = ()) -> str:
    """The plan, one quantity a line: batch, loading, pipeline, length, ramp, memory and kernel; then the warnings.

    Args:
      more: further rows, after that of memory.
    """
    rows = [*_batch_rows(plan), *_pipeline_rows(plan), *_length_rows(plan), *_optimizer_rows(plan)]
    if plan.diloco_num_replicas is not None:
        replicas, shards = plan.diloco_num_replicas, plan.mesh["data"]
        held = f"{_count(replicas, 'replica')}, {replicas // shards} on each part of the data axis ({shards})"
        rows.append(("local updates", f"{held}, synchronised every {plan.diloco_sync_period} steps"))
    rows += [*_rampup_rows(plan), *_memory_rows(plan.memory), *more]
    warnings = (f"warning: {warning}" for warning in plan.warnings)
    return "\n".join([*aligned(rows), f"attention kernel: {plan.attention_kernel}", *warnings])


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The rows of a table as lines; the columns with the numbers `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _decimal(value: Fraction) -> str:
    """A number for reading that is never a ratio such as 3/38269."""
    text = short_text(value)
    return rounded_text(float(value)) if "/" in text else text


def _batch_rows(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    devices, accumulation = _count(plan.num_devices, "device"), plan.gradient_accumulation_steps
    per_device, examples = number_text(plan.per_device_batch_size), _count(plan.global_batch_to_train, "example")
    micro, slots = _count(plan.micro_batch_to_train, "example"), _count(plan.micro_batch_slots, "slot")
    mesh, rows, tokens = mesh_text(plan.mesh, "all mesh axes 1"), plan.rows_per_example, plan.max_target_length
    yield "num_devices", f"{plan.num_devices} = {mesh}, on {_count(plan.num_hosts, 'host')}"
    if plan.rl is not None:
        yield from plan.rl.rows()
    yield "micro_batch_to_train", f"{micro} = {per_device} per device x {devices}"
    shards = f"{slots} over {_count(plan.batch_shards, 'batch shard')}"
    yield "empty_slots_per_micro_batch", f"{plan.empty_slots_per_micro_batch} = {shards} - {micro}"
    yield "global_batch_to_train", f"{examples} = {per_device} per device x {devices} x {accumulation} accumulation"
    if rows > 1:
        step = plan.global_batch_to_train * rows
        yield "rows_per_example", f"{rows}, one of chosen and one of rejected answers: {step} rows per step"
    row = f"{tokens}" if rows == 1 else f"2 rows x {tokens}"
    yield "tokens_per_step", f"{plan.tokens_per_step} = {examples} x {row} tokens"
    if plan.rl is None:
        yield from _reading_rows(plan)
    if (shards := plan.mesh["context"]) > 1:
        chunk = f"an early and a late chunk of {tokens // (2 * shards)} of the {tokens} tokens of an example"
        yield "context shards", f"{shards}, each with {chunk}"


def _reading_rows(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    per_device, devices = number_text(plan.eval_per_device_batch_size), _count(plan.num_devices, "device")
    yield "eval batch", f"{_count(plan.eval_batch_examples, 'example')} = {per_device} per device x {devices}"
    factor, share = plan.expansion_factor_real_data, plan.examples_per_loading_host
    exact = plan.global_batch_to_train * factor
    rounded = "" if exact.denominator == 1 else f" = {short_text(exact)}, rounded up"
    examples = _count(plan.global_batch_to_train, "example")
    slots = _count(plan.global_batch_to_load, "slot")
    yield "global_batch_to_load", f"{slots} = {examples} x {number_text(factor)} expansion{rounded}"
    read = f"{short_text(share)} example{'' if share == 1 else 's'}{'' if share.denominator == 1 else ' on average'}"
    loads = _count(plan.loads_per_step, "load")
    yield (
        "loading_hosts",
        f"{len(plan.loading_hosts)} of {plan.num_hosts}, each reads {read} in each of {loads} per step",
    )


def _pipeline_rows(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    micro, pieces = plan.micro_batch_to_train, plan.num_pipeline_microbatches
    if plan.num_pipeline_stages == 1:
        return
    size, uneven = _count(plan.pipeline_microbatch_size, "example"), "" if micro % pieces == 0 else ", rounded up"
    yield "pipeline_microbatch_size", f"{size} = micro-batch {micro} / {pieces} pipeline microbatches{uneven}"
    yield "pipeline_bubble_fraction", _bubble_text(plan)
    if len(plan.pipeline_schedules) > 1:
        for name, cost in plan.pipeline_schedules.items():
            bubble = f"bubble {float(cost.bubble_fraction):.4g}"
            bytes_held = "" if cost.activations is None else f", activations {bytes_text(cost.activations)}"
            yield f"with {name}", bubble + bytes_held


def _bubble_text(plan: BatchPlan) -> str:
    stages, pieces, repeats = plan.num_pipeline_stages, plan.num_pipeline_microbatches, plan.num_pipeline_repeats
    accumulation, bubble = plan.gradient_accumulation_steps, f"{float(plan.pipeline_bubble_fraction):.4g}"
    if plan.pipeline_schedule == "1f1b":
        return (
            f"{bubble} = 2 x ({stages} stages - 1) / ({accumulation} accumulation x {pieces} microbatches + "
            f"2 x ({stages} stages - 1)), once in a step"
        )
    text = (
        f"{bubble} = ({stages} stages - 1) / ({_count(repeats, 'repeat')} x {pieces} microbatches + {stages} "
        "stages - 1), in every micro-batch"
    )
    if accumulation == 1:
        return text
    merged = replace(plan.pipeline_shape, num_microbatches=pieces * accumulation, gradient_accumulation_steps=1)
    return (
        f"{text}; as one micro-batch of {pieces * accumulation} microbatches it would be "
        f"{float(merged.bubble_fraction('gpipe')):.4g}, with {accumulation} times the activations"
    )


def _length_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    total, tokens = plan.total_examples, plan.rows_per_example * plan.max_target_length
    rows = [("steps", f"{plan.steps}: {_count(total, 'example')}, {total * tokens} tokens")]
    step, seen = plan.length.done
    if step:
        left = f"{_count(plan.steps - step, 'step')} and {_count(total - seen, 'example')} are left"
        rows.append(("already done", f"{step}: {_count(seen, 'example')}, {seen * tokens} tokens; {left}"))
    if plan.epochs is not None and plan.steps_per_epoch is not None:
        rows.append(("epochs", f"{_decimal(plan.epochs)}; steps_per_epoch {_decimal(plan.steps_per_epoch)}"))
    batch = plan.stage_at(plan.total_examples).global_batch_to_train
    if plan.last_batch_examples is not None:
        rows.append(("last batch", f"the last step has {plan.last_batch_examples} of {batch} examples"))
    elif dropped := plan.dropped_examples:
        verb = "is" if dropped == 1 else "are"
        rows.append(("last batch", f"{_count(dropped, 'example')} at the end, of {batch}, {verb} dropped"))
    return rows


def _optimizer_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    scaling, multiplier = plan.scaling, plan.learning_rate_multiplier
    ratio, rate = short_text(scaling.batch_ratio), scaling.scaled["learning_rate"]
    if scaling.rule == "none":
        return [("learning_rate", f"{rate:g} = {plan.learning_rate:g} x {multiplier:g}")]
    root = "root of " if scaling.rule == "sqrt" else ""
    how = {
        "learning_rate": f"{plan.learning_rate:g} x {multiplier:g}, the {root}m",
        "adam_b1": f"1 - m x (1 - {scaling.configured['adam_b1']:g})",
        "adam_b2": f"1 - m x (1 - {scaling.configured['adam_b2']:g})",
        "adam_eps": f"{scaling.configured['adam_eps']:g} / root of m",
    }
    base = plan.global_batch_to_train / scaling.batch_ratio
    rows = [("batch ratio m", f"{ratio} = {plan.global_batch_to_train} / base_global_batch_size={short_text(base)}")]
    for key, formula in how.items():
        old, new = scaling.configured[key], scaling.scaled[key]
        if new != old:
            rows.append((key, f"{old:g} -> {new:g} = {formula}"))
        elif key == "learning_rate":
            rows.append((key, f"{new:g} = {formula}"))
    return rows


def _rampup_rows(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    ramp = plan.rampup
    if ramp is None:
        return
    done, (*stages, last) = plan.length.done[0], plan.length.stages_ahead
    target, start = number_text(ramp.per_device_batch_size), number_text(ramp.per_device_batch_size_start)
    increment = number_text(ramp.per_device_batch_size_increment)
    yield "num_increments", f"{ramp.num_increments} = ({target} - {start}) / {increment}"
    each = short_text(ramp.samples_per_increment)
    yield "samples_per_increment", f"{each} = {ramp.global_rampup_samples} / {ramp.num_increments}"
    steps = f"{_count(last.first_step - 1 - done, 'step')}{' left' if done else ''}"
    yield "ramp-up", f"{steps}; rampup_mode={ramp.mode}"
    shown = stages if len(stages) <= _MOST_STAGES else stages[: _MOST_STAGES - 1]
    for stage in shown:
        assert stage.num_steps is not None
        yield (
            "",
            f"from step {stage.first_step}: {_count(stage.num_steps, 'step')} of "
            f"{stage.global_batch_to_train} = {number_text(stage.per_device_batch_size)} per device x "
            f"{plan.num_devices} x {stage.gradient_accumulation_steps}",
        )
    if len(shown) < len(stages):
        yield "", f"... {len(stages) - len(shown)} more stages (--json has them all)"
    yield "", f"from step {last.first_step}: {last.global_batch_to_train}"


_WHEN = {"mlp": "during an mlp's backward pass", "attention": "during attention's backward pass"}


def _memory_rows(memory: MemoryEstimate) -> Iterator[tuple[str, str]]:
    if not memory.is_known:
        return
    limit = "" if memory.limit is None else f" of {bytes_text(memory.limit)}"
    parts = [f"{name} {bytes_text(memory.at_peak(part))}" for part, name in PARTS.items() if memory.at_peak(part)]
    when = _WHEN.get(memory.peak, f"at the {memory.peak}")
    yield "memory per device", f"{bytes_text(memory.total)}{limit} = {' + '.join(parts)}, {when}"
    if memory.offloaded:
        yield "in host memory", f"{bytes_text(memory.offloaded)} per device"
