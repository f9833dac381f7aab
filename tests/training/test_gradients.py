"""Batches in chunks add up to the same step as all at once, and their gradients cross the data axis once.

In pipelines and on other meshes: the responses of tests/invariance/test_matrix.py.
"""

import re

import jax
import numpy as np

from maxtext_lite.analysis.hlo import collectives
from maxtext_lite.parallel import sharding
from maxtext_lite.post_training.rollout_steps import ChunkedStep
from maxtext_lite.training.optimizer import learning_rate_schedule
from maxtext_lite.training.step import TRAIN_BATCH_AXES

ACCUMULATION = 4


def chunk_of(it, batch, index):
    """One micro-batch of a batch, as a batch of its own."""
    where = sharding(it.mesh, TRAIN_BATCH_AXES)
    one = slice(index, index + 1)
    return {
        name: jax.device_put(np.asarray(x)[one], where) for name, x in batch.items()
    }


def run_chunks(it, step, batch, steps):
    """State and metrics of steps of one micro-batch after another."""
    state, metrics = it.state(), []
    with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
        for _ in range(steps):
            sums = step.start()
            for index in range(ACCUMULATION):
                chunk = chunk_of(it, batch, index)
                sums = jax.block_until_ready(step.add(state, sums, chunk))
            state, found = step.update(state, sums)
            metrics.append(jax.device_get(found))
    return jax.device_get(state), metrics


SGD = ("optimizer=sgd", "learning_rate=0.5", "z_loss_multiplier=1e-3")
EXPERTS = "num_experts=4 num_experts_per_tok=2 base_moe_mlp_dim=8 routed_bias=true load_balance_loss_weight=0.1"


def test_chunks_one_by_one_are_the_step_of_all_micro_batches(setup, rows, agrees):
    """Although the expected count is three times the actual one."""
    it = setup(*SGD, *EXPERTS.split(), data=2)
    batch = it.batch(rows, ACCUMULATION, 4)
    counted = np.count_nonzero(rows["weights"])
    want, want_metrics = it.run(it.compile_step(batch), batch, 2)
    schedule = learning_rate_schedule(it.config, last=it.config.steps)
    with jax.set_mesh(it.mesh):
        step = ChunkedStep(it.parts, schedule, expected=3 * counted)
    got, metrics = run_chunks(it, step, batch, 2)
    for found, wanted in zip(metrics, want_metrics, strict=True):
        assert set(found) == set(wanted)
        assert wanted["groups"] > 1
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-5, err_msg=key)
    assert got.progress.tokens.tolist() == want.progress.tokens.tolist()
    assert got.progress.examples.tolist() == want.progress.examples.tolist() == [0, 32]
    agrees(got.params, want.params)
    gradients_cross_in_the_update_alone(it, step, chunk_of(it, batch, 0))
    infinite = np.where(rows["weights"] > 0, np.float32(np.inf), 0)
    for weights in (np.zeros_like(infinite), infinite):
        bad = it.batch(rows | {"weights": weights}, ACCUMULATION, 4)
        state, (metrics,) = run_chunks(it, step, bad, 1)
        assert metrics["skipped"]
        assert state.step == 1
        for part in ("params", "opt_state", "progress"):
            unchanged = getattr(state, part), getattr(it.initial, part)
            jax.tree.map(np.testing.assert_array_equal, *unchanged)


def gradients_cross_in_the_update_alone(it, step, chunk):
    """And sums are added to where they lie: of a chunk's results nothing is new but counts."""
    with jax.set_mesh(it.mesh):
        start, sums = step.start.lower().compile(), step.start()
        add = step.add.lower(it.abstract, sums, chunk).compile()
        update = step.update.lower(it.abstract, sums).compile()
    assert not collectives(start.as_text())
    across = [c for c in collectives(add.as_text()) if "data" in c.axes(it.mesh)]
    assert not across
    parameters = sum(leaf.size for leaf in jax.tree.leaves(it.decoder.abstract_params))
    reduced = sum(
        np.prod([int(n) for n in sizes.split(",")], dtype=int)
        for c in collectives(update.as_text())
        if "data" in c.axes(it.mesh)
        for sizes in re.findall(r"f32\[([\d,]+)\]", c.line.split(c.kind + "(")[0])
    )
    assert parameters <= reduced <= parameters + 100
    memory = add.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * parameters
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1000
