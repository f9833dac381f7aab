"""Batch ramp-up in closed form: the batch size as a pure function of the examples seen."""

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from maxtext_lite.batching.batch import Batch
from maxtext_lite.config import BatchConfig
from maxtext_lite.config.errors import number_text, unwhole_text
from maxtext_lite.config.violation import Violation, multiples, one_of

RampupMode = Literal["per_device_batch_size", "gradient_accumulation_steps"]
_MOST_INCREMENTS = 1_000  # each is a stage of the plan
_START, _INCREMENT = "per_device_batch_size_start", "per_device_batch_size_increment"


@dataclass(frozen=True)
class BatchStage:
    """Consecutive steps of one batch size.

    Attributes:
      first_step: number of its first step; the first step of the run is 1, as in metrics.jsonl.
      num_steps: its steps; None for the stage that lasts to the end of the run.
      samples_before: examples seen when it starts.
      samples: examples that it consumes; None where num_steps is.
    """

    first_step: int
    num_steps: int | None
    per_device_batch_size: Fraction
    gradient_accumulation_steps: int
    micro_batch_to_train: int
    global_batch_to_train: int
    samples_before: int
    samples: int | None


def only_stage(batch: Batch) -> BatchStage:
    """The one stage of a run without a ramp."""
    per_device, accumulation, micro = (
        batch.per_device_batch_size,
        batch.gradient_accumulation_steps,
        batch.micro_batch_to_train,
    )
    return BatchStage(1, None, per_device, accumulation, micro, batch.global_batch_to_train, 0, None)


def stage_at(stages: Sequence[BatchStage], examples_seen: int) -> BatchStage:
    """The stage of the next step, when `examples_seen` examples have been consumed.

    Raises:
      ValueError: examples_seen is negative.
    """
    if examples_seen < 0:
        raise ValueError(f"examples_seen={examples_seen} is negative")
    return stages[bisect.bisect_right(stages, examples_seen, key=lambda stage: stage.samples_before) - 1]


def samples_before(stages: Sequence[BatchStage], step: int) -> int:
    """Examples consumed when step number `step` (the first is 1) begins, all batches before it being whole.

    Raises:
      ValueError: step is below 1.
    """
    stage = _stage_of_step(stages, step)
    return stage.samples_before + (step - stage.first_step) * stage.global_batch_to_train


def _stage_of_step(stages: Sequence[BatchStage], step: int) -> BatchStage:
    if step < 1:
        raise ValueError(f"step={step}: the first step is 1")
    return stages[bisect.bisect_right(stages, step, key=lambda stage: stage.first_step) - 1]


@dataclass(frozen=True)
class RampupBatchManager:
    """The ramp: equal shares of `global_rampup_samples` at each batch size from the start up to the target.

    Pure: it holds no position. Stage k has b_k = start + k x increment, lasts
    ceil(samples_per_increment / global_batch_to_train) steps and carries no overshoot over. In the mode
    `per_device_batch_size` a device's batch is b_k; in `gradient_accumulation_steps` it stays at the target and the
    accumulation is A x b_k / target, so that both modes have the same global batches.

    Attributes:
      num_devices: all devices of the mesh.
      per_device_batch_size_start: b_0.
      per_device_batch_size: the target.
      per_device_batch_size_increment: b_(k+1) - b_k; target - start is a whole number of them.
      global_rampup_samples: examples of the whole ramp.
      gradient_accumulation_steps: A, at the target.
    Raises:
      ValueError: a stage has no whole number of examples, or the increments do not lead from start to target.
    """

    num_devices: int
    per_device_batch_size_start: Fraction
    per_device_batch_size: Fraction
    per_device_batch_size_increment: Fraction
    global_rampup_samples: int
    gradient_accumulation_steps: int = 1
    mode: RampupMode = "per_device_batch_size"

    def __post_init__(self) -> None:
        start, increment = self.per_device_batch_size_start, self.per_device_batch_size_increment
        if min(start, increment, self.global_rampup_samples, self.per_device_batch_size - start) <= 0:
            raise ValueError("a ramp goes up: 0 < start < target, and increment and samples above 0")
        if ((self.per_device_batch_size - start) / increment).denominator != 1:
            raise ValueError("the target is not a whole number of increments above the start")
        unit = self._unit
        if any((size * unit).denominator != 1 for size in (start, increment)):
            raise ValueError("a stage has a batch that is not a whole number")

    @property
    def _unit(self) -> Fraction:
        """What b_k is multiplied by to give the number that must be whole: examples, or accumulation steps."""
        if self.mode == "per_device_batch_size":
            return Fraction(self.num_devices)
        return self.gradient_accumulation_steps / self.per_device_batch_size

    @property
    def num_increments(self) -> int:
        """The number of stages below the target."""
        return int(
            (self.per_device_batch_size - self.per_device_batch_size_start) / self.per_device_batch_size_increment
        )

    @property
    def samples_per_increment(self) -> Fraction:
        """Examples after which a stage ends with the step that reaches them."""
        return Fraction(self.global_rampup_samples, self.num_increments)

    @property
    def stages(self) -> tuple[BatchStage, ...]:
        """The stages of the ramp, without the target."""
        return _stages(self)

    @functools.cached_property
    def last_stage(self) -> BatchStage:
        """The stage at the target, which lasts to the end of the run."""
        end = self.stages[-1]
        assert end.num_steps is not None
        assert end.samples is not None
        return self.stage(
            self.per_device_batch_size, end.first_step + end.num_steps, None, end.samples_before + end.samples
        )

    @functools.cached_property
    def all_stages(self) -> tuple[BatchStage, ...]:
        """The stages of the ramp and the one at the target."""
        return (*self.stages, self.last_stage)

    def stage(self, size: Fraction, first_step: int, num_steps: int | None, seen: int) -> BatchStage:
        """The stage of b_k = `size`, at a place in the run."""
        if self.mode == "per_device_batch_size":
            per_device, accumulation = size, self.gradient_accumulation_steps
        else:
            per_device, accumulation = self.per_device_batch_size, int(size * self._unit)
        micro = int(per_device * self.num_devices)
        batch = micro * accumulation
        return BatchStage(
            first_step,
            num_steps,
            per_device,
            accumulation,
            micro,
            batch,
            seen,
            None if num_steps is None else num_steps * batch,
        )

    @property
    def total_steps(self) -> int:
        """Steps of the whole ramp."""
        return self.last_stage.first_step - 1

    def stage_at(self, examples_seen: int) -> BatchStage:
        """The stage of the next step, when `examples_seen` examples have been consumed.

        Raises:
          ValueError: examples_seen is negative.
        """
        return stage_at(self.all_stages, examples_seen)

    def batch_size_at(self, step: int) -> int:
        """global_batch_to_train of step number `step` (the first is 1).

        Raises:
          ValueError: step is below 1.
        """
        return _stage_of_step(self.all_stages, step).global_batch_to_train

    def samples_before(self, step: int) -> int:
        """Examples consumed when step number `step` (the first is 1) begins.

        Raises:
          ValueError: step is below 1.
        """
        return samples_before(self.all_stages, step)


