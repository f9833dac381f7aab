"""Decoding token by token: the decoder over a cache, and sampling of the next token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from maxtext_lite.config.keys import mixer_of
from maxtext_lite.config.weights import layer_kind
from maxtext_lite.inference.cache import CachedAttend, KVCache
from maxtext_lite.models.decoder import Decoder, first_states
from maxtext_lite.models.layers import Attend, Memory, state_table
from maxtext_lite.models.shape import DecoderShape
from maxtext_lite.parallel import Params


def new_cache(decoder: Decoder, num_sequences: int, num_positions: int) -> KVCache:
    """An empty cache of all layers, in `dtype`, for sequences of at most this many tokens."""
    shape = decoder.shape
    num_heads = shape.num_kv_heads
    key_dim = shape.head_dim
    value_dim = shape.head_dim
    if shape.latent is not None:
        num_heads = 1
        key_dim = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
        value_dim = None
    layers_of = shape.caching_layers_of
    sizes = (
        len(layers_of.get("attention", ())),
        num_sequences,
        num_heads,
        num_positions,
    )
    cache = KVCache.empty(sizes, key_dim, value_dim, shape.dtype)
    if wide := layers_of.get("global_attention"):
        own = shape.of_mixer("global_attention")
        sizes = (len(wide), num_sequences, own.num_kv_heads, num_positions)
        cache = cache._replace(wide=KVCache.empty(sizes, own.head_dim, own.head_dim, shape.dtype))
    states = {kind: first_states(shape, kind, len(layers_of[kind]), num_sequences) for kind in _kinds_with_state(shape)}
    return cache._replace(states=states)


def cache_axes(decoder: Decoder) -> KVCache:
    """Logical axes of the cache; latent attention's one head is on all devices that share its queries."""
    shape = decoder.shape
    axes: Any = (
        None,
        "batch",
        None if shape.latent else "activation_heads",
        None,
        None,
    )
    states: Any = {
        kind: {name: (None, "batch", *weight.axes) for name, weight in state_table(shape, kind).items()}
        for kind in _kinds_with_state(shape)
    }
    wide = KVCache(axes, axes) if shape.global_attention else None
    return KVCache(axes, None if shape.latent else axes, states, wide)


def _kinds_with_state(shape: DecoderShape) -> list[str]:
    return [mixer for mixer in shape.layers_of if layer_kind(mixer)]


def decode(
    decoder: Decoder,
    params: Params,
    token_BT: Array,
    start_B: Array,
    cache: KVCache,
    count_B: Array | None = None,
) -> tuple[Array, KVCache]:
    """Hidden states [B, T, D] of T more tokens of B sequences, which have `start_B` tokens in the cache already.

    A rotation that follows the length uses the length so far; keys in the cache keep theirs.

    Args:
      count_B: how many of the T are tokens; None: all. Padding follows them: later tokens overwrite its keys, and
        no earlier token attends to them.
    """
    assert decoder.pipeline is None, "a cache belongs to all layers, a stage has some"
    place_1T = jnp.arange(token_BT.shape[1])[None, :]
    position_BT = start_B[:, None] + place_1T
    segment_BT = jnp.ones_like(token_BT) if count_B is None else (place_1T < count_B[:, None]).astype(jnp.int32)
    shape = decoder.shape
    layers_of = shape.caching_layers_of

    def of_layer(kind: str, number: Array, cache: KVCache) -> Attend | Memory:
        mixer = mixer_of(kind, splits_global=shape.global_attention is not None)
        if shape.shared_kv is not None:
            number = jnp.asarray(shape.kv_layers)[number]
        layer = number if len(layers_of) == 1 else jnp.sum(jnp.asarray(layers_of[mixer]) < number)
        if layer_kind(mixer):
            state = {name: all_LB[layer] for name, all_LB in cache.states[kind].items()}
            return Memory(segment_BT, position_BT, state, kind, cache, layer)
        scoring = shape.scoring(kind)
        scoring = dataclasses.replace(scoring, scale=scoring.scale_of(shape.of_kind(kind).head_dim))
        return CachedAttend(position_BT, cache, layer, scoring, is_wide=mixer != "attention")

    first = shape.num_dense_layers
    stream = decoder.embedded(params, token_BT, segment_BT, position_BT)
    if first:
        stream, cache = decoder.scan_layers(params["dense_layers"], stream, of_layer, first=0, cache=cache)
    # A capacity is for training: here a token's output would depend on how many are decoded at once.
    stream, cache = decoder.scan_layers(params["layers"], stream, of_layer, first=first, cache=cache, drop=False)
    return decoder.final_norm(params, stream.x_BTD), cache


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is sampled.

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
        """The temperature of the distribution that reinforcement learning trains; 1, the model's own, if greedy."""
        return self.temperature or 1.0


def sample_token(logits_BV: Array, key_B: Array, sampling: Sampling, scored_at: float = 1.0) -> tuple[Array, Array]:
    """The next token of each sequence, and its log-probability.

    Args:
      logits_BV: float32 logits.
      key_B: one PRNG key per sequence, whose text thus does not depend on its neighbours.
      scored_at: temperature of the distribution of the log-probabilities; 1: the model's own.
    Returns:
      Tokens [B] int32, and log-probabilities [B] float32 over the whole vocabulary, even if `sampling` restricts it.
    Source: top-p is nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751.
    """
    log_probability_BV = jax.nn.log_softmax(logits_BV / scored_at, axis=-1)
    if sampling.temperature == 0:
        token_B = jnp.argmax(logits_BV, axis=-1)
    else:
        scaled_BV = logits_BV / sampling.temperature
        if sampling.top_k:
            kth_B1 = jax.lax.top_k(scaled_BV, min(sampling.top_k, logits_BV.shape[-1]))[0][:, -1:]
            scaled_BV = jnp.where(scaled_BV < kth_B1, -jnp.inf, scaled_BV)
        if sampling.top_p < 1:  # the only case that sorts the vocabulary
            ordered_BV = -jnp.sort(-scaled_BV, axis=-1)
            probability_BV = jax.nn.softmax(ordered_BV, axis=-1)
            before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
            kept_BV = before_BV < sampling.top_p
            least_B1 = jnp.min(jnp.where(kept_BV, ordered_BV, jnp.inf), axis=-1, keepdims=True)
            # Of equally likely tokens the first ones are kept.
            above_BV = scaled_BV > least_B1
            equal_BV = scaled_BV == least_B1
            left_B1 = (kept_BV.sum(axis=-1) - above_BV.sum(axis=-1))[:, None]
            scaled_BV = jnp.where(
                above_BV | (equal_BV & (equal_BV.cumsum(axis=-1) <= left_B1)),
                scaled_BV,
                -jnp.inf,
            )
        token_B = jax.vmap(jax.random.categorical)(key_B, scaled_BV)
    chosen_B = jnp.take_along_axis(log_probability_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B.astype(jnp.int32), chosen_B
