"""Batch-size ramp-up in closed form: the batch as a pure function of the examples seen."""

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from maxtext_lite.batching.batch import Batch
from maxtext_lite.config import BatchConfig
from maxtext_lite.config.errors import number_text, unwhole_text
from maxtext_lite.config.violation import Sides, Violation, divisors, multiples, one_of

RampupMode = Literal["per_device_batch_size", "gradient_accumulation_steps"]
_NO_RAMP = {"enable_rampup_batch_size": False}
_MOST_INCREMENTS = 1_000  # each is a stage of the plan
_START, _INCREMENT = "per_device_batch_size_start", "per_device_batch_size_increment"


@dataclass(frozen=True)
class BatchStage(Batch):
    """Consecutive steps of one batch size.

    Attributes:
      first_step: number of the first step; the first step of the run is 1, as in metrics.jsonl.
      num_steps: number of steps; None for the stage that lasts to the end of the run.
      samples_before: examples seen when the stage starts.
    """

    first_step: int = 1
    num_steps: int | None = None
    samples_before: int = 0

    @property
    def samples(self) -> int | None:
        """Examples that the stage consumes; None where num_steps is None."""
        return None if self.num_steps is None else self.num_steps * self.global_batch_to_train


def only_stage(batch: Batch) -> BatchStage:
    """The one stage of a run without a ramp."""
    return BatchStage(batch.per_device_batch_size, batch.gradient_accumulation_steps, batch.micro_batch_to_train)


def stage_at(stages: Sequence[BatchStage], examples_seen: int) -> BatchStage:
    """The stage of the next step once `examples_seen` examples have been consumed.

    Raises:
      ValueError: examples_seen is negative.
    """
    if examples_seen < 0:
        raise ValueError(f"examples_seen={examples_seen} is negative")
    return stages[bisect.bisect_right(stages, examples_seen, key=lambda stage: stage.samples_before) - 1]


