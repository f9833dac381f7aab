"""Two runs are compared line by line and array by array; exactly the planted differences are named."""

import json
import math

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data import example_ids, examples_hash
from maxtext_lite.training.run_difference import compare_checkpoints, compare_metrics, rows_of_step
from maxtext_lite.training.saving import save_alone

ROWS = 40  # of 32 tokens, in the text below


def line(step, **changes):
    ids = example_ids(4 * (step - 1), 4, num_examples=ROWS, seed=5)
    usual = {"step": step, "loss": 3 / step, "examples": 4, "examples_seen": 4 * step,
             "examples_hash": examples_hash(ids), "per_device_batch_size": 4.0, "gradient_accumulation_steps": 1,
             "step_seconds": 0.1 * step,
             "tokens_per_second": 7.0 / step, "source_epochs": {"a": 0.1 * step}}  # fmt: skip
    return usual | changes


@pytest.fixture
def run(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * (ROWS * 32))

    def make(name, lines):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        config = {"dataset_path": f"{tmp_path}/a.txt", "max_target_length": 32, "eval_fraction": 0.0,
                  "eval_interval": -1, "data_shuffle_seed": 5}  # fmt: skip
        (directory / "config.yml").write_text(json.dumps(config))
        return directory

    return make


def test_times_never_count_and_nothing_else_is_left_out(run):
    lines = [line(1), line(2), {"step": 2, "eval_loss": 1.5}, line(3)]
    first = run("first", lines)
    again = run("again", [each | {"step_seconds": 9.0, "tokens_per_second": None, "mfu": 0.5} for each in lines])
    found = compare_metrics((first, again), 0.0)
    assert (found.steps, found.evaluations, found.last, found.difference) == (3, 1, (3, 3), None)
    longer = run("longer", [*lines, line(4, loss=9.0)])
    assert compare_metrics((first, longer), 0.0).last == (3, 4)  # and no difference in what both have
    assert compare_metrics((longer, first), 0.0).difference is None


