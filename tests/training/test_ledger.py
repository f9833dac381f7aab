"""The ledger: what a step's record holds, how counts go on, and when a run ends for a gradient that is not finite."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training.checkpoint import Counts
from maxtext_lite.training.ledger import Consumed, Ledger, NonFiniteLoss
from maxtext_lite.training.metrics import MetricsLog, Terminal
from maxtext_lite.training.run import open_run
from tests.training.test_run import TINY

METRICS = {
    "loss": 2.0, "target_tokens": 60, "grad_norm": 1.5, "param_norm": 3.0, "learning_rate": 0.1, "skipped": False,
    "groups": 0, "group_squares": 0.0,
}  # fmt: skip
BATCH = Consumed(np.array([4, 9]), 2, 0.25)


@pytest.fixture
def ledger_of(tmp_path):
    """A function from overrides and counts to a ledger that writes metrics.jsonl."""
    logs = []

    def make(*overrides, counts=Counts()):  # noqa: B008 - it is frozen
        config = load_config(None, [*TINY, f"base_output_directory={tmp_path}", "run_name=here", *overrides])
        run = open_run(config)
        run.directory.mkdir(exist_ok=True)
        logs.append(MetricsLog(run.directory, 0, run.failures))
        return Ledger(run, Terminal(log_period=1, quiet=True), logs[-1], counts)

    yield make
    for log in logs:
        log.close()


def step(**changed):
    return {name: jnp.asarray(value) for name, value in (METRICS | changed).items()}


def lines(ledger):
    return [json.loads(line) for line in (ledger.directory / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_counted_and_recorded_with_what_is_added(ledger_of):
    ledger = ledger_of(counts=Counts(step=3, examples_seen=6, tokens_seen=100))
    ledger.add(4, step(), BATCH, find_cause=lambda: None, reward=0.5)
    counts = ledger.counts
    assert (counts.step, counts.examples_seen, counts.tokens_seen) == (4, 8, 160)
    (record,) = lines(ledger)
    assert (record["step"], record["loss"], record["reward"], record["data_seconds"]) == (4, 2.0, 0.5, 0.25)
    assert record["skipped"] is False
    assert record["examples"] == 2
    assert "groups" not in record


def test_a_gradient_that_is_not_finite_ends_the_run_and_the_cause_is_named(ledger_of):
    ledger = ledger_of()
    with pytest.raises(NonFiniteLoss, match=r"step 1 has loss 2\.0 and grad_norm nan: the cause; nothing was saved"):
        ledger.add(1, step(grad_norm=float("nan"), skipped=True), BATCH, find_cause=lambda: "the cause")
    assert lines(ledger)[0]["grad_norm"] is None  # on record all the same


def test_skipped_steps_in_a_row_end_the_run_at_their_limit(ledger_of):
    ledger = ledger_of("skip_nonfinite_updates=true", "max_skipped_updates=2")
    bad = step(grad_norm=float("inf"), skipped=True)
    ledger.add(1, bad, BATCH, find_cause=lambda: None)
    ledger.add(2, step(), BATCH, find_cause=lambda: None)
    assert ledger.counts.skipped_in_a_row == 0
    ledger.add(3, bad, BATCH, find_cause=lambda: None)
    with pytest.raises(NonFiniteLoss, match="after 2 skipped steps in a row"):
        ledger.add(4, bad, BATCH, find_cause=lambda: None)


def test_parameters_that_are_not_finite_end_the_run(ledger_of):
    with pytest.raises(NonFiniteLoss, match="step 1 left param_norm inf"):
        ledger_of().add(1, step(param_norm=float("inf")), BATCH, find_cause=lambda: None)
