"""A layer's modules declare one logical axis for each dim of each weight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext_lite.models import DecoderShape
from maxtext_lite.models.layers import DecoderLayer, Embedding, Head
from maxtext_lite.models.moe import ExpertShape
from maxtext_lite.models.rotary import Rope, rotary_angles

SHAPE = DecoderShape(vocab_size=11, emb_dim=8, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=12, num_layers=1)


def test_every_weight_names_every_dim():
    experts = dataclasses.replace(SHAPE, experts=ExpertShape(4, 2, 6, num_shared=1, biased=True))
    for module, shape in ((DecoderLayer, SHAPE), (DecoderLayer, experts), (Embedding, SHAPE), (Head, SHAPE)):
        state = nnx.state(module(shape, rngs=nnx.Rngs(params=0)))
        for param in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Param)):
            assert len(param.axes) == param[...].ndim


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


def test_a_layer_with_experts_adds_their_shared_mlp_and_nothing_for_padding():
    experts = ExpertShape(num_experts=4, num_per_token=2, mlp_dim=6, num_shared=2, biased=True)
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
        name: (2, 3)[: len(axes)] for name, axes in experts.aux_axes.items()
    }


def test_initial_weights_have_the_asked_deviation():
    wide = DecoderShape(
        vocab_size=512,
        emb_dim=64,
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_dim=256,
        num_layers=1,
        initializer_range=0.05,
    )
    layer = DecoderLayer(wide, rngs=nnx.Rngs(params=0))
    assert abs(float(jnp.std(layer.mlp.gate[...])) - 0.05) < 0.002
    np.testing.assert_array_equal(layer.mlp_norm.scale[...], np.ones(64))
