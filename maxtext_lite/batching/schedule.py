"""Schedules by examples seen: a ramp's batches, the length of a run, and a batch's learning rate."""

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from maxtext_lite.batching.batch import Batch, derive_batch, split_stage
from maxtext_lite.config import BatchConfig, Config, OptimizerConfig
from maxtext_lite.config.errors import (
    Refusal,
    UserError,
    around,
    counted,
    divisors,
    multiples_around,
    number_text,
    refuse,
    setting_text,
    short_text,
)
from maxtext_lite.config.keys import GLOBAL_BATCH_KEYS
from maxtext_lite.config.types import MOST_STAGES

RampupMode = Literal["per_device_batch_size", "gradient_accumulation_steps"]
_NO_RAMP = {"enable_rampup_batch_size": False}
_ENDLESS = 2**62  # steps
_START = "per_device_batch_size_start"
_INCREMENT = "per_device_batch_size_increment"


@dataclass(frozen=True)
class BatchStage(Batch):
    """Consecutive steps of one batch size.

    Attributes:
      threshold: examples seen from which on a step takes this stage.
      first_step: number of the first step; the first step of the run is 1, as in metrics.jsonl.
      num_steps: number of steps, 0 where one step of an earlier stage passes the whole stage; None for the stage that
        lasts to the end of the run.
      samples_before: examples seen when the stage starts.
    """

    threshold: int = 0
    first_step: int = 1
    num_steps: int | None = None
    samples_before: int = 0

    @property
    def samples(self) -> int | None:
        """Examples that the stage consumes; None where num_steps is None."""
        return None if self.num_steps is None else self.num_steps * self.global_batch_to_train

    def to_json(self) -> dict[str, object]:
        """The entries of a stage in plan.json."""
        return {
            "first_step": self.first_step,
            "num_steps": self.num_steps,
            "per_device_batch_size": json_number(self.per_device_batch_size),
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "global_batch_to_train": self.global_batch_to_train,
            "samples": self.samples,
        }


def json_number(value: Any) -> Any:
    """The value with a fraction as a number."""
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return value


