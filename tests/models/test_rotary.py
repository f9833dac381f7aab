"""Rotary angles against transformers' own, and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import RopeScaling
from maxtext_lite.models.rotary import Rope, rotary_angles, score_factor

DIM, BASE = 12, 10_000.0
SCALINGS = {
    "default": None,
    "linear": RopeScaling("linear", 3.0),
    "dynamic": RopeScaling("dynamic", 2.0, original_max_position_embeddings=20),
    "llama3": RopeScaling(
        "llama3", 8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": RopeScaling("yarn", 4.0, original_max_position_embeddings=64),
    "yarn, gpt-oss": RopeScaling(
        "yarn", 32.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, truncate=False),
    "yarn, DeepSeek": RopeScaling("yarn", 40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7),
    "yarn, factor given": RopeScaling("yarn", 4.0, original_max_position_embeddings=64, attention_factor=1.3),
}  # fmt: skip


def _theirs(scaling, positions):
    """Cosines and sines of transformers' Llama."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": BASE}
    length = 64
    if scaling is not None:
        parameters |= scaling.to_mapping()
        length = scaling.original_max_position_embeddings or length
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, head_dim=DIM, rope_parameters=parameters,
        max_position_embeddings=length,
    )  # fmt: skip
    cosine, sine = LlamaRotaryEmbedding(config)(torch.zeros(1, 1), torch.tensor(positions))
    return cosine.numpy()[..., : DIM // 2], sine.numpy()[..., : DIM // 2]


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_equal_transformers(name):
    positions = np.arange(50)[None]
    got = rotary_angles(jnp.asarray(positions), Rope(DIM, BASE, SCALINGS[name]))
    for ours, theirs in zip(got, _theirs(SCALINGS[name], positions), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_ntk_slows_the_slowest_plane_by_the_factor_and_leaves_the_fastest():
    rope, scaled = Rope(DIM, BASE), Rope(DIM, BASE, RopeScaling("ntk", 4.0))
    at = jnp.asarray([[8]])

    def angle(rope):
        cosine, sine = rotary_angles(at, rope)
        return np.arctan2(sine, cosine)[0, 0]

    assert angle(scaled)[0] == pytest.approx(angle(rope)[0], rel=1e-6)
    assert angle(scaled)[-1] == pytest.approx(angle(rope)[-1] / 4, rel=1e-5)


def test_dynamic_grows_with_each_row_by_itself():
    rope = Rope(DIM, BASE, SCALINGS["dynamic"])
    rows = jnp.stack([jnp.arange(20), jnp.arange(20) + 20])
    together = rotary_angles(rows, rope)
    for row in range(2):
        alone = rotary_angles(rows[row : row + 1], rope)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[row : row + 1], b), together, alone)  # noqa: B023
    plain = rotary_angles(rows[:1], Rope(DIM, BASE))
    np.testing.assert_allclose(together[0][:1], plain[0], atol=1e-6)
    assert np.abs(together[0][1] - rotary_angles(rows[1:], Rope(DIM, BASE))[0][0]).max() > 0.1


def test_scores_are_multiplied_only_where_asked():
    assert score_factor(None) == score_factor(SCALINGS["yarn"]) == 1
    assert score_factor(SCALINGS["yarn, DeepSeek"]) == pytest.approx((0.1 * 0.7 * np.log(40) + 1) ** 2)
