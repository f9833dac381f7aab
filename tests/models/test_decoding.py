"""The cache gives what the whole sequence gives; draws follow temperature, top-k and top-p."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import Decoder, DecoderShape, ExpertShape, KVCache, Sampling, sample_token

SHAPE = DecoderShape(vocab_size=31, emb_dim=16, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24, num_layers=2)


@pytest.mark.parametrize("experts", [None, ExpertShape(6, 2, 10, num_shared=1, biased=True)], ids=["mlp", "experts"])
def test_decoding_from_the_cache_equals_the_whole_sequence(experts):
    decoder = Decoder(dataclasses.replace(SHAPE, experts=experts))
    params = jax.tree.map(lambda x: 4 * x, jax.jit(decoder.init)(jax.random.key(0)))
    lengths, total = np.array([3, 7]), 12
    tokens = np.random.default_rng(0).integers(0, 31, (2, total)).astype(np.int32)
    position = jnp.tile(jnp.arange(total), (2, 1))
    whole = jax.jit(lambda p: decoder.hidden(p, tokens, jnp.ones_like(tokens), position))(params)

    # Prompts of different lengths, padded with junk that must be overwritten and never seen.
    prompt = np.where(np.arange(7)[None] < lengths[:, None], tokens[:, :7], 30)
    decode = jax.jit(decoder.decode)
    x, cache = decode(params, prompt, jnp.zeros(2, jnp.int32), KVCache.empty(SHAPE, 2, 16))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(x[row, :length], whole[row, :length], rtol=1e-4, atol=1e-5)
    for added in range(total - 7):
        at = lengths + added
        x, cache = decode(params, tokens[np.arange(2), at][:, None], jnp.asarray(at), cache)
        np.testing.assert_allclose(x[:, 0], whole[np.arange(2), at], rtol=1e-4, atol=1e-5)


LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1]))


def _frequencies(sampling, draws=20_000):
    keys = jax.random.split(jax.random.key(0), draws)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (draws, 4))
    tokens, log_probabilities = jax.jit(lambda l, k: sample_token(l, k, sampling))(logits, keys)
    np.testing.assert_allclose(log_probabilities, LOGITS[tokens], rtol=1e-5)  # of the model, whatever the restriction
    return np.bincount(tokens, minlength=4) / draws


@pytest.mark.parametrize(("sampling", "expected"), [
    (Sampling(temperature=0), [1, 0, 0, 0]),
    (Sampling(temperature=1), [0.5, 0.25, 0.15, 0.1]),
    (Sampling(temperature=0.5), [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),  # p^2, normalised
    (Sampling(top_k=2), [2 / 3, 1 / 3, 0, 0]),
    (Sampling(top_k=100), [0.5, 0.25, 0.15, 0.1]),
    (Sampling(top_p=0.6), [2 / 3, 1 / 3, 0, 0]),  # 0.5 does not reach 0.6, 0.75 does
    (Sampling(top_p=0.01), [1, 0, 0, 0]),
    (Sampling(top_k=3, top_p=0.8), [2 / 3, 1 / 3, 0, 0]),  # of the three: 0.556, 0.833
], ids=str)  # fmt: skip
def test_draws_follow_the_asked_distribution(sampling, expected):
    np.testing.assert_allclose(_frequencies(sampling), expected, atol=0.015)
