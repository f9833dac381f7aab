"""Latent attention against a float64 loop over heads and tokens, in training, on a mesh, and token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext_lite.config import Mla
from maxtext_lite.models import Decoder, DecoderShape, Scoring
from maxtext_lite.models.attention import attention
from maxtext_lite.models.latent_attention import LatentAttention
from maxtext_lite.models.rotary import Rope, rotary_angles

B, T, D, N = 2, 9, 16, 2
WIDTHS = Mla(q_lora_rank=10, kv_lora_rank=7, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6)
SHAPE = DecoderShape(
    vocab_size=31, emb_dim=D, num_query_heads=N, num_kv_heads=N, head_dim=9, mlp_dim=12, num_layers=2, latent=WIDTHS,
    rotary_dim=4, initializer_range=0.3,
)  # fmt: skip
SEGMENT = np.array([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2])
POSITION = np.array([[*range(5), *range(4)], [*range(7), 0, 1]])


def _normed(x, scale):
    return x / np.sqrt((x**2).mean() + 1e-6) * scale


def _turned(x, position):
    angle = position / 10_000.0 ** (np.arange(2) / 2)
    z = (x[:2] + 1j * x[2:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag])


def _by_loops(w, x):
    """float64, one query, key and head at a time, as the paper's equations 37 to 47 are written."""
    y = np.zeros((B, T, D))
    for b in range(B):
        latent = [x[b, t] @ w["kv_down"] for t in range(T)]
        keys = [_normed(c[:7], w["kv_down_norm"]["scale"]) for c in latent]
        for t in range(T):
            if "query" in w:
                query = np.einsum("D,DNH->NH", x[b, t], w["query"])
            else:
                low = _normed(x[b, t] @ w["query_down"], w["query_down_norm"]["scale"])
                query = np.einsum("R,RNH->NH", low, w["query_up"])
            for n in range(N):
                seen = [s for s in range(t + 1) if SEGMENT[b, s] == SEGMENT[b, t]]
                score = [
                    query[n, :5] @ (keys[s] @ w["key_up"][:, n])
                    + _turned(query[n, 5:], POSITION[b, t]) @ _turned(latent[s][7:], POSITION[b, s])
                    for s in seen
                ]
                share = np.exp(np.array(score) / 3)
                value = sum(p * (keys[s] @ w["value_up"][:, n]) for p, s in zip(share, seen, strict=True))
                y[b, t] += value / share.sum() @ w["out"][n]
    return y


@pytest.mark.parametrize("query_rank", [10, 0])
def test_latent_attention_equals_a_loop(query_rank):
    shape = dataclasses.replace(SHAPE, latent=dataclasses.replace(WIDTHS, q_lora_rank=query_rank))
    module = LatentAttention(shape, rngs=nnx.Rngs(params=0))
    rng = np.random.default_rng(0)
    module.kv_down_norm.scale[...] = jnp.asarray(rng.normal(size=7), jnp.float32)
    x = rng.normal(size=(B, T, D)).astype(np.float32)
    segment = jnp.asarray(SEGMENT)

    def attend(q, k, v, sink):
        assert sink is None
        return attention(q, k, v, segment, kernel="dot_product", strategy="ring", scoring=Scoring()), None

    with jax.default_matmul_precision("highest"):
        got, _ = module(x, rotary_angles(jnp.asarray(POSITION), Rope(4, 1e4)), attend)
    weights = jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(module)))
    real = SEGMENT > 0
    np.testing.assert_allclose(np.asarray(got)[real], _by_loops(weights, np.float64(x))[real], atol=2e-5)


def test_decoding_token_by_token_equals_the_whole():
    decoder = Decoder(SHAPE)
    params = jax.jit(decoder.init)(jax.random.key(0))
    token = jnp.asarray(np.random.default_rng(1).integers(0, 31, (B, T)))
    whole = decoder.hidden(params, token, jnp.ones_like(token), jnp.tile(jnp.arange(T), (B, 1)))
    cache = decoder.new_cache(B, 16)
    assert cache.value is None
    assert cache.key.shape == (2, B, 1, 16, 7 + 4)  # the latent vector and what is rotated, whatever the heads
    decode = jax.jit(decoder.decode)
    first, cache = decode(params, token[:, :4], jnp.zeros(B, jnp.int32), cache)
    parts = [first]
    for t in range(4, T):
        part, cache = decode(params, token[:, t : t + 1], jnp.full(B, t), cache)
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-5)
