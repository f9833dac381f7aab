"""The plan of a run: every batch size and what follows from it, without the machine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from maxtext_lite.batching.batch import SampledBatch
from maxtext_lite.batching.ledger import MemoryEstimate
from maxtext_lite.batching.length import RunLength
from maxtext_lite.batching.pipeline_shape import PipelineShape, Schedule
from maxtext_lite.batching.rampup import BatchStage, RampupBatchManager, stage_at
from maxtext_lite.batching.scaling import OptimizerScaling
from maxtext_lite.config.kernels import KernelChoice


@dataclass(frozen=True)
class ScheduleCost:
    """What a pipeline schedule costs: the share of ticks that a stage waits, and activations in bytes if estimated."""

    bubble_fraction: Fraction
    activations: int | None

    def to_json(self) -> dict[str, object]:
        """The fields by name."""
        cost = {"bubble_fraction": _json_value(self.bubble_fraction)}
        return cost if self.activations is None else cost | {"activations": self.activations}


@dataclass(frozen=True)
class BatchPlan:
    """The contents of plan.json, under the same names, and what the runtime needs besides. Counts are exact.

    Attributes:
      mesh: size of each mesh axis (stage, data, fsdp, expert, context, tensor); ici_mesh x dcn_mesh.
      empty_slots_per_micro_batch: slots of a micro-batch without an example; every shard has equally many slots.
      examples_per_loading_host: average number of examples that one loading host reads in one load.
      pipeline_microbatch_size: examples of the largest pipeline microbatch.
      pipeline_bubble_fraction: share of its ticks that a stage waits under the configured schedule.
      pipeline_schedules: cost of every schedule that suits this pipeline; empty without a pipeline.
      steps: optimizer steps of the whole run, stated or derived from num_epochs; where it resumes, with those done.
      num_examples: training examples in the data; None where unknown.
      epochs: passes over the data in the whole run; None without a data index, as is steps_per_epoch.
      length: the steps of the run and the examples of each.
      scaling: the optimizer's settings for this batch.
      rampup: the ramp, or None.
      diloco_num_replicas: copies of local updates; None where they are off, as is diloco_sync_period.
      rows_per_example: rows of max_target_length tokens in an example: two in DPO, otherwise one.
      flops_per_example: of all its rows, by the model: forward and backward, without recomputation.
      attention_kernel: the kernel that `attention` selects on these devices.
      warnings: what works but is probably a mistake.
      rl: the batches of reinforcement learning; None in other runs. With it an example is a pair of a prompt and a
        response, num_devices counts the trainer's devices, and num_examples counts prompts.
    """

    num_devices: int
    num_hosts: int
    mesh: Mapping[str, int]
    ici_mesh: Mapping[str, int]
    dcn_mesh: Mapping[str, int]
    per_device_batch_size: Fraction
    micro_batch_to_train: int
    empty_slots_per_micro_batch: int
    gradient_accumulation_steps: int
    global_batch_to_train: int
    global_batch_to_load: int
    loads_per_step: int
    loading_hosts: tuple[int, ...]
    examples_per_loading_host: Fraction
    tokens_per_step: int
    eval_per_device_batch_size: Fraction
    eval_batch_examples: int
    num_pipeline_stages: int
    num_pipeline_microbatches: int
    num_pipeline_repeats: int
    pipeline_schedule: Schedule
    pipeline_microbatch_size: int
    pipeline_bubble_fraction: Fraction
    pipeline_schedules: Mapping[Schedule, ScheduleCost]
    steps: int
    num_examples: int | None
    epochs: Fraction | None
    steps_per_epoch: Fraction | None
    length: RunLength
    scaling: OptimizerScaling
    diloco_num_replicas: int | None
    diloco_sync_period: int | None
    max_target_length: int
    rows_per_example: int
    flops_per_example: float
    expansion_factor_real_data: Fraction
    rampup: RampupBatchManager | None
    memory: MemoryEstimate
    attention_kernel: KernelChoice
    warnings: tuple[str, ...]
    rl: SampledBatch | None = None

    def period_steps(self, stated: int | Fraction) -> int:
        """The steps between two events with a period as stated: steps, or below 1 a part of an epoch."""
        if stated >= 1 or stated == -1:
            return int(stated)
        assert self.steps_per_epoch is not None, "a run knows the number of its examples"
        return max(1, round(stated * self.steps_per_epoch))

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
        return self.micro_batch_to_train + self.empty_slots_per_micro_batch

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of max_target_length tokens in one micro-batch, empty slots included."""
        return self.rows_per_example * self.micro_batch_slots

    def flops_of_step(self, stage: BatchStage) -> float:
        """`flops_per_example` of all examples of a step of a stage."""
        return self.flops_per_example * stage.global_batch_to_train

    @property
    def eval_batch_slots(self) -> int:
        """Rows in the arrays of one evaluation batch, `eval_batch_examples` of them examples."""
        return self.slots_for(self.eval_batch_examples)

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
    def total_examples(self) -> int:
        """Examples of the whole run, including a short last batch."""
        return self.length.total_examples

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
            "tokens_per_step",
            "eval_per_device_batch_size", "eval_batch_examples", "num_pipeline_stages", "num_pipeline_microbatches",
            "num_pipeline_repeats", "pipeline_schedule", "pipeline_microbatch_size",
            "pipeline_bubble_fraction", "steps", "epochs", "steps_per_epoch",
            "num_examples", "total_examples", "last_batch_examples", "dropped_examples", "learning_rate",
            "learning_rate_multiplier", "adam_b1", "adam_b2", "adam_eps", "diloco_num_replicas", "diloco_sync_period",
        )  # fmt: skip
        plain = {name: _json_value(getattr(self, name)) for name in names}
        return plain | {
            "mesh": dict(self.mesh),
            "loading_hosts": list(self.loading_hosts),
            "rampup": None if self.rampup is None else _rampup_json(self.rampup),
            "pipeline_schedules": {name: cost.to_json() for name, cost in self.pipeline_schedules.items()},
            **({"memory": self.memory.to_json()} if self.memory.is_known else {}),
            "attention_kernel": self.attention_kernel.to_json(),
            **({} if self.rl is None else {"rl": self.rl.to_json()}),
            **({"resumed": self._resumed_json()} if self.length.done[0] else {}),
            "warnings": list(self.warnings),
        }

    def _resumed_json(self) -> dict[str, object]:
        step, examples_seen = self.length.done
        stages = {} if self.rampup is None else {"stages_ahead": [*map(_stage_json, self.length.stages_ahead)]}
        return {"step": step, "examples_seen": examples_seen, **stages}


