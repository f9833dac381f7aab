"""Local updates against plain training, against a closed form, and in what is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from maxtext_lite.analysis.hlo import collectives
from maxtext_lite.training.local_updates import LocalUpdates
from maxtext_lite.training.optimizer import master_of, with_master
from maxtext_lite.training.synchronise import make_summarise, make_synchronise


def _run(it, compiled, batch, steps):
    """State after `steps` steps, synchronised every sync_period, and each step's metrics for the whole step."""
    with jax.set_mesh(it.mesh):
        synchronise = make_synchronise(it.parts)
        summarise = make_summarise(it.parts)
    state, metrics = it.state(), []
    for step in range(1, steps + 1):
        state, step_metrics = jax.block_until_ready(compiled(state, batch, None))
        metrics.append(jax.device_get(summarise(step_metrics)))
        if step % it.local.sync_period == 0:
            state = jax.block_until_ready(synchronise(state))
    return jax.device_get(state), metrics


@pytest.fixture(scope="module")
def four(setup, rows):
    """Four replicas on two data shards, their batch, and their step."""
    it = setup(*KEYS, data=2, fsdp=2, replicas=4)
    batch = it.batch(rows, 1, 16)
    return it, batch, it.compile_step(batch)


KEYS = (
    "optimizer=sgd",
    "diloco_outer_lr=1",
    "diloco_outer_momentum=0",
    "diloco_sync_period=3",
)


def test_nothing_crosses_the_replicas_between_synchronisations(four):
    it, _, step = four
    found = collectives(step.as_text())
    assert found  # within a replica, over fsdp
    assert not [c.line for c in found if "data" in c.axes(it.mesh)]
    with jax.set_mesh(it.mesh):
        synchronise = make_synchronise(it.parts).lower(it.abstract).compile()
    assert [c for c in collectives(synchronise.as_text()) if "data" in c.axes(it.mesh)]


def test_a_replica_skips_for_itself(four, rows):
    it, _, step = four
    bad = {name: array.copy() for name, array in rows.items()}
    bad["weights"][0, 0] = np.nan  # in the first replica's quarter
    state, (metrics,) = _run(it, step, it.batch(bad, 1, 16), 1)
    start, end = (jax.tree.leaves(tree.params) for tree in (it.initial, state))
    moved = [
        any(not np.array_equal(p[r], q[r]) for p, q in zip(start, end, strict=True))
        for r in range(4)
    ]
    assert moved == [False, True, True, True]
    assert metrics["skipped"]
    assert state.opt_state.gradient_step.tolist() == [0, 1, 1, 1]


@pytest.mark.fast
def test_four_replicas_of_a_quadratic_follow_the_closed_form():
    """Replica r minimises (x - c_r)^2 / 2 by H steps of rate e: x -> c_r + (1 - e)^H (x - c_r). With q = (1 - e)^H and
    the mean c of the c_r, the outer gradient is (1 - q)(x - c): Nesterov SGD on a quadratic around c."""
    lr, momentum = 0.7, 0.9
    local = LocalUpdates(
        num_replicas=4, sync_period=5, outer_lr=lr, outer_momentum=momentum
    )
    centres, rate = np.array([1.0, -2.0, 4.0, 0.5]), 0.1
    q = (1 - rate) ** 5
    outer = local.outer_state({"x": jnp.float32(3.0)})
    x_R = local.copies({"x": jnp.float32(3.0)})
    synchronised = jax.jit(local.synchronised)
    x, v = 3.0, 0.0
    for _ in range(6):
        for _ in range(5):
            x_R = {"x": np.float32(x_R["x"] - rate * (x_R["x"] - centres))}
        x_R, outer = synchronised(x_R, outer)
        gradient = (1 - q) * (x - centres.mean())
        v = momentum * v + gradient
        x -= lr * (gradient + momentum * v)
        assert float(outer.params["x"]) == pytest.approx(x, rel=1e-5)
        assert_array_equal(x_R["x"], np.full(4, np.float32(outer.params["x"])))


def test_replicas_with_narrow_weights_go_on_from_the_masters_that_met(setup):
    it = setup(*KEYS, "optimizer=adamw", "weight_dtype=bfloat16", data=2, replicas=2)
    state = it.state()
    apart = jax.tree.map(
        lambda m: m * np.array([1.0, 3.0], np.float32).reshape(-1, *[1] * (m.ndim - 1)),
        jax.device_get(master_of(state.opt_state)),
    )
    placed = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding),
        apart,
        master_of(state.opt_state),
    )
    state = dataclasses.replace(state, opt_state=with_master(state.opt_state, placed))
    with jax.set_mesh(it.mesh):
        met = jax.device_get(make_synchronise(it.parts)(state))
    for got_R, shared, rounded, was_R in zip(
        *map(
            jax.tree.leaves,
            (master_of(met.opt_state), met.outer.master, met.outer.params, apart),
        ),
        strict=True,
    ):
        assert_array_equal(shared, 2 * was_R[0])
        assert_array_equal(got_R, np.stack([shared, shared]))
        assert_array_equal(rounded, shared.astype(rounded.dtype))
