"""Parts of a layer, what each kind sees and how it rotates, in which order layers run, and keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import jaxprs_in_params
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.models import DecoderLayer, DecoderShape, root_key
from maxtext_lite.models.decoder import layer_of
from maxtext_lite.models.layers import (
    RESIDUAL_AXES,
    Embedding,
    projections,
)
from maxtext_lite.parallel.mesh import partition_spec
from tests.meshes import mesh_of

SHAPE = DecoderShape(
    vocab_size=11,
    emb_dim=8,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=12,
    num_layers=7,
)


def module_and_state(make, dtype=np.float32):
    """A module's graph, and random numbers in the place of its parameters."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(params=0))))
    rng = np.random.default_rng(0)
    return graph, jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(dtype), abstract
    )


# ---- The block ------------------------------------------------------------------------------------------------------


def test_a_multiplier_that_two_bytes_do_not_hold_is_not_rounded():
    graph, state = module_and_state(
        lambda rngs: DecoderLayer(
            dataclasses.replace(SHAPE, residual_multiplier=0.22), rngs=rngs
        )
    )
    y = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(jnp.bfloat16)
    want = (np.float64(y) * 0.22).astype(jnp.bfloat16)
    assert_array_equal(
        jax.jit(nnx.merge(graph, state)._plus)(np.zeros_like(y), y), want
    )


def test_the_gradient_of_an_embedding_is_summed_over_tokens_in_float32():
    """In bfloat16 256 + 1 is 256."""
    shape = dataclasses.replace(SHAPE, num_positions=4)
    graph, state = module_and_state(
        lambda rngs: Embedding(shape, rngs=rngs), jnp.bfloat16
    )
    tokens, positions = jnp.full((2, 512), 3), jnp.ones((2, 512), jnp.int32)

    def total(state):
        return jnp.sum(
            nnx.merge(graph, state)(tokens, positions, jnp.bfloat16).astype(jnp.float32)
        )

    with jax.set_mesh(mesh_of()):
        found = jax.jit(jax.grad(total))(state)
    for name, row in (("table", 3), ("positions", 1)):
        gradient = np.float32(found[name][...])
        assert_array_equal(gradient[row], np.full(8, 1024.0))
        assert np.count_nonzero(gradient) == 8


def constraints_in(jaxpr):
    """The PartitionSpec of every sharding constraint, also of those inside other equations."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            yield eqn.params["sharding"].spec
        for inner in jaxprs_in_params(eqn.params):
            yield from constraints_in(inner)


def test_tokens_are_gathered_over_tensor_once_in_each_pass_for_all_weights_that_they_meet():
    """XLA merges gathers of one array on CPU and TPU, but not on GPU: there a gather for each weight stays one."""
    graph, state = module_and_state(lambda rngs: DecoderLayer(SHAPE, rngs=rngs))
    attention = nnx.merge(graph, state).attention

    def total(x_BTD):
        return sum(
            jnp.sum(y)
            for y in projections(x_BTD, attention.query, attention.key, attention.value)
        )

    with jax.set_mesh(mesh_of(tensor=2)):
        found = list(
            constraints_in(
                jax.make_jaxpr(jax.grad(total))(np.ones((2, 16, 8), np.float32)).jaxpr
            )
        )
    assert found.count(partition_spec(("batch", "length", "activation_embed"))) == 2
    assert partition_spec(RESIDUAL_AXES) in found  # what is kept, and the gradient


# ---- Their order ----------------------------------------------------------------------------------------------------


def test_a_loop_takes_one_layer_of_a_stack_at_a_time_and_widens_no_more_than_that():
    stack = np.arange(5 * 300 * 7.0).reshape(5, 300, 7).astype(jnp.bfloat16)

    def products(stack):
        def product(number, found):
            return found.at[number].set(
                jnp.ones(300, jnp.bfloat16)
                @ layer_of({"weight": stack}, number)["weight"]
            )

        return jax.lax.fori_loop(0, 5, product, jnp.zeros((5, 7), jnp.bfloat16))

    compiled = jax.jit(products).lower(stack).compile()
    assert_allclose(
        np.float64(compiled(stack)), np.float64(stack).sum(axis=1), rtol=2**-8
    )
    assert (
        compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * 300 * 7
    )  # float32 of all five would be 5 x 4 x ...


def test_all_bits_of_a_seed_count_and_one_of_32_bits_has_the_key_of_jax():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**63 - 1]
    keys = [tuple(np.asarray(jax.random.key_data(root_key(seed)))) for seed in seeds]
    assert len(set(keys)) == len(seeds)
    for seed in seeds[:4]:
        assert_array_equal(
            keys[seeds.index(seed)], jax.random.key_data(jax.random.key(seed))
        )
