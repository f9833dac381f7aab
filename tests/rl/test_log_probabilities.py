"""Log-probabilities are those of the tempered softmax in double precision, in the batch's order on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.parallel import sharding
from maxtext_lite.parallel.pipeline import Pipeline
from maxtext_lite.post_training.log_probabilities import make_log_probabilities
from maxtext_lite.training.step import TRAIN_BATCH_AXES
from tests.responses import rows
from tests.training.conftest import make_setup

MESHES = {
    "data 2 context 2 tensor 2, tiled, soft cap": (
        {"data": 2, "context": 2, "tensor": 2},
        None,
        0.1,
        ("num_vocab_tiling=2", "final_logits_soft_cap=0.1"),
    ),
    "data 2, 1f1b": ({"data": 2}, Pipeline(2, 2, schedule="1f1b"), 0, ()),
}


def in_double(soft_cap):
    it = make_setup("optimizer=sgd")
    batch, params = rows(), it.initial.params

    @jax.jit
    def hidden(params):
        return it.decoder.hidden(
            params, batch["tokens"], batch["segments"], batch["positions"]
        ), it.decoder.head(params)

    with jax.default_matmul_precision("highest"):
        x, head = (np.asarray(a, np.float64) for a in hidden(params))
    logits = x @ head
    logits = (soft_cap * np.tanh(logits / soft_cap) if soft_cap else logits) / 0.7
    log_probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    of_target = np.take_along_axis(log_probability, batch["targets"][..., None], -1)[
        ..., 0
    ]
    return np.where(batch["weights"] > 0, of_target, 0)


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_gives_them_in_the_order_of_the_batch(name):
    mesh, pipeline, soft_cap, keys = MESHES[name]
    it = make_setup("optimizer=sgd", *keys, **mesh, pipeline=pipeline)
    batch = it.batch(rows(), 2, 4)  # row j in micro-batch j % 2, slot j // 2
    with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
        function = make_log_probabilities(it.parts, 0.7)
        found = function(it.state().params, batch)
    assert found.dtype == jnp.float32
    assert found.sharding.is_equivalent_to(sharding(it.mesh, TRAIN_BATCH_AXES), 3)
    got = np.asarray(found).swapaxes(0, 1).reshape(8, -1)
    np.testing.assert_allclose(got, in_double(soft_cap), rtol=1e-5, atol=1e-6)
