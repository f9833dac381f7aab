"""Rotary angles against transformers' own frequencies, and by hand."""

import functools

import jax
import numpy as np
import pytest

from maxtext_lite.config import RopeScaling
from maxtext_lite.models.rotary import Rope, rotary_angles, score_factor

DIM, BASE = 12, 10_000.0
PLAIN = BASE ** (-np.arange(0, DIM, 2) / DIM)
YARN = functools.partial(RopeScaling, "yarn", original_max_position_embeddings=64)
DEEPSEEK = YARN(40.0, mscale=1.0, mscale_all_dim=0.7)
SCALINGS = {
    "linear": RopeScaling("linear", 3.0),
    "llama3": RopeScaling(
        "llama3",
        8.0,
        original_max_position_embeddings=64,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "yarn": YARN(4.0),
    "yarn, gpt-oss": YARN(32.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
    "yarn, DeepSeek": DEEPSEEK,
}


def angles(rope, position, segment=None):
    return jax.jit(lambda position: rotary_angles(position, rope, segment))(position)


def assert_turned(found, position, frequency, factor=1.0):
    angle = position[..., None] * frequency
    np.testing.assert_allclose(
        found, factor * np.stack([np.cos(angle), np.sin(angle)]), atol=2e-5
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_equal_transformers(name):
    transformers, scaling = pytest.importorskip("transformers"), SCALINGS[name]
    position = np.arange(50)[None]
    found = angles(Rope(DIM, BASE, scaling), position)
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        head_dim=DIM,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": BASE, **scaling.to_mapping()},
    )
    frequency, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[
        scaling.rope_type
    ](config, "cpu")
    assert_turned(found, position, frequency.numpy().astype(np.float64), factor)


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


def test_longrope_chooses_its_list_by_the_length_of_each_document():
    short, long = np.arange(1, 7.0), np.arange(11, 17.0)
    scaling = RopeScaling(
        "longrope",
        3.0,
        original_max_position_embeddings=10,
        short_factor=tuple(short),
        long_factor=tuple(long),
    )
    frequency = PLAIN / np.where(LENGTH[..., None] > 10, long, short)
    factor = np.sqrt(1 + np.log(3) / np.log(10))
    assert_turned(
        angles(Rope(DIM, BASE, scaling), POSITION, SEGMENT), POSITION, frequency, factor
    )


def test_scores_are_multiplied_only_where_asked():
    assert score_factor(None) == score_factor(SCALINGS["yarn"]) == 1
    assert score_factor(DEEPSEEK) == pytest.approx((0.1 * 0.7 * np.log(40) + 1) ** 2)
