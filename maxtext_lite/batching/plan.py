"""The plan of a run: every batch size and what follows from it, without the machine."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from maxtext_lite.batching.batch import Batch, SampledBatch, derive_batch, not_whole, stated_batch
from maxtext_lite.batching.ledger import MemoryEstimate
from maxtext_lite.batching.parameters import count_parameters, flops_per_example, master_bytes
from maxtext_lite.batching.rules import context_violations, model_violations, pipeline_violations
from maxtext_lite.batching.schedule import (
    BatchStage,
    OptimizerScaling,
    RampupBatchManager,
    RunLength,
    derive_length,
    json_number,
    make_rampup,
    make_stages,
    rate_multiplier,
    scale_optimizer,
    scaling_violations,
    scaling_warnings,
    stage_at,
)
from maxtext_lite.batching.topology import (
    SCHEDULES,
    MeshSizes,
    PipelineShape,
    Schedule,
    Topology,
    num_repeats,
    resolve_mesh,
    splits_residual,
    stated_axes,
    topology_violations,
)
from maxtext_lite.config import BatchConfig, Config, Refusal, UserError, registry, remat_of
from maxtext_lite.config.errors import (
    bytes_text,
    counted,
    divisors_around,
    multiples_around,
    nearest_clause,
    number_text,
    refuse,
    rounded_text,
    value_text,
)
from maxtext_lite.config.kernels import (
    Accelerator,
    KernelChoice,
    Platform,
    kernel_named,
    planned_kernel,
)
from maxtext_lite.config.load import defaults_of, read_config
from maxtext_lite.config.rules import rule_violations


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
      rampup: the schedule of the batch, or None where it is always the same.
      scales_by_stage: learning_rate_scaling_of=stage.
      diloco_num_replicas: copies of local updates; None where they are off, as is diloco_sync_period.
      rows_per_example: rows of max_target_length tokens in an example: two in DPO, otherwise one.
      attention_kernel: the kernel that `attention` selects on these devices.
      rl: the batches of reinforcement learning; None in other runs. With it an example is a pair of a prompt and a
        response, num_devices counts the trainer's devices, and num_examples counts prompts.
      flops_per_example: of all its rows, by the model: forward and backward, without recomputation. `make_plan` adds
        this and the fields below.
      memory: of a step on one device, where it is estimated.
      pipeline_schedules: cost of every schedule that suits this pipeline; empty without a pipeline.
      before: how the batch was split before this start, where it resumed and was split differently.
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
    scales_by_stage: bool
    diloco_num_replicas: int | None
    diloco_sync_period: int | None
    attention_kernel: KernelChoice
    rl: SampledBatch | None
    flops_per_example: float = 0.0
    memory: MemoryEstimate = field(default_factory=lambda: MemoryEstimate((), None))
    pipeline_schedules: Mapping[Schedule, ScheduleCost] = field(default_factory=dict[Schedule, ScheduleCost])
    before: Mapping[str, Any] | None = None
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
        """Rows of one load over all hosts: batch x factor, rounded up. `micro_batch_slots` is what the devices hold."""
        return math.ceil(self.global_batch_to_train * self.expansion_factor_real_data)

    @property
    def loads_per_step(self) -> int:
        """Loads that make one step; 1 unless the expansion factor is below 1."""
        return math.ceil(1 / self.expansion_factor_real_data)

    @property
    def examples_per_loading_host(self) -> Fraction:
        """Examples that one host reads in one load; the mean over the hosts that load."""
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

    @property
    def stages(self) -> tuple[BatchStage, ...]:
        """All stages of the run, the target's last; a single one without a ramp."""
        return self.length.stages

    @property
    def split(self) -> dict[str, Any]:
        """The target batch and its split, as in plan.json."""
        names = ("num_devices", "per_device_batch_size", "gradient_accumulation_steps", "global_batch_to_train")
        return {name: json_number(getattr(self, name)) for name in names}

    @property
    def most_micro_batches(self) -> int:
        """The largest accumulation of all stages."""
        return max(stage.gradient_accumulation_steps for stage in self.stages)

    def array_micro_batches(self, slots: int) -> int:
        """Micro-batches in the arrays of the stages whose micro-batches have so many slots: the most of any of them."""
        sizes = [stage for stage in self.stages if self.slots_for(stage.micro_batch_to_train) == slots]
        return max(stage.gradient_accumulation_steps for stage in sizes)

    @property
    def ramps_accumulation(self) -> bool:
        """Whether the number of micro-batches changes during the run."""
        return any(stage.gradient_accumulation_steps != self.most_micro_batches for stage in self.stages)

    def stage_at(self, examples_seen: int) -> BatchStage:
        """The batch sizes of the next step once `examples_seen` examples have been consumed."""
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
        """The position at which a run's schedule ends, in steps of the target batch: the end of the run.

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
        """The factor that the batch gives the learning rate."""
        return self.scaling.learning_rate_multiplier

    def stage_multiplier(self, stage: BatchStage) -> float:
        """The factor by which a stage scales the learning rate: the target's, or its own."""
        if not self.scales_by_stage:
            return self.learning_rate_multiplier
        base = self.global_batch_to_train / self.scaling.batch_ratio
        return rate_multiplier(self.scaling.rule, stage.global_batch_to_train / base)

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
        found["rampup"] = None if self.rampup is None else self._stages_json(self.rampup)
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
            if self.before is not None:
                resumed["before"] = dict(self.before)
            found["resumed"] = resumed
        found["warnings"] = list(self.warnings)
        return found

    def _stages_json(self, rampup: RampupBatchManager) -> dict[str, object]:
        """The entry `rampup`, with each stage's learning_rate_multiplier where they differ."""
        found = rampup.to_json()
        if self.scales_by_stage:
            found["stages"] = [self._stage_json(stage) for stage in rampup.stages]
            found["target"] = self._stage_json(rampup.last_stage)
        return found

    def _stage_json(self, stage: BatchStage) -> dict[str, object]:
        return {**stage.to_json(), "learning_rate_multiplier": self.stage_multiplier(stage)}