@pytest.mark.parametrize(("place", "change", "field", "values"), [
    (1, {"loss": math.nextafter(1.5, 2)}, "loss", (1.5, math.nextafter(1.5, 2))),
    (1, {"source_epochs": {"a": 0.3}}, "source_epochs.a", (0.2, 0.3)),
    (1, {"z_loss": 0.0}, "z_loss", (None, 0.0)),
    (2, {"eval_loss": 1.6}, "eval_loss", (1.5, 1.6)),
    (3, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps", (1, 2)),
])  # fmt: skip
def test_the_first_difference_is_named_with_both_values(run, place, change, field, values):
    lines = [line(1), line(2), {"step": 2, "eval_loss": 1.5}, line(3), line(4)]
    changed = [each | change if number == place else each for number, each in enumerate(lines)]
    changed[4] = changed[4] | {"loss": 0.0}  # later, and not the first
    found = compare_metrics((run("first", lines), run("second", changed)), 0.0).difference
    assert (found.step, found.evaluation) == (lines[place]["step"], place == 2)
    assert dict(found.fields) == {field: values}


def test_within_a_tolerance_splits_and_roundings_agree_but_counts_and_hashes_must_be_equal(run):
    lines = [line(1), line(2)]
    rounded = [each | {"loss": each["loss"] * (1 + 9e-6), "per_device_batch_size": 2.0, "gradient_noise_scale": 5.0}
               for each in lines]  # fmt: skip
    first = run("first", lines)
    assert compare_metrics((first, run("rounded", rounded)), 1e-5).difference is None
    apart = run("apart", [each | {"loss": each["loss"] * (1 + 2e-5)} for each in lines])
    assert list(compare_metrics((first, apart), 1e-5).difference.fields) == ["loss"]
    hashed = run("hashed", [lines[0], line(2, examples_hash="0" * 16, loss=1.5 * (1 + 2e-5), examples=5)])
    found = compare_metrics((first, hashed), 1e-5).difference
    assert found.step == 2
    assert list(found.fields) == ["examples_hash", "examples", "loss"]  # what explains comes first
    rated = run("rated", [lines[0], line(2, loss=1.0, learning_rate=0.5)])
    assert list(compare_metrics((first, rated), 1e-5).difference.fields) == ["learning_rate", "loss"]


def test_rewards_at_the_reference_are_rounding_and_later_ones_are_not(run):
    at_reference, signs = (
        {"reward_margin": 2e-8, "reward_accuracy": 0.3},
        {"reward_margin": -1e-8, "reward_accuracy": 0.4},
    )
    first = run("first", [line(1) | at_reference, line(2) | {"reward_margin": 0.01, "reward_accuracy": 0.5}])
    flipped = run("flipped", [line(1) | signs, line(2) | {"reward_margin": 0.010009, "reward_accuracy": 0.5}])
    assert compare_metrics((first, flipped), 1e-5).difference is None
    assert list(compare_metrics((first, flipped), 0.0).difference.fields) == ["reward_margin", "reward_accuracy"]
    other = run("other", [line(1) | signs, line(2) | {"reward_margin": 0.01002, "reward_accuracy": 0.6}])
    assert list(compare_metrics((first, other), 1e-5).difference.fields) == ["reward_margin", "reward_accuracy"]


def test_runs_without_a_common_step_and_no_runs_are_refused(run, tmp_path):
    with pytest.raises(UserError, match="no step in common"):
        compare_metrics((run("first", [line(1)]), run("second", [line(2)])), 0.0)
    with pytest.raises(UserError, match=r"RUN_DIR=.*none has no metrics\.jsonl"):
        compare_metrics((tmp_path / "first", tmp_path / "none"), 0.0)


def test_rows_of_a_step_are_those_of_its_hash_or_not_known(run, tmp_path):
    first = run("first", [line(1), line(7), line(12), line(8, examples_hash="f" * 16)])
    assert rows_of_step(first, 7) == example_ids(24, 4, num_examples=ROWS, seed=5).tolist()
    assert rows_of_step(first, 12) == example_ids(44, 4, num_examples=ROWS, seed=5).tolist()  # of the second epoch
    assert "another examples_hash" in rows_of_step(first, 8)
    assert rows_of_step(first, 9) == "metrics.jsonl has no step 9"
    (tmp_path / "a.txt").unlink()
    assert "a.txt" in rows_of_step(first, 7)
    (first / "config.yml").write_text("base: post_train/rl.yml\n")
    assert "reinforcement learning reads prompts" in rows_of_step(first, 7)


def save(run, step, params, moments):
    about = {"params": ocp.args.StandardSave(params), "update_state": ocp.args.StandardSave(moments)}
    save_alone((run / "checkpoints" / str(step)).absolute(), about)


def test_arrays_are_compared_to_the_bit_or_in_norm(run):
    runs = tuple(run(name, [line(1)]) for name in ("first", "second"))
    params = {"w": jnp.arange(1.0, 7.0).reshape(2, 3), "small": jnp.full(4, 1e-3)}
    moments = {"mu": jnp.ones(3), "count": jnp.asarray(2)}
    for each in runs:
        save(each, 2, params, moments)
    save(runs[0], 4, params, moments)
    save(runs[1], 4, params | {"w": params["w"].at[1, 2].add(6e-5)}, moments | {"mu": jnp.full(3, 2.0)})
    save(runs[1], 6, params, moments)
    same, different = compare_checkpoints(runs, 0.0)
    assert (same.step, same.compared, same.arrays) == (2, 4, {})
    assert (different.step, list(different.arrays)) == (4, ["params/w", "update_state/mu"])
    apart = np.float32(6 + 6e-5) - 6
    assert different.arrays["params/w"] == pytest.approx(apart / math.sqrt(91 + 12 * apart), rel=1e-3)  # 6.3e-6
    assert different.arrays["update_state/mu"] == pytest.approx(0.5)
    assert [each.arrays for each in compare_checkpoints(runs, 1e-5)] == [{}, {}]
    tight = compare_checkpoints(runs, 5e-6)[-1]
    assert list(tight.arrays) == ["params/w"]


def test_an_array_that_is_0_but_for_rounding_is_as_far_apart_as_it_counts(run):
    runs = tuple(run(name, [line(1)]) for name in ("first", "second"))
    for each, sign in zip(runs, (1, -1), strict=True):
        save(each, 2, {"w": jnp.full(4, 5.0), "bias": jnp.full(4, sign * 1e-9)}, {"count": jnp.asarray(2)})
    (within,) = compare_checkpoints(runs, 1e-5)
    assert not within.arrays
    assert within.largest == pytest.approx(4e-9 / (0.01 * 10), rel=1e-3)
    (to_the_bit,) = compare_checkpoints(runs, 0.0)
    assert to_the_bit.arrays == {"params/bias": pytest.approx(2)}


def test_an_array_that_one_run_lacks_or_has_in_another_shape_differs(run):
    runs = tuple(run(name, [line(1)]) for name in ("first", "second"))
    for each, params in zip(runs, ({"w": jnp.ones((2, 3)), "v": jnp.ones(1)}, {"w": jnp.ones(6)}), strict=True):
        save(each, 1, params, {"count": jnp.asarray(1)})
    assert compare_checkpoints(runs, 1e-5)[0].arrays == {"params/v": math.inf, "params/w": math.inf}
