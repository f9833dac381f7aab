"""The plan of a run: every batch size and what follows from it, before a machine exists."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from maxtext_lite.batching.memory import MemoryEstimate, bytes_text, estimate_memory
from maxtext_lite.batching.mend import refusals
from maxtext_lite.batching.rampup import BatchStage, RampupBatchManager
from maxtext_lite.batching.sizes import Sizes, work_out
from maxtext_lite.batching.topology import Topology
from maxtext_lite.config import Config, ConfigError, Refusal, UserError, load_config
from maxtext_lite.config.errors import number_text, value_text


@dataclass(frozen=True)
class BatchPlan:
    """What plan.json holds, under the same names, and what the runtime needs beside it. Counts are exact.

    Attributes:
      mesh: size of each mesh axis (stage, data, fsdp, expert, context, tensor); ici_mesh x dcn_mesh.
      empty_slots_per_micro_batch: slots of a micro-batch without an example: rows are laid out in equal shares.
      examples_per_loading_host: examples that one loading host reads in one load, on average.
      pipeline_microbatch_size: the most examples in one pipeline microbatch.
      epochs: passes over the data in the whole run; null without a data index, as is steps_per_epoch.
      rampup: the ramp, or None.
      warnings: what works but is probably not meant.
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
    pipeline_microbatch_size: int
    pipeline_bubble_fraction: Fraction
    steps: int
    epochs: Fraction | None
    steps_per_epoch: Fraction | None
    learning_rate: float
    learning_rate_multiplier: float
    max_target_length: int
    expansion_factor_real_data: Fraction
    rampup: RampupBatchManager | None
    memory: MemoryEstimate
    warnings: tuple[str, ...]

    @property
    def batch_shards(self) -> int:
        """The parts into which the rows of a micro-batch are split over devices: data x fsdp x expert."""
        return self.mesh["data"] * self.mesh["fsdp"] * self.mesh["expert"]

    def slots_for(self, examples: int) -> int:
        """Row slots of a pass over `examples` rows: rounded up to the batch shards, hosts and pipeline microbatches."""
        return row_slots(examples, self.batch_shards, self.num_hosts, self.num_pipeline_microbatches)

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
        return (*self.rampup.stages, self.rampup.last_stage) if self.rampup else (self._only_stage,)

    @property
    def _only_stage(self) -> BatchStage:
        return BatchStage(
            1,
            None,
            self.per_device_batch_size,
            self.gradient_accumulation_steps,
            self.micro_batch_to_train,
            self.global_batch_to_train,
            0,
            None,
        )

    def stage_at(self, examples_seen: int) -> BatchStage:
        """The batch sizes of the next step, when `examples_seen` examples have been consumed.

        Raises:
          ValueError: examples_seen is negative.
        """
        if self.rampup:
            return self.rampup.stage_at(examples_seen)
        if examples_seen < 0:
            raise ValueError(f"examples_seen={examples_seen} is negative")
        return self._only_stage

    def samples_before(self, step: int) -> int:
        """Examples consumed when step number `step` (the first is 1) begins.

        Raises:
          ValueError: step is below 1.
        """
        if self.rampup:
            return self.rampup.samples_before(step)
        if step < 1:
            raise ValueError(f"step={step}: the first step is 1")
        return (step - 1) * self.global_batch_to_train

    @property
    def total_examples(self) -> int:
        """Examples of the whole run."""
        return self.samples_before(self.steps + 1)

    def to_json(self) -> dict[str, object]:
        """The keys of plan.json, fractions as numbers."""
        names = (
            "num_devices", "num_hosts", "mesh", "per_device_batch_size", "micro_batch_to_train",
            "empty_slots_per_micro_batch", "gradient_accumulation_steps", "global_batch_to_train",
            "global_batch_to_load", "loads_per_step", "loading_hosts", "examples_per_loading_host", "tokens_per_step",
            "eval_per_device_batch_size", "eval_batch_examples", "num_pipeline_stages", "num_pipeline_microbatches",
            "pipeline_microbatch_size", "pipeline_bubble_fraction", "steps", "epochs", "steps_per_epoch",
            "learning_rate", "learning_rate_multiplier",
        )  # fmt: skip
        plain = {name: _json_value(getattr(self, name)) for name in names}
        return plain | {
            "mesh": dict(self.mesh),
            "loading_hosts": list(self.loading_hosts),
            "rampup": None if self.rampup is None else _rampup_json(self.rampup),
            "memory": self.memory.to_json(),
            "warnings": list(self.warnings),
        }


