"""Local updates against plain training, against a closed form, and in what is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.parallel.hlo import collectives
from maxtext_lite.training.local_updates import LocalUpdates, local_updates
from maxtext_lite.training.step import make_summarise, make_synchronise


def _run(it, compiled, batch, steps):
    """State after `steps` steps with a meeting every sync_period, and each step's metrics for the whole step."""
    with jax.set_mesh(it.mesh):
        synchronise = make_synchronise(it.decoder, it.optimizer, it.mesh, it.local)
        summarise = make_summarise(it.mesh)
    state, metrics = it.state(), []
    for step in range(1, steps + 1):
        state, step_metrics = jax.block_until_ready(compiled(state, batch, None))
        metrics.append(jax.device_get(summarise(step_metrics)))
        if step % it.local.sync_period == 0:
            state = jax.block_until_ready(synchronise(state))
    return jax.device_get(state), metrics


OUTER = ("diloco_outer_lr=1", "diloco_outer_momentum=0", "diloco_sync_period=2")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_one_replica_that_averages_with_itself_is_plain_training(optimizer, setup, rows, agrees):
    plain, alone = setup(f"optimizer={optimizer}"), setup(f"optimizer={optimizer}", *OUTER, replicas=1)
    batch = plain.batch(rows, 2, 8)
    want, want_metrics = plain.run(plain.compile_step(batch), batch, 5)
    got, got_metrics = _run(alone, alone.compile_step(batch), batch, 5)
    if optimizer == "sgd":
        agrees(jax.tree.map(lambda p: p[0], got.params), want.params)
    for name in ("loss", "grad_norm", "learning_rate", "target_tokens"):
        np.testing.assert_allclose([m[name] for m in got_metrics], [m[name] for m in want_metrics], rtol=1e-5)


def test_replicas_train_on_their_own_rows_and_meet_in_the_mean(setup, rows, agrees):
    """Four replicas on two data shards, three steps and a meeting: each as a plain run on its quarter of the rows."""
    keys = ("optimizer=sgd", "diloco_outer_lr=1", "diloco_outer_momentum=0", "diloco_sync_period=3")
    it, one = setup(*keys, data=2, fsdp=2, replicas=4), setup(*keys)
    state, metrics = _run(it, it.compile_step(it.batch(rows, 1, 16)), it.batch(rows, 1, 16), 3)
    ends, losses, tokens = [], [], []
    for replica in range(4):
        own = {name: array[4 * replica : 4 * replica + 4] for name, array in rows.items()}
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
        lambda p, m: np.testing.assert_array_equal(p, np.broadcast_to(m, p.shape)), state.params, state.outer.params
    )
    np.testing.assert_allclose([m["loss"] for m in metrics], np.average(losses, axis=0, weights=tokens), rtol=1e-5)
    assert metrics[0]["target_tokens"] == sum(tokens)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.0), (0.7, 0.9), (1.0, 0.9)])
def test_four_replicas_of_a_quadratic_follow_the_closed_form(lr, momentum):
    """Replica r minimises (x - c_r)^2 / 2 by H steps of rate e: x -> c_r + (1 - e)^H (x - c_r). With q = (1 - e)^H and
    the mean c of the c_r, the outer gradient is (1 - q)(x - c): Nesterov SGD on a quadratic around c."""
    local = LocalUpdates(num_replicas=4, sync_period=5, outer_lr=lr, outer_momentum=momentum)
    centres, rate = np.array([1.0, -2.0, 4.0, 0.5]), 0.1
    q = (1 - rate) ** 5
    outer = local.outer_state({"x": jnp.float32(3.0)})
    x_R = local.copies({"x": jnp.float32(3.0)})
    x, v = 3.0, 0.0
    for _ in range(6):
        for _ in range(5):
            x_R = {"x": x_R["x"] - rate * (x_R["x"] - centres)}
        x_R, outer = local.synchronised(x_R, outer)
        gradient = (1 - q) * (x - centres.mean())
        v = momentum * v + gradient
        x -= lr * (gradient + momentum * v)
        assert float(outer.params["x"]) == pytest.approx(x, rel=1e-5)
        np.testing.assert_array_equal(x_R["x"], np.full(4, np.float32(outer.params["x"])))


def test_nothing_crosses_the_replicas_between_synchronisations(setup, rows):
    it = setup("optimizer=adamw", data=4, fsdp=2, replicas=4)
    batch = it.batch(rows, 2, 8)
    inner = it.compile_step(batch)
    found = collectives(inner.as_text())
    assert found  # within a replica, over fsdp
    assert not [c.line for c in found if c.crosses(it.mesh, "data")]
    with jax.set_mesh(it.mesh):
        meeting = make_synchronise(it.decoder, it.optimizer, it.mesh, it.local).lower(it.abstract).compile()
    assert [c for c in collectives(meeting.as_text()) if c.crosses(it.mesh, "data")]


def test_a_replica_skips_for_itself(setup, rows):
    it = setup("optimizer=sgd", "diloco_sync_period=9", data=2, replicas=2)
    bad = {name: array.copy() for name, array in rows.items()}
    bad["weights"][0, 0] = np.nan  # in the first replica's half
    state, (metrics,) = _run(it, it.compile_step(it.batch(bad, 1, 16)), it.batch(bad, 1, 16), 1)
    start, end = (jax.tree.leaves(tree.params) for tree in (it.initial, state))
    moved = [any(not np.array_equal(p[r], q[r]) for p, q in zip(start, end, strict=True)) for r in range(2)]
    assert moved == [False, True]
    assert metrics["skipped"]
    assert state.opt_state.gradient_step.tolist() == [0, 1]


def test_a_config_without_it_has_none():
    config = load_config(None, ["enable_diloco=true", "diloco_sync_period=7"])
    assert local_updates(config, None) is None
    assert dataclasses.asdict(local_updates(config, 4)) == {
        "num_replicas": 4, "sync_period": 7, "outer_lr": 0.7, "outer_momentum": 0.9,
    }  # fmt: skip
