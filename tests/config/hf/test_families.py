"""Every family by its class of transformers: what fields mean that are missing, null, or of the wrong kind."""

import copy
from typing import Any

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.hf.config import family_of, model_keys
from maxtext_lite.config.hf.families import FAMILIES
from maxtext_lite.config.hf.fields import JsonObject, same_architecture

_NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6}, "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4},  # one expert, its default, is no model of ours
}  # fmt: skip
_WRONG = (
    "x", 5, 1.5, True, [1], {"rope_type": []}, {"full_attention": 5}, {"type": ["a"]}, {"rope_theta": "x"},
    {"rope_type": "longrope", "short_factor": [0], "long_factor": [1], "original_max_position_embeddings": 0},
    {"rope_type": "longrope", "short_factor": 5, "long_factor": "x", "original_max_position_embeddings": "4"},
    {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 1.5, "llama_4_scaling_beta": [1]},
    {"rope_type": "dynamic", "factor": 1, "alpha": []},
)  # fmt: skip


def of_transformers(kind: str, fields: JsonObject) -> JsonObject:
    """All fields as transformers reads these, its defaults among them."""
    made: Any = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING[kind]
    return made.from_dict(copy.deepcopy(fields)).to_dict()


def test_families_name_themselves():
    assert all(family_of({"model_type": kind}, "x") == kind for kind in FAMILIES)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_field_that_is_not_there_or_null_is_what_transformers_takes_it_for(kind):
    not_allowed = (TypeError, pytest.importorskip("huggingface_hub.errors").StrictDataclassError)
    whole = of_transformers(kind, _NEEDED.get(kind, {}))
    compared = 0
    for field in set(whole) - {"model_type", "architectures", "transformers_version"}:
        for fields in ({key: value for key, value in whole.items() if key != field}, whole | {field: None}):
            try:
                ours = model_keys(fields, "config.json")
            except UserError:  # what must be there is not guessed
                continue
            try:
                theirs = of_transformers(kind, fields)
            except not_allowed:  # null is not allowed
                continue
            assert same_architecture(model_keys(theirs, "config.json"), ours) == [], field
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "gpt2"])
def test_rotary_positions_of_the_wrong_kind_are_refused(kind):
    plain = of_transformers(kind, _NEEDED.get(kind, {}))
    del plain["rope_parameters"]
    for field in ("rope_parameters", "rope_scaling"):
        for wrong in _WRONG:
            with pytest.raises(UserError, match=r"rope_|rotary_|original_max_position|llama_4|short_mscale"):
                model_keys(plain | {field: wrong}, "config.json")


@pytest.mark.parametrize(("kind", "fields", "message"), [
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "says type, which transformers does not read"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50 cannot be expressed: it must be null"),
    ("apertus", {"rope_theta": 500.0}, "rope_theta=500 contradicts rope_parameters, in which it is 12000000."),
    ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
               "max_position_embeddings": None}, "lacks max_position_embeddings beside it."),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=linear is not of this family"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 32, "sliding_window": 5}, "sliding_attention needs a sliding_"),
    ("solar_open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 has no effect in this family"),
    ("cohere2", {"sliding_window": None, "layer_types": ["full_attention"] * 40}, "sliding_window=null is a model"),
])  # fmt: skip
def test_what_transformers_passes_over_is_refused(kind, fields, message):
    plain = of_transformers(kind, {})
    for field in ("rope_parameters", *fields):
        plain.pop(field, None)
    with pytest.raises(UserError, match=message):
        model_keys(plain | fields, "config.json")


@pytest.mark.parametrize("kind", ["gpt_oss", "apertus"])
def test_an_empty_object_is_no_rotation_by_default(kind):
    """Where the family's own default scales it."""
    plain = of_transformers(kind, {})
    del plain["rope_parameters"]
    scaled, empty = (model_keys(plain | fields, "x") for fields in ({}, {"rope_parameters": {}}))
    assert scaled["rope_scaling"] != empty["rope_scaling"] == {}
    theirs = model_keys(of_transformers(kind, plain | {"rope_parameters": {}}), "x")
    assert same_architecture(theirs, empty) == []


def test_a_base_that_no_scaling_names_is_transformers_usual_one():
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1}
    fields = of_transformers("ministral3", {"rope_parameters": scaling})
    named = model_keys(fields, "x")
    del fields["rope_parameters"]["rope_theta"]
    assert named["rope_max_timescale"] == model_keys(fields, "x")["rope_max_timescale"] == 10_000.0


