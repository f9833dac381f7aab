"""The head of a report: the progress and results of a run, and what its noise scale suggests."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable

from maxtext_lite.analysis.laws import batch_size_advice
from maxtext_lite.analysis.plan_view import long_number, plain, short_number
from maxtext_lite.analysis.run_data import Run
from maxtext_lite.config.errors import counted

_REWARD_STEPS = 20  # the mean reward of a single step is mostly chance
_MOST_BATCHES = 8
NONE = "–"
"""The text for a missing value."""

Cell = tuple[str, str]
"""A value and a remark on it."""


def status(run: Run) -> str:
    """The progress of the run."""
    planned = run.plan.get("steps")
    if planned is None:
        return counted(run.num_steps, "step")
    done = f"all {planned:,}" if run.num_steps >= planned else f"{run.num_steps:,} of {planned:,}"
    return f"{done} steps done"


def summary(run: Run) -> dict[str, Cell]:
    """The value of each headline and a remark on it; an unknown value is NONE."""
    epochs = run.plan.get("epochs")
    return {
        "Steps": _steps(run),
        "Reward": _reward(run),
        "Held-out accuracy": _evaluation(run, "eval_accuracy", "highest", max),
        "Loss": _loss(run),
        "Held-out loss": _evaluation(run, "eval_loss", "lowest", min),
        "Tokens seen": _large(run.last("tokens_seen"), "target tokens"),
        "Examples seen": (_text(run.last("examples_seen")), ""),
        "Epochs": (_text(run.last("epoch")), "" if epochs is None else f"of {long_number(epochs)}"),
        "Global batch": _global_batch(run),
        "Tokens per second": _speed(run),
        "Devices": _devices(run),
        "Parameters": _large(run.num_parameters, ""),
    }


def _text(value: float | None, write: Callable[[float], str] = long_number) -> str:
    return NONE if value is None else write(value)


def _large(value: float | None, unit: str) -> Cell:
    """A count in short form, and from 1,000 on in full as the remark."""
    remarks = [unit] if unit else []
    if value is not None and value >= 1000:
        remarks.append(f"{value:,}")
    return _text(value, short_number), ", ".join(remarks)


def _steps(run: Run) -> Cell:
    planned = run.plan.get("steps")
    remarks = [] if planned is None else [f"of {planned:,}"]
    if any(run.skipped):
        remarks.append(f"{sum(run.skipped):,} skipped")
    return f"{run.num_steps:,}", ", ".join(remarks)


def _speed(run: Run) -> Cell:
    speeds = [value for _, value in run.rows("tokens_per_second")]
    mfu = [value for _, value in run.rows("mfu")]
    median = statistics.median(speeds) if speeds else None
    return _text(median, short_number), f"median; MFU {statistics.median(mfu):.1%}" if mfu else "median"


def _reward(run: Run) -> Cell:
    rewards = run.rows("reward")[-_REWARD_STEPS:]
    if not rewards:
        return NONE, ""
    over = f"steps {rewards[0][0]:,} to" if len(rewards) > 1 else "step"
    return long_number(statistics.fmean(value for _, value in rewards)), f"training, mean of {over} {rewards[-1][0]:,}"


def _loss(run: Run) -> Cell:
    losses = run.rows("loss")
    if not losses or run.rows("reward"):  # a policy's loss is about 0, whatever it has learned
        return NONE, ""
    step, loss = losses[-1]
    return long_number(loss), f"training, at step {step:,}"


def _global_batch(run: Run) -> Cell:
    rows = run.rows("global_batch_to_train")
    if not rows:
        planned = run.plan.get("global_batch_to_train")
        return (NONE, "") if planned is None else (plain(planned), "planned")
    changes = [rows[0]]
    changes += [row for before, row in itertools.pairwise(rows) if row[1] != before[1]]
    remark = "examples per step"
    if len(changes) > 1:
        texts = [f"{size:,} from step {step:,}" for step, size in changes]
        if len(texts) > _MOST_BATCHES:
            texts[_MOST_BATCHES - 1 : -1] = [f"{len(texts) - _MOST_BATCHES:,} others"]
        remark = f"examples per step: {', '.join(texts)}"
    return long_number(rows[-1][1]), remark


def _devices(run: Run) -> Cell:
    kinds = Counter(run.environment.get("devices", ()))
    count = run.plan.get("num_devices", kinds.total() or None)
    return _text(count, plain), ", ".join(f"{number} × {kind}" for kind, number in kinds.items())


def _evaluation(run: Run, metric: str, word: str, best_of: Callable[[Iterable[float]], float]) -> Cell:
    """The last value of an evaluation's metric, and the best one where that differs."""
    rows = run.rows(metric)
    if not rows:
        return NONE, ""
    last_step, last = rows[-1]
    best = best_of(value for _, value in rows)
    remark = f"at step {last_step:,}"
    if best != last:
        best_step = next(step for step, value in rows if value == best)
        remark += f"; {word} {best:.5g} at step {best_step:,}"
    return long_number(last), remark


def advice(run: Run) -> str:
    """What the last measured noise scale says about the last batch; "" if the run's batch is unknown."""
    batch = run.last("global_batch_to_train") or run.plan.get("global_batch_to_train")
    if batch is None:
        return ""
    scales = run.rows("gradient_noise_scale")
    if not scales:
        return batch_size_advice(None, None, int(batch))
    step, scale = scales[-1]
    error = dict(run.rows("gradient_noise_scale_error")).get(step)
    return batch_size_advice(scale, error, int(batch))
