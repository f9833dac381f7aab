"""What stands at the head of a report: how far a run is, what it came to, and what its noise scale suggests."""

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

from maxtext_lite.batching import batch_size_advice
from maxtext_lite.reporting.plan_view import plain
from maxtext_lite.reporting.run_data import Run, last_value
from maxtext_lite.reporting.scales import long_number, short_number

_REWARD_STEPS = 20  # the reward of one step's responses is mostly chance
NONE = "–"
"""What stands for a value that is not there."""


def status(run: Run) -> str:
    """How far the run is."""
    planned = run.planned_steps
    if planned is None:
        return f"{run.num_steps:,} steps"
    if run.num_steps >= planned:
        return f"all {planned:,} steps done"
    return f"{run.num_steps:,} of {planned:,} steps done"


def summary(run: Run) -> list[tuple[str, str, str]]:
    """Name, value and a remark of each headline fact; a value that is not known is NONE."""
    return [(name, *make(run)) for name, make in _FACTS.items()]


def _number(value: float | None, write: Callable[[float], str] = long_number) -> str:
    return NONE if value is None else write(value)


def _steps(run: Run) -> tuple[str, str]:
    skipped = sum(run.skipped)
    planned = "" if run.planned_steps is None else f"of {run.planned_steps:,}"
    return f"{run.num_steps:,}", ", ".join(filter(None, (planned, f"{skipped:,} skipped" if skipped else "")))


def _loss(run: Run) -> tuple[str, str]:
    if "reward" in run.steps:  # a policy's loss is about 0 whatever it has learned
        return NONE, ""
    rows = [row for row, value in enumerate(run.steps.get("loss", ())) if value is not None]
    return _number(run.last("loss")), f"training, at step {run.steps['step'][rows[-1]]:,}" if rows else ""


def _reward(run: Run) -> tuple[str, str]:
    rewards = zip(run.steps.get("reward", ()), run.steps.get("step", ()), strict=False)
    found = [(value, step) for value, step in rewards if value is not None]
    if not found:
        return NONE, ""
    last = found[-_REWARD_STEPS:]
    steps = f"steps {last[0][1]:,} to {last[-1][1]:,}" if len(last) > 1 else f"step {last[0][1]:,}"
    return long_number(statistics.fmean(value for value, _ in last)), f"training, mean of {steps}"


def _evaluation(metric: str, best_word: str, best_of: Callable[..., Any]) -> Callable[[Run], tuple[str, str]]:
    """The last value of an evaluation's metric, with the best one where that is another."""

    def fact(run: Run) -> tuple[str, str]:
        pairs = zip(run.evaluations.get(metric, ()), run.evaluations["step"], strict=False)
        found = [(value, step) for value, step in pairs if value is not None]
        if not found:
            return NONE, ""
        last, last_step = found[-1]
        best = best_of(value for value, _ in found)
        best_step = next(step for value, step in found if value == best)
        remark = f"at step {last_step:,}"
        return long_number(last), remark + (f"; {best_word} {best:.5g} at step {best_step:,}" if best != last else "")

    return fact


def _tokens(run: Run) -> tuple[str, str]:
    seen = run.last("tokens_seen")
    return _number(seen, short_number), "target tokens" + (f", {seen:,}" if seen and seen >= 1000 else "")


def _examples(run: Run) -> tuple[str, str]:
    return _number(run.last("examples_seen")), ""


def _epochs(run: Run) -> tuple[str, str]:
    planned = (run.plan or {}).get("epochs")
    return _number(run.last("epoch")), f"of {long_number(planned)}" if isinstance(planned, int | float) else ""


def _batch(run: Run) -> tuple[str, str]:
    sizes = [size for size in run.steps.get("global_batch_to_train", ()) if size is not None]
    planned = (run.plan or {}).get("global_batch_to_train")
    if not sizes:
        return (NONE, "") if planned is None else (plain(planned), "planned")
    return long_number(sizes[-1]), "examples per step" + (f", from {sizes[0]:,}" if sizes[0] != sizes[-1] else "")


def _speed(run: Run) -> tuple[str, str]:
    def median(metric: str) -> float | None:
        values = [value for value in run.steps.get(metric, ()) if value is not None]
        return statistics.median(values) if values else None

    mfu = median("mfu")
    return _number(median("tokens_per_second"), short_number), "median" + ("" if mfu is None else f"; MFU {mfu:.1%}")


def _devices(run: Run) -> tuple[str, str]:
    kinds = (run.environment or {}).get("devices")
    remark = ""
    if isinstance(kinds, list):
        remark = ", ".join(f"{count} × {kind}" for kind, count in Counter(map(str, kinds)).items())
    count = (run.plan or {}).get("num_devices", len(kinds) if isinstance(kinds, list) else None)
    return NONE if count is None else plain(count), remark


def _parameters(run: Run) -> tuple[str, str]:
    count = run.num_parameters
    return _number(count, short_number), f"{count:,}" if count and count >= 1000 else ""


_FACTS: dict[str, Callable[[Run], tuple[str, str]]] = {
    "Steps": _steps,
    "Held-out accuracy": _evaluation("eval_accuracy", "highest", max),
    "Reward": _reward,
    "Loss": _loss,
    "Held-out loss": _evaluation("eval_loss", "lowest", min),
    "Tokens seen": _tokens,
    "Examples seen": _examples,
    "Epochs": _epochs,
    "Global batch": _batch,
    "Tokens per second": _speed,
    "Devices": _devices,
    "Parameters": _parameters,
}


def advice(run: Run) -> str:
    """What the last measured noise scale says about the last batch; "" for a run whose batch is not known."""
    batch = run.last("global_batch_to_train") or (run.plan or {}).get("global_batch_to_train")
    if not isinstance(batch, int):
        return ""
    scales = run.steps.get("gradient_noise_scale", ())
    rows = [row for row, value in enumerate(scales) if value is not None]
    if not rows:
        return batch_size_advice(None, None, batch)
    errors = run.steps.get("gradient_noise_scale_error")
    return batch_size_advice(last_value(scales), None if errors is None else errors[rows[-1]], batch)
