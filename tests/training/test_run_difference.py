"""Two runs are compared line by line and array by array; exactly the planted differences are named."""

import json
import math

import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_lite.analysis.replay import compare_checkpoints, compare_metrics
from maxtext_lite.data import example_ids, examples_hash
from maxtext_lite.training.saving import save_alone
from tests.run_directories import write_lines

ROWS = 40  # of 32 tokens, in the text below


def line(step, **changes):
    ids = example_ids(4 * (step - 1), 4, num_examples=ROWS, seed=5)
    usual = {
        "step": step,
        "loss": 3 / step,
        "examples": 4,
        "examples_seen": 4 * step,
        "examples_hash": examples_hash(ids),
        "per_device_batch_size": 4.0,
        "gradient_accumulation_steps": 1,
        "step_seconds": 0.1 * step,
        "tokens_per_second": 7.0 / step,
        "source_epochs": {"a": 0.1 * step},
    }
    return usual | changes


LINES = [line(1), line(2), {"step": 2, "eval_loss": 1.5}, line(3), line(4)]


@pytest.fixture
def run(tmp_path):
    """A function from lines to a run directory."""
    (tmp_path / "a.txt").write_bytes(b"x" * (ROWS * 32))
    config = {
        "dataset_path": f"{tmp_path}/a.txt",
        "max_target_length": 32,
        "eval_fraction": 0.0,
        "eval_interval": -1,
        "data_shuffle_seed": 5,
    }

    def make(lines=LINES[:1]):
        directory = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        write_lines(directory / "metrics.jsonl", lines)
        (directory / "config.yml").write_text(json.dumps(config))
        return directory

    return make


def test_times_never_count_and_a_longer_run_is_compared_in_what_both_have(run):
    times = {"step_seconds": 9.0, "tokens_per_second": None, "mfu": 0.5}
    again = run([each | times for each in LINES])
    found = compare_metrics((run(LINES[:4]), again), 0.0)
    assert (found.steps, found.evaluations) == (3, 1)
    assert (found.last, found.difference) == ((3, 4), None)


@pytest.mark.parametrize(
    ("before", "change", "named"),
    [
        (
            {},
            {
                "loss": 1.5 * (1 + 9e-6),
                "per_device_batch_size": 2.0,
                "gradient_noise_scale": 5.0,
            },
            [],
        ),
        ({}, {"loss": 1.5 * (1 + 2e-5)}, ["loss"]),
        # What explains comes first.
        (
            {},
            {"examples_hash": "0" * 16, "loss": 1.6, "examples": 5},
            ["examples_hash", "examples", "loss"],
        ),
        # Rewards at the reference are rounding, later ones are not.
        (
            {"reward_margin": 2e-8, "reward_accuracy": 0.3},
            {"reward_margin": -1e-8, "reward_accuracy": 0.4},
            [],
        ),
    ],
)
def test_within_a_tolerance_splits_and_roundings_agree_but_counts_and_hashes_must_be_equal(
    run, before, change, named
):
    runs = run([line(1), line(2, **before)]), run([line(1), line(2, **before | change)])
    found = compare_metrics(runs, 1e-5).difference
    assert (list(found.fields) if found else []) == named


def saved(run, states):
    """Two runs with the checkpoints of some steps: for each step the (params, update_state) of each run."""
    runs = run(), run()
    for step, both in states.items():
        for directory, (params, moments) in zip(runs, both, strict=True):
            items = {
                "params": ocp.args.StandardSave(params),
                "update_state": ocp.args.StandardSave(moments),
            }
            save_alone((directory / "checkpoints" / str(step)).absolute(), items)
    return runs


def test_arrays_are_compared_to_the_bit_or_in_norm(run):
    w, small = (
        np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3),
        np.full(4, 1e-3, np.float32),
    )
    other = w.copy()
    other[1, 2] += 6e-5
    state = {"w": w, "small": small}, {"mu": np.ones(3), "count": np.asarray(2)}
    changed = (
        {"w": other, "small": small},
        {"mu": np.full(3, 2.0), "count": np.asarray(2)},
    )
    runs = saved(run, {2: (state, state), 4: (state, changed)})
    same, different = compare_checkpoints(runs, 0.0)
    assert (same.step, same.compared, same.arrays) == (2, 4, {})
    assert (different.step, list(different.arrays)) == (
        4,
        ["params/w", "update_state/mu"],
    )
    apart = float(other[1, 2]) - 6
    assert different.arrays["params/w"] == pytest.approx(
        apart / math.sqrt(91 + 12 * apart), rel=1e-3
    )  # 6.3e-6
    assert [each.arrays for each in compare_checkpoints(runs, 1e-5)] == [
        {},
        {},
    ]  # moments count to the bit alone
    assert list(compare_checkpoints(runs, 5e-6)[-1].arrays) == ["params/w"]
