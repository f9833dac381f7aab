"""What published laws recommend for a config on a machine: intervals, and the legal batches near them."""

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maxtext_lite.analysis.laws import (
    BATCH_LAWS,
    RATE_LAWS,
    WIDENING,
    Budget,
    Interval,
    Measured,
    adam_b2,
    critical_at,
    doubling_tokens,
    interval,
    timescale,
    warmup_steps,
    weight_decay,
)
from maxtext_lite.batching.batch import Batch, derive_batch
from maxtext_lite.batching.devices import Device
from maxtext_lite.batching.parameters import active_parameters, flops_per_example
from maxtext_lite.batching.plan import BatchPlan, make_plan
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import divisors, settings_of, value_text
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.records import read_records

UTILIZATION = Interval(0.3, 0.5)
"""The range of MFU behind the wall-clock time: what well-tuned runs report."""

BRANCHES_FILE = "branches.json"
"""In the directory of a run's branches: their losses and the critical batch."""
_DOUBLINGS = 3
_MOST_TRIED = 64
_NEAR = math.log(1.2)  # little compared with the range of the laws
_TOKENS_SAY: dict[str, object] = {
    "global_batch_size": 0,
    "global_batch_tokens": 0,
    "batch_schedule": (),
    "batch_schedule_unit": "examples",
    "enable_rampup_batch_size": False,
    "num_epochs": Fraction(0),
    "last_batch": "drop",
}
"""Values for the keys that would otherwise contradict a batch and a number of tokens."""
_ANY_STEPS: dict[str, object] = {**_TOKENS_SAY, "steps": 1, "warmup_steps": 0}
"""The same with a length, because a batch is planned before its steps are known."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine to train on; `device` is None if unknown."""

    num_devices: int
    num_hosts: int
    device: Device | None

    def plan(self, config: Config) -> BatchPlan:
        """The plan of a config on this machine. Raises UserError if there is none."""
        return make_plan(
            config,
            num_devices=self.num_devices,
            num_hosts=self.num_hosts,
            device_memory_gb=None if self.device is None else self.device.memory_bytes / 1e9,
            platform=self.device.platform if self.device else "gpu",
        )


