"""The starts of a run that changed it, as each checkpoint lists them, and what a resume says of its schedule."""

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from maxtext_lite.batching import BatchPlan
from maxtext_lite.batching.rate_shape import decay, warm_up
from maxtext_lite.config import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from maxtext_lite.config.bucket import absolute, original
from maxtext_lite.config.errors import setting_text

_OF_STEPS = ("steps", "num_epochs", "last_batch", "seed", "balance_attention", "excluded_rows")
_OTHERS = {*DataConfig.model_fields, *ModelConfig.model_fields, *RunConfig.model_fields}.difference(_OF_STEPS)
"""Keys that change no step, that no start may change, or that have a history of their own, as mixtures do."""

_OF_SCHEDULE = ("learning_rate_schedule", "schedule_unit", "learning_rate_final_fraction", "wsd_decay_steps_fraction")

_OF_BATCH = ("global_batch_size", "per_device_batch_size", "gradient_accumulation_steps")

Starts = list[dict[str, Any]]
"""For each start that changed something, first to last: `step`, those done before it; `end`, the (steps, examples) at
which the run then was to end; `batch`, examples of a step of the target; `settings`, the config's keys that decide its
steps, each as on a command line; `parameters`, the absolute load_parameters_path, "" without one."""


def with_start(
    before: Sequence[Mapping[str, Any]], config: Config, plan: BatchPlan, step: int, examples_seen: int
) -> Starts:
    """The starts with this one, which begins after `step` steps, if it differs from the last."""
    settings = {key: setting_text(getattr(config, key)) for key in Config.model_fields if key not in _OTHERS}
    end, batch = list(plan.length.end_after(step, examples_seen)), plan.global_batch_to_train
    path = config.load_parameters_path and str(absolute(original(config.load_parameters_path, "load_parameters_path")))
    now = {"step": step, "end": end, "batch": batch, "settings": settings, "parameters": path}
    same = before and {**before[-1], "step": step} == now
    return [*map(dict, before)] if same else [*map(dict, before), now]


def settings_at(starts: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """The settings with which a step was taken, as `key=value`; [] if it is older than all starts."""
    found = [start["settings"] for start in starts if start["step"] < step]
    return [f"{key}={value}" for key, value in found[-1].items() if key in Config.model_fields] if found else []


def first_parameters(starts: Sequence[Mapping[str, Any]]) -> str | None:
    """The load_parameters_path of a run's first start; None if it is not known."""
    return starts[0].get("parameters") if starts and starts[0]["step"] == 0 else None


def resume_between(starts: Sequence[Mapping[str, Any]], after: int, step: int) -> int | None:
    """The first step, of those after `after` and before `step`, after which the run resumed with others; None: none."""
    for before, start in itertools.pairwise(starts):
        if after < start["step"] < step and _decides_steps(before) != _decides_steps(start):
            return start["step"]
    return None


def _decides_steps(start: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the steps of a start: its length only where that has a part in them."""
    settings: dict[str, str] = start["settings"]
    found = {"batch": start["batch"], "settings": settings}
    by_end = _depends_on_end(settings["learning_rate_schedule"], Fraction(settings["warmup_steps"]))
    if settings["num_epochs"] == "0" and not by_end:
        return {**found, "settings": {**settings, "steps": ""}}
    return {**found, "end": start["end"]}


def _depends_on_end(schedule: str, warmup_steps: int | Fraction) -> bool:
    """Whether the learning rate depends on where the run ends: even a constant one, if its warm-up is a part of it."""
    return schedule != "constant" or 0 < warmup_steps < 1


def moved_batch(plan: BatchPlan, starts: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """A sentence on the batch of a run that has just got another size; [] for any other run.

    Args:
      starts: with the one that begins after `step` steps.
    """
    if len(starts) < 2 or starts[-1]["step"] != step or starts[-1]["batch"] == starts[-2]["batch"]:
        return []
    before, now = starts[-2:]
    if plan.rl:
        why = "batch_size or num_generations has changed"
        return [f"a batch is {now['batch']:,} responses instead of {before['batch']:,} after step {step:,}: {why}"]
    changed = [key for key in _OF_BATCH if before["settings"].get(key) != now["settings"].get(key)]
    why = ", ".join(f"{key}={now['settings'][key]} instead of {before['settings'].get(key)}" for key in changed)
    if not changed:  # each device has as many examples as before
        devices = plan.num_devices * before["batch"] // now["batch"]
        why = f"the run has {plan.num_devices:,} devices instead of {devices:,}"
        why += f"; global_batch_size={before['batch']} keeps it"
    return [f"global_batch_to_train is {now['batch']:,} instead of {before['batch']:,} after step {step:,}: {why}"]


def moved_schedule(
    config: OptimizerConfig, plan: BatchPlan, starts: Sequence[Mapping[str, Any]], step: int, examples_seen: int
) -> list[str]:
    """A sentence on the learning rate of a run whose schedule has just got another end or shape; [] for any other.

    Args:
      starts: with the one that begins after `step` steps. Versions that listed none ended the schedule where a run
        with this batch and length from its first step would end.
    """
    if not starts or starts[-1]["step"] != step:
        return []
    now = starts[-1]
    before: Mapping[str, Any] = starts[-2] if len(starts) > 1 else {**now, "end": plan.length.end_after(0, 0)}
    schedule = {key: type(getattr(config, key))(before["settings"][key]) for key in _OF_SCHEDULE}
    schedule["warmup_steps"] = Fraction(before["settings"]["warmup_steps"])
    then, rates = config.model_copy(update=schedule), list[str]()
    for each, start in ((then, before), (config, now)):
        (last_step, last_example), batch = start["end"], start["batch"]
        # Skipped steps are not known here; tokens are taken to be as many in each example.
        in_steps = each.schedule_unit == "steps"
        u, last = (step, float(last_step)) if in_steps else (examples_seen / batch, last_example / batch)
        at = np.float64(u)
        rates.append(f"{float(decay(each, at, last, np) * warm_up(each, at, last, np)):.1%}")
    noun, index = ("step", 0) if config.schedule_unit == "steps" else ("example", 1)
    old_end, end = before["end"][index], now["end"][index]
    ends = old_end != end and all(_depends_on_end(x.learning_rate_schedule, x.warmup_steps) for x in (then, config))
    is_constant = "constant" in (then.learning_rate_schedule, config.learning_rate_schedule)
    if rates[0] == rates[1] and (is_constant or not ends):
        return []
    what = f"ends with this run, at {noun} {end:,} instead of {old_end:,}" if ends else "has changed"
    peaks = [start["settings"]["learning_rate"] for start in (before, now)]
    old, new = ("its peak", "its peak") if peaks[0] == peaks[1] else (f"learning_rate={peak}" for peak in peaks)
    instead = rates[0] if old == new else f"{rates[0]} of {old}"
    return [
        f"the learning rate's schedule {what}: after step {step:,} the rate is about {rates[1]} of {new} instead of "
        f"{instead}"
    ]
