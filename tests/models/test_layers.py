"""A layer's modules declare one logical axis for each dim of each weight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext_lite.models import DecoderShape
from maxtext_lite.models.block import DecoderLayer
from maxtext_lite.models.layers import Embedding, Head
from maxtext_lite.models.moe import ExpertShape

SHAPE = DecoderShape(vocab_size=11, emb_dim=8, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=12, num_layers=1)


def test_every_weight_names_every_dim():
    experts = dataclasses.replace(SHAPE, experts=ExpertShape(4, 2, 6, num_shared=1, biased=True))
    for module, shape in ((DecoderLayer, SHAPE), (DecoderLayer, experts), (Embedding, SHAPE), (Head, SHAPE)):
        state = nnx.state(module(shape, rngs=nnx.Rngs(params=0)))
        for param in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Param)):
            assert len(param.axes) == param[...].ndim


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
