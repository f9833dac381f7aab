"""Latent attention against a float64 loop over heads and tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext_lite.config import Mla
from maxtext_lite.models import DecoderShape
from maxtext_lite.models.attention import attention
from maxtext_lite.models.latent_attention import LatentAttention
from maxtext_lite.models.rotary import Rope, rotary_angles

B, T, D, N = 2, 9, 16, 2
WIDTHS = Mla(
    q_lora_rank=10, kv_lora_rank=7, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6
)
SHAPE = DecoderShape(
    vocab_size=31,
    emb_dim=D,
    num_query_heads=N,
    num_kv_heads=N,
    head_dim=9,
    mlp_dim=12,
    num_layers=2,
    latent=WIDTHS,
    rotary_dim=4,
)
SEGMENT = np.array([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2])
POSITION = np.array([[*range(5), *range(4)], [*range(7), 0, 1]])


def normed(x, scale):
    return x / np.sqrt((x**2).mean() + 1e-6) * scale


def turned(x, position):
    angle = position / 10_000.0 ** (np.arange(2) / 2)
    z = (x[:2] + 1j * x[2:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag])


def by_loops(w, x):
    """float64, one query, key and head at a time, as the paper's equations 37 to 47 are written."""
    y = np.zeros((B, T, D))
    for b, t in np.ndindex(B, T):
        latent = [x[b, s] @ w["kv_down"] for s in range(T)]
        keys = [normed(c[:7], w["kv_down_norm"]["scale"]) for c in latent]
        if "query" in w:
            query = np.einsum("D,DNH->NH", x[b, t], w["query"])
        else:
            low = normed(x[b, t] @ w["query_down"], w["query_down_norm"]["scale"])
            query = np.einsum("R,RNH->NH", low, w["query_up"])
        for n in range(N):
            seen = [s for s in range(t + 1) if SEGMENT[b, s] == SEGMENT[b, t]]
            score = [
                query[n, :5] @ (keys[s] @ w["key_up"][:, n])
                + turned(query[n, 5:], POSITION[b, t])
                @ turned(latent[s][7:], POSITION[b, s])
                for s in seen
            ]
            share = np.exp(np.array(score) / 3)
            value = sum(
                p * (keys[s] @ w["value_up"][:, n])
                for p, s in zip(share, seen, strict=True)
            )
            y[b, t] += value / share.sum() @ w["out"][n]
    return y


@pytest.mark.parametrize("query_rank", [10, 0])
@pytest.mark.fast
def test_latent_attention_equals_a_loop(query_rank):
    shape = dataclasses.replace(
        SHAPE, latent=dataclasses.replace(WIDTHS, q_lora_rank=query_rank)
    )
    graph, abstract = nnx.split(
        nnx.eval_shape(lambda: LatentAttention(shape, rngs=nnx.Rngs(params=0)))
    )
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / 3, abstract
    )
    x = rng.normal(size=(B, T, D)).astype(np.float32)

    def attend(q, k, v, sink):
        assert sink is None
        return attention(
            q, k, v, jnp.asarray(SEGMENT), kernel="dot_product", strategy="ring"
        ), None

    @jax.jit
    def run(state, x):
        rotation = rotary_angles(jnp.asarray(POSITION), Rope(4, 1e4))
        return nnx.merge(graph, state)(x, rotation, attend)[0]

    with jax.default_matmul_precision("highest"):
        got = np.asarray(run(state, x))
    real = SEGMENT > 0
    weights = jax.tree.map(np.float64, nnx.to_pure_dict(state))
    np.testing.assert_allclose(
        got[real], by_loops(weights, np.float64(x))[real], atol=2e-5
    )
