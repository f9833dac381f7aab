"""The dynamic loss scale, and that it cancels out of what is learned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training.loss_scale import LossScaling, loss_scaling


def _after(scaling, finite):
    state, scales = scaling.init(), []
    for each in finite:
        state = scaling.next(state, jnp.bool_(each))
        scales.append(float(state.scale))
    return scales


def test_doubles_after_so_many_updates_in_a_row_and_halves_at_once():
    scaling = LossScaling(fixed=0, growth_interval=3)
    start = 2.0**16
    assert _after(scaling, [1, 1, 1]) == [start, start, 2 * start]
    assert _after(scaling, [1, 1, 0, 1, 1, 1]) == [start, start, start / 2, start / 2, start / 2, start]
    assert _after(scaling, [0] * 20)[-1] == 1.0  # and no lower
    assert _after(LossScaling(0, 1), [1] * 200)[-1] == 2.0**127  # and stays a number


def test_a_fixed_scale_stays():
    assert _after(LossScaling(fixed=128.0, growth_interval=1), [1, 0, 1]) == [128.0] * 3
    assert not LossScaling(128.0, 1).may_shrink(128.0)
    assert LossScaling(0, 1).may_shrink(2.0)
    assert not LossScaling(0, 1).may_shrink(1.0)


def test_only_float16_is_scaled():
    assert loss_scaling(load_config(None, ["dtype=bfloat16"])) is None
    assert loss_scaling(load_config(None, ["dtype=float16", "loss_scale=8"])) == LossScaling(8.0, 2000)


@pytest.mark.parametrize(("accumulation", "mesh"), [(1, {}), (4, {"data": 2, "fsdp": 2})], ids=str)
def test_float16_gradients_are_near_float32s_whatever_the_scale(accumulation, mesh, setup, rows):
    wide, narrow = setup("optimizer=sgd"), setup("optimizer=sgd", "dtype=float16", **mesh)
    want = wide.gradients(wide.state().params, wide.batch(rows, 1, 16))
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))  # noqa: E731
    batch = narrow.batch(rows, accumulation, 16 // accumulation)
    for scale in (1.0, 2.0**14):
        got = narrow.gradients(narrow.state().params, batch, None, jnp.float32(scale))
        difference = jax.tree.map(lambda a, b: a - b, got.gradients, want.gradients)
        assert norm(difference) < 5e-3 * norm(want.gradients)
        assert got.loss == pytest.approx(want.loss, rel=1e-3)


def test_small_gradients_survive_only_scaled(setup, rows):
    """A loss whose gradients in float16 all round to zero: weights of 2^-24."""
    it = setup("optimizer=sgd", "dtype=float16")
    tiny = rows | {"weights": rows["weights"] * np.float32(2.0**-24)}
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))  # noqa: E731
    whole = norm(it.gradients(it.state().params, it.batch(rows, 1, 16)).gradients) * 2.0**-24
    lost, kept = (
        norm(it.gradients(it.state().params, it.batch(tiny, 1, 16), None, jnp.float32(scale)).gradients)
        for scale in (1.0, 2.0**30)
    )
    assert lost < 0.5 * whole
    assert kept == pytest.approx(whole, rel=0.02)


def test_an_overflow_is_skipped_and_halves_the_scale(setup, rows):
    """At 2^127 float16 overflows: each step halves the scale and leaves everything else, until one fits."""
    it = setup("optimizer=adamw", "dtype=float16", "loss_scale_growth_interval=1000")
    batch = it.batch(rows, 2, 8)
    compiled = it.compile_step(batch)
    state = it.state()
    skip_state = state.opt_state.skip_state._replace(scale=jnp.float32(2.0**30))
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(skip_state=skip_state))
    skipped = []
    for step in range(30):
        state, metrics = compiled(state, batch, None)
        skipped.append(bool(metrics["skipped"]))
        assert float(metrics["loss_scale"]) == 2.0 ** (30 - step)
        if not skipped[-1]:
            break
    assert skipped[0]
    assert not skipped[-1]
    assert len(skipped) < 25
    assert state.opt_state.gradient_step == 1
    assert state.step == len(skipped)
