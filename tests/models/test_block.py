"""A layer of the decoder adds its two parts to the stream."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext_lite.models import DecoderShape
from maxtext_lite.models.block import DecoderLayer
from maxtext_lite.models.moe import ExpertShape
from maxtext_lite.models.rotary import Rope, rotary_angles

SHAPE = DecoderShape(vocab_size=11, emb_dim=8, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=12, num_layers=1)


def test_a_layer_with_silent_weights_is_the_identity():
    layer = DecoderLayer(SHAPE, rngs=nnx.Rngs(params=0))
    layer.attention.out[...] = jnp.zeros_like(layer.attention.out[...])
    layer.mlp.down[...] = jnp.zeros_like(layer.mlp.down[...])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.float32)
    rotation = rotary_angles(jnp.zeros((2, 3), jnp.int32), Rope(SHAPE.head_dim, 1e4))
    y, kept, aux = layer(x, rotation, lambda q, k, v, sink: (q, "kept"), jnp.ones((2, 3), bool))
    np.testing.assert_array_equal(y, x)
    assert kept == "kept"
    assert aux == {}


def test_a_multiplier_that_two_bytes_do_not_hold_is_not_rounded():
    layer = DecoderLayer(dataclasses.replace(SHAPE, residual_multiplier=0.22), rngs=nnx.Rngs(params=0))
    y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.bfloat16)
    want = (np.asarray(y, np.float64) * 0.22).astype(jnp.bfloat16)
    np.testing.assert_array_equal(layer._plus(jnp.zeros_like(y), y), want)


def test_a_layer_with_experts_adds_their_shared_mlp_and_nothing_for_padding():
    experts = ExpertShape(num_experts=4, num_per_token=2, mlp_dim=6, shared_dim=12, biased=True)
    layer = DecoderLayer(dataclasses.replace(SHAPE, experts=experts), rngs=nnx.Rngs(params=0))
    layer.attention.out[...] = jnp.zeros_like(layer.attention.out[...])
    assert layer.mlp.shared.up[...].shape == (8, 2 * 6)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.float32)
    rotation = rotary_angles(jnp.zeros((2, 3), jnp.int32), Rope(SHAPE.head_dim, 1e4))
    real = jnp.array([[True, True, False], [False] * 3])
    y, _, aux = layer(x, rotation, lambda q, k, v, sink: (q, None), real)
    shared = layer.mlp.shared(layer.mlp_norm(x))
    routed = np.asarray(y - x - shared)
    np.testing.assert_allclose(routed[~np.asarray(real)], 0, atol=1e-6)
    assert (np.abs(routed[np.asarray(real)]).max(-1) > 1e-7).all()
    assert {name: value.shape for name, value in aux.items()} == {
        "moe_balance": (2,), "router_z": (2, 3), "expert_counts": (2, 4)
    }  # fmt: skip
