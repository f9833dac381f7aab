"""Attention, experts and a projection by their formulas, differentiated by JAX: the references for kernels."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_lite.models.attention import Scoring
from maxtext_lite.models.ops import Activation, mlp_hidden

_MOST_QUERIES = 512  # with scores in memory at a time


def plain_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    sink_N: jax.Array | None = None,
    *,
    segment_BT: jax.Array,
    place_T: Sequence[int] | jax.Array,
    scoring: Scoring,
) -> jax.Array:
    """`attention.attention` by a softmax over all keys; keys that a query does not see have no weight.

    Args:
      place_T: each token's place in its example.
    """
    B, T, N, H = q_BTNH.shape
    place_T = jnp.asarray(place_T)
    k_BSNH, v_BSNW = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k_BSKH, v_BSKW))
    count = next(count for count in range(min(T, _MOST_QUERIES), 0, -1) if T % count == 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def some(_: None, queries: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        q_BtNH, segment_Bt, place_t = queries
        product = jnp.einsum("BtNH,BSNH->BNtS", q_BtNH, k_BSNH, preferred_element_type=jnp.float32)
        distance_tS = place_t[:, None] - place_T
        seen_tS = (distance_tS >= 0) & (distance_tS < (scoring.window or T))
        seen_BtS = seen_tS & (segment_Bt[:, :, None] == segment_BT[:, None, :])
        score_BNtS = jnp.where(seen_BtS[:, None], scoring.score(product, H), -jnp.inf)
        if sink_N is not None:  # one more key, with value 0
            nothing = jnp.broadcast_to(sink_N.astype(jnp.float32)[:, None, None], (B, N, count, 1))
            score_BNtS = jnp.concatenate([score_BNtS, nothing], axis=-1)
        weight_BNtS = jax.nn.softmax(score_BNtS, axis=-1)[..., :T].astype(v_BSKW.dtype)
        return None, jnp.einsum("BNtS,BSNW->BtNW", weight_BNtS, v_BSNW)

    def pieces(x: jax.Array, dim: int) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:dim], T // count, count, *x.shape[dim + 1 :]), dim, 0)

    _, context = jax.lax.scan(some, None, (pieces(q_BTNH, 1), pieces(segment_BT, 1), pieces(place_T, 0)))
    return jnp.moveaxis(context, 0, 1).reshape(B, T, N, -1)


def plain_experts(
    x_BTD: jax.Array,
    share_BTJ: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    *,
    expert_BTJ: jax.Array,
    activation: Activation,
    on_input: bool,
) -> jax.Array:
    """`experts.dropless` by every expert for every token; experts that were not chosen have no share."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def plus(y_BTD: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        number, gate_DF, up_DF, down_FD = expert
        share_BT1 = jnp.sum(jnp.where(expert_BTJ == number, share_BTJ, 0), axis=-1, keepdims=True)
        given: Any = (x_BTD * share_BT1 if on_input else x_BTD).astype(x_BTD.dtype)
        hidden_BTF: Any = mlp_hidden(activation, given @ gate_DF, given @ up_DF)
        out = hidden_BTF @ down_FD
        return y_BTD + (out if on_input else share_BT1 * out).astype(jnp.float32), None

    experts = jnp.arange(len(gate_EDF)), gate_EDF, up_EDF, down_EFD
    y_BTD, _ = jax.lax.scan(plus, jnp.zeros(x_BTD.shape, jnp.float32), experts)
    return y_BTD.astype(x_BTD.dtype)
