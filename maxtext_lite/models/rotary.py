"""Rotary positions: the angle of each position in each plane of a head, and its scaling for longer texts.

Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext_lite.config import RopeScaling
from maxtext_lite.models.ops import Rotation

_BETA_FAST, _BETA_SLOW = 32.0, 1.0


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotation of `dim` dims of a head, in dim / 2 planes with wavelengths from 2 pi to 2 pi max_timescale."""

    dim: int
    max_timescale: float
    scaling: RopeScaling | None = None

    @property
    def follows_length(self) -> bool:
        """Whether a token's rotation depends on how many tokens its document has."""
        return self.scaling is not None and self.scaling.rope_type in (
            "dynamic",
            "longrope",
        )


def rotary_angles(position_BT: Array, rope: Rope, segment_BT: Array | None = None) -> Rotation:
    """Cosines and sines [B, T, dim / 2], float32, of each position in each plane.

    Args:
      segment_BT: document number of each token, from 0 to T; None: each row is a document.
    """
    position_BT1 = position_BT[..., None].astype(jnp.float32)
    if rope.scaling is not None and rope.follows_length:
        length_BT1 = _document_lengths(position_BT, segment_BT)[..., None]
        of_length = _dynamic_frequencies if rope.scaling.rope_type == "dynamic" else _longrope
        angle_BTH = position_BT1 * of_length(length_BT1, rope, rope.scaling)
    else:
        angle_BTH = position_BT1 * jnp.asarray(_frequencies(rope), jnp.float32)
    factor = _rotation_factor(rope.scaling)
    cosine_BTH = jnp.cos(angle_BTH)
    sine_BTH = jnp.sin(angle_BTH)
    return (cosine_BTH, sine_BTH) if factor == 1 else (factor * cosine_BTH, factor * sine_BTH)


def _plain(dim: int, max_timescale: float) -> np.ndarray:
    return max_timescale ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def _frequencies(rope: Rope) -> np.ndarray:
    """Radians per position of each plane, float64."""
    plain = _plain(rope.dim, rope.max_timescale)
    scaling = rope.scaling
    if scaling is None:
        return plain
    assert scaling.factor is not None
    match scaling.rope_type:
        case "linear":
            return plain / scaling.factor
        case "ntk":
            return _plain(rope.dim, rope.max_timescale * scaling.factor ** _ntk_exponent(rope.dim))
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, rope, scaling)
        case kind:
            raise AssertionError(f"rope_type {kind!r} passed the config")


def _ntk_exponent(dim: int) -> float:
    """The power of a growth in length by which the base must grow to slow the slowest plane as much."""
    return dim / max(dim - 2, 1)


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Fast planes within the original length are kept, slow ones are divided by factor, with a blend between.

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
    plain = _plain(rope.dim, rope.max_timescale)
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


def _growth(factor: float, multiplier: float) -> float:
    """Source: arXiv:2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1


def _rotation_factor(scaling: RopeScaling | None) -> float:
    """The factor of cosines and sines, whose square multiplies scores."""
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    assert scaling.factor is not None
    if scaling.rope_type == "longrope":
        original = scaling.original_max_position_embeddings
        assert original is not None
        return math.sqrt(1 + math.log(scaling.factor) / math.log(original)) if scaling.factor > 1 else 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return _growth(scaling.factor, scaling.mscale) / _growth(scaling.factor, scaling.mscale_all_dim)
    return _growth(scaling.factor, 1.0)


def score_factor(scaling: RopeScaling | None) -> float:
    """The factor of whole scores, rotated dims and others. Source: DeepSeek-V2's published code."""
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    assert scaling.factor is not None
    return _growth(scaling.factor, scaling.mscale_all_dim) ** 2