@dataclasses.dataclass(frozen=True)
class LegalBatch:
    """A batch near a desired one that the config can train with on the machine.

    Attributes:
      tokens, examples: size of the batch.
      empty_slots: slots of a step without an example; they take as long as those with one.
      steps: steps for the tokens of the run.
      overrides: command-line settings for it, including those that undo contradicting keys of the config.
      fits: whether the planned memory is within the device's; None if that or the model's shapes are unknown.
      days: duration of the run at the ends of `UTILIZATION`; None if the device's peak is unknown.
    """

    tokens: int
    examples: int
    per_device_batch_size: Fraction
    gradient_accumulation_steps: int
    empty_slots: int
    steps: int
    overrides: tuple[str, ...]
    fits: bool | None
    days: Interval | None


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A batch that doubles while the critical batch grows.

    Attributes:
      batches: in tokens, from the first to the target.
      starts: for each batch after the first, the tokens seen from which the laws allow it.
      overrides: command-line settings of a schedule that doubles at the middle of each interval; () if there is none.
      refusal: why there is no ramp; "" if there is one.
    """

    batches: tuple[float, ...] = ()
    starts: tuple[Interval, ...] = ()
    overrides: tuple[str, ...] = ()
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What the laws say about one run. Batches are in tokens.

    Attributes:
      best, critical: ranges of the laws for the batch.
      learning_rate: range of the laws for it.
      weight_decay: from the smallest batch at the largest rate to the largest batch at the smallest rate.
      adam_b2: at the ends of `best`.
      warmup_steps: range of the laws at the middle of `best`.
      measured: the run's critical batch from which the ramp follows; None: from the laws'.
      legal: the distinct legal batches near the ends and the middle of `best` and the ends of its widened interval,
        and within that interval if any is.
    """

    budget: Budget
    best: Interval
    critical: Interval
    learning_rate: Interval
    weight_decay: Interval
    adam_b2: Interval
    warmup_steps: Interval
    ramp: Ramp
    measured: Measured | None
    legal: tuple[LegalBatch, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything, including each law by name, for programs."""
        found = dataclasses.asdict(self)
        found["budget"]["flops"] = self.budget.flops
        found["best"]["widened"] = dataclasses.asdict(self.best.widened(WIDENING))
        found["timescale"] = timescale(self.budget)
        for name, laws, value in (
            ("batch_laws", BATCH_LAWS, "tokens"),
            ("learning_rate_laws", RATE_LAWS, "learning_rate"),
        ):
            words = ("name", "purpose", "formula", "fitted", "source")
            found[name] = [{key: getattr(law, key) for key in words} | {value: law.value(self.budget)} for law in laws]
        return found


def recommend(config: Config, budget: Budget, machine: Machine, measured: Measured | None = None) -> Recommendation:
    """What the laws recommend for the config on the machine.

    If the budget is for another model than the config's, its shapes are unknown: the days follow from 6 N D FLOPs, and
    memory is not checked.

    Raises:
      UserError: no batch near those of the laws can be planned.
    """
    best = interval(budget, "best")
    rates = interval(budget, "rate")
    wide = best.widened(WIDENING)
    flops = None if budget.parameters == active_parameters(config) else 6 * budget.parameters
    wanted = (wide.low, best.low, best.middle, best.high, wide.high)
    legal = [nearest_legal(config, tokens, budget.tokens, machine, flops) for tokens in wanted]
    target = legal[2]
    if measured is not None:  # allowed from about a fifth of the run on
        largest = critical_at(budget.tokens, measured) / 2
        target = nearest_legal(config, largest, budget.tokens, machine, flops)
    ramp = ramp_of(config.optimizer, target.tokens, budget.tokens, measured)
    ramp = dataclasses.replace(ramp, overrides=_schedule_of(config, ramp, target, budget.tokens, machine))
    inside = [each for each in legal if wide.low <= each.tokens <= wide.high]
    distinct = {each.examples: each for each in inside or legal}
    return Recommendation(
        budget,
        best,
        interval(budget, "critical"),
        rates,
        Interval(weight_decay(budget, best.low, rates.high), weight_decay(budget, best.high, rates.low)),
        Interval.of((adam_b2(best.low), adam_b2(best.high))),
        Interval.of(warmup_steps(budget, best.middle).values()),
        ramp,
        measured,
        tuple(distinct[examples] for examples in sorted(distinct)),
    )


def ramp_of(optimizer: str, batch: float, tokens: float, measured: Measured | None = None) -> Ramp:
    """Doublings that lead up to a batch, for AdamW.

    Args:
      batch: the target, in tokens.
      measured: as in `doubling_tokens`.
      tokens: tokens of the run; doublings that the laws allow only after its end are omitted.
    """
    if optimizer == "muon":
        return Ramp(
            refusal="Muon's critical batch is larger, and Qwen3.8 reports that a ramp cost it 18.8 % more steps"
        )
    if optimizer != "adamw":
        return Ramp(refusal=f"no law is known for optimizer={optimizer}; those above are AdamW's")
    batches = [batch / 2**doublings for doublings in range(_DOUBLINGS, -1, -1)]
    starts = [doubling_tokens(doubled, measured) for doubled in batches[1:]]  # they grow with the batch
    starts = [start for start in starts if start.low < tokens]
    return Ramp(tuple(batches[: len(starts) + 1]), tuple(starts))


def nearest_legal(
    config: Config, tokens: float, run_tokens: float, machine: Machine, flops_per_token: float | None = None
) -> LegalBatch:
    """A plannable batch of about `tokens` tokens.

    The first choice is the largest per-device batch, not above the config's if it states one and that leaves no slot
    empty, whose total comes within 20 % and fits. Otherwise it is the nearest batch that fits, or else the nearest that
    can be planned. Slots per example count as the distance does: twice as many are as bad as twice the batch.

    Args:
      flops_per_token: of a model other than the config's, whose memory is unknown.
    Raises:
      UserError: no candidate can be planned.
    """
    planner = machine if flops_per_token is None else dataclasses.replace(machine, device=None)
    refused: list[UserError] = []
    best: tuple[tuple[bool, float, float], BatchPlan] | None = None
    for change in _candidates(config, tokens, planner):
        try:
            plan = planner.plan(config.model_copy(update=change))
        except UserError as error:
            refused.append(error)
            continue
        distance = abs(math.log(plan.tokens_per_step / tokens))
        cost = round(distance + math.log(plan.micro_batch_slots / plan.micro_batch_to_train), 9)
        is_first_choice = plan.memory.fits and cost <= _NEAR
        if best is None or is_first_choice or (not plan.memory.fits, cost, distance) < best[0]:
            best = (not plan.memory.fits, cost, distance), plan
        if is_first_choice:
            break
    if best is None:
        raise refused[0]
    plan = best[1]
    steps = math.ceil(run_tokens / plan.tokens_per_step)
    keys: dict[str, object] = {
        "per_device_batch_size": plan.per_device_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
    }
    peak = machine.device.peak(config.dtype) if machine.device else None
    days = None
    if peak is not None:
        if flops_per_token is None:
            flops_per_token = flops_per_example(config, config.max_target_length) / config.max_target_length
        slots = plan.micro_batch_slots / plan.micro_batch_to_train  # of an example
        busy = steps * plan.tokens_per_step * slots * flops_per_token / (machine.num_devices * peak) / 86_400
        days = Interval(busy / UTILIZATION.high, busy / UTILIZATION.low)
    return LegalBatch(
        plan.tokens_per_step,
        plan.global_batch_to_train,
        plan.per_device_batch_size,
        plan.gradient_accumulation_steps,
        plan.gradient_accumulation_steps * plan.empty_slots_per_micro_batch,
        steps,
        tuple(settings_of(_for_steps(config, keys, steps))),
        None if plan.memory.limit is None else plan.memory.fits,
        days,
    )


def _candidates(config: Config, tokens: float, machine: Machine) -> Iterator[dict[str, object]]:
    """Changes to batches of about `tokens` tokens: the largest per-device batch first, each half of the one before.

    No micro-batch has fewer examples than slots, unless the batch has.
    """
    num_devices = machine.num_devices
    examples = max(round(tokens / (config.max_target_length * config.rows_per_example)), 1)
    most = config.per_device_batch_size
    if most == -1:
        derived = derive_batch(config, num_devices)
        shares = Fraction(-(-examples // num_devices))  # all in one micro-batch, if nothing limits it
        most = derived.per_device_batch_size if isinstance(derived, Batch) else shares
    one = {**_ANY_STEPS, "per_device_batch_size": Fraction(1, num_devices), "gradient_accumulation_steps": 1}
    try:
        slots = machine.plan(config.model_copy(update=one)).micro_batch_slots
    except UserError:
        slots = 1
    micro = max(most * num_devices, Fraction(slots))
    least = Fraction(min(slots, examples))
    for _ in range(_MOST_TRIED):
        exact = Fraction(examples) / micro
        for accumulation in sorted({max(math.floor(exact), 1), max(math.ceil(exact), 1)}):
            split = {"per_device_batch_size": micro / num_devices, "gradient_accumulation_steps": accumulation}
            yield {**_ANY_STEPS, **split}
        if micro <= least:
            return
        micro = max(Fraction(math.floor(micro / 2)), least)


def _for_steps(config: Config, keys: dict[str, object], steps: int) -> dict[str, object]:
    """The keys of a batch and of a run of that many steps, with changes to keys that would contradict them."""
    found: dict[str, object] = {**keys, "steps": steps}
    for key, value in _TOKENS_SAY.items():
        if key not in keys and getattr(config, key) != value:
            found[key] = value
    if config.warmup_steps > steps:
        found["warmup_steps"] = steps
    return found


def _schedule_of(config: Config, ramp: Ramp, legal: LegalBatch, run_tokens: float, machine: Machine) -> tuple[str, ...]:
    """The settings of a schedule up to a legal batch, each batch from the middle of its interval on; () for none."""
    if ramp.refusal:
        return ()
    stages: list[tuple[int, int]] = []
    micro = legal.examples // legal.gradient_accumulation_steps
    for batch, start in zip(ramp.batches, [0.0, *(start.middle for start in ramp.starts)], strict=True):
        examples = _filling(round(legal.examples * batch / legal.tokens), micro)
        is_larger = not stages or examples > stages[-1][1]
        if start < run_tokens and examples >= 1 and is_larger:
            stages.append((int(float(f"{start:.3g}")) if stages else 0, examples))
    if len(stages) < 2:
        return ()
    for mode in ("gradient_accumulation_steps", "per_device_batch_size"):
        keys: dict[str, object] = {
            "per_device_batch_size": legal.per_device_batch_size,
            "gradient_accumulation_steps": -1,
            "batch_schedule": tuple(stages),
            "batch_schedule_unit": "tokens",
            "rampup_mode": mode,
        }
        try:
            plan = machine.plan(type(config).model_validate({**dict(config), **_ANY_STEPS, **keys}))
        except ValidationError:
            return ()  # more tokens than a threshold may have
        except UserError:
            continue  # a stage is no whole number of micro-batches
        examples = math.ceil(run_tokens / config.tokens_per_example)
        steps = plan.length.steps_within(0, examples)
        steps += plan.length.examples_after(steps, 0) < examples
        return tuple(settings_of(_for_steps(config, keys, steps)))
    return ()


def _filling(examples: int, micro: int) -> int:
    """This batch, or the nearest multiple of a micro-batch where no divisor of it fills half of one."""
    fits = max(size for size in divisors(max(examples, 1)) if size <= micro)
    if examples <= micro or 2 * fits > micro:
        return examples
    return round(examples / micro) * micro


def measured_batch(run: Path, config: Config) -> Measured:
    """The critical batch of a run: from its newest branches, or its newest noise scale.

    Raises:
      UserError: it has neither.
    """
    found: list[dict[str, Any]] = []
    for path in run.parent.glob(f"{run.name}-branches-*/{BRANCHES_FILE}"):
        outcome = read_object(path)
        if outcome["critical_batch"] is not None:
            found.append(outcome)
    each = config.tokens_per_example
    if found:
        newest = max(found, key=lambda outcome: outcome["step"])
        how = f"branches of step {newest['step']}"
        return Measured(newest["critical_batch"] * each, newest["examples_seen"] * each, how)
    scale = "gradient_noise_scale"
    lines = [line for line in read_records(run / "metrics.jsonl", []) if line.get(scale)]
    if not lines:
        raise UserError(
            f"--from={value_text(run)} has no measured critical batch: no branches, and no gradient_noise_scale in its "
            "metrics.jsonl. Run `branch` first, or steps of several micro-batches."
        )
    how = f"the noise scale of step {lines[-1]['step']}"
    return Measured(lines[-1][scale] * each, lines[-1]["examples_seen"] * each, how)
