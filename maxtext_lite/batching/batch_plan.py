"""The plan of a run: every batch size and what follows from it, before a machine exists."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.batching.ledger import MemoryEstimate
from maxtext_lite.batching.length import RunLength
from maxtext_lite.batching.pipeline_shape import PipelineShape, Schedule
from maxtext_lite.batching.rampup import BatchStage, RampupBatchManager, samples_before, stage_at
from maxtext_lite.batching.rl import RLBatch
from maxtext_lite.batching.scaling import OptimizerScaling
from maxtext_lite.config.kernels import KernelChoice


@dataclass(frozen=True)
class ScheduleCost:
    """What a pipeline schedule costs: the share of ticks that a stage waits, and estimated activations in bytes."""

    bubble_fraction: Fraction
    activations: int

    def to_json(self) -> dict[str, object]:
        """The fields by name."""
        return {"bubble_fraction": _json_value(self.bubble_fraction), "activations": self.activations}


@dataclass(frozen=True)
class BatchPlan:
    """What plan.json holds, under the same names, and what the runtime needs beside it. Counts are exact.

    Attributes:
      mesh: size of each mesh axis (stage, data, fsdp, expert, context, tensor); ici_mesh x dcn_mesh.
      empty_slots_per_micro_batch: slots of a micro-batch without an example: rows are laid out in equal shares.
      examples_per_loading_host: examples that one loading host reads in one load, on average.
      pipeline_microbatch_size: the most examples in one pipeline microbatch.
      pipeline_bubble_fraction: the share of its ticks that a stage waits, with the schedule that is set.
      pipeline_schedules: for each schedule that this pipeline could have, what it costs; empty without stages.
      steps: optimizer steps in the whole run, stated or derived from num_epochs.
      num_examples: training examples in the data; None where not known.
      epochs: passes over the data in the whole run; null without a data index, as is steps_per_epoch.
      length: the steps of the run and their examples.
      scaling: the optimizer's settings for this batch.
      rampup: the ramp, or None.
      diloco_num_replicas: copies of local updates; None where they are off, as is diloco_sync_period.
      rows_per_example: rows of max_target_length tokens in an example: in DPO two, otherwise one.
      attention_kernel: what `attention` means on these devices.
      warnings: what works but is probably not meant.
      rl: the batches of reinforcement learning; None in other runs. There an example is a pair of a prompt with a
        response, the devices are those that train, and num_examples counts prompts.
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
    expansion_factor_real_data: Fraction
    rampup: RampupBatchManager | None
    memory: MemoryEstimate
    attention_kernel: KernelChoice
    warnings: tuple[str, ...]
    rl: RLBatch | None = None

    @property
    def pipeline_shape(self) -> PipelineShape:
        """The pipeline and the work of one step at the target batch."""
        return PipelineShape(
            self.num_pipeline_stages,
            self.num_pipeline_microbatches,
            self.num_pipeline_repeats,
            self.gradient_accumulation_steps,
        )

    @property
    def batch_shards(self) -> int:
        """The parts into which the rows of a micro-batch are split over devices: data x fsdp x expert."""
        return self.mesh["data"] * self.mesh["fsdp"] * self.mesh["expert"]

    @property
    def layout_shards(self) -> int:
        """The equal shares of rows: the batch shards, or with local updates replicas x fsdp x expert."""
        return layout_shards(self.mesh, self.diloco_num_replicas)

    def slots_for(self, examples: int) -> int:
        """Row slots of a pass over `examples` rows: a multiple of the layout shards, hosts and pipeline pieces."""
        return row_slots(examples, self.layout_shards, self.num_hosts, self.num_pipeline_microbatches)

    @property
    def micro_batch_slots(self) -> int:
        """Rows of the arrays of one micro-batch: its examples and its empty slots."""
        return self.micro_batch_to_train + self.empty_slots_per_micro_batch

    @property
    def eval_batch_slots(self) -> int:
        """Rows of the arrays of one evaluation batch, of which `eval_batch_examples` hold an example."""
        return self.slots_for(self.eval_batch_examples)

    @property
    def stages(self) -> tuple[BatchStage, ...]:
        """All stages of the run, the one at the target last; a single one without a ramp."""
        return self.length.stages

    @property
    def ramps_accumulation(self) -> bool:
        """Whether the number of micro-batches changes during the run; the target's is then the largest."""
        return any(stage.gradient_accumulation_steps != self.gradient_accumulation_steps for stage in self.stages)

    def stage_at(self, examples_seen: int) -> BatchStage:
        """The batch sizes of the next step, when `examples_seen` examples have been consumed.

        Raises:
          ValueError: examples_seen is negative.
        """
        return stage_at(self.stages, examples_seen)

    def samples_before(self, step: int) -> int:
        """Examples consumed when step number `step` (the first is 1) begins, all batches before it being whole.

        Raises:
          ValueError: step is below 1.
        """
        return samples_before(self.stages, step)

    def step_examples(self, examples_seen: int) -> int:
        """Examples of the next step: its stage's batch, what is left for a short last one, or 0 after the end.

        Raises:
          ValueError: examples_seen is negative.
        """
        return self.length.step_examples(examples_seen)

    def steps_left(self, step: int, examples_seen: int) -> int:
        """Steps that remain after `step` steps that consumed `examples_seen` examples; see `RunLength.steps_left`.

        Raises:
          ValueError: step or examples_seen is negative.
        """
        return self.length.steps_left(step, examples_seen)

    def examples_after(self, steps: int, examples_seen: int) -> int:
        """Examples seen after so many further steps; see `RunLength.examples_after`."""
        return self.length.examples_after(steps, examples_seen)

    def steps_within(self, examples_seen: int, end: int) -> int:
        """Steps of whole batches that end at no more than `end` examples; see `RunLength.steps_within`."""
        return self.length.steps_within(examples_seen, end)

    @property
    def total_examples(self) -> int:
        """Examples of the whole run, those of a short last batch included."""
        return self.length.total_examples

    @property
    def steps_at_target(self) -> float:
        """Steps of the target batch that consume as many examples as the whole run."""
        return self.total_examples / self.global_batch_to_train

    @property
    def last_batch_examples(self) -> int | None:
        """Examples of the last step where it is a short one (last_batch=train); None where all batches are whole."""
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
        """What the batch multiplies the learning rate by."""
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
        """The keys of plan.json, fractions as numbers."""
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
            "memory": self.memory.to_json(),
            "attention_kernel": self.attention_kernel.to_json(),
            **({} if self.rl is None else {"rl": self.rl.to_json()}),
            "warnings": list(self.warnings),
        }


