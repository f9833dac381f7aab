"""The updates of a batch of responses do not depend on how it is split into chunks, nor on the mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from maxtext_lite.parallel import Pipeline
from maxtext_lite.training.optimizer import learning_rate_schedule
from maxtext_lite.training.step import ChunkedStep, make_train_step
from tests.responses import AGGREGATIONS, PAIRS, chunks_of, rows, variant
from tests.training.conftest import agrees, setup  # noqa: F401

SGD = ("optimizer=sgd", "learning_rate=0.5")
UPDATES = 5
"""Of the same batch: from the second on, ratios are those of num_iterations > 1."""
# Between them every algorithm, aggregation, KL with and without, and importance weights with and without.
POLICIES = {
    "seq_mean_token_mean": variant(
        algo="gspo", epsilon_low=0.003, epsilon_high=0.004, compares=True, correction_cap=2.0
    ),
    "token_mean": variant(aggregation="token_mean", beta=0.0, compares=True, correction_cap=1.2),
    "seq_mean_token_sum_norm": variant(aggregation="seq_mean_token_sum_norm"),
}
MESHES = {
    "1": ({}, None),
    "data 2 fsdp 2 tensor 2": ({"data": 2, "fsdp": 2, "tensor": 2}, None),
    "context 2 data 2": ({"context": 2, "data": 2}, None),
    "gpipe": ({"fsdp": 2}, Pipeline(2, 2)),
    "1f1b": ({"data": 2}, Pipeline(2, 2, schedule="1f1b")),
}
# mesh, pairs of a chunk, row slots of a chunk; 4 prompts with 2 responses each
SPLITS = [
    *(("1", aggregation, micro, micro) for aggregation in AGGREGATIONS for micro in (2, 4, 8)),
    *(
        (mesh, aggregation, micro, slots)
        for shift, mesh in enumerate(list(MESHES)[1:])
        for aggregation, (micro, slots) in zip(
            AGGREGATIONS, (((2, 4), (4, 4), (8, 8)) * 2)[shift % 3 : shift % 3 + 3], strict=True
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def unsplit(setup):  # noqa: F811
    """State and metrics of each aggregation's updates, the batch in one piece, by the step in one piece."""

    def updates(aggregation):
        it = setup(*SGD)
        (batch,) = chunks_of(rows(), it.mesh, micro=PAIRS, slots=PAIRS)
        schedule = learning_rate_schedule(it.config, last=it.config.steps)
        with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
            step = make_train_step(dataclasses.replace(it.parts, objective=POLICIES[aggregation]), schedule)
            return it.run(step.lower(it.abstract, batch, None).compile(), batch, UPDATES)

    return {aggregation: updates(aggregation) for aggregation in AGGREGATIONS}


@pytest.mark.parametrize(("mesh", "aggregation", "micro", "slots"), SPLITS)
def test_updates_of_chunks_are_those_of_the_unsplit_batch(mesh, aggregation, micro, slots, setup, unsplit, agrees):  # noqa: F811
    sizes, pipeline = MESHES[mesh]
    it, policy = setup(*SGD, **sizes, pipeline=pipeline), POLICIES[aggregation]
    want, want_metrics = unsplit[aggregation]
    parts = dataclasses.replace(it.parts, objective=policy)
    schedule, expected = learning_rate_schedule(it.config, last=it.config.steps), policy.expected(PAIRS)
    with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
        step = ChunkedStep(parts, schedule, expected=expected)
        state, metrics = it.state(), []
        for _ in range(UPDATES):
            sums = step.start()
            for chunk in chunks_of(rows(), it.mesh, micro=micro, slots=slots):
                sums = jax.block_until_ready(step.add(state, sums, chunk))
            state, found = step.update(state, sums)
            metrics.append(jax.device_get(found))
    assert step.add._cache_size() == step.update._cache_size() == 1  # one executable for all chunks of all batches
    got = jax.device_get(state.params)
    agrees(jax.tree.map(lambda x, like: np.reshape(x, like.shape), got, want.params), want.params)
    for name in set(want_metrics[0]) - {"groups", "group_squares"}:
        values = [[m[name] for m in each] for each in (metrics, want_metrics)]
        np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-7, err_msg=name)
    # The policy has moved away from the one that it was: another share of its ratios is clipped.
    shares = [m["clip_fraction_low"] + m["clip_fraction_high"] for m in want_metrics]
    assert len({float(share) for share in shares}) > 1
    assert [m["target_tokens"] for m in metrics] == [41] * UPDATES
