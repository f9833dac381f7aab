"""Token by token: the key/value cache, attention over it, and the choice of the next token."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
    """Keys and values of the tokens seen so far: [L, B, S, K, H], or [B, S, K, H] within a layer."""

    key: jax.Array
    value: jax.Array

    @staticmethod
    def empty(shape: Any, num_sequences: int, num_positions: int) -> "KVCache":
        """A cache for `num_sequences` of at most `num_positions` tokens, in the decoder shape's dtype."""
        sizes = (shape.num_layers, num_sequences, num_positions, shape.num_kv_heads, shape.head_dim)
        return KVCache(jnp.zeros(sizes, shape.dtype), jnp.zeros(sizes, shape.dtype))


def cached_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, position_BT: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Attention of new tokens over the cache, into which their keys and values are written at `position_BT`.

    Returns:
      Context [B, T, N, H] in the dtype of q_BTNH, and the cache with the new tokens; the softmax is float32.
    """
    B, T, N, H = q_BTNH.shape
    row_B1 = jnp.arange(B)[:, None]
    key_BSKH = cache.key.at[row_B1, position_BT].set(k_BTKH.astype(cache.key.dtype))
    value_BSKH = cache.value.at[row_B1, position_BT].set(v_BTKH.astype(cache.value.dtype))
    q_BTKGH = q_BTNH.reshape(B, T, key_BSKH.shape[2], -1, H)
    score_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, key_BSKH, preferred_element_type=jnp.float32) * H**-0.5
    seen_BTS = jnp.arange(key_BSKH.shape[1])[None, None, :] <= position_BT[:, :, None]
    score_BKGTS = jnp.where(seen_BTS[:, None, None], score_BKGTS, -jnp.inf)
    weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(value_BSKH.dtype)
    context_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weight_BKGTS, value_BSKH)
    return context_BTKGH.reshape(B, T, N, H).astype(q_BTNH.dtype), KVCache(key_BSKH, value_BSKH)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: only the k likeliest tokens; 0: all.
      top_p: only the smallest set of tokens whose probabilities, at this temperature, sum to at least p; 1: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def sample_token(logits_BV: jax.Array, key_B: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """The next token of each sequence, and its log-probability under the model itself.

    Args:
      logits_BV: float32 logits.
      key_B: one PRNG key per sequence, so that a sequence's text does not depend on its neighbours.
    Returns:
      Tokens [B] int32 and log-probabilities [B] float32: of the untempered, unrestricted distribution.
    Source: top-p is nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751.
    """
    log_probability_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    if sampling.temperature == 0:
        token_B = jnp.argmax(logits_BV, axis=-1)
    else:
        scaled_BV = logits_BV / sampling.temperature
        ordered_BV = -jnp.sort(-scaled_BV, axis=-1)
        if sampling.top_k:
            kth_B1 = ordered_BV[:, min(sampling.top_k, logits_BV.shape[-1]) - 1, None]
            scaled_BV = jnp.where(scaled_BV < kth_B1, -jnp.inf, scaled_BV)
            ordered_BV = jnp.where(ordered_BV < kth_B1, -jnp.inf, ordered_BV)
        if sampling.top_p < 1:
            probability_BV = jax.nn.softmax(ordered_BV, axis=-1)
            before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
            least_B1 = jnp.min(jnp.where(before_BV < sampling.top_p, ordered_BV, jnp.inf), axis=-1, keepdims=True)
            scaled_BV = jnp.where(scaled_BV < least_B1, -jnp.inf, scaled_BV)
        token_B = jax.vmap(jax.random.categorical)(key_B, scaled_BV)
    chosen_B = jnp.take_along_axis(log_probability_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B.astype(jnp.int32), chosen_B
