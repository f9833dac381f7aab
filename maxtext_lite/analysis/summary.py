"""The head of a report: the progress and results of a run, and what its noise scale suggests."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable

from maxtext_lite.analysis.laws import batch_size_advice
from maxtext_lite.analysis.plan_view import long_number, plain, short_number
from maxtext_lite.analysis.run_data import Run
from maxtext_lite.config.errors import counted
from maxtext_lite.config.records import as_list

_REWARD_STEPS = 20  # the mean reward of a single step is mostly chance
_MOST_BATCHES = 8
NONE = "–"
"""The text for a missing value."""


def status(run: Run) -> str:
    """The progress of the run."""
    planned = run.plan.get("steps")
    if not isinstance(planned, int):
        return counted(run.num_steps, "step")
    return f"{f'all {planned:,}' if run.num_steps >= planned else f'{run.num_steps:,} of {planned:,}'} steps done"


def summary(run: Run) -> dict[str, tuple[str, str]]:
    """The value of each headline and a remark on it; an unknown value is NONE."""
    planned, epochs, skipped = run.plan.get("steps"), run.plan.get("epochs"), sum(run.skipped)
    of_steps = [f"of {planned:,}" if isinstance(planned, int) else "", f"{skipped:,} skipped" if skipped else ""]
    speeds, mfu = ([value for _, value in run.rows(metric)] for metric in ("tokens_per_second", "mfu"))
    seen, parameters = run.last("tokens_seen"), run.num_parameters
    return {
        "Steps": (f"{run.num_steps:,}", ", ".join(filter(None, of_steps))),
        "Reward": _reward(run),
        "Held-out accuracy": _evaluation(run, "eval_accuracy", "highest", max),
        "Loss": _loss(run),
        "Held-out loss": _evaluation(run, "eval_loss", "lowest", min),
        "Tokens seen": (_text(seen, short_number), "target tokens" + (f", {seen:,}" if seen and seen >= 1000 else "")),
        "Examples seen": (_text(run.last("examples_seen")), ""),
        "Epochs": (_text(run.last("epoch")), f"of {long_number(epochs)}" if isinstance(epochs, int | float) else ""),
        "Global batch": _global_batch(run),
        "Tokens per second": (
            _text(statistics.median(speeds) if speeds else None, short_number),
            f"median; MFU {statistics.median(mfu):.1%}" if mfu else "median",
        ),
        "Devices": _devices(run),
        "Parameters": (_text(parameters, short_number), f"{parameters:,}" if (parameters or 0) >= 1000 else ""),
    }


def _reward(run: Run) -> tuple[str, str]:
    rewards = run.rows("reward")[-_REWARD_STEPS:]
    if not rewards:
        return NONE, ""
    over = f"steps {rewards[0][0]:,} to" if len(rewards) > 1 else "step"
    return long_number(statistics.fmean(value for _, value in rewards)), f"training, mean of {over} {rewards[-1][0]:,}"


def _loss(run: Run) -> tuple[str, str]:
    losses = run.rows("loss")
    if not losses or run.rows("reward"):  # a policy's loss is about 0, whatever it has learned
        return NONE, ""
    step, loss = losses[-1]
    return long_number(loss), f"training, at step {step:,}"


def _global_batch(run: Run) -> tuple[str, str]:
    rows, planned = run.rows("global_batch_to_train"), run.plan.get("global_batch_to_train")
    if not rows:
        return (NONE, "") if planned is None else (plain(planned), "planned")
    changes = [rows[0]]
    changes += [row for before, row in itertools.pairwise(rows) if row[1] != before[1]]
    if len(changes) > 1:
        texts = [f"{size:,} from step {step:,}" for step, size in changes]
        if len(texts) > _MOST_BATCHES:
            texts[_MOST_BATCHES - 1 : -1] = [f"{len(texts) - _MOST_BATCHES:,} others"]
        return long_number(rows[-1][1]), f"examples per step: {', '.join(texts)}"
    return long_number(rows[-1][1]), "examples per step"


def _devices(run: Run) -> tuple[str, str]:
    devices = Counter(map(str, as_list(run.environment.get("devices"))))
    count = run.plan.get("num_devices", devices.total() if "devices" in run.environment else None)
    return NONE if count is None else plain(count), ", ".join(f"{number} × {kind}" for kind, number in devices.items())


def _text(value: float | None, write: Callable[[float], str] = long_number) -> str:
    return NONE if value is None else write(value)


def _evaluation(run: Run, metric: str, word: str, best_of: Callable[[Iterable[float]], float]) -> tuple[str, str]:
    """The last value of an evaluation's metric, and the best one where that differs."""
    rows = run.rows(metric)
    if not rows:
        return NONE, ""
    best = best_of(value for _, value in rows)
    best_step = next(step for step, value in rows if value == best)
    also = f"; {word} {best:.5g} at step {best_step:,}" if best != rows[-1][1] else ""
    return long_number(rows[-1][1]), f"at step {rows[-1][0]:,}{also}"


def advice(run: Run) -> str:
    """What the last measured noise scale says about the last batch; "" for a run whose batch is unknown."""
    batch = run.last("global_batch_to_train") or run.plan.get("global_batch_to_train")
    if not isinstance(batch, int):
        return ""
    scales = run.rows("gradient_noise_scale")
    errors = dict(run.rows("gradient_noise_scale_error"))
    return batch_size_advice(*((scales[-1][1], errors.get(scales[-1][0])) if scales else (None, None)), batch)