def layout_shards(mesh: Mapping[str, int], diloco_num_replicas: int | None) -> int:
    """The equal parts into which the rows of a micro-batch are split; see `BatchPlan.layout_shards`."""
    copies = mesh["data"] if diloco_num_replicas is None else diloco_num_replicas
    return copies * mesh["fsdp"] * mesh["expert"]


def row_slots(examples: int, layout_shards: int, num_hosts: int, num_pipeline_microbatches: int) -> int:
    """Slots for `examples` rows, equally many for each shard, host and pipeline microbatch."""
    pieces = num_pipeline_microbatches
    unit = math.lcm(layout_shards, num_hosts // math.gcd(num_hosts, pieces))
    return pieces * unit * -(-examples // (pieces * unit))


# ---- From a config and a machine to a plan, or the rules that they break --------------------------------------------

T = TypeVar("T")
_ROUNDED = Fraction(1, 1000)


def resolve(config: Config, topology: Topology, num_examples: int | None = None) -> BatchPlan | list[Refusal]:
    """The plan of a config on a machine, without what `make_plan` adds, or every broken rule.

    Args:
      num_examples: training examples in the data; if unknown, the length of a run of num_epochs is unknown too.
    """
    broken = topology_violations(topology)
    if broken:
        return broken
    sampled: SampledBatch | None = None
    if config.run_kind != "train":
        outcome: SampledBatch | list[Refusal] = registry.load("batch", config.run_kind)(config, topology)
        if isinstance(outcome, list):
            return outcome
        sampled = outcome
        topology = sampled.training_part(topology)

    def legal(part: T | Refusal) -> T | None:
        if isinstance(part, Refusal):
            broken.append(part)
            return None
        return part

    num_devices = topology.num_devices
    mesh = legal(resolve_mesh(config, num_devices))
    batch = sampled.trained if sampled else legal(derive_batch(config, num_devices))
    eval_size = config.eval_per_device_batch_size
    if (eval_size * num_devices).denominator != 1:
        broken.append(not_whole("eval_per_device_batch_size", eval_size, num_devices))
    readers = legal(loading_hosts(config, topology.num_hosts))
    target = batch if config.batch_schedule else batch or stated_batch(config, num_devices)
    ramp = make_rampup(config, target, num_devices, sampled.stages if sampled else None)
    rampup = legal(ramp)
    stages = None
    if batch and not isinstance(ramp, Refusal):
        stages = rampup.all_stages if rampup else make_stages([(0, batch)])
    length = legal(derive_length(config, stages, None if sampled else num_examples))
    axes = mesh or stated_axes(config)
    replicas = legal(_diloco_replicas(config, axes.total["data"]))
    broken.extend(scaling_violations(config, batch))
    refused = {refusal.key for refusal in broken}  # the nearest sizes of a mesh axis suit the model too
    broken.extend(refusal for refusal in model_violations(config, axes, num_devices) if refusal.key not in refused)
    broken.extend(context_violations(config, axes.total["context"]))
    broken.extend(pipeline_violations(config, axes.total["stage"], axes.total["context"]))
    if broken or not (mesh and batch and readers and length):
        return broken
    num_stages = mesh.total["stage"]
    pieces = config.num_pipeline_microbatches
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
        scales_by_stage=config.learning_rate_scaling_of == "stage",
        diloco_num_replicas=replicas,
        diloco_sync_period=None if replicas is None else config.diloco_sync_period,
        attention_kernel=planned_kernel(config, topology.accelerator, mesh.total["context"]),
        rl=sampled,
    )


def _expansion_factor(config: BatchConfig) -> Fraction:
    stated = config.expansion_factor_real_data
    return Fraction(1) if stated == -1 else stated


def loading_hosts(config: BatchConfig, num_hosts: int) -> tuple[int, ...] | Refusal:
    """The hosts that read, or why expansion_factor_real_data does not suit this number of hosts."""
    key = "expansion_factor_real_data"
    factor = _expansion_factor(config)
    if factor < 1:
        if factor.numerator == 1:
            return tuple(range(num_hosts))
        loads = 1 / factor
        rule = f"is 1/x = {number_text(loads)} loads per step, not a whole number"
        return refuse(config, key, rule, Fraction(1, int(loads) + 1), Fraction(1, int(loads)))
    hosts = num_hosts / factor
    if hosts.denominator == 1:
        return tuple(range(int(hosts)))
    is_rounded = abs(hosts - round(hosts)) < _ROUNDED and hosts > 1
    # 2.6667 on 8 hosts is 8/3
    near = [Fraction(num_hosts, round(hosts))] if is_rounded else divisors_around(num_hosts, factor)
    rule = f"makes {number_text(hosts)} loading hosts of {num_hosts}, not a whole number"
    return refuse(config, key, rule, *near)


def _diloco_replicas(config: Config, data_axis: int) -> int | Refusal | None:
    """The copies of the model that local updates train; None where local updates are off."""
    key = "diloco_num_replicas"
    replicas = config.diloco_num_replicas
    if not config.enable_diloco:
        return None
    if replicas == -1:
        return data_axis
    if replicas % data_axis == 0:
        return replicas
    rule = f"is not a multiple of the data axis, {data_axis}: each part has equally many"
    return refuse(config, key, rule, *multiples_around(data_axis, replicas), -1)


def refusals(config: Config, topology: Topology, num_examples: int | None = None) -> list[Refusal]:
    """Every rule that a config breaks on a machine.

    Args:
      num_examples: training examples in the data, where known.
    """
    broken = [*rule_violations(config, defaults_of(type(config)))]
    outcome = resolve(config, topology, num_examples)
    return broken + outcome if isinstance(outcome, list) else broken


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
    topology = Topology(num_devices, num_hosts, Accelerator.planned(platform))
    problems = _data_refusals(config, num_examples)
    if problems:
        raise UserError(map(str, [*problems, *refusals(config, topology)]))
    plan = _resolve_or_raise(config, topology, num_examples)
    plan = _with_costs(config, plan, topology.accelerator, device_memory_gb)
    return replace(plan, warnings=tuple(_warnings(config, plan, topology.accelerator)))


def plan_batch(
    config: Config, *, num_devices: int, num_hosts: int = 1, platform: Platform | Accelerator = "gpu"
) -> BatchPlan:
    """The plan of a config whose data are not open yet, as in `resolve`; num_epochs gives it no length.

    Raises:
      UserError: with every broken rule, each naming values that work.
    """
    return _resolve_or_raise(config, Topology(num_devices, num_hosts, Accelerator.planned(platform)), None)


def _resolve_or_raise(config: Config, topology: Topology, num_examples: int | None) -> BatchPlan:
    plan = resolve(config, topology, num_examples)
    if isinstance(plan, list):
        raise UserError(map(str, refusals(config, topology, num_examples)))
    return plan


def _data_refusals(config: Config, num_examples: int | None) -> list[Refusal]:
    if num_examples is None and config.num_epochs:
        rule = "gives no steps without the number of examples: num_examples of make_plan, or plan --examples"
        return [refuse(config, "num_epochs", rule)]
    if num_examples is not None and num_examples < 1:
        return [Refusal("", f"num_examples={value_text(num_examples)}: there is no training example.")]
    return []


def _with_costs(config: Config, plan: BatchPlan, accelerator: Accelerator, memory_gb: float | None) -> BatchPlan:
    """The plan with the FLOPs and memory of a step and the cost of each schedule, where estimators are installed."""
    largest = max(stage.micro_batch_to_train for stage in plan.stages)
    rows = plan.rows_per_example * plan.slots_for(largest)
    pieces = plan.num_pipeline_microbatches
    memory = MemoryEstimate((), None if memory_gb is None else int(memory_gb * 1e9))
    is_estimated = registry.is_installed("estimate", "memory")
    if is_estimated:
        estimate: Callable[..., MemoryEstimate] = registry.load("estimate", "memory")
        accumulation = plan.most_micro_batches
        replicas = plan.diloco_num_replicas
        memory = estimate(config, plan.mesh, rows, accumulation, pieces, memory_gb, replicas, accelerator)
        if plan.rl is not None:
            memory = plan.rl.with_sampling(memory, config, plan.mesh)
    costs: dict[Schedule, ScheduleCost] = {}
    if plan.num_pipeline_stages > 1:
        for schedule in SCHEDULES:
            if schedule == "1f1b" and plan.num_pipeline_repeats > 1:
                continue
            activations = None
            if is_estimated:
                estimate_activations = registry.load("estimate", "activations")
                activations = estimate_activations(config, plan.mesh, rows, pieces, schedule, accelerator)
            costs[schedule] = ScheduleCost(plan.pipeline_shape.bubble_fraction(schedule), activations)
    flops = flops_per_example(config, config.max_target_length) * config.rows_per_example
    return replace(plan, flops_per_example=flops, memory=memory, pipeline_schedules=costs)


def resumed(
    config: Config, plan: BatchPlan, *, step: int, examples_seen: int, before: Mapping[str, Any] | None = None
) -> BatchPlan:
    """The plan of a run's start after `step` steps that consumed `examples_seen` examples: its length is the run's.

    Args:
      plan: of the same config, machine and data.
      before: the `split` of the start before it; None: unknown.
    """
    before = None if before == plan.split else before
    after = replace(plan, length=replace(plan.length, done=(step, examples_seen)), before=before)
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
    """Loads a config and makes its plan, and reports the problems of both together.

    Args:
      num_examples: training examples in the data, or a function that counts them. It is called only if num_epochs needs
        it and nothing else is wrong.
    Raises:
      UserError: with every problem of the config and of its plan.
    """
    topology = Topology(num_devices, num_hosts, Accelerator.planned(platform))
    reading = read_config(path, overrides)
    config = reading.config
    known = None if callable(num_examples) else num_examples
    problems = [] if callable(num_examples) else _data_refusals(config, known)
    if refused := reading.problems([*problems, *refusals(config, topology, None if problems else known)]):
        raise UserError(refused)
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


_LARGEST_TUNING_RATE = 1e-3
_LARGE_MODEL_RATE = 3e-3
_LARGE_MODEL = 10**9


def _warnings(config: Config, plan: BatchPlan, accelerator: Accelerator) -> Iterator[str]:
    """What works but is probably a mistake."""
    yield from scaling_warnings(config, plan.scaling)
    yield from _rate_warnings(config, plan)
    yield from _diloco_warnings(plan)
    if registry.is_installed("estimate", "evaluation"):
        yield from registry.load("estimate", "evaluation")(config, plan, accelerator)
    micro = plan.micro_batch_to_train
    pieces = plan.num_pipeline_microbatches
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
    """Warns of a learning rate that destroys a pretrained model or is too high to train a large one."""
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
    total = plan.global_batch_to_train
    period = plan.diloco_sync_period
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
            f"the stages before the target take {ramp_steps} steps, more than steps={plan.steps}: "
            f"global_batch_to_train={plan.global_batch_to_train} is not reached."
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
    kernel = plan.attention_kernel.name
    remat = remat_of(config)
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
