"""The ways to split one global batch that `tune` measures, and their order."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from maxtext_lite.analysis.ranking import is_open, microbatch_choices
from maxtext_lite.analysis.smaller_step import REMAT_ORDER
from maxtext_lite.batching.plan import BatchPlan
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.nearest import divisors

_MOST_AGAIN = 3
_SPLITS_OF_ALL_POLICIES = 2
_REMAT = "remat_policy"


@dataclasses.dataclass(frozen=True)
class Timing:
    """The result of a candidate.

    Attributes:
      seconds: median step time; None if it does not fit on a device.
      compiled_bytes: bytes on one device by the compiler; None if it did not compile.
    """

    seconds: float | None
    compiled_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One legal way to split the batch.

    Attributes:
      keys: the values that differ from the config in question.
    """

    keys: dict[str, Any]
    config: Config
    plan: BatchPlan


Found = dict[str, tuple[Candidate, Timing]]
Measure = Callable[[Candidate], Timing]


def tune(
    config: Config, plan_of: Callable[[Config], BatchPlan], measure: Measure, *, full: bool = False
) -> list[tuple[Candidate, Timing]]:
    """Measures ways to split the config's global batch; returns the fastest first and those that do not fit last.

    First every legal accumulation that leaves as few slots empty as any, with every number of pipeline microbatches
    from one to eight per stage, is measured under the remat_policy that keeps most and fits; if none of these fits,
    those that leave the next fewest, and so on. Then the two fastest are measured under each of the other policies.
    Then the three fastest are measured again; the shorter of two medians counts. Keys that the user stated stay.

    Args:
      plan_of: plans a config for the devices; raises UserError if there is no plan.
      full: whether to measure every split under every policy.
    Raises:
      UserError: the batch ramps up.
    """
    if config.enable_rampup_batch_size:
        raise UserError("enable_rampup_batch_size=true: tune measures one batch. Nearest that works: false.")
    plan = plan_of(config)
    policies: list[dict[str, Any]] = [{}]
    if is_open(config, _REMAT):
        policies = [{_REMAT: policy} for policy in REMAT_ORDER]
    found: Found = {}

    def look(split: dict[str, Any], policy: dict[str, Any]) -> Timing | None:
        candidate = _planned(config, split | policy, plan_of)
        if candidate is None:
            return None
        name = str(candidate.keys)
        if name not in found:
            found[name] = candidate, measure(candidate)
        return found[name][1]

    for splits in _by_empty_slots(config, plan, plan_of):
        for split in splits:
            for policy in policies:
                timing = look(split, policy)
                if timing is None or (timing.seconds is not None and not full):
                    break
        if any(timing.seconds is not None for _, timing in found.values()):
            break
    fastest = [candidate for candidate, timing in _sorted(found) if timing.seconds is not None]
    for candidate in fastest[:_SPLITS_OF_ALL_POLICIES]:
        split = {key: value for key, value in candidate.keys.items() if key != _REMAT}
        for policy in policies:
            look(split, policy)
    for candidate, timing in _sorted(found)[:_MOST_AGAIN]:
        if timing.seconds is not None:
            again = measure(candidate).seconds or timing.seconds
            shorter = dataclasses.replace(timing, seconds=min(timing.seconds, again))
            found[str(candidate.keys)] = candidate, shorter
    return _sorted(found)


def _sorted(found: Found) -> list[tuple[Candidate, Timing]]:
    """Fastest first; among equals, the first measured."""
    return sorted(found.values(), key=lambda each: (each[1].seconds is None, each[1].seconds))


def _by_empty_slots(
    config: Config, plan: BatchPlan, plan_of: Callable[[Config], BatchPlan]
) -> Iterator[list[dict[str, Any]]]:
    """The legal splits in groups with equally many empty slots in a step, the fewest first: an idle device makes no
    step faster."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for split in _splits(config, plan):
        candidate = _planned(config, split, plan_of)
        if candidate is not None:
            empty = candidate.plan.empty_slots_per_micro_batch * candidate.plan.gradient_accumulation_steps
            groups.setdefault(empty, []).append(split)
    return (groups[empty] for empty in sorted(groups))


def _splits(config: Config, plan: BatchPlan) -> Iterator[dict[str, Any]]:
    """From the fewest micro-batches to the most."""
    micro = plan.per_device_batch_size * plan.gradient_accumulation_steps
    pieces = microbatch_choices(config, plan.num_pipeline_stages)
    for accumulation in divisors(plan.global_batch_to_train):
        for piece in pieces:
            split = {"per_device_batch_size": micro / accumulation, "gradient_accumulation_steps": accumulation}
            yield split | piece


def _planned(config: Config, keys: dict[str, Any], plan_of: Callable[[Config], BatchPlan]) -> Candidate | None:
    changed = config.model_copy(update=keys)
    try:
        return Candidate(keys, changed, plan_of(changed))
    except UserError:
        return None