def row_slots(examples: int, batch_shards: int, num_hosts: int, num_pipeline_microbatches: int) -> int:
    """Slots in which `examples` rows are laid out so that every shard, host and pipeline piece has as many."""
    pieces = num_pipeline_microbatches
    unit = math.lcm(batch_shards, num_hosts // math.gcd(num_hosts, pieces))
    return pieces * unit * -(-examples // (pieces * unit))


def make_plan(
    config: Config,
    *,
    num_devices: int,
    num_hosts: int = 1,
    num_examples: int | None = None,
    device_memory_gb: float | None = None,
) -> BatchPlan:
    """The plan of a config on a machine.

    Args:
      num_devices: every device of the mesh.
      num_hosts: hosts (processes), each with as many devices.
      num_examples: training examples in the data, where known; without it `epochs` is None.
      device_memory_gb: memory of a device in GB (1e9 bytes), to be compared with the estimate.
    Raises:
      UserError: with every broken rule, each naming values that work.
    """
    if num_examples is not None and num_examples < 1:
        raise UserError(f"num_examples={num_examples}: there is no training example.")
    topology = Topology(num_devices, num_hosts)
    sizes = work_out(config, topology)
    if not isinstance(sizes, Sizes):
        raise UserError(str(refusal) for refusal in refusals(config, topology, sizes))
    batch, mesh = sizes.batch, sizes.mesh
    pieces, stages = sizes.num_pipeline_microbatches, sizes.num_pipeline_stages
    slots = row_slots(batch.micro_batch_to_train, mesh.batch_shards, num_hosts, pieces)
    memory = estimate_memory(config, mesh.total, slots, batch.gradient_accumulation_steps, pieces, device_memory_gb)
    total = batch.global_batch_to_train
    examples = sizes.rampup.samples_before(config.steps + 1) if sizes.rampup else config.steps * total
    return BatchPlan(
        num_devices=num_devices,
        num_hosts=num_hosts,
        mesh=mesh.total,
        ici_mesh=mesh.ici,
        dcn_mesh=mesh.dcn,
        per_device_batch_size=batch.per_device_batch_size,
        micro_batch_to_train=batch.micro_batch_to_train,
        empty_slots_per_micro_batch=slots - batch.micro_batch_to_train,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        global_batch_to_train=total,
        global_batch_to_load=sizes.loading.global_batch_to_load(total),
        loads_per_step=sizes.loading.loads_per_step,
        loading_hosts=sizes.loading.loading_hosts,
        examples_per_loading_host=sizes.loading.examples_per_loading_host(total),
        tokens_per_step=total * config.max_target_length,
        eval_per_device_batch_size=sizes.eval_per_device_batch_size,
        eval_batch_examples=sizes.eval_batch_examples,
        num_pipeline_stages=stages,
        num_pipeline_microbatches=pieces,
        num_pipeline_repeats=sizes.num_pipeline_repeats,
        pipeline_microbatch_size=-(-batch.micro_batch_to_train // pieces),
        pipeline_bubble_fraction=Fraction(stages - 1, sizes.num_pipeline_repeats * pieces + stages - 1),
        steps=config.steps,
        epochs=None if num_examples is None else Fraction(examples, num_examples),
        steps_per_epoch=None if num_examples is None else Fraction(num_examples, total),
        learning_rate=config.learning_rate,
        learning_rate_multiplier=1.0,
        max_target_length=config.max_target_length,
        expansion_factor_real_data=sizes.loading.factor,
        rampup=sizes.rampup,
        memory=memory,
        warnings=tuple(_warnings(config, sizes, slots, memory)),
    )


def load_plan(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    num_devices: int,
    num_hosts: int = 1,
    device_memory_gb: float | None = None,
) -> tuple[Config, BatchPlan]:
    """`load_config` and `make_plan` together, so that the problems of both are reported at once.

    Raises:
      UserError: with every problem of the config and of its plan.
    """
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        if error.mended is None:
            raise
        topology = Topology(num_devices, num_hosts)
        sizes = work_out(error.mended, topology)
        later = [] if isinstance(sizes, Sizes) else refusals(error.mended, topology, sizes)
        raise UserError(_joined(error.refusals, later)) from error
    return config, make_plan(config, num_devices=num_devices, num_hosts=num_hosts, device_memory_gb=device_memory_gb)


def _joined(first: Sequence[Refusal], later: Sequence[Refusal]) -> list[str]:
    """Both, where a value that the first named for a key must also suit the plan."""
    keys = {refusal.key for refusal in first}
    bare = [refusal for refusal in later if refusal.nearest and not isinstance(refusal.nearest[0], str)]
    better = {refusal.key: refusal.nearest for refusal in bare if refusal.key in keys}
    shown = [dataclasses.replace(refusal, nearest=better.get(refusal.key, refusal.nearest)) for refusal in first]
    return [str(refusal) for refusal in (*shown, *(refusal for refusal in later if refusal.key not in better))]


def not_yet_trainable(config: Config, plan: BatchPlan) -> list[str]:
    """What can be planned but not yet trained, one refusal for each; an issue that adds a feature deletes its entry."""
    lacking = (
        ("ici_context_parallelism", plan.mesh["context"] > 1, "a context axis", "1"),
        ("ici_expert_parallelism", plan.mesh["expert"] > 1, "an expert axis", "1"),
        ("ici_pipeline_parallelism", plan.mesh["stage"] > 1, "pipeline stages", "1"),
        ("enable_rampup_batch_size", config.enable_rampup_batch_size, "batch ramp-up", "false"),
        ("expansion_factor_real_data", plan.expansion_factor_real_data != 1, "loading hosts", "-1"),
    )
    problems: list[str] = []
    for key, wanted, what, legal in lacking:
        if wanted:
            # A dcn key is the one to change where the axis spans slices only.
            named = key.replace("ici_", "dcn_") if getattr(config, key) == 1 else key
            text = value_text(getattr(config, named))
            problems.append(f"{named}={text}: {what} can be planned but not trained yet. Nearest that works: {legal}.")
    return problems


def _warnings(config: Config, sizes: Sizes, slots: int, memory: MemoryEstimate) -> list[str]:
    warnings: list[str] = []
    if config.warmup_steps > config.steps:
        warnings.append(
            f"warmup_steps={config.warmup_steps} is more than steps={config.steps}: the run ends in the warm-up."
        )
    if sizes.rampup and sizes.rampup.total_steps > config.steps:
        warnings.append(
            f"the ramp takes {sizes.rampup.total_steps} steps, more than steps={config.steps}: the target "
            f"per_device_batch_size={number_text(sizes.batch.per_device_batch_size)} is not reached."
        )
    micro, pieces = sizes.batch.micro_batch_to_train, sizes.num_pipeline_microbatches
    if micro % pieces:
        warnings.append(
            f"num_pipeline_microbatches={pieces} does not divide the micro-batch of {micro} examples: "
            f"{slots - micro} of {slots} slots stay empty."
        )
    if memory.limit is not None and memory.total > memory.limit:
        warnings.append(
            f"about {bytes_text(memory.total)} per device are needed, more than the "
            f"{bytes_text(memory.limit)} it has: lower per_device_batch_size, raise "
            "gradient_accumulation_steps, or set remat_policy=full."
        )
    return warnings


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
    return {
        "num_increments": rampup.num_increments,
        "samples_per_increment": _json_value(rampup.samples_per_increment),
        "total_steps": rampup.total_steps,
        "stages": [{name: _json_value(getattr(stage, name)) for name in names} for stage in rampup.stages],
    }