@dataclass(frozen=True)
class RampupBatchManager:
    """A ramp that spends an equal share of `global_rampup_samples` at each batch size from the start to the target.

    It keeps no position. Stage k has b_k = start + k x increment and lasts
    ceil(samples_per_increment / global_batch_to_train) steps; its overshoot does not shorten the next stage. In the
    mode `per_device_batch_size` the batch of a device is b_k. In the mode `gradient_accumulation_steps` the batch of a
    device is the target's and the accumulation is A x b_k / target. Both modes have the same global batches.

    Attributes:
      num_devices: all devices of the mesh.
      per_device_batch_size_start: b_0.
      per_device_batch_size: the target.
      per_device_batch_size_increment: b_(k+1) - b_k; target - start is a multiple of it.
      global_rampup_samples: examples of the whole ramp.
      gradient_accumulation_steps: A, the target's.
    Raises:
      ValueError: a stage is not a whole number of examples, or no whole number of increments leads to the target.
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
        """The factor that turns b_k into the count that must be whole: examples or accumulation steps."""
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
        """Examples of one increment; a stage ends with the step that reaches them."""
        return Fraction(self.global_rampup_samples, self.num_increments)

    @functools.cached_property
    def all_stages(self) -> tuple[BatchStage, ...]:
        """The stages of the ramp, then the one at the target, which lasts to the end of the run."""
        stages: list[BatchStage] = []
        first_step, seen = 1, 0
        for index in range(self.num_increments):
            batch = self._batch_of(self.per_device_batch_size_start + index * self.per_device_batch_size_increment)
            num_steps = math.ceil(self.samples_per_increment / batch.global_batch_to_train)
            stages.append(replace(batch, first_step=first_step, num_steps=num_steps, samples_before=seen))
            first_step, seen = first_step + num_steps, seen + num_steps * batch.global_batch_to_train
        target = self._batch_of(self.per_device_batch_size)
        return (*stages, replace(target, first_step=first_step, samples_before=seen))

    @property
    def stages(self) -> tuple[BatchStage, ...]:
        """The stages of the ramp, without the target."""
        return self.all_stages[:-1]

    @property
    def last_stage(self) -> BatchStage:
        """The stage at the target."""
        return self.all_stages[-1]

    def _batch_of(self, size: Fraction) -> BatchStage:
        """A stage of b_k = `size`, as if the run consisted of it."""
        if self.mode == "per_device_batch_size":
            per_device, accumulation = size, self.gradient_accumulation_steps
        else:
            per_device, accumulation = self.per_device_batch_size, int(size * self._unit)
        return BatchStage(per_device, accumulation, int(per_device * self.num_devices))

    @property
    def total_steps(self) -> int:
        """Steps of the whole ramp."""
        return self.last_stage.first_step - 1

    def stage_at(self, examples_seen: int) -> BatchStage:
        """The stage of the next step once `examples_seen` examples have been consumed.

        Raises:
          ValueError: examples_seen is negative.
        """
        return stage_at(self.all_stages, examples_seen)

    def batch_size_at(self, step: int) -> int:
        """global_batch_to_train of step number `step` (the first is 1).

        Raises:
          ValueError: step is below 1.
        """
        return self._stage_of_step(step).global_batch_to_train

    def samples_before(self, step: int) -> int:
        """Examples consumed before step number `step` (the first is 1).

        Raises:
          ValueError: step is below 1.
        """
        stage = self._stage_of_step(step)
        return stage.samples_before + (step - stage.first_step) * stage.global_batch_to_train

    def _stage_of_step(self, step: int) -> BatchStage:
        if step < 1:
            raise ValueError(f"step={step}: the first step is 1")
        return self.all_stages[bisect.bisect_right(self.all_stages, step, key=lambda stage: stage.first_step) - 1]


def make_rampup(
    config: BatchConfig, batch: Batch | None, num_devices: int
) -> RampupBatchManager | list[Violation] | None:
    """The ramp of a config; None where it is off or its target unknown; or every rule that it breaks."""
    if batch is None or not config.enable_rampup_batch_size:
        return None
    unit = _unit(config, batch, num_devices)
    if broken := _not_whole_stages(config, batch, num_devices, unit) or _no_way_up(config, batch, unit):
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


def _unit(config: BatchConfig, batch: Batch, num_devices: int) -> Fraction:
    """What the start and the increment are multiples of: one example, or one accumulation step."""
    if config.rampup_mode == "per_device_batch_size":
        return Fraction(1, num_devices)
    return batch.per_device_batch_size / batch.gradient_accumulation_steps


def _no_way_up(config: BatchConfig, batch: Batch, unit: Fraction) -> list[Violation]:
    """Refuses a ramp of whole stages that does not rise to the target in whole increments."""
    start, increment = config.per_device_batch_size_start, config.per_device_batch_size_increment
    target = batch.per_device_batch_size
    if start >= target:

        def nearest_starts() -> Sides:
            starts = (target - number * increment for number in range(1, 65))
            return one_of(_START, [each for each in starts if each > 0], start)()

        message = f"{_START}={number_text(start)} is not below the target per_device_batch_size={number_text(target)}."
        return [Violation(_START, message, (nearest_starts, _NO_RAMP), rule="ramp goes up")]
    steps = (target - start) / increment
    if steps.denominator == 1 and steps <= _MOST_INCREMENTS:
        return []

    whole = int((target - start) / unit)
    increments = [unit * number for number in divisors(whole) if whole // number <= _MOST_INCREMENTS]
    near = (one_of(_INCREMENT, increments, increment), _NO_RAMP)
    if steps > _MOST_INCREMENTS:
        message = (
            f"{_INCREMENT}={number_text(increment)} takes {math.ceil(steps):,} increments from {_START}="
            f"{number_text(start)} to per_device_batch_size={number_text(target)}, more than {_MOST_INCREMENTS:,}."
        )
        return [Violation(_INCREMENT, message, near, rule="few increments")]
    message = (
        f"from {_START}={number_text(start)} to per_device_batch_size={number_text(target)} by "
        f"{_INCREMENT}={number_text(increment)} is {unwhole_text(steps)} increments, not a whole number."
    )
    return [Violation(_INCREMENT, message, near, rule="whole increments")]


def _not_whole_stages(config: BatchConfig, batch: Batch, num_devices: int, unit: Fraction) -> list[Violation]:
    """Refuses stages that are not a whole number of examples, or of accumulation steps."""
    target, accumulation = batch.per_device_batch_size, batch.gradient_accumulation_steps
    by_device = config.rampup_mode == "per_device_batch_size"
    times = f"x {num_devices} device{'s' * (num_devices != 1)}"
    if not by_device:
        times = f"x gradient_accumulation_steps={accumulation} / per_device_batch_size={number_text(target)}"
    what = "examples" if by_device else "accumulation steps"
    return [
        Violation(
            key,
            f"{key}={number_text(value)} {times} = {unwhole_text(value / unit)} {what}, not a whole number.",
            (multiples(key, unit, value), _NO_RAMP),
            rule=f"{key} is whole",
        )
        for key in (_START, _INCREMENT)
        if ((value := getattr(config, key)) / unit).denominator != 1
    ]
