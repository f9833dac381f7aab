"""Local updates against plain training, against a closed form, and in what is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training.accumulate import master_of, with_master
from maxtext_lite.training.local_updates import LocalUpdates, local_updates
from maxtext_lite.training.step import make_summarise, make_synchronise
from maxtext_lite.xla.hlo import collectives


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


OUTER = ("diloco_outer_lr=1", "diloco_outer_momentum=0", "diloco_sync_period=2")


def test_one_replica_that_averages_with_itself_is_plain_training(setup, rows, agrees):
    keys = ("optimizer=sgd", "sgd_momentum=0.9")
    plain, alone = setup(*keys), setup(*keys, *OUTER, replicas=1)
    batch = plain.batch(rows, 2, 8)
    want, want_metrics = plain.run(plain.compile_step(batch), batch, 5)
    got, got_metrics = _run(alone, alone.compile_step(batch), batch, 5)
    agrees(jax.tree.map(lambda p: p[0], got.params), want.params)
    for name in ("loss", "grad_norm", "learning_rate", "target_tokens"):
        np.testing.assert_allclose(
            [m[name] for m in got_metrics], [m[name] for m in want_metrics], rtol=1e-5
        )


def test_replicas_train_on_their_own_rows_and_are_averaged(setup, rows, agrees):
    """Four replicas on two data shards, three steps, one synchronisation: each trains on its quarter of the rows."""
    keys = (
        "optimizer=sgd",
        "diloco_outer_lr=1",
        "diloco_outer_momentum=0",
        "diloco_sync_period=3",
    )
    it, one = setup(*keys, data=2, fsdp=2, replicas=4), setup(*keys)
    state, metrics = _run(
        it, it.compile_step(it.batch(rows, 1, 16)), it.batch(rows, 1, 16), 3
    )
    ends, losses, tokens = [], [], []
    for replica in range(4):
        own = {
            name: array[4 * replica : 4 * replica + 4] for name, array in rows.items()
        }
        batch = one.batch(own, 1, 4)
        if replica == 0:
            compiled = one.compile_step(batch)
        end, own_metrics = one.run(compiled, batch, 3)
        ends.append(end.params)
        losses.append([m["loss"] for m in own_metrics])
        tokens.append(own_metrics[0]["target_tokens"])
    mean = jax.tree.map(lambda *p: np.mean(np.stack(p), axis=0), *ends)
    agrees(state.outer.params, mean)
    jax.tree.map(
        lambda p, m: np.testing.assert_array_equal(p, np.broadcast_to(m, p.shape)),
        state.params,
        state.outer.params,
    )
    np.testing.assert_allclose(
        [m["loss"] for m in metrics],
        np.average(losses, axis=0, weights=tokens),
        rtol=1e-5,
    )
    assert metrics[0]["target_tokens"] == sum(tokens)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
@pytest.mark.fast
def test_four_replicas_of_a_quadratic_follow_the_closed_form(lr, momentum):
    """Replica r minimises (x - c_r)^2 / 2 by H steps of rate e: x -> c_r + (1 - e)^H (x - c_r). With q = (1 - e)^H and
    the mean c of the c_r, the outer gradient is (1 - q)(x - c): Nesterov SGD on a quadratic around c."""
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
        np.testing.assert_array_equal(
            x_R["x"], np.full(4, np.float32(outer.params["x"]))
        )


def test_masters_meet_and_weights_are_the_rounding_of_what_comes_of_it():
    """At 1 + 2^-9 and 1 + 3 x 2^-9, whose mean is 1 + 2^-8; in bfloat16 they are 1 and 1 + 2^-7."""
    local = LocalUpdates(
        num_replicas=2, sync_period=1, outer_lr=0.5, outer_momentum=0.0
    )
    outer = local.outer_state({"x": jnp.ones((), jnp.bfloat16)}, {"x": jnp.float32(1)})
    masters_R = {"x": jnp.array([1 + 2**-9, 1 + 3 * 2**-9], jnp.float32)}
    params_R = jax.tree.map(lambda x: x.astype(jnp.bfloat16), masters_R)
    synchronised = jax.jit(local.synchronised)
    for mean, after in ((1 + 2**-8, 1 + 2**-9), (1 + 2**-8, 1 + 1.5 * 2**-9)):
        x_R, outer = synchronised(params_R, outer, masters_R)
        assert float(np.mean(masters_R["x"])) == mean
        assert float(outer.master["x"]) == after
        assert x_R["x"].dtype == outer.params["x"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(x_R["x"], jnp.full(2, after, jnp.bfloat16))


def test_replicas_with_narrow_weights_go_on_from_the_masters_that_met(setup):
    it = setup("optimizer=adamw", "weight_dtype=bfloat16", *OUTER, data=2, replicas=2)
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
        np.testing.assert_array_equal(shared, 2 * was_R[0])
        np.testing.assert_array_equal(got_R, np.stack([shared, shared]))
        np.testing.assert_array_equal(rounded, shared.astype(rounded.dtype))


def test_nothing_crosses_the_replicas_between_synchronisations(setup, rows):
    it = setup("optimizer=adamw", data=4, fsdp=2, replicas=4)
    batch = it.batch(rows, 2, 8)
    inner = it.compile_step(batch)
    found = collectives(inner.as_text())
    assert found  # within a replica, over fsdp
    assert not [c.line for c in found if "data" in c.axes(it.mesh)]
    with jax.set_mesh(it.mesh):
        synchronise = make_synchronise(it.parts).lower(it.abstract).compile()
    assert [c for c in collectives(synchronise.as_text()) if "data" in c.axes(it.mesh)]


def test_a_replica_skips_for_itself(setup, rows):
    it = setup("optimizer=sgd", "diloco_sync_period=9", data=2, replicas=2)
    bad = {name: array.copy() for name, array in rows.items()}
    bad["weights"][0, 0] = np.nan  # in the first replica's half
    state, (metrics,) = _run(
        it, it.compile_step(it.batch(bad, 1, 16)), it.batch(bad, 1, 16), 1
    )
    start, end = (jax.tree.leaves(tree.params) for tree in (it.initial, state))
    moved = [
        any(not np.array_equal(p[r], q[r]) for p, q in zip(start, end, strict=True))
        for r in range(2)
    ]
    assert moved == [False, True]
    assert metrics["skipped"]
    assert state.opt_state.gradient_step.tolist() == [0, 1]


def test_a_config_without_it_has_none():
    config = load_config(None, ["enable_diloco=true", "diloco_sync_period=7"])
    assert local_updates(config, None) is None
    assert dataclasses.asdict(local_updates(config, 4)) == {
        "num_replicas": 4,
        "sync_period": 7,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
    }
