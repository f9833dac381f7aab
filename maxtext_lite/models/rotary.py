"""Rotary positions: the angle of each position in each plane of a head.

Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext_lite.config import RopeScaling
from maxtext_lite.config.registry import resolve
from maxtext_lite.models.ops import Rotation


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotates `dim` dims of a head in dim / 2 planes, with wavelengths from 2 pi to 2 pi max_timescale."""

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
    factor = 1.0
    if rope.scaling is None:
        frequency_H = plain_frequencies(rope.dim, rope.max_timescale)
        angle_BTH = position_BT[..., None].astype(jnp.float32) * jnp.asarray(frequency_H, jnp.float32)
    else:  # most models have none
        scaled_angles = resolve("maxtext_lite.models.rope_scaling:scaled_angles")
        angle_BTH, factor = scaled_angles(position_BT, rope, segment_BT)
    cosine_BTH = jnp.cos(angle_BTH)
    sine_BTH = jnp.sin(angle_BTH)
    return (cosine_BTH, sine_BTH) if factor == 1 else (factor * cosine_BTH, factor * sine_BTH)


def plain_frequencies(dim: int, max_timescale: float) -> np.ndarray:
    """Radians per position of each plane, float64, without scaling."""
    return max_timescale ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def growth(factor: float, multiplier: float) -> float:
    """The factor of cosines and sines for texts that are longer by `factor`. Source: arXiv:2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1


def score_factor(scaling: RopeScaling | None) -> float:
    """The factor of whole scores, rotated dims and others. Source: DeepSeek-V2's published code."""
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    assert scaling.factor is not None
    return growth(scaling.factor, scaling.mscale_all_dim) ** 2
