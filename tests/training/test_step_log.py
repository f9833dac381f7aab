"""The step log: a step's record, the counts, and when a non-finite gradient or a loss out of its band ends the run."""

import dataclasses
import math

import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.hooks import LossSpike, NonFiniteLoss
from maxtext_lite.training.metrics import JsonLines
from maxtext_lite.training.opening import open_run
from maxtext_lite.training.step_log import StepLog, StepResult
from tests.run_directories import lines_of
from tests.training.conftest import TINY

METRICS = {
    "loss": 2.0,
    "target_tokens": 60,
    "grad_norm": 1.5,
    "param_norm": 3.0,
    "learning_rate": 0.1,
    "skipped": False,
    "groups": 0,
    "group_squares": 0.0,
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A run."""
    words = [
        "dataset_type=synthetic",
        f"base_output_directory={tmp_path_factory.mktemp('runs')}",
        "eval_interval=-1",
    ]
    run = open_run(load_config(None, [*TINY, *words, "run_name=here"]))
    run.directory.mkdir()
    return run


@pytest.fixture
def log_of(opened, monkeypatch):
    """A function from counts and changed keys to a step log that writes metrics.jsonl."""
    logs, config = [], opened.config

    def make(counts=TrainProgress(), **changed):  # noqa: B008 - it is frozen
        monkeypatch.setattr(opened, "config", config.model_copy(update=changed))
        logs.append(JsonLines(opened.directory / "metrics.jsonl", 0))
        return StepLog(opened, counts, lines=logs[-1])

    yield make
    for log in logs:
        log.close()


def add(log, step, *, more=None, **changed):
    metrics = {name: np.asarray(value) for name, value in (METRICS | changed).items()}
    log.record(
        step,
        StepResult(
            metrics,
            np.array([4, 9]),
            2,
            0.25,
            lambda state: f"it is in {state}",
            more or {},
        ),
        "the state",
    )


def test_a_step_is_counted_and_recorded_with_what_is_added(log_of):
    log = log_of(TrainProgress(step=3, examples_seen=6, tokens_seen=100))
    add(log, 4, more={"reward": 0.5, "unscored_fraction": 0.25})
    counts = log.counts
    assert (counts.step, counts.examples_seen, counts.tokens_seen) == (4, 8, 160)
    (record,) = lines_of(log.run.directory)
    want = {
        "step": 4,
        "loss": 2.0,
        "reward": 0.5,
        "unscored_fraction": 0.25,
        "data_seconds": 0.25,
        "skipped": False,
        "examples": 2,
        "examples_seen": 8,
        "tokens_seen": 160,
    }
    assert want.items() <= record.items()
    assert "groups" not in record
    add(log, 5, loss=0.0, target_tokens=0)
    assert lines_of(log.run.directory)[-1]["loss"] is None


@pytest.mark.fast
def test_numbers_that_are_not_finite_end_the_run_and_the_cause_is_named(log_of):
    with pytest.raises(
        NonFiniteLoss, match=r"step 1 .*grad_norm nan: it is in the state"
    ):
        add(log := log_of(), 1, grad_norm=math.nan, skipped=True)
    assert lines_of(log.run.directory)[0]["grad_norm"] is None  # on record all the same
    with pytest.raises(NonFiniteLoss, match="step 1 left param_norm inf") as spike:
        add(log := log_of(), 1, param_norm=math.inf)
    assert (spike.value.step, spike.value.examples_seen) == (
        2,
        lines_of(log.run.directory)[0]["examples_seen"],
    )


def test_skipped_steps_in_a_row_end_the_run_at_their_limit(log_of):
    log = log_of(skip_nonfinite_updates=True, max_skipped_updates=2)
    add(log, 1, grad_norm=math.inf, skipped=True)
    add(log, 2)
    assert log.counts.skipped_in_a_row == 0
    add(log, 3, grad_norm=math.inf, skipped=True)
    with pytest.raises(NonFiniteLoss, match="2 skipped steps in a row"):
        add(log, 4, grad_norm=math.inf, skipped=True)


def test_a_loss_above_the_band_of_those_before_it_ends_the_run(log_of):
    """Sixteen losses of 1 and 3 in turn: median 2, its distances 1, so that two deviations end at 2 + 2 x 1.4826."""
    counts = TrainProgress(losses=(*[9.0] * 16, *[1.0, 3.0] * 7, 1.0))
    log = log_of(counts, max_loss_spike=2.0, skip_nonfinite_updates=True)
    add(log, 1, loss=3.0)
    assert log.counts.losses == (*[9.0] * 16, *[1.0, 3.0] * 8)  # the last 32
    add(log, 2, loss=0.0, target_tokens=0)  # nothing of it was a loss
    add(log, 3, loss=math.nan, skipped=True)
    assert len(log.counts.losses) == 32
    log.counts = dataclasses.replace(log.counts, losses=log.counts.losses[16:])
    add(log, 4, loss=4.965)
    log.counts = dataclasses.replace(log.counts, losses=log.counts.losses[:16])
    with pytest.raises(LossSpike, match="max_loss_spike=2") as spike:
        add(log, 5, loss=4.966)
    assert (spike.value.step, spike.value.limit) == (5, pytest.approx(4.9652))
    assert spike.value.examples_seen == lines_of(log.run.directory)[3]["examples_seen"]
    assert len(lines_of(log.run.directory)) == 5  # on record all the same
    without = log_of(TrainProgress(losses=(1.0,) * 32))
    add(without, 1, loss=1e6)
    assert without.counts.losses == (1.0,) * 32
