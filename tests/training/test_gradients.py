"""Batches in chunks add up to the same step as all at once, and their gradients cross the data axis once.

In pipelines and on other meshes: the responses of tests/invariance/test_matrix.py.
"""

import dataclasses
import re

import jax
import numpy as np

from maxtext_lite.analysis.hlo import collectives
from maxtext_lite.parallel import sharding
from maxtext_lite.training.objective import NEXT_TOKEN
from maxtext_lite.training.optimizer import learning_rate_schedule
from maxtext_lite.training.step import TRAIN_BATCH_AXES, ChunkedStep

ACCUMULATION = 4


class Chunked:
    """A chunked step, compiled for chunks of the shape of a micro-batch of `batch`."""

    def __init__(self, it, batch, expected, objective=NEXT_TOKEN):
        self.it, parts = it, dataclasses.replace(it.parts, objective=objective)
        schedule = learning_rate_schedule(it.config, last=it.config.steps)
        with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
            step = ChunkedStep(parts, schedule, expected=expected)
            self.start = step.start.lower().compile()
            sums = jax.tree.map(
                lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
                jax.eval_shape(step.start),
                self.start.output_shardings,
            )
            chunk = {
                name: jax.ShapeDtypeStruct(
                    (1, *x.shape[1:]), x.dtype, sharding=x.sharding
                )
                for name, x in batch.items()
            }
            self.chunk = step.add.lower(it.abstract, sums, chunk).compile()
            self.update = step.update.lower(it.abstract, sums).compile()

    def run(self, batch, steps):
        state, metrics = self.it.state(), []
        where = sharding(self.it.mesh, TRAIN_BATCH_AXES)
        for _ in range(steps):
            sums = self.start()
            for index in range(ACCUMULATION):
                chunk = {
                    name: jax.device_put(np.asarray(x)[index : index + 1], where)
                    for name, x in batch.items()
                }
                sums = jax.block_until_ready(self.chunk(state, sums, chunk))
            state, found = self.update(state, sums)
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
    chunked = Chunked(it, batch, 3 * counted)
    got, metrics = chunked.run(batch, 2)
    for found, wanted in zip(metrics, want_metrics, strict=True):
        assert set(found) == set(wanted)
        assert wanted["groups"] > 1
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-5, err_msg=key)
    assert got.progress.tokens.tolist() == want.progress.tokens.tolist()
    assert got.progress.examples.tolist() == want.progress.examples.tolist() == [0, 32]
    agrees(got.params, want.params)
    gradients_cross_in_the_update_alone(it, chunked)
    infinite = np.where(rows["weights"] > 0, np.float32(np.inf), 0)
    for weights in (np.zeros_like(infinite), infinite):
        bad = it.batch(rows | {"weights": weights}, ACCUMULATION, 4)
        state, (metrics,) = chunked.run(bad, 1)
        assert metrics["skipped"]
        assert state.step == 1
        for part in ("params", "opt_state", "progress"):
            unchanged = getattr(state, part), getattr(it.initial, part)
            jax.tree.map(np.testing.assert_array_equal, *unchanged)


def gradients_cross_in_the_update_alone(it, chunked):
    """And sums are added to where they lie: of a chunk's results nothing is new but counts."""
    assert not collectives(chunked.start.as_text())
    assert not [
        c.line
        for c in collectives(chunked.chunk.as_text())
        if "data" in c.axes(it.mesh)
    ]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(it.decoder.abstract_params))
    reduced = sum(
        np.prod([int(n) for n in sizes.split(",")], dtype=int)
        for c in collectives(chunked.update.as_text())
        if "data" in c.axes(it.mesh)
        for sizes in re.findall(r"f32\[([\d,]+)\]", c.line.split(c.kind + "(")[0])
    )
    assert parameters <= reduced <= parameters + 100
    memory = chunked.chunk.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * parameters
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1000
