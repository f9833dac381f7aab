"""Token by token: the key/value cache, attention over it, and the choice of the next token."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_lite.models.blockwise import PLAIN, Scoring


class KVCache(NamedTuple):
    """Keys [L, B, S, K, H] and values [L, B, S, K, W] of the tokens seen so far; without the L within a layer."""

    key: jax.Array
    value: jax.Array

    @staticmethod
    def empty(
        *,
        num_layers: int,
        num_sequences: int,
        num_positions: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: Any,
    ) -> "KVCache":
        """A cache for `num_sequences` of at most `num_positions` tokens."""
        sizes = (num_layers, num_sequences, num_positions, num_kv_heads)
        return KVCache(jnp.zeros((*sizes, key_dim), dtype), jnp.zeros((*sizes, value_dim), dtype))


def cached_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKW: jax.Array,
    position_BT: jax.Array,
    cache: KVCache,
    sink_N: jax.Array | None = None,
    *,
    scoring: Scoring = PLAIN,
) -> tuple[jax.Array, KVCache]:
    """Attention of new tokens over the cache, into which their keys and values are written at `position_BT`.

    Args:
      sink_N: each head's learned score of nothing, which takes part in the softmax; None: no sinks.
      scoring: how queries score keys, and how many they see.
    Returns:
      Context [B, T, N, W] in the dtype of q_BTNH, and the cache with the new tokens; the softmax is float32.
    """
    B, T, N, H = q_BTNH.shape
    row_B1 = jnp.arange(B)[:, None]
    key_BSKH = cache.key.at[row_B1, position_BT].set(k_BTKH.astype(cache.key.dtype))
    value_BSKW = cache.value.at[row_B1, position_BT].set(v_BTKW.astype(cache.value.dtype))
    q_BTKGH = q_BTNH.reshape(B, T, key_BSKH.shape[2], -1, H)
    product_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, key_BSKH, preferred_element_type=jnp.float32)
    score_BKGTS = scoring.score(product_BKGTS, H)
    key_11S, query_BT1 = jnp.arange(key_BSKH.shape[1])[None, None, :], position_BT[:, :, None]
    seen_BTS = key_11S <= query_BT1
    if scoring.window is not None:
        seen_BTS &= query_BT1 - key_11S < scoring.window
    score_BKGTS = jnp.where(seen_BTS[:, None, None], score_BKGTS, -jnp.inf)
    if sink_N is not None:  # scored like one more key, whose weight then goes nowhere
        sink_KG11 = sink_N.astype(jnp.float32).reshape(*score_BKGTS.shape[1:3], 1, 1)
        sink_BKGT1 = jnp.broadcast_to(sink_KG11, (*score_BKGTS.shape[:-1], 1))
        score_BKGTS = jnp.concatenate([score_BKGTS, sink_BKGT1], axis=-1)
    weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(value_BSKW.dtype)[..., : value_BSKW.shape[1]]
    context_BTKGW = jnp.einsum("BKGTS,BSKW->BTKGW", weight_BKGTS, value_BSKW)
    return context_BTKGW.reshape(B, T, N, -1).astype(q_BTNH.dtype), KVCache(key_BSKH, value_BSKW)


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

    @property
    def policy_temperature(self) -> float:
        """That of the distribution which reinforcement learning trains; of greedy choices, the model's own, 1."""
        return self.temperature or 1.0


def sample_token(
    logits_BV: jax.Array, key_B: jax.Array, sampling: Sampling, scored_at: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """The next token of each sequence, and its log-probability.

    Args:
      logits_BV: float32 logits.
      key_B: one PRNG key per sequence, so that a sequence's text does not depend on its neighbours.
      scored_at: temperature of the distribution whose log-probabilities are given; 1: the model itself.
    Returns:
      Tokens [B] int32 and log-probabilities [B] float32: over the whole vocabulary, whatever `sampling` restricts.
    Source: top-p is nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751.
    """
    log_probability_BV = jax.nn.log_softmax(logits_BV / scored_at, axis=-1)
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
