"""A run that was killed and goes on on the same devices equals, to the bit, the run that nobody stopped.

On other devices and processes: test_hosts.py.
"""

import itertools
import shutil

import jax
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from tests.invariance.conftest import MODEL, TABLE
from tests.run_directories import lines_of

RUN = [
    *MODEL,
    "steps=4",
    "checkpoint_period=2",
    "eval_interval=-1",
    "eval_fraction=0.05",
    "learning_rate_schedule=constant",
    "global_batch_size=8",
    "gradient_accumulation_steps=-1",
    "per_device_batch_size=1",
]


def losses(lines):
    return [line["loss"] for line in lines if "loss" in line]


def noise_scale(lines, state):
    narrow(lines, state)
    assert lines[-2]["gradient_noise_scale"] > 0
    assert lines[-2]["gradient_noise_scale_ratio"] == pytest.approx(
        lines[-2]["gradient_noise_scale"] / 8
    )
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]


def local_updates(lines, state):
    assert {line["gradient_noise_scale"] for line in lines} == {None}
    # The last synchronisation was a step ago.
    start, end = (jax.tree.leaves(tree) for tree in (state.outer.params, state.params))
    assert any(not np.array_equal(p, own[0]) for p, own in zip(start, end, strict=True))


def scaled_losses(lines, state):
    assert any(
        line["skipped"] for line in lines
    )  # doubling at every update, it must overflow
    assert lines[0]["loss_scale"] == 2.0**16
    for before, after in itertools.pairwise(lines):
        assert after["loss_scale"] == before["loss_scale"] * (
            0.5 if before["skipped"] else 2
        )
    assert int(state.opt_state.gradient_step) == sum(
        not line["skipped"] for line in lines
    )


def experts(lines, state):
    assert losses(lines)[-1] < losses(lines)[0] - 0.02
    assert all(0.9 < line["moe_balance"] < 2 for line in lines)
    assert {"moe_balance_loss", "router_z_loss"} <= lines[0].keys()
    assert (
        0
        < np.abs(state.params["layers"]["mlp"]["router_bias"]).max()
        <= 6 * 0.001 + 1e-6
    )


def load_of_the_batch(lines, state):
    """Of 4 experts; the first step has an even load, which makes the loss 1."""
    assert lines[0]["moe_balance"] == pytest.approx(1)
    load = np.asarray(state.params["layers"]["mlp"]["router_load"])
    np.testing.assert_allclose(load.sum(axis=-1), 0, atol=1e-5)
    assert load.min() >= -1
    assert np.abs(load).max() > 0.01


def narrow(lines, state):
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}
    dtypes = {
        leaf.dtype.name for leaf in jax.tree.leaves(state.opt_state) if leaf.size > 1
    }
    assert dtypes == {"float32", "int8", "uint8"}


CHECKS = {
    "noise scale": noise_scale,
    "replicas within a period": local_updates,
    "loss scale": scaled_losses,
    "experts": experts,
    "load of the batch": load_of_the_batch,
}


def timeless(directory):
    """Metrics without what depends on the clock."""
    clock = ("seconds", "per_second", "tflops", "mfu")
    return [
        {key: x for key, x in line.items() if not any(word in key for word in clock)}
        for line in lines_of(directory)
    ]


@pytest.mark.parametrize("feature", TABLE["resumed"])
def test_killed_and_resumed_a_run_is_the_one_that_nobody_stopped(
    feature, tmp_path, documents, capsys
):
    keys, check = TABLE["resumed"][feature], CHECKS[feature]

    def run(name):
        path = f"dataset_path={documents}/0/documents.jsonl"
        config = load_config(
            None,
            [
                *RUN,
                *keys,
                path,
                f"base_output_directory={tmp_path}",
                f"run_name={name}",
            ],
        )
        return config, train(config)

    config, straight = run("straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / str(config.steps))
    capsys.readouterr()
    _, resumed = run("resumed")
    assert f"after step {config.checkpoint_period}" in capsys.readouterr().out
    states = [jax.device_get(result.state) for result in (resumed, straight)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    lines = timeless(tmp_path / "straight")
    assert timeless(tmp_path / "resumed") == lines
    check(lines, states[1])
    assert losses(lines)[-1] < losses(lines)[0]
