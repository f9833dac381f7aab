"""The MultiSteps subclass: one inner update per step, float32 sums, no accumulator in its state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.training.gradients import step_gradients
from maxtext_lite.training.optimizer import GradientAccumulation, LossScaling, master_of
from tests.training.conftest import norm

PARAMS = {"w": np.array([1.0, -2.0], np.float32), "b": np.float32(3.0)}


@pytest.mark.fast
def test_512_bfloat16_gradients_sum_to_512():
    """A bfloat16 sum stops at 256: 256 + 1 rounds to 256."""
    accumulation = GradientAccumulation(optax.sgd(1.0))
    ones = {"w": jnp.ones(3, jnp.bfloat16)}
    total, _ = jax.lax.scan(
        lambda acc, _: (accumulation.accumulate(acc, ones), None),
        accumulation.accumulator(ones),
        length=512,
    )
    assert total["w"].dtype == jnp.float32
    assert_array_equal(total["w"], 512.0)


def test_a_master_copy_keeps_what_bfloat16_parameters_would_lose():
    """A thousand steps of 1e-3 from 1: bfloat16 alone stays at 1, as 1 - 1e-3 rounds to 1, wherever it is."""
    ones = {"w": jnp.ones((2, 8), jnp.bfloat16)}
    for over_data, masters, expected in (
        (False, False, 1.0),
        (True, False, 1.0),
        (True, True, 0.0),
        (False, True, 0.0),
    ):
        accumulation = GradientAccumulation(
            optax.identity(), over_data=over_data, masters=masters
        )
        state, params = accumulation.init(ones), ones

        def step(carry, _, accumulation=accumulation):
            params, state = carry
            return accumulation.finish(
                {"w": jnp.ones((2, 8))}, state, params, 1e-3
            ), None

        (params, state), _ = jax.lax.scan(step, (params, state), length=1000)
        assert params["w"].dtype == jnp.bfloat16
        assert_allclose(params["w"].astype(jnp.float32), expected, atol=1e-3)
    assert master_of(state)["w"].dtype == jnp.float32
    assert_allclose(
        master_of(state)["w"], 0, atol=1e-4
    )  # each of its thousand sums is rounded to 2^-24


def _driven(multi_steps, stream):
    """Parameters after a stream of micro-batches' gradients, by the interface of `optax.MultiSteps` alone."""
    transformation = multi_steps.gradient_transformation()
    params, state = PARAMS, transformation.init(PARAMS)

    def micro_step(carry, gradients):
        params, state = carry
        updates, state = transformation.update(gradients, state, params)
        about = (multi_steps.has_updated(state), state.gradient_step, state.mini_step)
        return (optax.apply_updates(params, updates), state), about

    (params, _), about = jax.jit(
        lambda stream: jax.lax.scan(micro_step, (params, state), stream)
    )(stream)
    return params, about


def test_driven_as_any_multisteps_it_does_what_the_original_does():
    """Three steps of three micro-batches."""
    k, rng = 3, np.random.default_rng(3)
    stream = {"w": rng.normal(size=(3 * k, 2)), "b": rng.normal(size=3 * k)}
    stream = jax.tree.map(np.float32, stream)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    want, want_about = _driven(optax.MultiSteps(inner, k, use_grad_mean=False), stream)
    got, about = _driven(GradientAccumulation(inner, every_k_schedule=k), stream)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-6), got, want)
    jax.tree.map(assert_array_equal, about, want_about)


def _after(scaling, finite):
    def update(state, each):
        state = scaling.next(state, each)
        return state, state.scale

    return jax.jit(lambda each: jax.lax.scan(update, scaling.init(), each)[1])(
        np.array(finite, bool)
    ).tolist()


def test_doubles_after_so_many_updates_in_a_row_and_halves_at_once():
    scaling = LossScaling(fixed=0, growth_interval=3)
    start = 2.0**16
    assert _after(scaling, [1, 1, 1]) == [start, start, 2 * start]
    assert _after(scaling, [1, 1, 0, 1, 1, 1]) == [
        start,
        start,
        start / 2,
        start / 2,
        start / 2,
        start,
    ]
    assert _after(scaling, [0] * 20)[-1] == 1.0  # and no lower
    assert _after(LossScaling(0, 1), [1] * 200)[-1] == 2.0**127  # and stays a number
    assert _after(LossScaling(fixed=128.0, growth_interval=1), [1, 0, 1]) == [128.0] * 3


def test_float16_gradients_are_near_float32s_whatever_the_scale_and_small_ones_survive_only_scaled(
    setup, rows
):
    """Weights of 2^-24 make a loss whose gradients in float16 all round to zero."""
    wide = setup("optimizer=sgd")
    want = wide.gradients(wide.state().params, wide.batch(rows, 1, 16))
    it = setup("optimizer=sgd", "dtype=float16", data=2, fsdp=2)
    batch = it.batch(rows, 4, 4)
    step = jax.jit(functools.partial(step_gradients, it.parts))

    def found(batch, scale):
        with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
            result = step(it.state().params, batch, None, np.float32(scale))
        return jax.device_get(result)

    for scale in (1.0, 2.0**14):
        got = found(batch, scale)
        apart = jax.tree.map(np.subtract, got.gradients, want.gradients)
        assert norm(apart) < 5e-3 * norm(want.gradients)
        assert got.losses.loss == pytest.approx(want.losses.loss, rel=1e-3)
    tiny = batch | {"weights": batch["weights"] * np.float32(2.0**-24)}
    lost, kept = (norm(found(tiny, scale).gradients) for scale in (1.0, 2.0**30))
    whole = norm(want.gradients) * 2.0**-24
    assert lost < 0.5 * whole
    assert kept == pytest.approx(whole, rel=0.02)
