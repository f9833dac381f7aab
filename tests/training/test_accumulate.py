"""The MultiSteps subclass: one inner update per step, float32 sums, no accumulator in its state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training.accumulate import (
    GradientAccumulation,
    LossScaling,
    loss_scaling,
    master_of,
)
from maxtext_lite.training.gradients import GradientLoop

PARAMS = {"w": np.array([1.0, -2.0], np.float32), "b": np.float32(3.0)}


def test_is_a_multisteps_and_keeps_no_accumulator():
    accumulation = GradientAccumulation(optax.adam(0.1))
    assert isinstance(accumulation, optax.MultiSteps)
    state = accumulation.init(PARAMS)
    assert jax.tree.leaves(state.acc_grads) == []
    assert not accumulation.has_updated(state)


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
    np.testing.assert_array_equal(total["w"], 512.0)


def test_leading_dims_hold_one_accumulator_each():
    accumulator = GradientAccumulation(optax.sgd(1.0)).accumulator(PARAMS, 4)
    assert accumulator["w"].shape == (4, 2)
    assert accumulator["b"].shape == (4,)


def test_a_master_copy_keeps_what_bfloat16_parameters_would_lose():
    """A thousand steps of 1e-3 from 1: bfloat16 alone stays at 1, as 1 - 1e-3 rounds to 1, wherever it is."""
    ones = {"w": jnp.ones(3, jnp.bfloat16)}
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
            return accumulation.finish({"w": jnp.ones(3)}, state, params, 1e-3), None

        (params, state), _ = jax.lax.scan(step, (params, state), length=1000)
        assert params["w"].dtype == jnp.bfloat16
        np.testing.assert_allclose(params["w"].astype(jnp.float32), expected, atol=1e-3)
    assert master_of(state)["w"].dtype == jnp.float32
    np.testing.assert_allclose(
        master_of(state)["w"], 0, atol=1e-4
    )  # each of its thousand sums is rounded to 2^-24


@pytest.mark.fast
def test_three_steps_of_a_narrow_weight_by_hand():
    """From 1 with momentum 0.5, rate 2^-10 and gradients 1, 2, 0: the trace is 1, 2.5, 1.25."""
    accumulation = GradientAccumulation(optax.trace(0.5))
    params = {"w": jnp.ones((), jnp.bfloat16)}
    state = accumulation.init(params)
    for gradient, master, weight in (
        (1.0, 1 - 1 / 1024, 1.0),  # half of bfloat16's step below 1, 2^-8, is 2^-9
        (2.0, 1 - 3.5 / 1024, 1 - 4 / 1024),
        (0.0, 1 - 4.75 / 1024, 1 - 4 / 1024),
    ):
        params, state = accumulation.finish(
            {"w": jnp.float32(gradient)}, state, params, 2.0**-10
        )
        assert (float(master_of(state)["w"]), float(params["w"])) == (master, weight)


def test_only_narrow_parameters_have_masters():
    accumulation = GradientAccumulation(optax.identity())
    assert master_of(accumulation.init(PARAMS)) is None


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


@pytest.mark.parametrize("k", [1, 3])
def test_driven_as_any_multisteps_it_does_what_the_original_does_and_the_train_steps_way_ends_there_too(
    k,
):
    """Three steps of k equal micro-batches; the train step's gradients are divided by k before they are added up."""
    rng = np.random.default_rng(k)
    stream = {"w": rng.normal(size=(3 * k, 2)), "b": rng.normal(size=3 * k)}
    stream = jax.tree.map(np.float32, stream)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    want, want_about = _driven(optax.MultiSteps(inner, k, use_grad_mean=False), stream)
    got, about = _driven(GradientAccumulation(inner, every_k_schedule=k), stream)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    jax.tree.map(np.testing.assert_array_equal, about, want_about)
    assert about[1].tolist() == [(i + 1) // k for i in range(3 * k)]

    mean, _ = _driven(optax.MultiSteps(inner, k), stream)
    ours = GradientAccumulation(optax.chain(inner, optax.scale(-1.0)))

    @jax.jit
    def as_the_train_step(stream):
        params, state = PARAMS, ours.init(PARAMS)
        for step in range(3):
            accumulator = ours.accumulator(params)
            for micro in range(k):
                gradients = jax.tree.map(
                    lambda g, at=step * k + micro: g[at] / k, stream
                )
                accumulator = ours.accumulate(accumulator, gradients)
            params, state = ours.finish(accumulator, state, params, 1.0)
        return params

    params = as_the_train_step(stream)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, mean)


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


def test_a_fixed_scale_stays():
    assert _after(LossScaling(fixed=128.0, growth_interval=1), [1, 0, 1]) == [128.0] * 3
    assert not LossScaling(128.0, 1).may_shrink(128.0)
    assert LossScaling(0, 1).may_shrink(2.0)
    assert not LossScaling(0, 1).may_shrink(1.0)


def test_only_float16_is_scaled():
    assert loss_scaling(load_config(None, ["dtype=bfloat16"])) is None
    assert loss_scaling(
        load_config(None, ["dtype=float16", "loss_scale=8"])
    ) == LossScaling(8.0, 2000)


def norm(tree):
    return np.sqrt(
        sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree))
    )


def gradients_by(it, like):
    """The compiled gradients of a step of batches like this one, as a function of (batch, loss scale)."""
    with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
        step = (
            jax.jit(GradientLoop(it.parts).of_step)
            .lower(it.abstract.params, like, None, np.float32(1))
            .compile()
        )

    def of(batch, scale):
        with jax.set_mesh(it.mesh):
            return jax.device_get(
                step(it.state().params, batch, None, np.float32(scale))
            )

    return of


def test_float16_gradients_are_near_float32s_whatever_the_scale_and_small_ones_survive_only_scaled(
    setup, rows
):
    """Weights of 2^-24 make a loss whose gradients in float16 all round to zero."""
    wide = setup("optimizer=sgd")
    want = wide.gradients(wide.state().params, wide.batch(rows, 1, 16))
    for accumulation, mesh in ((1, {}), (4, {"data": 2, "fsdp": 2})):
        it = setup("optimizer=sgd", "dtype=float16", **mesh)
        batch = it.batch(rows, accumulation, 16 // accumulation)
        narrow = gradients_by(it, batch)
        for scale in (1.0, 2.0**14):
            got = narrow(batch, scale)
            assert norm(
                jax.tree.map(np.subtract, got.gradients, want.gradients)
            ) < 5e-3 * norm(want.gradients)
            assert got.loss == pytest.approx(want.loss, rel=1e-3)
        tiny = it.batch(
            rows | {"weights": rows["weights"] * np.float32(2.0**-24)},
            accumulation,
            16 // accumulation,
        )
        lost, kept = (norm(narrow(tiny, scale).gradients) for scale in (1.0, 2.0**30))
        whole = norm(want.gradients) * 2.0**-24
        assert lost < 0.5 * whole
        assert kept == pytest.approx(whole, rel=0.02)


def test_an_overflow_is_skipped_and_halves_the_scale(setup, rows):
    """At 2^127 float16 overflows: each step halves the scale and leaves everything else, until one fits."""
    it = setup("optimizer=adamw", "dtype=float16", "loss_scale_growth_interval=1000")
    batch = it.batch(rows, 2, 8)
    compiled = it.compile_step(batch)
    state = it.state()
    skip_state = state.opt_state.skip_state._replace(scale=jnp.float32(2.0**30))
    state = dataclasses.replace(
        state, opt_state=state.opt_state._replace(skip_state=skip_state)
    )
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
