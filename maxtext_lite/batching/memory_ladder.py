"""Changes to a config, in order, that make a step hold less and compute the same."""

from collections.abc import Callable, Iterator

from maxtext_lite.batching.batch_plan import BatchPlan
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.violation import divisors

LADDER_KEYS = (
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "per_device_batch_size_start",
    "per_device_batch_size_increment",
    "remat_policy",
    "remat_save",
    "remat_offload",
    "num_vocab_tiling",
)
"""The keys that the ladder changes."""

REMAT_ORDER = ("none", "save_dot_products", "minimal", "save_qkv_proj", "full")
"""From the policy that keeps most on the device to the one that keeps least."""

Rung = dict[str, object]
Planner = Callable[[Config], BatchPlan]


def next_rung(config: Config, plan: BatchPlan, plan_of: Planner) -> Rung | None:
    """The next keys to try, or None if nothing is left.

    First half the rows of a micro-batch and twice as many micro-batches, then a remat_policy that keeps less, then more
    vocabulary tiles. The global batch of every step stays the same, and with it the order of the examples and the
    schedule.

    Args:
      plan: the plan of `config`.
      plan_of: plans another config for the same machine and data; raises UserError if there is no plan.
    """
    batches = [(stage.samples_before, stage.global_batch_to_train) for stage in plan.stages]
    for rung, found in _planned(config, _halves(config, plan), plan_of):
        same = [(stage.samples_before, stage.global_batch_to_train) for stage in found.stages] == batches
        if same and found.micro_batch_slots < plan.micro_batch_slots:
            return rung
    for rung, found in _planned(config, _stronger_remat(config), plan_of):
        if found.memory.activations < plan.memory.activations:
            return rung
    for rung, found in _planned(config, _more_tiles(config), plan_of):
        if found.memory.logits < plan.memory.logits:
            return rung
    return None


def _halves(config: Config, plan: BatchPlan) -> Iterator[Rung]:
    rung: Rung = {
        "per_device_batch_size": plan.per_device_batch_size / 2,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps * 2,
    }
    if config.enable_rampup_batch_size:
        ramp = ("per_device_batch_size_start", "per_device_batch_size_increment")
        yield rung | {name: getattr(config, name) / 2 for name in ramp}
    yield rung


def _stronger_remat(config: Config) -> Iterator[Rung]:
    after = REMAT_ORDER.index(config.remat_policy) + 1 if config.remat_policy in REMAT_ORDER else 0
    for policy in REMAT_ORDER[after:]:
        yield {"remat_policy": policy, "remat_save": "", "remat_offload": ""}


def _more_tiles(config: Config) -> Iterator[Rung]:
    for pieces in divisors(config.max_target_length):
        if pieces > max(config.num_vocab_tiling, 1):
            yield {"num_vocab_tiling": pieces}


def _planned(config: Config, rungs: Iterator[Rung], plan_of: Planner) -> Iterator[tuple[Rung, BatchPlan]]:
    """The rungs that can be planned."""
    for rung in rungs:
        try:
            yield rung, plan_of(config.model_copy(update=rung))
        except UserError:
            continue
