"""The outputs of a forward pass: logits and likelihoods, whole or split, and rows' weights spread over targets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_lite.training.outputs import TokenSplit, forward, spread_over_targets

HALVES = TokenSplit(
    lambda x: x.reshape(-1, x.shape[1] // 2, *x.shape[2:]), lambda x: x.reshape(-1, 2 * x.shape[1], *x.shape[2:])
)


def test_likelihoods_and_logits_are_each_others_and_the_same_in_shares(setup, rows):
    it = setup("num_vocab_tiling=2", "final_logits_soft_cap=3.0")

    @jax.jit
    def found(params):
        whole = forward(it.decoder, params, rows, it.config)
        shared = dataclasses.replace(whole, x_BTD=HALVES.split(whole.x_BTD), tokens=HALVES)
        return [(each.nll(rows["targets"]), each.logits()) for each in (whole, shared)], whole.scored_nll(
            rows["targets"]
        )

    with jax.default_matmul_precision("highest"):
        ((nll, logits), shared), scored = jax.device_get(found(it.initial.params))
    log_probability = np.take_along_axis(jax.nn.log_softmax(logits), rows["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(nll, -log_probability, rtol=1e-5)
    np.testing.assert_allclose(scored, nll, rtol=1e-6)
    np.testing.assert_allclose(shared[0], nll, rtol=1e-6)
    np.testing.assert_allclose(shared[1], logits, rtol=1e-5, atol=1e-6)


def test_target_tokens_share_a_row_s_weight_alike():
    rows = {"weights": jnp.array([[0.5, 1.0, 0.0], [0.0, 0.0, 0.0]])}
    weight_BT, weight_B = spread_over_targets(jnp.array([3.0, 4.0]), rows)
    assert weight_BT.tolist() == [[1.5, 1.5, 0.0], [0.0, 0.0, 0.0]]
    assert weight_B.tolist() == [3.0, 4.0]
