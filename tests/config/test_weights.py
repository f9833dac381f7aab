"""The tables of weights, by hand."""

import dataclasses

from maxtext_lite.config import Mla
from maxtext_lite.config.weights import ExpertSizes, ModelShape, end_weights, layer_weights, stacks_of

SMALL = ModelShape(vocab_size=11, emb_dim=8, num_query_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=5, num_layers=3)


def of_kind(table, is_normal):
    return {path: (weight.sizes, weight.axes) for path, weight in table.items() if weight.is_normal == is_normal}


def test_a_llamas_layer_is_as_written_by_hand_in_the_order_in_which_its_values_are_drawn():
    table = layer_weights(SMALL)
    assert list(of_kind(table, True).items()) == [
        ("attention/query", ((8, 4, 6), ("embed", "heads", "head_dim"))),
        ("attention/key", ((8, 2, 6), ("embed", "kv_heads", "head_dim"))),
        ("attention/value", ((8, 2, 6), ("embed", "kv_heads", "head_dim"))),
        ("attention/out", ((4, 6, 8), ("heads", "head_dim", "embed"))),
        ("mlp/gate", ((8, 5), ("embed", "mlp"))),
        ("mlp/up", ((8, 5), ("embed", "mlp"))),
        ("mlp/down", ((5, 8), ("mlp", "embed"))),
    ]
    norms = ("attention_norm/scale", "mlp_norm/scale")
    assert of_kind(table, False) == dict.fromkeys(norms, ((8,), ("norm",)))
    assert {table[path].start for path in norms} == {"ones"}


def test_experts_and_latent_attention_are_as_written_by_hand():
    latent, experts = Mla(7, 3, 4, 2, 5), ExpertSizes(6, 2, 9, shared_dim=18, biased=True, with_bias=True)
    shape = dataclasses.replace(SMALL, latent=latent, experts=experts, num_dense_layers=1)
    stacks = stacks_of(shape)
    assert {name: count for name, (count, _) in stacks.items()} == {"": 1, "dense_layers": 1, "layers": 2}
    assert list(of_kind(stacks["layers"][1], True).items()) == [
        ("attention/query_down", ((8, 7), ("embed", "latent"))),
        ("attention/query_up", ((7, 4, 6), ("latent", "heads", "head_dim"))),
        ("attention/kv_down", ((8, 3 + 2), ("embed", "latent"))),
        ("attention/key_up", ((3, 4, 4), ("latent", "heads", "head_dim"))),
        ("attention/value_up", ((3, 4, 5), ("latent", "heads", "head_dim"))),
        ("attention/out", ((4, 5, 8), ("heads", "head_dim", "embed"))),
        ("mlp/router", ((8, 6), ("embed", "router"))),
        ("mlp/gate", ((6, 8, 9), ("experts", "expert_embed", "mlp"))),
        ("mlp/up", ((6, 8, 9), ("experts", "expert_embed", "mlp"))),
        ("mlp/down", ((6, 9, 8), ("experts", "mlp", "expert_embed"))),
        ("mlp/shared/gate", ((8, 18), ("embed", "mlp"))),
        ("mlp/shared/up", ((8, 18), ("embed", "mlp"))),
        ("mlp/shared/down", ((18, 8), ("mlp", "embed"))),
    ]
    assert of_kind(stacks["layers"][1], False) == {
        "attention_norm/scale": ((8,), ("norm",)),
        "mlp_norm/scale": ((8,), ("norm",)),
        "attention/query_down_norm/scale": ((7,), ("norm",)),
        "attention/kv_down_norm/scale": ((3,), ("norm",)),
        "mlp/router_bias": ((6,), ("router_bias",)),
        "mlp/router_logit_bias": ((6,), ("norm",)),
        "mlp/gate_bias": ((6, 9), ("experts", "mlp")),
        "mlp/up_bias": ((6, 9), ("experts", "mlp")),
        "mlp/down_bias": ((6, 8), ("experts", "norm")),
    }
    dense = of_kind(stacks["dense_layers"][1], True)
    assert dense["mlp/gate"] == ((8, 5), ("embed", "mlp"))
    assert "mlp/router" not in dense


def test_biases_norms_and_sinks_are_there_where_the_model_has_them():
    gpt = dataclasses.replace(
        SMALL, norm="layer_norm", gated=False, mlp_bias=True, attention_bias="all", num_positions=4, tied=True
    )
    assert {path for path in layer_weights(gpt) if path.endswith("bias")} == {
        "attention_norm/bias", "mlp_norm/bias", "attention/query_bias", "attention/key_bias", "attention/value_bias",
        "attention/out_bias", "mlp/up_bias", "mlp/down_bias",
    }  # fmt: skip
    assert list(end_weights(gpt)) == ["embedding/table", "embedding/positions", "final_norm/scale", "final_norm/bias"]
    assert list(end_weights(SMALL)) == ["embedding/table", "final_norm/scale", "head/projection"]
    others = dataclasses.replace(
        SMALL, norm="rms_norm_plus_one", norm_placement="both", qk_norm="all_heads", attention_bias="qkv", sinks=True
    )
    table = layer_weights(others)
    assert table.keys() - layer_weights(SMALL).keys() == {
        "attention_post_norm/scale", "mlp_post_norm/scale", "attention/query_norm/scale", "attention/key_norm/scale",
        "attention/query_bias", "attention/key_bias", "attention/value_bias", "attention/sinks",
    }  # fmt: skip
    assert {weight.start for weight in table.values() if not weight.is_normal} == {"zeros"}
    assert table["attention/key_norm/scale"].sizes == (2, 6)
    assert layer_weights(dataclasses.replace(others, qk_norm="head"))["attention/key_norm/scale"].sizes == (6,)
    post = layer_weights(dataclasses.replace(SMALL, norm_placement="post"))
    assert {path for path in post if "norm" in path} == {"attention_post_norm/scale", "mlp_post_norm/scale"}


def test_adapters_stand_between_a_weights_inputs_and_its_outputs():
    experts = dataclasses.replace(SMALL, experts=ExpertSizes(6, 2, 9))
    table = layer_weights(experts)
    found = {name: [each.sizes for each in table[name].adapters(3)] for name in ("attention/out", "mlp/up")}
    assert found == {"attention/out": [(4, 6, 3), (3, 8)], "mlp/up": [(6, 8, 3), (6, 3, 9)]}
    assert table["mlp/up"].adapters(3)[1].axes == ("experts", "lora_rank", "mlp")