# ---- With experts: what their hubs' config.json say, in keys ---------------------------------------------------------

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
OF_HUBS = {
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "decoder_sparse_step": 1,
        "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21, "torch_dtype": "bfloat16",
    },
    "glm4.5-air": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rms_norm_eps": 1e-5,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "use_qk_norm": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    },
    "minimax-m2": {
        "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
        "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        "rotary_dim": 64, "rope_theta": 5000000, "rms_norm_eps": 1e-6, "num_local_experts": 256,
        "num_experts_per_tok": 8, "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid",
        "use_routing_bias": True, "shared_intermediate_size": 0, "attn_type_list": [1] * 62,
    },
    "llama4-maverick": {
        "model_type": "llama4", "text_config": {
            "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False,
            "attention_chunk_size": 8192, "attn_temperature_tuning": 4, "no_rope_layers": [1, 1, 1, 0] * 12,
            "moe_layers": list(range(1, 48, 2)), "for_llm_compressor": False,
        }, "vision_config": {"hidden_size": 1408},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OF_HUBS)
def test_a_config_of_a_hub_is_the_model_of_that_name(name):
    keys, named = model_keys(OF_HUBS[name], "x"), load_config(None, [f"model_name={name}"])
    odd = {key for key, value in keys.items() if (getattr(named, key) or {}) != (value or {})}
    tuning = named.position_temperature
    if tuning is not None and keys["position_temperature"] == tuning.to_mapping():
        odd -= {"position_temperature"}
    assert odd == set()


@pytest.mark.parametrize(("kind", "fields"), [
    ("glm4_moe", {**GLM, "first_k_dense_replace": 9}),
    ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 7}),
])  # fmt: skip
def test_a_model_whose_layers_are_all_dense_is_a_dense_one(kind, fields):
    keys = model_keys({"model_type": kind, **SIZES, **fields}, "x")
    assert {key: keys[key] for key in ("num_experts", "base_mlp_dim", "first_num_dense_layers", "routed_bias")} == {
        "num_experts": 1, "base_mlp_dim": 48, "first_num_dense_layers": 0, "routed_bias": False
    }  # fmt: skip


def test_one_expert_in_a_layer_is_refused_by_its_field():
    with pytest.raises(UserError, match=r"x: n_routed_experts=1 cannot be expressed in a layer with experts\. Nearest"):
        model_keys({"model_type": "glm4_moe", **SIZES, **GLM, "n_routed_experts": 1, "num_experts_per_tok": 1}, "x")


@pytest.mark.parametrize(("kind", "fields", "message"), [
    ("phimoe", {"num_local_experts": 4, "router_jitter_noise": 0.1}, "router_jitter_noise=0.1 cannot be expressed"),
    ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 3}, "num_experts_per_tok=3 cannot be expressed"),
    ("phimoe", {"num_local_experts": 4, "rope_scaling": {
        "type": "longrope", "short_factor": [1] * 4, "long_factor": [1] * 4, "short_mscale": 1.0, "long_mscale": 1.1,
        "original_max_position_embeddings": 8, "factor": 2.0}}, "short_mscale and long_mscale=[1, 1.1] cannot be"),
    ("phimoe", {"num_local_experts": 4, "rope_scaling": {
        "type": "longrope", "short_factor": [1] * 4, "long_factor": [1] * 4, "short_mscale": 10**400,
        "long_mscale": 10**400, "original_max_position_embeddings": 8, "factor": 2.0}}, "cannot be expressed: it must"),
    ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "use_bias": True},
     "use_bias=true cannot be expressed"),
    ("ernie4_5_moe", {"moe_num_experts": 4, "num_experts": 5, "moe_k": 2, "moe_intermediate_size": 8},
     "num_experts=5 contradicts moe_num_experts=4."),
    ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 64, "partial_rotary_factor": 0.25},
     "rotary_dim=64 contradicts partial_rotary_factor=0.25."),
    ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [2] * 4}, "moe_topk=[2, 2, 2, 2] is a list or a mapping"),
    ("glm4_moe", {**GLM, "topk_method": "greedy"}, "topk_method=greedy cannot be expressed"),
    ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 0}, "logits_scaling=0 is not"),
])  # fmt: skip
def test_what_cannot_be_expressed_is_refused_by_name(kind, fields, message):
    with pytest.raises(UserError) as refusal:
        model_keys({"model_type": kind, **SIZES, **fields}, "there")
    assert any(message in problem for problem in refusal.value.problems), refusal.value.problems