@functools.lru_cache(maxsize=16)
def _stages(ramp: RampupBatchManager) -> tuple[BatchStage, ...]:
    stages: list[BatchStage] = []
    first_step, seen = 1, 0
    share = ramp.samples_per_increment
    for index in range(ramp.num_increments):
        size = ramp.per_device_batch_size_start + index * ramp.per_device_batch_size_increment
        batch = int(size * ramp.num_devices * ramp.gradient_accumulation_steps)
        num_steps = -(-share.numerator // (share.denominator * batch))
        stages.append(ramp.stage(size, first_step, num_steps, seen))
        first_step, seen = first_step + num_steps, seen + num_steps * batch
    return tuple(stages)


def make_rampup(
    config: BatchConfig, batch: Batch | None, num_devices: int
) -> RampupBatchManager | list[Violation] | None:
    """The ramp of a config, None where it is off or its target unknown, or every rule that it breaks."""
    if batch is None or not config.enable_rampup_batch_size:
        return None
    if broken := _no_way_up(config, batch.per_device_batch_size) or _not_whole_stages(config, batch, num_devices):
        return broken
    return RampupBatchManager(
        num_devices,
        config.per_device_batch_size_start,
        batch.per_device_batch_size,
        config.per_device_batch_size_increment,
        config.global_rampup_samples,
        batch.gradient_accumulation_steps,
        config.rampup_mode,
    )


def _no_way_up(config: BatchConfig, target: Fraction) -> list[Violation]:
    """Refuses a ramp that does not lead up to the target in whole increments."""
    start, increment = config.per_device_batch_size_start, config.per_device_batch_size_increment
    if start >= target:
        starts = [target - number * increment for number in range(1, 65) if target > number * increment]
        message = f"{_START}={number_text(start)} is not below the target per_device_batch_size={number_text(target)}."
        return [Violation(_START, message, (one_of(_START, starts, start),), rule="ramp goes up")]
    steps = (target - start) / increment
    if steps.denominator == 1 and steps <= _MOST_INCREMENTS:
        return []
    near = range(max(int(steps) - 32, 1), min(int(steps) + 33, _MOST_INCREMENTS + 1))
    shares = [(target - start) / number for number in (near or (_MOST_INCREMENTS, 500, 100, 10, 5, 2, 1))]
    if steps > _MOST_INCREMENTS:
        message = (
            f"{_INCREMENT}={number_text(increment)} takes {math.ceil(steps):,} increments from {_START}="
            f"{number_text(start)} to per_device_batch_size={number_text(target)}, more than {_MOST_INCREMENTS:,}."
        )
        return [Violation(_INCREMENT, message, (one_of(_INCREMENT, shares, increment),), rule="few increments")]
    message = (
        f"from {_START}={number_text(start)} to per_device_batch_size={number_text(target)} by "
        f"{_INCREMENT}={number_text(increment)} is {unwhole_text(steps)} increments, not a whole number."
    )
    return [Violation(_INCREMENT, message, (one_of(_INCREMENT, shares, increment),), rule="whole increments")]


def _not_whole_stages(config: BatchConfig, batch: Batch, num_devices: int) -> list[Violation]:
    """Refuses stages that have no whole number of examples, or of accumulation steps."""
    target, accumulation = batch.per_device_batch_size, batch.gradient_accumulation_steps
    by_device = config.rampup_mode == "per_device_batch_size"
    unit = Fraction(1, num_devices) if by_device else target / accumulation
    times = (
        f"x {num_devices} devices"
        if by_device
        else (f"x gradient_accumulation_steps={accumulation} / per_device_batch_size={number_text(target)}")
    )
    what = "examples" if by_device else "accumulation steps"
    return [
        Violation(
            key,
            f"{key}={number_text(value)} {times} = {unwhole_text(value / unit)} {what}, not a whole number.",
            (multiples(key, unit, value),),
            rule=f"{key} is whole",
        )
        for key in (_START, _INCREMENT)
        if ((value := getattr(config, key)) / unit).denominator != 1
    ]
