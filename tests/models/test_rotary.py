"""Rotary angles by hand, of what no family has; those of families: invariance/test_families.py."""

import jax
import numpy as np
import pytest

from maxtext_lite.config import RopeScaling
from maxtext_lite.models.rotary import Rope, rotary_angles

DIM, BASE = 12, 10_000.0
PLAIN = BASE ** (-np.arange(0, DIM, 2) / DIM)


def angles(rope, position, segment=None):
    return jax.jit(lambda position: rotary_angles(position, rope, segment))(position)


def assert_turned(found, position, frequency, factor=1.0):
    angle = position[..., None] * frequency
    np.testing.assert_allclose(
        found, factor * np.stack([np.cos(angle), np.sin(angle)]), atol=2e-5
    )


@pytest.mark.fast
def test_ntk_slows_the_slowest_plane_by_the_factor_and_leaves_the_fastest():
    base = BASE * 4.0 ** (DIM / (DIM - 2))
    frequency = base ** (-np.arange(0, DIM, 2) / DIM)
    np.testing.assert_allclose(frequency[[0, -1]], PLAIN[[0, -1]] / [1, 4])
    position = np.array([[8, 50]])
    assert_turned(
        angles(Rope(DIM, BASE, RopeScaling("ntk", 4.0)), position), position, frequency
    )


LENGTHS = 10, 14
"""Of a row's two documents, of which the first is just as long as the original; tokens may lie in any order."""
POSITION = np.array([[*range(10), *range(14)], [*range(10), *range(14)]])[:, ::-1]
SEGMENT = np.repeat([[1, 2], [1, 1]], LENGTHS, axis=1)[:, ::-1]
LENGTH = np.where(SEGMENT == 1, np.array([[10], [14]]), 14)


def test_dynamic_grows_with_each_document_by_itself_beyond_the_original_length():
    scaling = RopeScaling("dynamic", 2.0, original_max_position_embeddings=10)
    growth = 2.0 * np.maximum(LENGTH, 10) / 10 - 1
    base = BASE * growth ** (DIM / (DIM - 2))
    frequency = base[..., None] ** (-np.arange(0, DIM, 2) / DIM)
    assert_turned(
        angles(Rope(DIM, BASE, scaling), POSITION, SEGMENT), POSITION, frequency
    )
