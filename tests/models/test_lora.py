"""Adapters: what they add, by hand and by the merged formula; where they are, how they begin, how trees are parted."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.scipy.special import erf

from maxtext_lite.config import load_config
from maxtext_lite.models import Adapted, Decoder, Lora, merged
from maxtext_lite.models.ops import project
from maxtext_lite.parallel import Pipeline
from maxtext_lite.training.state import decoder_shape

TINY = ("vocab_size=264", "base_emb_dim=16", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=4",
        "base_mlp_dim=24", "base_num_decoder_layers=4", "max_target_length=32", "lora_rank=3", "lora_alpha=6",
        "initializer_range=0.2")  # fmt: skip
MODELS = {
    "Llama": (),
    "Gemma-like": ("layer_pattern=local,global", "sliding_window_size=8", "norm_placement=both",
                   "logits_via_embedding=true"),
    "DeepSeek-like": ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=8", "shared_experts=1",
                      "first_num_dense_layers=1", "base_num_kv_heads=4", "head_dim=6",
                      "mla={q_lora_rank: 6, kv_lora_rank: 4, qk_nope_head_dim: 4, qk_rope_head_dim: 2, v_head_dim: 5}"),
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 264, (2, 32))
ONES, POSITIONS = np.ones_like(TOKENS), np.broadcast_to(np.arange(32), TOKENS.shape)


def decoder_of(*keys, pipeline=None):
    return Decoder(decoder_shape(load_config(None, [*TINY, *keys])), pipeline)


def without(decoder):
    return Decoder(dataclasses.replace(decoder.shape, lora=None))


def logits(decoder, params):
    def of(params):
        return decoder.logits(params, decoder.hidden(params, TOKENS, ONES, POSITIONS))

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(of)(decoder.cast(params)))


def noisy(decoder, params, width=0.1):
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(lambda x: x + width * rng.standard_normal(x.shape, np.float32), decoder.trained(params))
    return decoder.joined(adapters, decoder.frozen(params))


@pytest.mark.parametrize("name", MODELS)
def test_beside_the_weights_they_add_what_they_add_merged_and_nothing_before_the_first_step(name):
    decoder = decoder_of(*MODELS[name])
    plain, params = without(decoder), decoder.init(jax.random.key(0))
    base = plain.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, decoder.frozen(params), base)
    before = logits(plain, base)
    np.testing.assert_array_equal(logits(decoder, params), before)
    changed = noisy(decoder, params)
    after = logits(decoder, changed)
    assert np.abs(after - before).max() > 0.1 * np.abs(before).max()
    assert np.linalg.norm(logits(plain, merged(changed)) - after) <= 1e-6 * np.linalg.norm(after)


def test_in_bfloat16_the_first_step_too_begins_with_the_frozen_model():
    decoder = decoder_of("dtype=bfloat16", "weight_dtype=bfloat16")
    params = decoder.init(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder.trained(params))} == {np.dtype(np.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder.frozen(params))} == {np.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(logits(decoder, params), logits(without(decoder), decoder.frozen(params)))


@pytest.mark.parametrize("inputs", [1, 2])
def test_a_projection_and_its_gradients_by_hand(inputs):
    """In float64: y = x W + s x a b, g the cotangent of y; W's place in the sum leaves da = s x^T (g b^T)."""
    rng = np.random.default_rng(2)
    x, g = rng.standard_normal((2, 5, 6)), rng.standard_normal((2, 5, 12))
    w, a, b = rng.standard_normal((6, 12)), rng.standard_normal((6, 3)), rng.standard_normal((3, 12))
    ins, outs = ((6,), (4, 3)) if inputs == 1 else ((2, 3), (12,))
    axes = ("embed", "heads", "head_dim") if inputs == 1 else ("heads", "head_dim", "embed")
    weight = Adapted(*(jnp.float32(v) for v in (w.reshape(*ins, *outs), a.reshape(*ins, 3), b.reshape(3, *outs))), 1.5)

    def of(x, adapters):
        return project(
            x,
            nnx.Param(dataclasses.replace(weight, **adapters), axes=axes, grad_dtype=jnp.float32, quantization="none"),
        )

    with jax.default_matmul_precision("highest"):
        y, back = jax.vjp(of, jnp.float32(x.reshape(2, 5, *ins)), {"a": weight.a, "b": weight.b})
        dx, found = back(jnp.float32(g.reshape(y.shape)))
    flat = lambda v: v.reshape(-1, v.shape[-1])  # noqa: E731
    expected = {
        "y": (y, x @ (w + 1.5 * a @ b)),
        "x": (dx, g @ (w + 1.5 * a @ b).T),
        "a": (found["a"], 1.5 * flat(x).T @ flat(g) @ b.T),
        "b": (found["b"], 1.5 * (flat(x) @ a).T @ flat(g)),
    }
    for name, (got, want) in expected.items():
        np.testing.assert_allclose(np.reshape(got, want.shape), want, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("ins", "outs", "stack"), [("i", "no", "l"), ("ni", "o", "l"), ("i", "o", "le"), ("i", "o", "")]
)
def test_sums_of_stacks_of_layers_and_experts(ins, outs, stack):
    sizes = {"l": 2, "e": 3, "n": 4, "i": 5, "o": 6, "r": 2}
    rng = np.random.default_rng(3)
    w, a, b = (
        rng.standard_normal([sizes[letter] for letter in stack + part]) for part in (ins + outs, ins + "r", "r" + outs)
    )
    node = Adapted(*(jnp.float32(v) for v in (w, a, b)), 0.5)
    assert node.num_stacked == len(stack)
    want = w + 0.5 * np.einsum(f"{stack}{ins}r,{stack}r{outs}->{stack}{ins}{outs}", a, b)
    np.testing.assert_allclose(node.merged(), want, rtol=1e-5, atol=1e-5)


