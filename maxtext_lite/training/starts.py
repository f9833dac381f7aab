"""The starts of a run that changed it, as each checkpoint lists them, and what a resume says of its schedule."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxtext_lite.batching import BatchPlan
from maxtext_lite.batching.rate_shape import decay, warm_up
from maxtext_lite.config import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from maxtext_lite.config.errors import setting_text

_OF_STEPS = ("steps", "num_epochs", "last_batch", "seed", "balance_attention", "excluded_rows")
_OTHERS = {*DataConfig.model_fields, *ModelConfig.model_fields, *RunConfig.model_fields}.difference(_OF_STEPS)
"""Keys that change no step, that no start may change, or that have a history of their own, as mixtures do."""

Starts = list[dict[str, Any]]
"""For each start that changed something, first to last: `step`, those done before it; `end`, the (steps, examples) at
which the run then was to end; `batch`, examples of a step of the target; `settings`, the config's keys that decide its
steps, each as on a command line."""


def with_start(
    before: Sequence[Mapping[str, Any]], config: Config, plan: BatchPlan, step: int, examples_seen: int
) -> Starts:
    """The starts with this one, which begins after `step` steps, if it differs from the last."""
    settings = {key: setting_text(getattr(config, key)) for key in Config.model_fields if key not in _OTHERS}
    end, batch = list(plan.end_after(step, examples_seen)), plan.global_batch_to_train
    now = {"step": step, "end": end, "batch": batch, "settings": settings}
    same = before and {**before[-1], "step": step} == now
    return [*map(dict, before)] if same else [*map(dict, before), now]


def settings_at(starts: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """The settings with which a step was taken, as `key=value`; [] if it is older than all starts."""
    found = [start["settings"] for start in starts if start["step"] < step]
    return [f"{key}={value}" for key, value in found[-1].items() if key in Config.model_fields] if found else []


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
    if (settings["learning_rate_schedule"], settings["num_epochs"]) == ("constant", "0"):
        return {**found, "settings": {**settings, "steps": ""}}
    return {**found, "end": start["end"]}


def moved_schedule(
    config: OptimizerConfig, starts: Sequence[Mapping[str, Any]], step: int, examples_seen: int
) -> list[str]:
    """A sentence on the learning rate of a run that has just got another end or batch; [] for any other start.

    Args:
      starts: with the one that begins after `step` steps.
    """
    if config.learning_rate_schedule == "constant" or len(starts) < 2 or starts[-1]["step"] != step:
        return []
    in_steps = config.schedule_unit == "steps"
    parts: list[float] = []
    for start in starts[-2:]:
        (last_step, last_example), batch = start["end"], start["batch"]
        # Skipped steps are not known here; tokens are taken to be as many in each example.
        u, last = (step, float(last_step)) if in_steps else (examples_seen / batch, last_example / batch)
        at = np.float64(u)
        parts.append(float(decay(config, at, last, np) * warm_up(config, at, np)))
    ends = [start["end"][0 if in_steps else 1] for start in starts[-2:]]
    if ends[0] == ends[1] and parts[0] == parts[1]:
        return []
    noun = "step" if in_steps else "example"
    return [
        f"the learning rate's schedule ends with this run, at {noun} {ends[1]:,} instead of {ends[0]:,}: after step "
        f"{step:,} the rate is about {parts[1]:.1%} of its peak instead of {parts[0]:.1%}"
    ]