def make_stages(batches: Sequence[tuple[int, Batch]]) -> tuple[BatchStage, ...]:
    """A run's stages for these thresholds and batches. A step that begins at or past a threshold takes its batch.

    Thresholds rise from 0. No step is cut, and the overshoot of one does not move a later threshold.
    """
    stages: list[BatchStage] = []
    first_step = 1
    seen = 0
    ends = [threshold for threshold, _ in batches[1:]]
    for (threshold, batch), end in itertools.zip_longest(batches, ends):
        split = (batch.per_device_batch_size, batch.gradient_accumulation_steps, batch.micro_batch_to_train)
        num_steps = None if end is None else max(-(-(end - seen) // batch.global_batch_to_train), 0)
        stages.append(BatchStage(*split, threshold, first_step, num_steps, seen))
        first_step += num_steps or 0
        seen += stages[-1].samples or 0
    return tuple(stages)


def stage_at(stages: Sequence[BatchStage], examples_seen: int) -> BatchStage:
    """The stage of the next step once `examples_seen` examples have been consumed."""
    return stages[bisect.bisect_right(stages, examples_seen, key=lambda stage: stage.threshold) - 1]


@dataclass(frozen=True)
class RampupBatchManager:
    """The batch by examples seen: that of the last stage whose threshold they have reached.

    It keeps no position, and batches may rise and fall. Made of `batch_schedule`, or of the four keys of a ramp.

    Attributes:
      all_stages: as in `make_stages`; the last is the target.
      mode: `rampup_mode`, what realises the batch of a stage.
      samples_per_increment: of a ramp: examples of one increment; a stage ends with the step that reaches them.
    """

    all_stages: tuple[BatchStage, ...]
    mode: RampupMode
    samples_per_increment: Fraction | None = None

    @classmethod
    def of_ramp(
        cls,
        num_devices: int,
        start: Fraction,
        target: Fraction,
        increment: Fraction,
        samples: int,
        accumulation: int = 1,
        mode: RampupMode = "per_device_batch_size",
    ) -> "RampupBatchManager":
        """A ramp that spends an equal share of `samples` at each batch size from the start to the target.

        Stage k has b_k = start + k x increment and lasts ceil(share / global_batch_to_train) steps. In the mode
        `per_device_batch_size` the batch of a device is b_k. In the mode `gradient_accumulation_steps` the batch of a
        device is the target's and the accumulation is A x b_k / target. Both modes have the same global batches.

        Args:
          accumulation: A, the target's.
        Raises:
          ValueError: a stage is not a whole number, or no whole number of increments leads to the target.
        """
        if min(start, increment, samples, target - start) <= 0:
            raise ValueError("a ramp goes up: 0 < start < target, and increment and samples above 0")
        unit = Fraction(num_devices) if mode == "per_device_batch_size" else accumulation / target
        increments = (target - start) / increment
        if any(number.denominator != 1 for number in (increments, start * unit, increment * unit)):
            raise ValueError("the increments to the target, or the batch of a stage, are not a whole number")
        share = samples / increments
        batches: list[tuple[int, Batch]] = []
        threshold = 0
        for index in range(int(increments) + 1):
            size = start + index * increment
            if mode == "per_device_batch_size":
                batch = Batch(size, accumulation, int(size * num_devices))
            else:
                batch = Batch(target, int(size * unit), int(target * num_devices))
            batches.append((threshold, batch))
            threshold += math.ceil(share / batch.global_batch_to_train) * batch.global_batch_to_train
        return cls(make_stages(batches), mode, share)

    @property
    def stages(self) -> tuple[BatchStage, ...]:
        """The stages before the target."""
        return self.all_stages[:-1]

    @property
    def last_stage(self) -> BatchStage:
        """The stage at the target."""
        return self.all_stages[-1]

    @property
    def num_increments(self) -> int:
        """The number of stages before the target."""
        return len(self.stages)

    @property
    def total_steps(self) -> int:
        """Steps before the target."""
        return self.last_stage.first_step - 1

    def stage_at(self, examples_seen: int) -> BatchStage:
        """The stage of the next step once `examples_seen` examples have been consumed."""
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

    def to_json(self) -> dict[str, object]:
        """The entry `rampup` of plan.json."""
        return {
            "mode": self.mode,
            "num_increments": self.num_increments,
            "samples_per_increment": json_number(self.samples_per_increment),
            "total_steps": self.total_steps,
            "stages": [stage.to_json() for stage in self.stages],
            "target": self.last_stage.to_json(),
        }


def make_rampup(
    config: Config, batch: Batch | None, num_devices: int, sampled: Sequence[tuple[int, Batch]] | None = None
) -> RampupBatchManager | Refusal | None:
    """The schedule of a config's batch, or a rule it breaks; None for a single batch or an unknown target.

    Args:
      sampled: thresholds and batches of a run that samples its examples.
    """
    if batch is None:
        return None
    if sampled is not None:
        return RampupBatchManager(make_stages(sampled), "gradient_accumulation_steps") if len(sampled) > 1 else None
    if config.enable_rampup_batch_size:
        if broken := _ramp_violation(config, batch, num_devices):
            return broken
        return RampupBatchManager.of_ramp(
            num_devices,
            config.per_device_batch_size_start,
            batch.per_device_batch_size,
            config.per_device_batch_size_increment,
            config.global_rampup_samples,
            batch.gradient_accumulation_steps,
            config.rampup_mode,
        )
    if len(config.batch_schedule) < 2:
        return None
    unit = config.tokens_per_example if config.batch_schedule_unit == "tokens" else 1
    batches: list[tuple[int, Batch]] = []
    for threshold, examples in config.batch_schedule:
        split = split_stage(config, examples, num_devices)
        if isinstance(split, Refusal):
            return split
        batches.append((-(-threshold // unit), split))
    return RampupBatchManager(make_stages(batches), config.rampup_mode)


def batch_settings(config: BatchConfig) -> dict[str, str]:
    """The keys that decide the global batches, each as on a command line."""
    return {key: setting_text(getattr(config, key)) for key in GLOBAL_BATCH_KEYS}


def has_same_batch_keys(start: Mapping[str, Any], stated: Mapping[str, str]) -> bool:
    """Whether these batch keys equal what the user stated at a start of a run or its config.yml."""
    settings = start.get("settings", {})
    return stated in (start.get("stated"), {key: settings.get(key) for key in GLOBAL_BATCH_KEYS})


def keep_batches(config: Config, batches: Sequence[tuple[int, int]], num_devices: int) -> Config:
    """The config that has these global batches on other devices; the same one where it has them as it is.

    A device takes at most per_device_batch_size examples, accumulation the rest.

    Args:
      batches: the thresholds in examples, and the batch from each on.
    Raises:
      UserError: a device has room for less than one example.
    """
    per_device = config.per_device_batch_size
    batch = derive_batch(config, num_devices)
    ramp = batch if isinstance(batch, Refusal) else make_rampup(config, batch, num_devices)
    if isinstance(batch, Batch) and not isinstance(ramp, Refusal):
        stages = ramp.all_stages if ramp else make_stages([(0, batch)])
        if [(stage.threshold, stage.global_batch_to_train) for stage in stages] == list(batches):
            return config
    if per_device == -1:  # it follows from the target, in as many micro-batches
        per_device = Fraction(batches[-1][1], max(config.gradient_accumulation_steps, 1) * num_devices)
    most = int(per_device * num_devices)
    if not most:
        rule = f"num_devices={num_devices} x per_device_batch_size={number_text(per_device)} is less than one example."
        raise UserError(str(Refusal("num_devices", rule, (math.ceil(1 / per_device),))))
    mode = config.rampup_mode if len(batches) > 1 else "per_device_batch_size"
    if mode == "gradient_accumulation_steps":
        common = math.gcd(*(examples for _, examples in batches))
        per_device = Fraction(max(size for size in divisors(common) if size <= most), num_devices)
    kept = {
        "enable_rampup_batch_size": False,
        "global_batch_size": 0,
        "global_batch_tokens": 0,
        "gradient_accumulation_steps": -1,
        "batch_schedule": tuple(batches),
        "batch_schedule_unit": "examples",
        "per_device_batch_size": per_device,
        "rampup_mode": mode,
    }
    return config.model_copy(update=kept)


def _ramp_violation(config: BatchConfig, batch: Batch, num_devices: int) -> Refusal | None:
    """Refuses stages that are not whole, and a ramp that does not rise to the target in whole increments."""
    start = config.per_device_batch_size_start
    increment = config.per_device_batch_size_increment
    target = batch.per_device_batch_size
    unit = Fraction(1, num_devices)  # of the start and the increment: one example, or one accumulation step
    unit_text = f"1 example on {counted(num_devices, 'device')}"
    if config.rampup_mode == "gradient_accumulation_steps":
        unit = target / batch.gradient_accumulation_steps
        unit_text = f"per_device_batch_size / gradient_accumulation_steps={batch.gradient_accumulation_steps}"
    for key in (_START, _INCREMENT):
        size = getattr(config, key)
        if (size / unit).denominator != 1:
            rule = f"is not a multiple of {number_text(unit)}, {unit_text}"
            return refuse(config, key, rule, *multiples_around(unit, size), _NO_RAMP)
    if start >= target:
        near = [target - increment] if target > increment else []
        return refuse(
            config, _START, f"is not below the target per_device_batch_size={number_text(target)}", *near, _NO_RAMP
        )
    steps = (target - start) / increment
    if steps.denominator == 1 and steps <= MOST_STAGES:
        return None
    whole = int((target - start) / unit)
    increments = [unit * number for number in divisors(whole) if whole // number <= MOST_STAGES]
    rule = (
        f"makes {number_text(steps)} increments of {_START}={number_text(start)} to "
        f"per_device_batch_size={number_text(target)}, not a whole number of at most {MOST_STAGES:,}"
    )
    return refuse(config, _INCREMENT, rule, *around(increments, increment), _NO_RAMP)


@dataclass(frozen=True)
class RunLength:
    """The steps of a run and the examples of each, computed from the stages without walking the steps.

    Attributes:
      stages: all stages of the run, in order; the last one has no end.
      stated_steps: `steps`; None where num_epochs states the length.
      stated_examples: num_epochs x examples in the data; None where `steps` states the length, or the data are unknown.
      trains_short_batch: whether examples at the end that fill no batch make one more step (`last_batch`).
      done: (steps, examples) before this start of the run; those of a checkpoint where it resumes.
    """

    stages: tuple[BatchStage, ...]
    stated_steps: int | None
    stated_examples: int | None
    trains_short_batch: bool
    done: tuple[int, int] = (0, 0)

    @property
    def steps(self) -> int:
        """Steps of the whole run, unless a later start changes its plan."""
        return self.end_after(*self.done)[0]

    @property
    def total_examples(self) -> int:
        """Examples of the whole run, including a short last batch, unless a later start changes its plan."""
        return self.end_after(*self.done)[1]

    @property
    def short_batch_examples(self) -> int:
        """Examples at the end that fill no batch; 0 if the last batch is whole, or already done."""
        if self.stated_examples is None:
            return 0
        return max(self.stated_examples - self._whole_batches(self.done[1])[1], 0)

    def ahead(self, examples_seen: int) -> Iterator[tuple[BatchStage, int]]:
        """The stages that are not over, each with its steps from there; the last one is endless."""
        seen = examples_seen
        for stage, following in itertools.pairwise(self.stages):
            steps = -(-(following.threshold - seen) // stage.global_batch_to_train)
            if steps > 0:
                yield stage, steps
                seen += steps * stage.global_batch_to_train
        yield self.stages[-1], _ENDLESS

    @property
    def stages_ahead(self) -> tuple[BatchStage, ...]:
        """The stages that remain, each with this start's steps and examples before it and in it."""
        found: list[BatchStage] = []
        step, seen = self.done
        for stage, steps in self.ahead(seen):
            num_steps = None if steps == _ENDLESS else steps
            found.append(replace(stage, first_step=step + 1, num_steps=num_steps, samples_before=seen))
            step += steps
            seen += steps * stage.global_batch_to_train
        return tuple(found)

    def step_examples(self, examples_seen: int) -> int:
        """Examples of the next step once `examples_seen` have been consumed; 0 at the end of the run's data."""
        batch = stage_at(self.stages, examples_seen).global_batch_to_train
        if self.stated_examples is None or examples_seen + batch <= self.stated_examples:
            return batch
        if not self.trains_short_batch:
            return 0
        return max(self.stated_examples - examples_seen, 0)

    def steps_left(self, step: int, examples_seen: int) -> int:
        """Steps that remain after `step` steps that consumed `examples_seen` examples.

        Stated steps are simply counted. Epochs end with their examples, however many steps those took.
        """
        if self.stated_examples is None:
            assert self.stated_steps is not None
            return max(self.stated_steps - step, 0)
        steps, seen = self._whole_batches(examples_seen)
        return steps + (self.trains_short_batch and seen < self.stated_examples)

    def end_after(self, step: int, examples_seen: int) -> tuple[int, int]:
        """(steps, examples) at the end of a run after `step` steps that consumed `examples_seen` examples.

        It is the same after each step of a run, and another one after a change of its batches or of its length.
        """
        left = self.steps_left(step, examples_seen)
        return step + left, self.examples_after(left, examples_seen)

    def examples_after(self, steps: int, examples_seen: int) -> int:
        """Examples seen after `steps` further steps, which must be among the `steps_left` after `examples_seen`."""
        left = steps
        seen = examples_seen
        for stage, steps_of_stage in self.ahead(examples_seen):
            taken = min(left, steps_of_stage)
            left -= taken
            seen += taken * stage.global_batch_to_train
        return seen if self.stated_examples is None else max(min(seen, self.stated_examples), examples_seen)

    def steps_within(self, examples_seen: int, end: int) -> int:
        """Whole batches that fit between `examples_seen` and `end` examples."""
        return replace(self, stated_examples=end)._whole_batches(examples_seen)[0]

    def _whole_batches(self, examples_seen: int) -> tuple[int, int]:
        """(whole batches that fit before the end of the data, examples seen after them)."""
        assert self.stated_examples is not None
        steps = 0
        seen = examples_seen
        for stage, steps_of_stage in self.ahead(examples_seen):
            fitting = max(self.stated_examples - seen, 0) // stage.global_batch_to_train
            taken = min(fitting, steps_of_stage)
            steps += taken
            seen += taken * stage.global_batch_to_train
            if taken < steps_of_stage:
                break
        return steps, seen


def derive_length(
    config: Config, stages: tuple[BatchStage, ...] | None, num_examples: int | None
) -> RunLength | Refusal | None:
    """The length of a run, or the rule that it breaks.

    Args:
      stages: None where they are not known, and so the length is not.
      num_examples: None where unknown; the length of a run of num_epochs is then unknown too.
    """
    epochs = config.num_epochs
    stated = None if num_examples is None or epochs == 0 else epochs * num_examples
    if stated is not None and stated.denominator != 1:
        rule = f"x {num_examples} examples in the data = {number_text(stated)} examples, not a whole number"
        near = (*multiples_around(epochs / stated, epochs), Fraction(math.ceil(epochs)))
        return refuse(config, "num_epochs", rule, *near)
    if stages is None or (epochs == 0 and config.steps == -1):
        return None
    examples = None if stated is None else int(stated)
    length = RunLength(stages, None if epochs else config.steps, examples, config.last_batch == "train")
    if num_examples is not None and epochs and not length.steps:
        wanted = stages[0].global_batch_to_train
        is_packed = config.dataset_type == "sft" and config.packing
        what = f"packed rows of {config.max_target_length} tokens" if is_packed else "examples"
        rule = f"is {examples} {what}, fewer than the {wanted} of one batch, and last_batch=drop trains on no other"
        return refuse(config, "num_epochs", rule, Fraction(wanted, num_examples), {"last_batch": "train"})
    return length


def decay(config: OptimizerConfig, u: Any, last: float, xp: Any) -> Any:
    """The decayed learning rate, as a part of the peak, at positions `u` of a run that ends at `last`.

    It is 1 at u = warmup_steps and the final fraction at u = last; neither point is rounded.

    Args:
      xp: the library of `u`, jax.numpy or numpy.
    Source: wsd is Hu et al. 2024, arXiv:2404.06395, section 4, with a linear decay.
    """
    final = config.learning_rate_final_fraction
    warmup = warmup_end(config, last)
    decay_steps = max(last - warmup, 1)
    match config.learning_rate_schedule:
        case "cosine":
            progress = xp.clip((u - warmup) / decay_steps, 0, 1)
            return final + (1 - final) * 0.5 * (1 + xp.cos(xp.pi * progress))
        case "linear":
            return 1 - (1 - final) * xp.clip((u - warmup) / decay_steps, 0, 1)
        case "wsd":
            wsd_steps = max(config.wsd_decay_steps_fraction * last, 1)
            return 1 - (1 - final) * xp.clip((u - (last - wsd_steps)) / wsd_steps, 0, 1)
        case "constant":
            return xp.ones_like(u)


def warm_up(config: OptimizerConfig, u: Any, last: float, xp: Any) -> Any:
    """The warm-up's part of the peak rate, at most 1, at positions `u` of a run that ends at `last`."""
    warmup = warmup_end(config, last)
    if warmup == 0:  # positions count in part where the schedule's unit is examples
        return xp.ones_like(u)
    return xp.minimum(u / warmup, 1)


def warmup_end(config: OptimizerConfig, last: float) -> float:
    """Where the warm-up of a run that ends at `last` is over: at warmup_steps, or below 1 at that part."""
    stated = float(config.warmup_steps)
    return stated * last if stated < 1 else stated


@dataclass(frozen=True)
class OptimizerScaling:
    """Scaled optimizer settings, for m = target batch / batch that they were tuned for.

    Attributes:
      rule: learning_rate_scaling.
      batch_ratio: m of the target; 1 without scaling.
      learning_rate_multiplier: m (linear), its square root (sqrt), or 1.
      configured: learning_rate, adam_b1, adam_b2 and adam_eps (with CompleteP for this model) in the config.
      scaled: the same in the run.
      groups: the multiplier of each group's learning rate.
    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.1 (linear, for SGD); Malladi et al. 2022, arXiv:2205.10287,
      definition of the square root scaling rule for Adam (sqrt, betas and epsilon).
    """

    rule: Literal["none", "linear", "sqrt"]
    batch_ratio: Fraction
    learning_rate_multiplier: float
    configured: Mapping[str, float]
    scaled: Mapping[str, float]
    groups: Mapping[str, float]


def rate_multiplier(rule: Literal["none", "linear", "sqrt"], ratio: Fraction) -> float:
    """The factor of the learning rate for a batch `ratio` times as large."""
    if rule == "none":
        return 1.0
    return math.sqrt(ratio) if rule == "sqrt" else float(ratio)


def scaling_violations(config: Config, batch: Batch | None) -> list[Refusal]:
    """Refuses scaling without a base batch, and scaled decays outside [0, 1). `batch` is None where it is unknown."""
    if config.learning_rate_scaling == "none":
        return []
    base = config.base_global_batch_size
    if base == 0:
        rule = f"does not state the batch from which learning_rate_scaling={config.learning_rate_scaling} scales"
        nearest = () if batch is None else (batch.global_batch_to_train,)
        return [refuse(config, "base_global_batch_size", rule, *nearest)]
    if batch is None or not config.scale_adam_with_batch:
        return []
    ratio = Fraction(batch.global_batch_to_train, base)
    broken: list[Refusal] = []
    for key, decay in (("adam_b1", config.adam_b1), ("adam_b2", config.adam_b2)):
        forgotten = 1 - _exact(decay)
        if ratio * forgotten <= 1:
            continue
        largest = math.floor(Fraction(base) / forgotten)
        # The smallest decay that works, rounded up at enough digits to stay below 1.
        digits: int = 10 ** (2 + len(str(math.ceil(ratio))))
        smallest = float(Fraction(math.ceil((1 - 1 / ratio) * digits), digits))
        rule = (
            f"becomes {short_text(1 - ratio * forgotten)} with scale_adam_with_batch=true, not in [0, 1): beside "
            f"base_global_batch_size={base} the largest batch is {largest}, not {batch.global_batch_to_train}"
        )
        broken.append(refuse(config, key, rule, smallest, {"scale_adam_with_batch": False}))
    return broken


def scale_optimizer(config: Config, global_batch_to_train: int) -> OptimizerScaling:
    """The optimizer's settings for this batch, for a config without `scaling_violations`."""
    rule = config.learning_rate_scaling
    ratio = Fraction(1) if rule == "none" else Fraction(global_batch_to_train, config.base_global_batch_size)
    multiplier = rate_multiplier(rule, ratio)
    configured = {
        "learning_rate": config.learning_rate,
        "adam_b1": config.adam_b1,
        "adam_b2": config.adam_b2,
        "adam_eps": config.adam_eps / (config.width_ratio * config.depth_ratio),
    }
    matrices = {} if config.width_ratio == 1 else {"layers' matrices": 1 / config.width_ratio}
    scaled = configured | {"learning_rate": config.learning_rate * multiplier}
    if config.scale_adam_with_batch:
        scaled["adam_b1"] = float(1 - ratio * (1 - _exact(config.adam_b1)))
        scaled["adam_b2"] = float(1 - ratio * (1 - _exact(config.adam_b2)))
        scaled["adam_eps"] = configured["adam_eps"] / math.sqrt(ratio)
    return OptimizerScaling(rule, ratio, multiplier, configured, scaled, matrices | dict(config.learning_rate_groups))


def scaling_warnings(config: Config, scaling: OptimizerScaling) -> list[str]:
    """Warnings of a scaling that is probably a mistake."""
    warnings: list[str] = []
    ratio = scaling.batch_ratio
    if scaling.rule == "linear" and ratio > 1 and config.warmup_steps == 0:
        warnings.append(
            f"learning_rate_scaling=linear raises learning_rate {short_text(ratio)} times with warmup_steps=0: large "
            "batches need a warm-up (Goyal et al. 2017, section 2.2)."
        )
    if scaling.rule == "linear" and ratio != 1 and config.optimizer == "adamw":
        warnings.append(
            "learning_rate_scaling=linear is the rule for SGD; for optimizer=adamw it is sqrt (Malladi et al. 2022)."
        )
    return warnings


def _exact(decay: float) -> Fraction:
    return Fraction(repr(decay))  # the decimal that the user wrote; 1 - 0.95 in floats is not 0.05
