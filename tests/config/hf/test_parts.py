"""Families and their parts by hand, each in both directions."""

from maxtext_lite.config import load_config
from maxtext_lite.config.hf.fields import Fields
from maxtext_lite.config.hf.parts import (
    Activation,
    Bias,
    Every,
    Heads,
    LearnedPositions,
    Only,
    QueryScalar,
    family,
)


def read(part, **fields):
    found = Fields(fields)
    keys = part.read(found)
    assert found.problems == []
    assert found.unknown("x") == []
    return keys


def problems(part, **fields):
    found = Fields(fields)
    part.read(found)
    return found.problems


def test_heads_share_the_stream_out_unless_their_width_is_said():
    sizes = {"num_attention_heads": 4}
    assert Heads().read(Fields({**sizes, "hidden_size": 32})) == {
        "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 8
    }  # fmt: skip
    assert read(Heads(head_dim=128), **sizes)["head_dim"] == 128
    assert read(Heads(kv_heads=2, head_dim=8), **sizes)["base_num_kv_heads"] == 2
    assert read(Heads(), **sizes, head_dim=5, num_key_value_heads=2)["base_num_kv_heads"] == 2


def test_positions_of_gpt2():
    assert read(LearnedPositions(), n_head=2, n_positions=7, n_inner=5) == {
        "base_num_query_heads": 2, "base_num_kv_heads": 2, "head_dim": 0, "base_mlp_dim": 5,
        "trainable_position_size": 7,
    }  # fmt: skip


def test_small_parts():
    assert read(Activation("hidden_act", "silu"), hidden_act="gelu_new") == {"mlp_activation": "gelu_tanh"}
    assert Activation("hidden_act", "silu").write(load_config(None, ["mlp_activation=gelu"])) == {"hidden_act": "gelu"}
    assert read(Bias("attention_bias", "all"), attention_bias=True) == {"attention_bias": "all"}
    assert read(QueryScalar(), query_pre_attn_scalar=144) == {"query_pre_attn_scalar": 144}
    assert read(Every("a", "b", key="k"), b=3) == {"k": 3}
    assert problems(Every("a", "b", key="k"), a=2, b=3) == ["b=3 contradicts a=2."]
    assert problems(Every("a", "b", key="k")) == ["a is missing."]
    assert problems(Only("a", 1), a=2) == ["a=2 cannot be expressed: it must be 1."]


def test_a_family_has_the_usual_sizes_and_its_own_defaults():
    sizes = {"vocab_size": 7, "hidden_size": 6, "intermediate_size": 5, "num_hidden_layers": 4}
    fields, keys = Fields(sizes), {}
    for part in family("XForCausalLM", epsilon=1e-3, tied=True).parts:
        keys |= part.read(fields)
    assert fields.problems == fields.unknown("x") == []
    assert keys == {
        "vocab_size": 7, "base_emb_dim": 6, "base_mlp_dim": 5, "base_num_decoder_layers": 4, "initializer_range": 0.02,
        "normalization_layer_epsilon": 1e-3, "logits_via_embedding": True,
    }  # fmt: skip
