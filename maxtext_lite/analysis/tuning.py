"""Short measured runs of the ways to split one global batch, fastest first: what `tune` does."""

import contextlib
import io
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from maxtext_lite.analysis.ranking import is_open, microbatch_choices
from maxtext_lite.analysis.short_runs import SHORT_RUNS
from maxtext_lite.analysis.smaller_step import REMAT_ORDER
from maxtext_lite.batching.plan import BatchPlan
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import divisors, value_text
from maxtext_lite.config.records import read_records

_MOST_AGAIN = 3
_SPLITS_OF_ALL_POLICIES = 2
_REMAT = "remat_policy"

Keys = dict[str, Any]


class Timing(NamedTuple):
    """The result of a candidate.

    Attributes:
      seconds: median step time; infinite if it does not fit on a device.
      compiled_bytes: bytes on one device by the compiler; None if it did not compile.
    """

    seconds: float
    compiled_bytes: int | None


class Candidate(NamedTuple):
    """One legal way to split the batch; `keys` differ from the config in question."""

    keys: Keys
    config: Config
    plan: BatchPlan


def tune(
    config: Config,
    plan_of: Callable[[Config], BatchPlan],
    measure: Callable[[Candidate], Timing],
    *,
    full: bool = False,
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
    if len(config.batch_schedule) > 1:
        stages = value_text(config.batch_schedule)
        target = [[0, config.stated_global_batch]]
        raise UserError(f"batch_schedule={stages}: tune measures one batch. Nearest that works: {target}.")
    policies: list[Keys] = [{_REMAT: policy} for policy in REMAT_ORDER] if is_open(config, _REMAT) else [{}]
    found: dict[str, tuple[Candidate, Timing]] = {}

    def planned(keys: Keys) -> Candidate | None:
        changed = config.model_copy(update=keys)
        with contextlib.suppress(UserError):
            return Candidate(keys, changed, plan_of(changed))
        return None

    def look(keys: Keys) -> bool:
        """Measures keys that were not measured before; whether they can be planned, but do not fit."""
        name = str(keys)
        if name not in found and (candidate := planned(keys)):
            found[name] = candidate, measure(candidate)
        return name in found and found[name][1].seconds == math.inf

    def fastest() -> list[tuple[Candidate, Timing]]:
        return sorted(found.values(), key=lambda each: each[1].seconds)  # among equals, the first measured

    by_empty_slots: dict[int, list[Keys]] = {}
    for split in _splits(config, plan_of(config)):
        if candidate := planned(split):
            empty = candidate.plan.empty_slots_per_micro_batch * candidate.plan.gradient_accumulation_steps
            by_empty_slots.setdefault(empty, []).append(split)
    for _, splits in sorted(by_empty_slots.items()):  # an idle device makes no step faster
        for split in splits:
            for policy in policies:
                if not look(split | policy) and not full:
                    break
        if any(timing.seconds < math.inf for _, timing in found.values()):
            break
    for candidate, _ in fastest()[:_SPLITS_OF_ALL_POLICIES]:
        for policy in policies:
            look(candidate.keys | policy)
    for candidate, timing in fastest()[:_MOST_AGAIN]:
        if timing.seconds < math.inf:
            again = min(timing.seconds, measure(candidate).seconds)
            found[str(candidate.keys)] = candidate, timing._replace(seconds=again)
    return fastest()


def _splits(config: Config, plan: BatchPlan) -> list[Keys]:
    """From the fewest micro-batches to the most."""
    micro = plan.per_device_batch_size * plan.gradient_accumulation_steps
    found: list[Keys] = []
    for accumulation in divisors(plan.global_batch_to_train):
        for pieces in microbatch_choices(config, plan.num_pipeline_stages):
            split: Keys = {"per_device_batch_size": micro / accumulation, "gradient_accumulation_steps": accumulation}
            found.append(split | pieces)
    return found


def measured(
    candidate: Candidate, directory: Path, *, warm_up: int, steps: int, device_memory_gb: float | None
) -> Timing:
    """The time of a candidate's step, from a short run without evaluations and checkpoints.

    Args:
      directory: of the run; replaced if it exists.
      warm_up: first steps, which do not count.
      device_memory_gb: see `loop.train`.
    """
    from maxtext_lite.training.compile import OutOfMemory
    from maxtext_lite.training.feed_steps import make_feed_steps
    from maxtext_lite.training.loop import train_run
    from maxtext_lite.training.opening import open_run

    changes = {
        **SHORT_RUNS["tune"],
        "base_output_directory": str(directory.parent),
        "run_name": directory.name,
        "steps": warm_up + steps,
    }
    run = open_run(candidate.config.model_copy(update=changes), device_memory_gb=device_memory_gb)
    seconds = math.inf
    with contextlib.suppress(OutOfMemory):
        with contextlib.redirect_stdout(io.StringIO()):
            train_run(run, make_feed_steps)
        lines = read_records(directory / "metrics.jsonl", [])
        seconds = statistics.median(line["step_seconds"] for line in lines if line["step"] > warm_up)
    memory = json.loads((directory / "memory.json").read_text(encoding="utf-8"))
    return Timing(seconds, memory["compiled_bytes"])
