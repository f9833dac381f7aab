"""What has been read of a config.json, and when two models are the same."""

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.hf.config import model_keys
from maxtext_lite.config.hf.fields import DEFAULTS, Fields, same_architecture
from maxtext_lite.config.model_parts import RopeScaling

SIZES = {"base_num_decoder_layers": 4, "head_dim": 16, "base_mlp_dim": 24}
KEYS = {**DEFAULTS, **SIZES}


def test_a_null_is_a_field_that_is_not_there_and_what_is_left_is_unknown():
    fields = Fields({"a": 1, "b": None, "c": 2, "d": False})
    assert (fields.take("a"), fields.take("b", 5), fields.peek("c", 0), fields.is_null("b")) == (1, 5, 2, True)
    (problem,) = fields.unknown("llama")
    assert problem.startswith("c=2 is not a field of llama")
    fields.drop(["c"])
    assert fields.unknown("llama") == []


@pytest.mark.parametrize(("kind", "name"), [
    ("llama", "rms_norm_eps"), ("llama", "mlp_bias"), ("glm4_moe", "routed_scaling_factor"),
    ("dots1", "norm_topk_prob"),  # null is false in transformers, and a missing field is not
])  # fmt: skip
def test_a_null_that_transformers_does_not_read_as_the_default_is_refused(kind, name):
    fields = {
        "model_type": kind, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    }  # fmt: skip
    known = fields if kind != "llama" else {name: fields[name] for name in list(fields)[:6]}
    model_keys(known, "config.json")
    with pytest.raises(UserError) as refusal:
        model_keys({**known, name: None}, "config.json")
    assert refusal.value.problems == (
        f"config.json: {name}=null is not a value of this field. Remove it for its default.",
    )


def test_what_is_missing_or_no_count_is_a_problem():
    fields = Fields({"a": 0, "b": True, "c": 3})
    assert [fields.whole(name) for name in "abcd"] == [1, 1, 3, 1]
    assert fields.problems == [
        "a=0 is not an integer of at least 1.", "b=true is not an integer of at least 1.", "d is missing."
    ]  # fmt: skip


def test_layer_types_name_every_layer_by_a_known_kind():
    fields = Fields({})
    fields.check_layer_types(["full_attention", "sliding_attention"], 2, 8, ("full_attention", "sliding_attention"))
    assert fields.problems == []
    fields.check_layer_types(["odd", "sliding_attention"], 3, 0, ("full_attention", "sliding_attention"))
    assert len(fields.problems) == 3


@pytest.mark.parametrize("same", [
    {"layer_pattern": "global, global"}, {"query_pre_attn_scalar": 16}, {"base_moe_mlp_dim": 24},
    {"initializer_range": 0.5}, {"norm_topk_prob": False}, {"mla": None},
])  # fmt: skip
def test_keys_that_say_the_same_are_the_same(same):
    assert same_architecture(KEYS | {"initializer_range": 0.02}, KEYS | {"initializer_range": 0.02} | same) == []


@pytest.mark.parametrize("other", [
    {"layer_pattern": "global,local"}, {"query_pre_attn_scalar": 15}, {"num_experts": 2},
    {"rope_scaling": RopeScaling("linear", 2.0)}, {"qk_norm": "head"},
])  # fmt: skip
def test_keys_that_do_not_are_named(other):
    assert set(other) <= set(same_architecture(KEYS, KEYS | other))


def test_entries_of_a_rope_scaling_may_be_left_out_where_they_are_usual():
    one = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    other = load_config(None, [
        "rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 64, beta_fast: 32, truncate: true}"
    ])  # fmt: skip
    assert same_architecture(KEYS | {"rope_scaling": one}, KEYS | {"rope_scaling": other.rope_scaling}) == []
