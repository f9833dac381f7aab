"""CompleteP: initial values, multipliers and updates follow from the base model's, by Dey et al. 2025, table 1."""

import dataclasses
import functools
import importlib

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
from maxtext_lite.hf.directory import run_config_json
from maxtext_lite.training.state import decoder_shape
from tests.source_tree import REPOSITORY
from tests.training.test_groups import assert_split_changes_nothing, changes, on_splits

# TINY is 4 times as wide as the base, and twice as deep.
BASE = ("mup_base_emb_dim=4", "mup_base_num_layers=1", "optimizer=adamw")
RATE = ("learning_rate=0.01", "warmup_steps=0", "learning_rate_schedule=constant")


def hidden(path):
    return "layers" in path and "norm" not in path


def names(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves
    }


def test_the_base_model_itself_is_unchanged():
    plain = load_config(None, [])
    base = load_config(None, ["mup_base_emb_dim=128", "mup_base_num_layers=4"])
    assert decoder_shape(base) == decoder_shape(plain)
    plans = [make_plan(config, num_devices=1) for config in (base, plain)]
    assert plans[0].scaling == plans[1].scaling


def test_hidden_matrices_start_smaller_and_branches_and_logits_are_scaled(setup):
    it, plain = setup(*BASE), setup("optimizer=adamw")
    shape = it.decoder.shape
    ratios = it.config.width_ratio, it.config.depth_ratio
    assert ratios == (4, 2)
    assert (shape.residual_multiplier, shape.logits_multiplier) == (1 / 2, 1 / 4)
    assert make_plan(it.config, num_devices=1).to_json()["adam_eps"] == 1e-8 / 8
    init = [jax.jit(each.decoder.init)(jax.random.key(0)) for each in (it, plain)]
    found, want = map(names, init)
    for path, x in want.items():
        by = 0.5 if hidden(path) else 1
        assert_allclose(found[path], by * x, rtol=1e-6, err_msg=path)
    again = dataclasses.replace(shape, residual_multiplier=1, logits_multiplier=1)
    assert again == dataclasses.replace(plain.decoder.shape, width_ratio=4)


def test_hidden_matrices_learn_more_slowly_and_decay_as_before(setup, rows):
    """A first AdamW step is g / (|g| + eps), times the rate over the ratio of widths, plus rate x decay x parameter."""
    it = setup(*BASE, *RATE, "adam_eps=1e-3", "gradient_clipping_threshold=0")
    batch = it.batch(rows, 1, 16)
    gradients = names(it.gradients(it.initial.params, batch).gradients)
    found = changes(it, batch)
    for path, p in names(it.initial.params).items():
        g = np.asarray(gradients[path], np.float64)
        by = 0.25 if hidden(path) else 1
        decay = 0.1 if "norm" not in path and "table" not in path else 0
        eps = 1e-3 if "layers" in path else 2e-3  # which knows no depth
        want = -0.01 * (by * g / (np.abs(g) + eps) + decay * p)
        assert_allclose(
            found[f"params/{path}"], want, rtol=1e-3, atol=1e-6, err_msg=path
        )


@on_splits
def test_no_split_changes_the_update(accumulation, keys, mesh, setup, rows):
    own = (*BASE, *RATE, "adam_eps=1")  # a small one makes whole steps of rounding
    assert_split_changes_nothing(setup, rows, own, accumulation, keys, mesh)


@pytest.mark.parametrize("head_dim", [8, 16, 128])
def test_an_export_states_the_multipliers_themselves(head_dim):
    keys = ["mup_base_emb_dim=32", "mup_base_num_layers=1", "residual_multiplier=2"]
    keys.append(f"head_dim={head_dim}")
    write = functools.partial(run_config_json, None, num_positions=64, dtype="float32")
    fields = write(load_config(None, keys))
    assert fields["model_type"] == "granite"
    assert (fields["residual_multiplier"], fields["logits_scaling"]) == (0.5, 4)
    plain = [keys[-1], "residual_multiplier=0.5", "logits_multiplier=0.25"]
    assert_array_equal(fields, write(load_config(None, plain)))


def test_activations_stay_flat_in_width_and_depth(monkeypatch):
    """The coordinate check: four times as wide and as deep, the sizes after ten steps are the same within a third."""
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    check = importlib.import_module("coordinate_check")
    complete_p = check.PARAMETERIZATIONS["CompleteP"]
    base = check.measure(32, 2, complete_p)
    for width, depth in ((128, 2), (32, 8)):
        found = check.measure(width, depth, complete_p)
        for quantity, sizes in base.items():
            assert found[quantity][-1] == pytest.approx(sizes[-1], rel=0.33)
    assert check.measure(128, 2, [])["stream"][-1] > 10 * base["stream"][-1]
