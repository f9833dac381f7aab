"""Two runs are compared line by line and array by array; exactly the planted differences are named."""

import json
import math

import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_lite.data import example_ids, examples_hash
from maxtext_lite.training.run_difference import (
    compare_checkpoints,
    compare_metrics,
    rows_of_step,
)
from maxtext_lite.training.saving import save_alone

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
        (directory / "metrics.jsonl").write_text(
            "".join(json.dumps(each) + "\n" for each in lines)
        )
        (directory / "config.yml").write_text(json.dumps(config))
        return directory

    return make


def test_times_never_count_and_nothing_else_is_left_out(run):
    first = run(LINES[:4])
    again = run(
        [
            each | {"step_seconds": 9.0, "tokens_per_second": None, "mfu": 0.5}
            for each in LINES[:4]
        ]
    )
    found = compare_metrics((first, again), 0.0)
    assert (found.steps, found.evaluations, found.last, found.difference) == (
        3,
        1,
        (3, 3),
        None,
    )
    longer = compare_metrics((first, run(LINES)), 0.0)
    assert (longer.last, longer.difference) == ((3, 4), None)  # in what both have


@pytest.mark.fast
@pytest.mark.parametrize(
    ("place", "change", "field", "values"),
    [
        (1, {"loss": math.nextafter(1.5, 2)}, "loss", (1.5, math.nextafter(1.5, 2))),
        (1, {"source_epochs": {"a": 0.3}}, "source_epochs.a", (0.2, 0.3)),
        (1, {"z_loss": 0.0}, "z_loss", (None, 0.0)),
        (2, {"eval_loss": 1.6}, "eval_loss", (1.5, 1.6)),
    ],
)
def test_the_first_difference_is_named_with_both_values(
    run, place, change, field, values
):
    changed = [
        each | change if number == place else each for number, each in enumerate(LINES)
    ]
    changed[4] = changed[4] | {"loss": 0.0}  # later, and not the first
    found = compare_metrics((run(LINES), run(changed)), 0.0).difference
    assert (found.step, found.evaluation, dict(found.fields)) == (
        2,
        place == 2,
        {field: values},
    )


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
        ({}, {"loss": 1.0, "learning_rate": 0.5}, ["learning_rate", "loss"]),
        # Rewards at the reference are rounding, later ones are not.
        (
            {"reward_margin": 2e-8, "reward_accuracy": 0.3},
            {"reward_margin": -1e-8, "reward_accuracy": 0.4},
            [],
        ),
        (
            {"reward_margin": 0.01, "reward_accuracy": 0.5},
            {"reward_margin": 0.010009},
            [],
        ),
        (
            {"reward_margin": 0.01, "reward_accuracy": 0.5},
            {"reward_margin": 0.01002},
            ["reward_margin"],
        ),
    ],
)
def test_within_a_tolerance_splits_and_roundings_agree_but_counts_and_hashes_must_be_equal(
    run, before, change, named
):
    runs = run([line(1), line(2, **before)]), run([line(1), line(2, **before | change)])
    found = compare_metrics(runs, 1e-5).difference
    assert (list(found.fields) if found else []) == named


def test_rows_of_a_step_are_those_of_its_hash_or_not_known(run, tmp_path):
    first = run([line(1), line(7), line(12), line(8, examples_hash="f" * 16)])
    for step in (7, 12):  # the second is of another epoch
        assert (
            rows_of_step(first, step)
            == example_ids(4 * (step - 1), 4, num_examples=ROWS, seed=5).tolist()
        )
    assert "another examples_hash" in rows_of_step(first, 8)
    assert "no step 9" in rows_of_step(first, 9)
    (tmp_path / "a.txt").unlink()
    assert "a.txt" in rows_of_step(first, 7)
    (first / "config.yml").write_text("base: post_train/rl.yml\n")
    assert "prompts" in rows_of_step(first, 7)


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
    assert different.arrays["update_state/mu"] == pytest.approx(0.5)
    assert [each.arrays for each in compare_checkpoints(runs, 1e-5)] == [
        {},
        {},
    ]  # moments count to the bit alone
    assert list(compare_checkpoints(runs, 5e-6)[-1].arrays) == ["params/w"]


def test_an_array_that_is_0_but_for_rounding_is_as_far_apart_as_it_counts_and_one_of_another_shape_infinitely(
    run,
):
    first, second = (
        {"w": np.full(4, 5.0), "bias": np.full(4, sign * 1e-9)} for sign in (1, -1)
    )
    count = {"count": np.asarray(2)}
    shaped = (
        ({"w": np.ones((2, 3)), "v": np.ones(1)}, count),
        ({"w": np.ones(6)}, count),
    )
    runs = saved(run, {2: ((first, count), (second, count)), 3: shaped})
    within, shapes = compare_checkpoints(runs, 1e-5)
    assert not within.arrays
    assert within.largest == pytest.approx(4e-9 / (0.01 * 10), rel=1e-3)
    assert shapes.arrays == {"params/v": math.inf, "params/w": math.inf}
    assert compare_checkpoints(runs, 0.0)[0].arrays == {"params/bias": pytest.approx(2)}