def layout_shards(mesh: Mapping[str, int], diloco_num_replicas: int | None) -> int:
    """The equal parts that the rows of a micro-batch are cut into; see `BatchPlan.layout_shards`."""
    copies = mesh["data"] if diloco_num_replicas is None else diloco_num_replicas
    return copies * mesh["fsdp"] * mesh["expert"]


def row_slots(examples: int, layout_shards: int, num_hosts: int, num_pipeline_microbatches: int) -> int:
    """Slots in which `examples` rows are laid out so that every shard, host and pipeline piece has as many."""
    pieces = num_pipeline_microbatches
    unit = math.lcm(layout_shards, num_hosts // math.gcd(num_hosts, pieces))
    return pieces * unit * -(-examples // (pieces * unit))


def _json_value(value: object) -> object:
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return value


def _rampup_json(rampup: RampupBatchManager) -> dict[str, object]:
    names = (
        "first_step",
        "num_steps",
        "per_device_batch_size",
        "gradient_accumulation_steps",
        "global_batch_to_train",
        "samples",
    )
    stages = [{name: _json_value(getattr(stage, name)) for name in names} for stage in rampup.all_stages]
    return {
        "mode": rampup.mode,
        "num_increments": rampup.num_increments,
        "samples_per_increment": _json_value(rampup.samples_per_increment),
        "total_steps": rampup.total_steps,
        "stages": stages[:-1],
        "target": stages[-1],
    }