def layout_shards(mesh: Mapping[str, int], diloco_num_replicas: int | None) -> int:
    """The equal parts into which the rows of a micro-batch are split; see `BatchPlan.layout_shards`."""
    copies = mesh["data"] if diloco_num_replicas is None else diloco_num_replicas
    return copies * mesh["fsdp"] * mesh["expert"]


def row_slots(examples: int, layout_shards: int, num_hosts: int, num_pipeline_microbatches: int) -> int:
    """Slots for `examples` rows, so that all shards, hosts and pipeline microbatches have equally many."""
    pieces = num_pipeline_microbatches
    unit = math.lcm(layout_shards, num_hosts // math.gcd(num_hosts, pieces))
    return pieces * unit * -(-examples // (pieces * unit))


def _json_value(value: object) -> object:
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return value


def _stage_json(stage: BatchStage) -> dict[str, object]:
    names = (
        "first_step",
        "num_steps",
        "per_device_batch_size",
        "gradient_accumulation_steps",
        "global_batch_to_train",
        "samples",
    )
    return {name: _json_value(getattr(stage, name)) for name in names}


def _rampup_json(rampup: RampupBatchManager) -> dict[str, object]:
    stages = [*map(_stage_json, rampup.all_stages)]
    return {
        "mode": rampup.mode,
        "num_increments": rampup.num_increments,
        "samples_per_increment": _json_value(rampup.samples_per_increment),
        "total_steps": rampup.total_steps,
        "stages": stages[:-1],
        "target": stages[-1],
    }
