"""Scaling of rotary positions for texts longer than in a model's training."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext_lite.config import RopeScaling
from maxtext_lite.models.rotary import Rope, growth, plain_frequencies

_BETA_FAST, _BETA_SLOW = 32.0, 1.0


def scaled_angles(
    position_BT: Array,
    rope: Rope,
    segment_BT: Array | None,
) -> tuple[Array, float]:
    """Angles [B, T, dim / 2], float32, and the factor of their cosines and sines; arguments as for `rotary_angles`."""
    scaling = rope.scaling
    assert scaling is not None
    position_BT1 = position_BT[..., None].astype(jnp.float32)
    if rope.follows_length:
        length_BT1 = _document_lengths(position_BT, segment_BT)[..., None]
        of_length = _dynamic_frequencies if scaling.rope_type == "dynamic" else _longrope
        angle_BTH = position_BT1 * of_length(length_BT1, rope, scaling)
    else:
        angle_BTH = position_BT1 * jnp.asarray(_frequencies(rope, scaling), jnp.float32)
    return angle_BTH, _rotation_factor(scaling)


def _frequencies(rope: Rope, scaling: RopeScaling) -> np.ndarray:
    """Radians per position of each plane, float64."""
    plain = plain_frequencies(rope.dim, rope.max_timescale)
    if scaling.rope_type == "proportional":
        assert scaling.partial_rotary_factor is not None
        turned = np.arange(rope.dim // 2) < int(scaling.partial_rotary_factor * rope.dim // 2)
        return turned * plain / (scaling.factor or 1)
    assert scaling.factor is not None
    match scaling.rope_type:
        case "linear":
            return plain / scaling.factor
        case "ntk":
            return plain_frequencies(rope.dim, rope.max_timescale * scaling.factor ** _ntk_exponent(rope.dim))
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, rope, scaling)
        case kind:
            raise AssertionError(f"rope_type {kind!r} passed the config")


def _ntk_exponent(dim: int) -> float:
    """The exponent that turns a growth in length into the base's growth, to slow the slowest plane as much."""
    return dim / max(dim - 2, 1)


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Keeps fast planes within the original length, divides slow ones by factor, and blends between.

    Source: Dubey et al. 2024, arXiv:2407.21783, section 3.4.1, as in the published code.
    """
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    length = scaling.original_max_position_embeddings
    assert scaling.factor is not None and low is not None and high is not None and length is not None  # noqa: PT018
    turns = length * plain / (2 * math.pi)
    # With nothing between the two, as in Llama 4 Scout, a plane is kept or slowed.
    kept = np.clip((turns - low) / (high - low), 0, 1) if high > low else (turns >= high).astype(plain.dtype)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(plain: np.ndarray, rope: Rope, scaling: RopeScaling) -> np.ndarray:
    """Like `_llama3`, with a blend that is linear in the planes' numbers. Source: arXiv:2309.00071, section 3.2."""
    length = scaling.original_max_position_embeddings
    assert scaling.factor is not None and length is not None  # noqa: PT018

    def plane_that_turns(times: float) -> float:
        return rope.dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rope.max_timescale))

    first = plane_that_turns(scaling.beta_fast or _BETA_FAST)
    last = plane_that_turns(scaling.beta_slow or _BETA_SLOW)
    if scaling.truncate is not False:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, rope.dim - 1)
    slowed = np.clip((np.arange(rope.dim // 2) - first) / ((last - first) or 0.001), 0, 1)
    return (1 - slowed) * plain + slowed * plain / scaling.factor


def _document_lengths(position_BT: Array, segment_BT: Array | None) -> Array:
    """The last position of each token's document, plus 1, [B, T].

    Tokens may be in any order, for context shards.
    """
    B, T = position_BT.shape
    segment_BT = jnp.zeros_like(position_BT) if segment_BT is None else segment_BT
    last_BS = jnp.zeros((B, T + 1), position_BT.dtype).at[jnp.arange(B)[:, None], segment_BT].max(position_BT)
    return jnp.take_along_axis(last_BS, segment_BT, axis=1) + 1


def _longrope(length_BT1: Array, rope: Rope, scaling: RopeScaling) -> Array:
    """Frequencies [B, T, H], float32, by the list for documents of this length. Source: arXiv:2402.13753."""
    plain = plain_frequencies(rope.dim, rope.max_timescale)
    original = scaling.original_max_position_embeddings
    assert original is not None
    short_H, long_H = (
        jnp.asarray(plain / np.asarray(factors, np.float64), jnp.float32)
        for factors in (scaling.short_factor, scaling.long_factor)
    )
    return jnp.where(length_BT1 > original, long_H, short_H)


def _dynamic_frequencies(length_BT1: Array, rope: Rope, scaling: RopeScaling) -> Array:
    """Frequencies [B, T, H], float32: the base grows with a document's length beyond the original one."""
    original = scaling.original_max_position_embeddings
    factor = scaling.factor
    assert original is not None and factor is not None  # noqa: PT018
    length_BT1 = jnp.maximum(length_BT1, original).astype(jnp.float32)
    growth_BT1 = (factor * length_BT1 / original - (factor - 1)) ** _ntk_exponent(rope.dim)
    exponent_H = jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim
    return (rope.max_timescale * growth_BT1) ** -exponent_H


def _rotation_factor(scaling: RopeScaling) -> float:
    """The factor of cosines and sines; its square multiplies scores."""
    if scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    assert scaling.factor is not None
    if scaling.rope_type == "longrope":
        original = scaling.original_max_position_embeddings
        assert original is not None
        return math.sqrt(1 + math.log(scaling.factor) / math.log(original)) if scaling.factor > 1 else 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return growth(scaling.factor, scaling.mscale) / growth(scaling.factor, scaling.mscale_all_dim)
    return growth(scaling.factor, 1.0)
