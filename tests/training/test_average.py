"""The moving average of parameters is that of every update, however a step is split, and comes back on any mesh."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.config import UserError
from maxtext_lite.parallel.pipeline import Pipeline
from maxtext_lite.training.checkpoint import Checkpointer, CheckpointReader, fingerprint
from maxtext_lite.training.parameter_files import load_adapters, load_parameters
from tests.training.conftest import COUNTS

KEYS = ("optimizer=sgd", "ema_decay=0.75", "skip_nonfinite_updates=true")
SPLITS = {
    "accumulation": (4, (), {}),
    "tensor": (1, (), {"fsdp": 2, "tensor": 2}),
    "ZeRO-1": (1, ("shard_optimizer_over_data=true",), {"data": 4}),
    "offloaded": (1, ("optimizer_memory_host_offload=true",), {"fsdp": 2}),
    "masters": (2, ("weight_dtype=bfloat16",), {"data": 2}),
    "pipeline": (1, (), {"pipeline": Pipeline(2, 2, 1), "fsdp": 2}),
    "LoRA": (2, ("lora_rank=2",), {"fsdp": 2}),
}


def wide(state):
    """The parameters that updates change, in float64."""
    inner = state.opt_state.inner_opt_state
    params = getattr(inner, "master", state.params)
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]


def saved(directory, it, state):
    checkpointer = Checkpointer(directory, it.config, fingerprint(it.config, "", None))
    checkpointer.save(state, COUNTS)
    checkpointer.close()


def restored(directory, it):
    reader = CheckpointReader(directory, fingerprint(it.config, "", None))
    return reader.find_before(99, print).restore(it.abstract)[0]


@pytest.mark.parametrize("split", SPLITS)
def test_the_average_follows_every_update_but_skipped_ones(
    split, setup, rows, tmp_path
):
    accumulation, keys, mesh = SPLITS[split]
    it = setup(*KEYS, *keys, **mesh)
    batch = it.batch(rows, accumulation, 16 // accumulation)
    bad = batch | {"weights": batch["weights"] * np.nan}
    step, state = it.compile_step(batch), it.state()
    expected = wide(state)
    for each in (batch, bad, batch):
        state, metrics = step(state, each, None)
        if not metrics["skipped"]:
            expected = [
                0.75 * a + 0.25 * p for a, p in zip(expected, wide(state), strict=True)
            ]
    assert jax.tree.map(lambda x: x.sharding, state.average) == jax.tree.map(
        lambda x: x.sharding, it.abstract.average
    )
    for leaf, want in zip(jax.tree.leaves(state.average), expected, strict=True):
        assert leaf.dtype == np.float32
        assert_allclose(leaf, want, rtol=1e-6, atol=1e-7)
    saved(tmp_path, it, state)
    other = restored(tmp_path, setup(*KEYS, *keys, fsdp=4))
    for leaf, want in zip(
        jax.tree.leaves(other.average), jax.tree.leaves(state.average), strict=True
    ):
        assert_array_equal(leaf.reshape(want.shape), want)
    if split == "LoRA":
        _, found = load_adapters(tmp_path / "checkpoints" / "7", it.mesh, "average")
    else:
        plain = setup(*KEYS, *keys)
        found = load_parameters(tmp_path, plain.abstract.params, "RUN", "ema")
    jax.tree.map(
        lambda x, want: assert_array_equal(x, np.asarray(want).astype(x.dtype)),
        found,
        jax.tree.map(lambda x, like: x.reshape(like.shape), state.average, found),
    )


@pytest.mark.parametrize(
    "keys", [(), ("weight_dtype=bfloat16", "optimizer_memory_host_offload=true")]
)
def test_switched_on_it_begins_with_the_parameters_and_switched_off_it_is_dropped(
    setup, rows, tmp_path, keys
):
    on, off = setup(*KEYS, *keys), setup(KEYS[0], *keys)
    batch = on.batch(rows, 1, 16)
    before, _ = off.compile_step(batch)(off.state(), batch, None)
    saved(tmp_path / "off", off, before)
    state = restored(tmp_path / "off", on)
    for leaf, want in zip(jax.tree.leaves(state.average), wide(before), strict=True):
        assert_array_equal(leaf, want)
    state, _ = on.compile_step(batch)(state, batch, None)  # donates both
    with pytest.raises(UserError, match=r"ema_decay=0. Nearest .*parameters=trained"):
        load_parameters(tmp_path / "off", on.abstract.params, "RUN", "ema")
    saved(tmp_path / "on", on, state)
    assert restored(tmp_path / "on", off).average is None
