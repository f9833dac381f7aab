"""Adapters: what they add, by hand and by the merged formula; where they are, and how they begin."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.models import (
    Adapted,
    Decoder,
    DecoderShape,
    ExpertShape,
    Lora,
)
from maxtext_lite.models.lora import merged
from maxtext_lite.models.ops import project
from maxtext_lite.parallel.pipeline import Pipeline

TARGETS = ("query", "key", "value", "out", "gate", "up", "down")
PLAIN = DecoderShape(
    vocab_size=264,
    emb_dim=16,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    num_layers=4,
)
LLAMA = dataclasses.replace(PLAIN, lora=Lora(3, 6.0, TARGETS), initializer_range=0.2)
EXPERTS = dataclasses.replace(
    LLAMA, experts=ExpertShape(4, 2, 8, shared_dim=8), num_dense_layers=1, num_layers=2
)
TOKENS = np.random.default_rng(0).integers(0, 264, (2, 16))
ONES, POSITIONS = np.ones_like(TOKENS), np.broadcast_to(np.arange(16), TOKENS.shape)


def without(decoder):
    return Decoder(dataclasses.replace(decoder.shape, lora=None))


def logits(decoder, params):
    params = decoder.cast(params)
    return decoder.logits(params, decoder.hidden(params, TOKENS, ONES, POSITIONS))


def random_params(decoder):
    """Frozen weights, and adapters that add nothing yet; and the same with other adapters."""
    rng = np.random.default_rng(1)
    random = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32) / 4,
        decoder.abstract_params,
    )
    frozen, adapters = decoder.frozen(random), decoder.trained(random)
    new = jax.tree_util.tree_map_with_path(
        lambda path, x: 0 * x if path[-1].key == "b" else x, adapters
    )
    return decoder.joined(new, frozen), random


def test_beside_the_weights_they_add_what_they_add_merged_and_nothing_before_the_first_step():
    decoder = Decoder(EXPERTS)
    new, changed = random_params(decoder)
    run = jax.jit(lambda params: logits(decoder, params))
    run_plain = jax.jit(lambda params: logits(without(decoder), params))
    with jax.default_matmul_precision("highest"):
        before, after = (
            np.asarray(run_plain(decoder.frozen(new))),
            np.asarray(run(changed)),
        )
        assert_array_equal(run(new), before)
        assert np.abs(after - before).max() > 0.1 * np.abs(before).max()
        as_one = run_plain(jax.jit(merged)(changed))
    assert np.linalg.norm(as_one - after) <= 2e-6 * np.linalg.norm(after)


@pytest.mark.fast
def test_beside_a_weight_in_eight_bits_they_add_what_they_add_beside_one_that_is_not():
    """Values and gradients, less those of the weight alone."""
    rng = np.random.default_rng(2)
    shapes = (2, 10, 6), (6, 4, 3), (6, 3), (3, 4, 3), (2, 10, 4, 3)
    given = [rng.standard_normal(shape, np.float32) for shape in shapes]

    def run(quantization, x, w, a, b, g):
        def of(x, value):
            axes = ("embed", "heads", "head_dim")
            how = {"grad_dtype": jnp.float32, "quantization": quantization}
            return project(x, nnx.Param(value, axes=axes, **how))

        y, back = jax.vjp(lambda x, a, b: of(x, Adapted(w, a, b, 1.5)), x, a, b)
        plain, back_of_plain = jax.vjp(lambda x: of(x, w), x)
        dx, da, db = back(g)
        return y - plain, dx - back_of_plain(g)[0], da, db, plain

    both = jax.jit(lambda *given: [run(word, *given) for word in ("int8", "none")])
    with jax.default_matmul_precision("highest"):
        (*found, narrow), (*expected, plain) = both(*given)
    for got, want in zip(found, expected, strict=True):
        assert np.abs(want).max() > 0.1
        assert_allclose(got, want, rtol=1e-5, atol=2e-5)
    assert 1e-3 < np.abs(narrow - plain).max() < 0.5


def test_new_ones_are_uniform_in_a_and_zero_in_b_whatever_the_pipeline():
    decoder, in_stages = Decoder(LLAMA), Decoder(LLAMA, Pipeline(2, 2, 2))
    params, base, staged = jax.device_get(
        jax.jit(
            lambda key: (
                decoder.init(key),
                without(decoder).init(key),
                in_stages.init(key),
            )
        )(jax.random.key(7))
    )
    jax.tree.map(assert_array_equal, decoder.frozen(params), base)
    assert np.std(base["layers"]["mlp"]["up"]) == pytest.approx(0.2, rel=0.1)
    assert_array_equal(base["layers"]["mlp_norm"]["scale"], np.ones((4, 16)))
    adapters = decoder.trained(params)["layers"]
    of_stages = in_stages.trained(staged)["layers"]
    jax.tree.map(
        lambda x, y: assert_array_equal(x, np.reshape(y, x.shape)),
        adapters,
        of_stages,
    )
    for part, name, inputs in (
        ("attention", "query", 16),
        ("attention", "out", 16),
        ("mlp", "down", 24),
    ):
        one, bound = adapters[part][name], inputs**-0.5
        assert not np.any(one["b"])
        assert 0.9 * bound < np.abs(one["a"]).max() <= bound
        # A uniform value's deviation is its bound / sqrt(3); of 192 values or more it is off by less than 15 %.
        assert np.std(one["a"]) == pytest.approx(bound / 3**0.5, rel=0.15)
    firsts = {float(np.ravel(leaf)[0]) for leaf in jax.tree.leaves(adapters)}
    assert len(firsts) == 7 + 1  # every b is zero, and no other begins as another does
