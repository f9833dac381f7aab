"""The modules of a layer: logical axes of their weights, initial values, and how often tokens are gathered."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import jaxprs_in_params

from maxtext_lite.config import PositionTemperature
from maxtext_lite.models import DecoderShape
from maxtext_lite.models.block import DecoderLayer
from maxtext_lite.models.layers import RESIDUAL_AXES, Embedding, Head, projections, query_factor
from maxtext_lite.models.moe import ExpertShape
from maxtext_lite.parallel import MESH_AXES, make_mesh
from maxtext_lite.parallel.axes import partition_spec

SHAPE = DecoderShape(vocab_size=11, emb_dim=8, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=12, num_layers=1)


def test_every_weight_names_every_dim():
    experts = dataclasses.replace(SHAPE, experts=ExpertShape(4, 2, 6, shared_dim=6, biased=True))
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


def test_the_gradient_of_an_embedding_is_summed_over_tokens_in_float32():
    """In bfloat16 256 + 1 is 256."""
    embedding = Embedding(dataclasses.replace(SHAPE, num_positions=4), rngs=nnx.Rngs(params=0))
    graph, state = nnx.split(embedding)
    state = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state)
    tokens, positions = jnp.full((2, 512), 3), jnp.ones((2, 512), jnp.int32)

    def total(state):
        return jnp.sum(nnx.merge(graph, state)(tokens, positions, jnp.bfloat16).astype(jnp.float32))

    with jax.set_mesh(make_mesh(dict.fromkeys(MESH_AXES, 1), dict.fromkeys(MESH_AXES, 1), jax.devices()[:1])):
        found = jax.jit(jax.grad(total))(state)
    for name, row in (("table", 3), ("positions", 1)):
        gradient = np.asarray(found[name][...], np.float32)
        np.testing.assert_array_equal(gradient[row], np.full(8, 1024.0))
        assert np.count_nonzero(gradient) == 8


def test_the_largest_offset_of_a_position_does_not_wrap():
    tuning = PositionTemperature(scale=0.5, floor_scale=8, offset=2**31 - 1)
    factor_BT = query_factor(
        dataclasses.replace(SHAPE, position_temperature=tuning), "global", jnp.arange(3)[None], None
    )
    np.testing.assert_allclose(factor_BT, np.full((1, 3), 1 + 0.5 * np.log1p(2**28)), rtol=1e-6)


def constraints_in(jaxpr):
    """The PartitionSpec of every sharding constraint, also of those inside other equations."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            yield eqn.params["sharding"].spec
        for inner in jaxprs_in_params(eqn.params):
            yield from constraints_in(inner)


def test_tokens_are_gathered_over_tensor_once_in_each_pass_for_all_weights_that_they_meet():
    """XLA merges gathers of one array on CPU and TPU, but not on GPU: there a gather for each weight stays one."""
    layer, x_BTD = DecoderLayer(SHAPE, rngs=nnx.Rngs(params=0)), jnp.ones((2, 16, 8))
    weights = layer.attention.query, layer.attention.key, layer.attention.value

    def total(x_BTD):
        return sum(jnp.sum(y) for y in projections(x_BTD, *weights))

    sizes = dict.fromkeys(MESH_AXES, 1)
    with jax.set_mesh(make_mesh(sizes | {"tensor": 2}, sizes, jax.devices()[:2])):
        found = list(constraints_in(jax.make_jaxpr(jax.grad(total))(x_BTD).jaxpr))
    of_tokens = partition_spec(("batch", "length", "activation_embed"))
    assert found.count(of_tokens) == 2
    assert partition_spec(RESIDUAL_AXES) in found  # what is kept, and the gradient
