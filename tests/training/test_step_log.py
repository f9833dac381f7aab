"""The step log: a step's record, the counts, and when a non-finite gradient ends the run."""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training.checkpoint import Counts
from maxtext_lite.training.metrics import MetricsLog, Terminal
from maxtext_lite.training.opening import open_run
from maxtext_lite.training.step_log import LEAST_LOSSES, LossSpike, NonFiniteLoss, StepLog, Taken, band_limit
from tests.training.test_run import TINY

METRICS = {
    "loss": 2.0, "target_tokens": 60, "grad_norm": 1.5, "param_norm": 3.0, "learning_rate": 0.1, "skipped": False,
    "groups": 0, "group_squares": 0.0,
}  # fmt: skip
STATE = "the state"


@pytest.fixture
def log_of(tmp_path):
    """A function from overrides and counts to a step log that writes metrics.jsonl."""
    logs = []

    def make(*overrides, counts=Counts()):  # noqa: B008 - it is frozen
        config = load_config(None, [*TINY, f"base_output_directory={tmp_path}", "run_name=here", *overrides])
        run = open_run(config)
        run.directory.mkdir(exist_ok=True)
        logs.append(MetricsLog(run.directory, 0, run.failures))
        return StepLog(run, Terminal(log_period=1, quiet=True), logs[-1], counts)

    yield make
    for log in logs:
        log.close()


def step(*, cause=None, more=None, **changed):
    metrics = {name: jnp.asarray(value) for name, value in (METRICS | changed).items()}
    return Taken(
        metrics, np.array([4, 9]), 2, 0.25, find_cause=lambda state: cause and f"{cause} in {state}", more=more or {}
    )


def lines(log):
    return [json.loads(line) for line in (log.directory / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_counted_and_recorded_with_what_is_added(log_of):
    log = log_of(counts=Counts(step=3, examples_seen=6, tokens_seen=100))
    log.add(4, step(more={"reward": 0.5}), STATE)
    counts = log.counts
    assert (counts.step, counts.examples_seen, counts.tokens_seen) == (4, 8, 160)
    (record,) = lines(log)
    assert (record["step"], record["loss"], record["reward"], record["data_seconds"]) == (4, 2.0, 0.5, 0.25)
    assert record["skipped"] is False
    assert record["examples"] == 2
    assert "groups" not in record


def test_a_gradient_that_is_not_finite_ends_the_run_and_the_cause_is_named(log_of):
    log = log_of()
    with pytest.raises(
        NonFiniteLoss, match=r"step 1 has loss 2\.0 and grad_norm nan: it is in the state; nothing was saved"
    ):
        log.add(1, step(cause="it is", grad_norm=float("nan"), skipped=True), STATE)
    assert lines(log)[0]["grad_norm"] is None  # on record all the same


def test_skipped_steps_in_a_row_end_the_run_at_their_limit(log_of):
    log = log_of("skip_nonfinite_updates=true", "max_skipped_updates=2")
    bad = step(grad_norm=float("inf"), skipped=True)
    log.add(1, bad, STATE)
    log.add(2, step(), STATE)
    assert log.counts.skipped_in_a_row == 0
    log.add(3, bad, STATE)
    with pytest.raises(NonFiniteLoss, match="after 2 skipped steps in a row"):
        log.add(4, bad, STATE)


def test_a_loss_above_the_band_of_those_before_it_ends_the_run(log_of):
    """Sixteen losses of 1 and 3 in turn: median 2, its distances 1, so that two deviations end at 2 + 2 x 1.4826."""
    counts = Counts(losses=(*[9.0] * 16, *[1.0, 3.0] * 7, 1.0))
    log = log_of("max_loss_spike=2", "skip_nonfinite_updates=true", counts=counts)
    log.add(1, step(loss=3.0), STATE)
    assert log.counts.losses == (*[9.0] * 16, *[1.0, 3.0] * 8)  # the last 32
    log.add(2, step(loss=0.0, target_tokens=0), STATE)  # nothing of it was a loss
    log.add(3, step(loss=float("nan"), skipped=True), STATE)
    assert len(log.counts.losses) == 32
    log.counts = dataclasses.replace(log.counts, losses=log.counts.losses[16:])
    log.add(4, step(loss=4.965), STATE)
    log.counts = dataclasses.replace(log.counts, losses=log.counts.losses[:16])
    with pytest.raises(LossSpike, match=r"step 5 has loss 4\.966, above 4\.9652: max_loss_spike=2 robust") as spike:
        log.add(5, step(loss=4.966), STATE)
    assert (spike.value.step, spike.value.limit) == (5, pytest.approx(4.9652))
    assert spike.value.examples_seen == lines(log)[3]["examples_seen"]
    assert len(lines(log)) == 5  # on record all the same


def test_without_a_band_a_run_goes_on_and_keeps_no_losses(log_of):
    log = log_of(counts=Counts(losses=(1.0,) * 32))
    log.add(1, step(loss=1e6), STATE)
    assert log.counts.losses == (1.0,) * 32


def test_parameters_that_are_not_finite_end_the_run(log_of):
    with pytest.raises(NonFiniteLoss, match="step 1 left param_norm inf") as spike:
        (log := log_of()).add(1, step(param_norm=float("inf")), STATE)
    assert (spike.value.step, spike.value.examples_seen) == (2, lines(log)[0]["examples_seen"])


@pytest.mark.parametrize(("values", "limit"), [
    # The median is 2, distances from it are 0 and 0.5 alike, and half of them are 0.25: two deviations of 1.4826 / 4.
    ([2, 2.5] * 8, 2.25 + 2 * 1.4826 * 0.25),
    # Of an odd number: median 3, distances 2, 1, 0, 1, 2 in turn, of which the median is 1. One is no number.
    ([1, 2, 3, 4, 5] * 3 + [math.nan, 3, 3], 3 + 2 * 1.4826 * 1),
    # One far away moves neither by much: median 1, distances 0 but for one.
    ([1.0] * 15 + [1e9], 1 + 2 * 0.01),
    ([-1.0] * 16, -1 + 2 * 0.01),
    ([0.0] * 16, 0.0),
    ([1.0] * 15, math.inf),
    ([1.0] * 15 + [math.inf], math.inf),
])  # fmt: skip
def test_the_band_ends_so_many_robust_deviations_above_the_median(values, limit):
    assert LEAST_LOSSES == 16
    assert band_limit(values, 2) == pytest.approx(limit, rel=1e-12)


def test_how_many_values_make_a_band_can_be_said():
    assert band_limit([1, 1, 1, 1], 5, least=4) == pytest.approx(1.05)
    assert band_limit([1, 1, 1], 5, least=4) == math.inf