def test_adapters_are_split_as_the_weights_that_they_stand_beside():
    decoder = decoder_of("num_experts=4", "lora_targets=query,out,down", "first_num_dense_layers=1")
    assert decoder.trained(decoder.axes) == {
        "layers": {
            "attention": {
                "query": {"a": ("layers", "embed", "lora_rank"), "b": ("layers", "lora_rank", "heads", "head_dim")},
                "out": {"a": ("layers", "heads", "head_dim", "lora_rank"), "b": ("layers", "lora_rank", "embed")},
            },
            "mlp": {
                "down": {
                    "a": ("layers", "experts", "mlp", "lora_rank"),
                    "b": ("layers", "experts", "lora_rank", "expert_embed"),
                }
            },
        },
        "dense_layers": {
            "attention": {
                "query": {
                    "a": ("dense_layers", "embed", "lora_rank"),
                    "b": ("dense_layers", "lora_rank", "heads", "head_dim"),
                },
                "out": {
                    "a": ("dense_layers", "heads", "head_dim", "lora_rank"),
                    "b": ("dense_layers", "lora_rank", "embed"),
                },
            },
            "mlp": {"down": {"a": ("dense_layers", "mlp", "lora_rank"), "b": ("dense_layers", "lora_rank", "embed")}},
        },
    }
    shapes = jax.tree.map(lambda leaf: leaf.shape, decoder.trained(decoder.abstract_params))["layers"]
    assert shapes["mlp"]["down"] == {"a": (3, 4, 24, 3), "b": (3, 4, 3, 16)}
    assert shapes["attention"]["out"] == {"a": (3, 4, 4, 3), "b": (3, 3, 16)}


def test_new_ones_are_uniform_in_a_and_zero_in_b_whatever_the_pipeline():
    params = decoder_of().init(jax.random.key(7))
    adapters = decoder_of().trained(params)["layers"]
    in_rounds = decoder_of(pipeline=Pipeline(2, 2, 2)).init(jax.random.key(7))
    in_rounds = decoder_of(pipeline=Pipeline(2, 2, 2)).trained(in_rounds)["layers"]
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.reshape(y, x.shape)), adapters, in_rounds)
    for path, inputs in ((("attention", "query"), 16), (("attention", "out"), 16), (("mlp", "down"), 24)):
        one = adapters[path[0]][path[1]]
        assert not np.any(one["b"])
        bound = inputs**-0.5
        assert 0.9 * bound < np.abs(one["a"]).max() <= bound
        # A uniform value's deviation is its bound / sqrt(3); of 192 values or more it is off by less than 15 %.
        assert np.std(one["a"]) == pytest.approx(bound / 3**0.5, rel=0.15)
    query, key = adapters["attention"]["query"]["a"], adapters["attention"]["key"]["a"]
    assert not np.any(query == key)
    assert not np.any(query[0] == query[1])


def test_a_tree_is_the_join_of_its_parts_and_without_lora_is_trained_whole():
    decoder = decoder_of()
    params = decoder.init(jax.random.key(0))
    again = decoder.joined(decoder.trained(params), decoder.frozen(params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert decoder.shape.lora == Lora(3, 6.0, ("query", "key", "value", "out", "gate", "up", "down"))
    assert decoder.shape.lora.scale == 2
    plain = without(decoder)
    base = decoder.frozen(params)
    assert plain.trained(base) is base
    assert plain.frozen(base) is None
    assert plain.joined(base, None) is base


def test_adapters_are_drawn_by_themselves_and_frozen_weights_as_without_them():
    """The uniform draws behind a weight are erf of its normal ones: no adapter begins as any of them does."""
    base = jax.device_get(jax.jit(without(decoder_of()).init)(jax.random.key(0)))
    drawn = [np.ravel(leaf) for leaf in jax.tree.leaves(base) if leaf.std()]
    drawn += [np.ravel(layer) for leaf in jax.tree.leaves(base["layers"]) if leaf.std() for layer in leaf]
    for rank in (3, 5):
        decoder = decoder_of(f"lora_rank={rank}")
        params = jax.device_get(jax.jit(decoder.init)(jax.random.key(0)))
        jax.tree.map(np.testing.assert_array_equal, decoder.frozen(params), base)
        firsts = [np.ravel(leaf) for leaf in jax.tree.leaves(decoder.trained(params)) if leaf.std()]
        assert len(firsts) == 7  # every b is zero
        for a, weight in itertools.product(firsts, drawn):
            size = min(len(a), len(weight))
            same = np.corrcoef(a[:size], np.asarray(erf(weight[:size] / (0.2 * np.sqrt(2)))))[0, 1]
            assert abs(same) < 0.6  # of 64 numbers and more, by chance never
