"""Keys that make a step fit on a device: it holds less and computes the same."""

import contextlib
from collections.abc import Callable, Sequence

from maxtext_lite.batching.plan import BatchPlan
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import bytes_text, divisors, settings_of
from maxtext_lite.config.keys import GLOBAL_BATCH_KEYS

REMAT_ORDER = ("none", "save_dot_products", "minimal", "save_qkv_proj", "full")
"""From the policy that keeps most on the device to the one that keeps least."""

Keys = dict[str, object]
Planner = Callable[[Config], BatchPlan]


def refusal_of(problem: str, share: float | None, config: Config, plan: BatchPlan, plan_of: Planner) -> str:
    """A step that does not fit, with the nearest one that does and makes the same updates; arguments of `smaller_step`.

    Args:
      problem: the error.
    """
    keys = smaller_step(config, plan, plan_of, share)
    changed = {key: value for key, value in keys.items() if value != getattr(config, key)}
    if not changed.keys().isdisjoint(GLOBAL_BATCH_KEYS):  # the user's own keys then no longer keep the batch
        kept = [key for key, origin in config.origins.items() if origin == "on_resume_batch"]
        changed = {key: getattr(config, key) for key in kept} | changed
    near = " ".join(settings_of(changed))
    if not near:
        held = bytes_text(plan.memory.held)
        near = f"more devices to shard over, as parameters and optimizer state take {held} of each"
    rows = f"{float(plan.per_device_batch_size):g}"
    return f"per_device_batch_size={rows}: {problem}. Nearest that works: {near}."


def smaller_step(config: Config, plan: BatchPlan, plan_of: Planner, share: float | None = None) -> Keys:
    """The keys of the nearest step that fits; empty if there is none.

    First fewer rows of a micro-batch and as many more micro-batches, then a remat_policy that keeps less, then more
    vocabulary tiles. The global batch of every step stays the same, and with it the order of the examples and the
    schedule.

    Args:
      plan: the plan of `config`.
      plan_of: plans another config for the same machine and data; raises UserError if there is no plan.
      share: the part of the memory that the step may keep, by the plan's own estimate; None: less than it has.
    """
    most = plan.memory.total - 1 if share is None else plan.memory.total * share
    keys: Keys = {}
    while plan.memory.total > most:
        following = _next(config, plan, plan_of)
        if following is None:
            return {}
        changed, plan = following
        config = config.model_copy(update=changed)
        keys |= changed
    return keys


def _next(config: Config, plan: BatchPlan, plan_of: Planner) -> tuple[Keys, BatchPlan] | None:
    """The first change that makes something smaller and keeps the batches, and its plan."""
    after = REMAT_ORDER.index(config.remat_policy) + 1 if config.remat_policy in REMAT_ORDER else 0
    remats: list[Keys] = [
        {"remat_policy": policy, "remat_save": "", "remat_offload": ""} for policy in REMAT_ORDER[after:]
    ]
    numbers = divisors(config.max_target_length)
    tiles: list[Keys] = [{"num_vocab_tiling": number} for number in numbers if number > max(config.num_vocab_tiling, 1)]
    changes: tuple[tuple[Sequence[Keys], Callable[[BatchPlan], int]], ...] = (
        (_halves(config, plan), lambda plan: max(plan.slots_for(stage.micro_batch_to_train) for stage in plan.stages)),
        (remats, lambda plan: plan.memory.most("activations")),
        (tiles, lambda plan: plan.memory.most("logits")),
    )
    for candidates, size in changes:
        for keys in candidates:
            with contextlib.suppress(UserError):  # it cannot be planned
                found = plan_of(config.model_copy(update=keys))
                if _batches(found) == _batches(plan) and size(found) < size(plan):
                    return keys, found
    return None


def _batches(plan: BatchPlan) -> list[tuple[int, int]]:
    return [(stage.samples_before, stage.global_batch_to_train) for stage in plan.stages]


def _halves(config: Config, plan: BatchPlan) -> list[Keys]:
    """Half as many rows in a micro-batch; of a ramp in all its batches if they divide."""
    if config.batch_schedule:
        return [{"per_device_batch_size": config.per_device_batch_size / 2}]
    keys: Keys = {
        "per_device_batch_size": plan.per_device_batch_size / 2,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps * 2,
    }
    if not config.enable_rampup_batch_size:
        return [keys]
    ramp = ("per_device_batch_size_start", "per_device_batch_size_increment")
    return [keys | {name: getattr(config, name) / 2 for name in ramp}, keys]
