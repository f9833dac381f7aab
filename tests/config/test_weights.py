"""The tables of weights, what their logical axes imply, and which may have adapters, by hand."""

import dataclasses

import pytest

from maxtext_lite.config import Mla, adapted_weights, load_config
from maxtext_lite.config.weights import (
    ExpertSizes,
    ModelShape,
    adaptable_weights,
    layer_weights,
    num_parts,
    stacks_of,
)

SMALL = ModelShape(
    vocab_size=11,
    emb_dim=8,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=5,
    num_layers=3,
)


def lines_of(table, *, is_normal):
    """Each weight with its sizes and its logical axes, in the order in which values are drawn."""
    kept = {
        path: weight for path, weight in table.items() if weight.is_normal == is_normal
    }
    return [
        " ".join(map(str, (path, *weight.sizes, *weight.axes)))
        for path, weight in kept.items()
    ]


def table(text):
    return [line.strip() for line in text.strip().splitlines()]


def test_a_llamas_layer_is_as_written_by_hand_in_the_order_in_which_its_values_are_drawn():
    weights = layer_weights(SMALL)
    assert lines_of(weights, is_normal=True) == table("""
        attention/query 8 4 6 embed heads head_dim
        attention/key 8 2 6 embed kv_heads head_dim
        attention/value 8 2 6 embed kv_heads head_dim
        attention/out 4 6 8 heads head_dim embed
        mlp/gate 8 5 embed mlp
        mlp/up 8 5 embed mlp
        mlp/down 5 8 mlp embed
    """)
    assert sorted(lines_of(weights, is_normal=False)) == [
        "attention_norm/scale 8 norm",
        "mlp_norm/scale 8 norm",
    ]
    assert {weight.start for weight in weights.values() if not weight.is_normal} == {
        "ones"
    }


def test_experts_and_latent_attention_are_as_written_by_hand():
    latent, experts = (
        Mla(7, 3, 4, 2, 5),
        ExpertSizes(6, 2, 9, shared_dim=18, biased=True, with_bias=True),
    )
    stacks = stacks_of(
        dataclasses.replace(SMALL, latent=latent, experts=experts, num_dense_layers=1)
    )
    assert {name: count for name, (count, _) in stacks.items()} == {
        "": 1,
        "dense_layers": 1,
        "layers": 2,
    }
    assert lines_of(stacks["layers"][1], is_normal=True) == table("""
        attention/query_down 8 7 embed latent
        attention/query_up 7 4 6 latent heads head_dim
        attention/kv_down 8 5 embed latent
        attention/key_up 3 4 4 latent heads head_dim
        attention/value_up 3 4 5 latent heads head_dim
        attention/out 4 5 8 heads head_dim embed
        mlp/router 8 6 embed router
        mlp/gate 6 8 9 experts expert_embed mlp
        mlp/up 6 8 9 experts expert_embed mlp
        mlp/down 6 9 8 experts mlp expert_embed
        mlp/shared/gate 8 18 embed mlp
        mlp/shared/up 8 18 embed mlp
        mlp/shared/down 18 8 mlp embed
    """)
    assert sorted(lines_of(stacks["layers"][1], is_normal=False)) == table("""
        attention/kv_down_norm/scale 3 norm
        attention/query_down_norm/scale 7 norm
        attention_norm/scale 8 norm
        mlp/down_bias 6 8 experts norm
        mlp/gate_bias 6 9 experts mlp
        mlp/router_bias 6 router_bias
        mlp/router_logit_bias 6 norm
        mlp/up_bias 6 9 experts mlp
        mlp_norm/scale 8 norm
    """)
    dense = lines_of(stacks["dense_layers"][1], is_normal=True)
    assert "mlp/gate 8 5 embed mlp" in dense
    assert not any("router" in line for line in dense)


LATENT = "mla={q_lora_rank: %d, kv_lora_rank: 4, qk_nope_head_dim: 12, qk_rope_head_dim: 4, v_head_dim: 8}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "query key value out gate up down"),
        (["gated_mlp=false"], "query key value out up down"),
        (["num_experts=4"], "query key value out gate up down"),  # but routers
        (
            ["base_num_kv_heads=8", LATENT % 0],
            "query kv_down key_up value_up out gate up down",
        ),
        (
            ["base_num_kv_heads=8", LATENT % 6],
            "query_down query_up kv_down key_up value_up out gate up down",
        ),
        (
            ["lora_targets=down, value,query,value"],
            "query value down",
        ),  # in the model's order
    ],
)
def test_adapters_are_for_the_weights_that_tokens_are_multiplied_by(words, expected):
    config = load_config(None, [*words, "lora_rank=2"])
    assert adapted_weights(config) == tuple(expected.split())
    assert set(adapted_weights(config)) <= set(adaptable_weights(config))
    assert adapted_weights(load_config()) == ()


def test_the_mesh_axes_that_split_a_logical_axis():
    mesh = {"data": 2, "fsdp": 3, "tensor": 5, "expert": 7, "context": 11}
    parts = {
        "embed": 3 * 7 * 11,
        "expert_embed": 3 * 11,
        "heads": 5,
        "experts": 7,
        "norm": 1,
        "layers": 1,
    }
    assert {axis: num_parts(axis, mesh) for axis in parts} == parts
