"""Each parameter's learning rate, and its weight decay with it, has the multiplier of its group."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from maxtext_lite.batching import make_plan
from maxtext_lite.batching.table import format_plan
from maxtext_lite.config import load_config
from maxtext_lite.config.weights import is_in_group
from maxtext_lite.parallel.pipeline import Pipeline

GROUPS = '{embedding: 0, layers/attention: 3, "*_norm": 0.5, query: 2}'
MULTIPLIERS = {
    "embedding/table": 0,
    "layers/attention/query": 2,
    "layers/attention/key": 3,
    "layers/attention_norm/scale": 0.5,
    "layers/mlp/up": 1,
    "final_norm/scale": 0.5,
    "head/projection": 1,
}
RATE = ("learning_rate=0.01", "warmup_steps=0", "learning_rate_schedule=constant")


def changes(it, batch):
    """What one step adds to each parameter, by path."""
    state = it.state()
    new, metrics = it.compile_step(batch)(state, batch, None)
    assert metrics["learning_rate"] == pytest.approx(0.01)
    both = (jax.tree_util.tree_leaves_with_path(t) for t in (new, it.initial))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(now)
        - np.asarray(before)
        for (path, now), (_, before) in zip(*both, strict=True)
        if path[0].name == "params"
    }


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "adafactor", "muon"])
def test_every_optimizers_update_and_decay_are_multiplied(optimizer, setup, rows):
    keys = (
        f"optimizer={optimizer}",
        *RATE,
        "weight_decay_on_norms_and_embeddings=true",
    )
    plain = setup(*keys)
    batch = plain.batch(rows, 1, 16)
    want = changes(plain, batch)
    found = changes(setup(*keys, f"learning_rate_groups={GROUPS}"), batch)
    for path, by in MULTIPLIERS.items():
        path = f"params/{path}"
        assert_allclose(found[path], by * want[path], rtol=1e-4, atol=1e-7)
        assert np.abs(want[path]).max() > 1e-5


on_splits = pytest.mark.parametrize(
    ("accumulation", "keys", "mesh"),
    [
        (4, (), {}),
        (1, (), {"fsdp": 2, "tensor": 2}),
        (2, ("shard_optimizer_over_data=true",), {"data": 4}),
        (1, (), {"pipeline": Pipeline(2, 2, 1), "fsdp": 2}),
    ],
)


def assert_split_changes_nothing(setup, rows, own, accumulation, keys, mesh):
    """An update of a config is that of one device, however its rows are split."""
    one = setup(*own)
    want = changes(one, one.batch(rows, 1, 16))
    it = setup(*own, *keys, **mesh)
    found = changes(it, it.batch(rows, accumulation, 16 // accumulation))
    for path, change in want.items():
        assert_allclose(found[path].reshape(change.shape), change, atol=1e-7)


@on_splits
def test_no_split_changes_a_multiplied_update(accumulation, keys, mesh, setup, rows):
    own = ("optimizer=sgd", *RATE, f"learning_rate_groups={GROUPS}")
    assert_split_changes_nothing(setup, rows, own, accumulation, keys, mesh)


def test_lora_b_alone_is_faster(setup, rows):
    keys = ("optimizer=sgd", *RATE, "lora_rank=2")
    plain, plus = setup(*keys), setup(*keys, "learning_rate_groups={lora_b: 16}")
    batch = plain.batch(rows, 1, 16)
    want, found = changes(plain, batch), changes(plus, batch)
    for path, change in want.items():
        by = 16 if path.endswith("/b") else 1
        assert_allclose(found[path], by * change, rtol=1e-5, atol=1e-8)


def test_groups_are_consecutive_names_of_a_path_and_in_the_plan():
    path = "layers/attention/query"
    for group in ("query", "layers", "attention/query", "layers/*/query", "q*"):
        assert is_in_group(path, group)
    for group in ("quer", "layers/query", "query/a", "attention/*/query"):
        assert not is_in_group(path, group)
    config = load_config(None, ["learning_rate_groups={head: 0.5}"])
    assert "of head                    0.0015 = 0.003 x 0.5" in format_plan(
        make_plan(config, num_devices=1)
    )
