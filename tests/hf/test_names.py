"""How tensors lie, by hand."""

import dataclasses

import numpy as np

from maxtext_lite.config import Mla
from maxtext_lite.config.weights import ExpertSizes, ModelShape
from maxtext_lite.hf.names import Name

PLAIN = ModelShape(
    vocab_size=11, emb_dim=6, num_query_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=5, num_layers=2, num_positions=7,
    norm="layer_norm", norm_placement="both", mlp_bias=True, attention_bias="all", qk_norm="head", sinks=True,
)  # fmt: skip
EXPERTS = ExpertSizes(3, 2, 4, shared_dim=8, biased=True, with_bias=True)
LATENT = dataclasses.replace(PLAIN, latent=Mla(5, 3, 2, 4, 3), experts=EXPERTS, num_layers=3, num_dense_layers=1)
MODELS = (PLAIN, dataclasses.replace(PLAIN, qk_norm="all_heads"), dataclasses.replace(PLAIN, experts=EXPERTS))
LATENT_MODELS = (LATENT, dataclasses.replace(LATENT, latent=Mla(0, 3, 2, 4, 3)))
SIZES = LATENT.sizes


QUERY = PLAIN.weight("D N H", "embed heads head_dim")
KEY = PLAIN.weight("D K H", "embed kv_heads head_dim")


def test_a_linear_layer_is_transposed_and_cut_into_heads():
    name = Name(("query",), "q").laid([QUERY])
    tensor = np.arange(24 * 6).reshape(24, 6)
    ours = name.to_ours(tensor, 0, SIZES)
    assert ours.base is not None, "a view"
    assert ours[2, 3, 1] == tensor[3 * 6 + 1, 2]


def test_a_pattern_says_what_is_otherwise():
    name = Name(("query",), "q", "D (N H)").laid([QUERY])
    tensor = np.arange(24 * 6).reshape(6, 24)
    assert name.to_ours(tensor, 0, SIZES)[2, 3, 1] == tensor[2, 3 * 6 + 1]


def test_the_output_of_heads_is_transposed_tables_and_vectors_are_not():
    out = Name(("out",), "o").laid([PLAIN.weight("N H D", "heads head_dim embed")])
    tensor = np.arange(6 * 24).reshape(6, 24)
    assert out.to_ours(tensor, 0, SIZES)[3, 1, 2] == tensor[2, 3 * 6 + 1]
    for weight, shape in (
        (PLAIN.weight("V D", "vocab embed"), (11, 6)),
        (PLAIN.weight("T D", "positions embed"), (7, 6)),
        (PLAIN.weight("N H", "heads head_dim", "zeros"), (24,)),
    ):
        name = Name(("x",), "x").laid([weight])
        assert name.their_shape(SIZES) == shape
        tensor = np.arange(np.prod(shape)).reshape(shape)
        np.testing.assert_array_equal(name.to_ours(tensor, 0, SIZES), tensor.reshape(weight.sizes))


def test_a_line_is_about_experts_or_it_is_not():
    """Of experts with a tensor each, one of them; of experts that share one, all."""
    weight = LATENT.weight("E D I", "experts expert_embed mlp")
    assert Name(("up",), "up").laid([weight]) is None
    assert Name(("up",), "{expert}.up").laid([QUERY]) is None
    assert Name(("up",), "{expert}.up").laid([weight]).their_shape(SIZES) == (4, 6)
    assert Name(("up",), "up", "E D I").laid([weight]).their_shape(SIZES) == (3, 6, 4)


def test_parts_stand_one_after_another():
    name = Name(("query", "key", "value"), "qkv", parts=("N", "K", "K")).laid([QUERY, KEY, KEY])
    tensor = np.arange(48 * 6).reshape(48, 6)
    assert name.to_ours(tensor, 0, SIZES)[5, 3, 2] == tensor[3 * 6 + 2, 5]
    assert name.to_ours(tensor, 1, SIZES)[5, 1, 2] == tensor[(4 + 1) * 6 + 2, 5]
    assert name.to_ours(tensor, 2, SIZES)[5, 1, 2] == tensor[(4 + 2 + 1) * 6 + 2, 5]


def test_parts_take_turns():
    weight = LATENT.weight("E D I", "experts expert_embed mlp")
    name = Name(("gate", "up"), "gate_up", "E D (I Z)", ("1", "1")).laid([weight, weight])
    tensor = np.arange(3 * 6 * 8).reshape(3, 6, 8)
    np.testing.assert_array_equal(name.to_ours(tensor, 0, SIZES), tensor[..., ::2])
    np.testing.assert_array_equal(name.to_ours(tensor, 1, SIZES), tensor[..., 1::2])


def test_pairs_become_halves_behind_the_dims_that_are_not_rotated():
    name = Name(("kv_down",), "kv", pairs="C").laid([LATENT.weight("D C", "embed latent")])
    tensor = np.arange(7 * 6).reshape(7, 6)
    order = name.to_ours(tensor, 0, SIZES)[0] // 6
    assert order.tolist() == [0, 1, 2, 3, 5, 4, 6]
