"""config.json of published models by hand, both ways of writing it, and what is refused."""

import copy
import itertools
import json
import re

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.hf.config import (
    TOWERS,
    config_json,
    model_keys,
    stored_dtype,
    text_fields,
    text_tensor,
    unbuilt,
)
from maxtext_lite.config.hf.families import FAMILIES
from maxtext_lite.config.hf.fields import DEFAULTS, same_architecture
from maxtext_lite.config.sections import ModelConfig

# As the models' authors published them.
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA32_ROPE = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "initializer_range": 0.02, "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2",
    "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
    "vocab_size": 256000,
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
MIXTRAL = {
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
GPT_OSS_20B = {
    "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880, "layer_types": ["sliding_attention",
    "full_attention"] * 12, "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False}, "rope_theta": 150000,
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip
DEEPSEEK_V3 = {
    "attention_bias": False, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32,
    "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
GPT2 = {
    "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
SMOLLM3 = {
    "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536, "max_window_layers": 28,
    "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
    "vocab_size": 128256,
}  # fmt: skip

PUBLISHED = [
    (LLAMA3_8B, {
        "vocab_size": 128256, "base_emb_dim": 4096, "base_num_query_heads": 32, "base_num_kv_heads": 8,
        "head_dim": 128, "base_mlp_dim": 14336, "base_num_decoder_layers": 32, "rope_max_timescale": 500000.0,
        "normalization_layer_epsilon": 1e-05, "logits_via_embedding": False, "rope_scaling": {},
    }),
    (LLAMA3_8B | {"rope_scaling": LLAMA32_ROPE, "tie_word_embeddings": True, "head_dim": 64}, {
        "rope_scaling": LLAMA32_ROPE, "logits_via_embedding": True, "head_dim": 64,
    }),
    (GEMMA2_2B, {
        "normalization": "rms_norm_plus_one", "norm_placement": "both", "scale_embeddings": True,
        "mlp_activation": "gelu_tanh", "logits_via_embedding": True, "layer_pattern": "local,global",
        "sliding_window_size": 4096, "attn_logits_soft_cap": 50.0, "final_logits_soft_cap": 30.0,
        "query_pre_attn_scalar": 256, "qk_norm": "none",
    }),
    (GEMMA3_1B, {
        "layer_pattern": "local,local,local,local,local,global", "sliding_window_size": 512, "qk_norm": "head",
        "rope_max_timescale": 1000000, "rope_local_max_timescale": 10000, "attn_logits_soft_cap": 0.0,
    }),
    (QWEN25_7B, {"attention_bias": "qkv", "layer_pattern": "global", "sliding_window_size": 0, "head_dim": 128}),
    (MIXTRAL, {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "routed_score_func": "softmax"}),
    (GPT_OSS_20B, {
        "attention_bias": "all", "attention_sinks": True, "expert_bias": True, "mlp_activation": "clamped_silu",
        "layer_pattern": "local,global", "sliding_window_size": 128, "num_experts": 32, "num_experts_per_tok": 4,
        "rope_max_timescale": 150000,
    }),
    (DEEPSEEK_V3, {
        "mla": {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                "v_head_dim": 128},
        "head_dim": 192, "first_num_dense_layers": 3, "num_experts": 256, "num_experts_per_tok": 8,
        "base_moe_mlp_dim": 2048, "shared_experts": 1, "routed_score_func": "sigmoid", "routed_bias": True,
        "routed_scaling_factor": 2.5, "n_routing_groups": 8, "topk_routing_group": 4,
        "rope_scaling": {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    }),
    (GPT2, {
        "normalization": "layer_norm", "gated_mlp": False, "mlp_bias": True, "attention_bias": "all",
        "mlp_activation": "gelu_tanh", "trainable_position_size": 1024, "base_emb_dim": 768, "head_dim": 64,
        "base_mlp_dim": 3072, "base_num_kv_heads": 12, "logits_via_embedding": True,
    }),
    (SMOLLM3, {"layer_pattern": "global,global,global,nope", "logits_via_embedding": True}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), PUBLISHED, ids=lambda value: value.get("model_type"))
def test_published_models_are_read_and_written(fields, expected):
    keys = model_keys(fields, "config.json")
    assert {key: keys[key] for key in expected} == expected
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])  # no rule is broken
    about = {"max_position_embeddings": 64, "dtype": "bfloat16"}
    carried = config_json(config, original=fields, **about)
    assert carried == {**carried, **fields, "torch_dtype": "bfloat16"}
    assert carried["dtype"] == "bfloat16"
    fresh = config_json(config, original={"model_type": fields["model_type"]}, **about)
    assert same_architecture(model_keys(fresh, "config.json"), keys) == []


@pytest.mark.parametrize(
    ("name", "fields"), [("llama3-8b", LLAMA3_8B), ("mixtral-8x7b", MIXTRAL)], ids=["llama", "mixtral"]
)
def test_a_published_model_is_the_file_of_configs_models(name, fields):
    config = load_config(None, [f"model_name={name}"])
    keys = model_keys(fields, "config.json")
    assert same_architecture(keys, {key: getattr(config, key) for key in keys}) == []


@pytest.mark.parametrize(("fields", "changed", "message"), [
    (LLAMA3_8B, {"model_type": "Qwen3-MoE"}, "Qwen3-MoE is not one that maxtext_lite knows. Did you mean 'qwen3_moe'?"),
    (LLAMA3_8B, {"model_type": "lama"}, "model_type=lama is not one that maxtext_lite knows. It knows"),
    (LLAMA3_8B, {"model_type": "llava"}, "model_type=llava: images are not read, and its text part has no table"),
    (LLAMA3_8B, {"model_type": "gemma3n_text"}, "model_type=gemma3n_text: its embeddings of each layer, streams"),
    (LLAMA3_8B, {"model_type": "mamba"}, "model_type=mamba: its layers keep a state in place of keys and values"),
    (LLAMA3_8B, {"model_type": "nemotron_h"}, "model_type=nemotron_h: some of its layers keep a state in place of"),
    (LLAMA3_8B, {"model_type": None}, "model_type=null is not one that maxtext_lite knows."),
    (LLAMA3_8B, {"model_type": "llama5_text"}, "model_type=llama5_text is not one that maxtext_lite knows. It knows"),
    (LLAMA3_8B, {"model_type": "whisper"}, "model_type=whisper: sound is not read."),
    (LLAMA3_8B, {"model_type": ["llama"]}, "is not one that maxtext_lite knows. It knows"),
    (LLAMA3_8B, {"hidden_size": None}, "hidden_size is missing."),
    (LLAMA3_8B, {"hidden_size": "64"}, "hidden_size=64 is text, not a number."),
    (LLAMA3_8B, {"hidden_size": 2}, "num_attention_heads=32 is more than hidden_size=2."),
    (LLAMA3_8B, {"vocab_size": 10**12}, "vocab_size=1000000000000 must be below 2**31."),
    (LLAMA3_8B, {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is more than 10,000."),
    (SMOLLM3, {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is more than 10,000."),
    (LLAMA3_8B, {"rms_norm_eps": "1e-5"}, "rms_norm_eps=1e-5 is text, not a number."),
    (LLAMA3_8B, {"tie_word_embeddings": "no"}, "tie_word_embeddings=no is not true or false."),
    (LLAMA3_8B, {"rope_theta": float("nan")}, "rope_theta=nan is not a finite number."),
    (LLAMA3_8B, {"rope_theta": float("nan"), "rope_parameters": {"rope_theta": 5e5}},
     "rope_theta=nan contradicts rope_parameters, in which it is 500000."),
    (LLAMA3_8B, {"rope_scaling": "linear"}, "rope_scaling=linear is not an object with entries such as rope_type."),
    (LLAMA3_8B, {"rope_scaling": ["linear"]}, "is not an object with entries such as rope_type."),
    (LLAMA3_8B, {"rope_scaling": {"type": "linear"}}, "rope_scaling={rope_type: linear} lacks factor"),
    (LLAMA3_8B, {"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor=nan, which is not a finite"),
    (LLAMA3_8B, {"rope_scaling": {"type": "linear", "factor": -2}}, "has factor=-2, which must be at least 1."),
    (LLAMA3_8B, {"rope_scaling": LLAMA32_ROPE, "rope_parameters": LLAMA32_ROPE | {"factor": 2.0}},
     "contradicts rope_parameters in factor."),
    (LLAMA3_8B, {"torch_dtype": "int4"}, "torch_dtype=int4 is none of float32, bfloat16, float16 or float64"),
    (LLAMA3_8B, {"dtype": "float32"}, "torch_dtype=bfloat16 contradicts dtype=float32."),
    (LLAMA3_8B, {"auto_map": {"AutoModelForCausalLM": "modeling_x.MyForCausalLM"}},
     "auto_map=modeling_x.MyForCausalLM is code of its author's, which is not run"),
    (LLAMA3_8B, {"attention_multiplier": 0}, "attention_multiplier=0 is not a field of llama that maxtext_lite"),
    (GEMMA3_1B, {"rope_parameters": {"full_attention": 3}}, "rope_parameters={full_attention: 3} is not an object"),
    (GEMMA2_2B, {"layer_types": "full_attention"}, "layer_types=full_attention is not a list."),
    (SMOLLM3, {"no_rope_layers": [1, 2] * 18}, "is not a list of 1 or 0 for each of the 36 layers."),
    (DEEPSEEK_V3, {"head_dim": 7}, "head_dim=7 contradicts the other widths of a head, by which it is 192."),
    (MIXTRAL, {"num_local_experts": 2.5}, "num_local_experts=2.5 is not an integer."),
    (LLAMA3_8B, {"num_attention_heads": "many"}, "num_attention_heads=many is not an integer of at least 1."),
    (LLAMA3_8B, {"attention_multiplier": 0.5}, "attention_multiplier=0.5 is not a field of llama that maxtext_lite"),
    (LLAMA3_8B, {"hidden_act": "tanh"}, "hidden_act=tanh is none of silu, swish, gelu,"),
    (LLAMA3_8B, {"rope_scaling": {"rope_type": "su"}}, "rope_scaling=su cannot be expressed"),
    (LLAMA3_8B, {"rope_scaling": {"type": "linear", "factor": 2.0, "kappa": 1}}, "has kappa, which is not known"),
    (LLAMA3_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (LLAMA3_8B, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quant_method=gptq is not a"),
    (GPT_OSS_20B, {"quantization_config": {"quant_method": "mxfp4", "bits": 5}}, "(mxfp4): bits=5 is not known"),
    (GPT_OSS_20B, {"swiglu_limit": 6.0}, "swiglu_limit=6 cannot be expressed: it must be 7."),
    (GPT_OSS_20B, {"experts_per_token": 2}, "experts_per_token=2 contradicts num_experts_per_tok=4."),
    (GEMMA2_2B, {"use_bidirectional_attention": True}, "use_bidirectional_attention=true cannot be expressed"),
    (LLAMA3_8B, {"is_causal": False}, "is_causal=false cannot be expressed: it must be true."),
    (QWEN25_7B, {"is_causal": None}, "is_causal=null is not a value of this field. Remove it for its default."),
    (GEMMA2_2B, {"layer_types": ["chunked_attention"] * 26}, "layer_types=chunked_attention cannot be expressed"),
    (GEMMA2_2B, {"layer_types": ["full_attention"] * 25}, "do not name the 26 layers"),
    (SMOLLM3, {"layer_types": ["chunked_attention"] * 36}, "layer_types=chunked_attention cannot be expressed"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": 2}, "scale_attn_by_inverse_layer_idx=2"),
    (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func=softmax cannot be expressed: it must be sigmoid."),
    (DEEPSEEK_V3, {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 cannot be expressed: it must be 1e-06."),
    (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2 cannot be expressed: it must be 1."),
    (DEEPSEEK_V3 | {"model_type": "deepseek_v2", "topk_method": "noaux_tc", "scoring_func": "softmax",
     "norm_topk_prob": False}, {}, "topk_method=noaux_tc cannot be expressed: it must be greedy or"),
])  # fmt: skip
def test_what_cannot_be_expressed_is_refused_by_name(fields, changed, message):
    with pytest.raises(UserError) as refusal:
        model_keys(fields | changed, "there/config.json")
    assert any(message in problem and problem.startswith("there/config.json: ") for problem in refusal.value.problems)


_WRONG = (
    "x", "", "4", "\x1b[31m\n", float("nan"), float("inf"), -1, 0, 1, 2.5, 10**18, 10**400, True, False, [], [1],
    [None], [[["a"]]], {}, {"a": 1}, {"rope_type": [1]}, {"full_attention": 3}, {"type": "yarn", "factor": -3},
    ["full_attention"] * 3,
)  # fmt: skip


@pytest.mark.parametrize("fields", [each for each, _ in PUBLISHED], ids=lambda value: value["model_type"])
def test_a_value_of_any_kind_in_any_field_is_read_or_named_by_its_field(fields):
    """Never an exception, and never the name of a key that is not a field."""
    keys = set(ModelConfig.model_fields) - set(fields) - {"rope_scaling"}
    refused = 0
    for field, wrong in itertools.product([*fields, "rope_scaling", "rope_parameters", "torch_dtype"], _WRONG):
        try:
            model_keys(fields | {field: wrong}, "F")
        except UserError as error:
            refused += 1
            for problem in error.problems:
                assert problem.startswith("F: ")
                assert problem.isprintable()
                assert not set(re.findall(r"\w+", problem.partition("=")[0])) & (keys - {field}), problem
    assert refused > 100


def test_every_problem_is_named_at_once():
    with pytest.raises(UserError) as refusal:
        model_keys(LLAMA3_8B | {"hidden_size": None, "hidden_act": "tanh", "zeta": 3}, "x")
    assert len(refusal.value.problems) == 3


def test_what_is_off_or_empty_or_about_other_things_changes_nothing():
    plain = model_keys(LLAMA3_8B, "x")
    more = {
        "use_zeta": False, "zeta": None, "zetas": [], "is_causal": True, "id2label": {"0": "a"}, "temperature": 0.7,
        "quantization_config": {}, "auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"},
    }  # fmt: skip
    assert model_keys(LLAMA3_8B | more, "x") == plain


def test_both_ways_of_writing_positions_are_the_same():
    old = LLAMA3_8B | {"rope_scaling": LLAMA32_ROPE}
    new = copy.deepcopy(old)
    del new["rope_scaling"], new["rope_theta"]
    new["rope_parameters"] = {**LLAMA32_ROPE, "rope_theta": 500000.0}
    assert model_keys(new, "x") == model_keys(old, "x")
    gemma = {**GEMMA3_1B, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }}  # fmt: skip
    for name in ("rope_theta", "rope_local_base_freq", "sliding_window_pattern"):
        del gemma[name]
    gemma["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2
    assert model_keys(gemma, "x") == model_keys(GEMMA3_1B, "x")


def test_a_model_of_ones_own_is_written_as_the_first_family_that_expresses_it():
    def kind(*overrides):
        config = load_config(None, overrides)
        return config_json(config, max_position_embeddings=256, dtype="float32", original={}, end_of_text_id=256)

    assert kind()["model_type"] == "llama"
    assert kind()["eos_token_id"] == 256
    assert kind("layer_pattern=local", "sliding_window_size=8")["model_type"] == "mistral"
    assert kind("qk_norm=head")["model_type"] == "qwen3"
    assert kind("num_experts=4")["model_type"] == "mixtral"
    with pytest.raises(UserError, match="model_type=llama has no place for attention_sinks=true"):
        kind("attention_sinks=true")
    with pytest.raises(UserError) as refusal:  # mixtral's config.json would be refused for its one expert alone
        kind("attention_sinks=true", "clip_qkv=8")
    assert refusal.value.problems == tuple(
        f"model_type=llama has no place for {key}." for key in ("attention_sinks=true", "clip_qkv=8")
    )


def test_training_on_longer_rows_raises_the_number_of_positions_unless_a_scaling_follows_from_it():
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}}
    for scaling, expected in (({}, 9000), (yarn, 8192)):
        original = LLAMA3_8B | scaling
        keys = model_keys(original, "config.json").items()
        config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in keys])
        of = {"dtype": "float32", "original": original}
        assert config_json(config, max_position_embeddings=9000, **of)["max_position_embeddings"] == expected
        assert config_json(config, max_position_embeddings=64, **of)["max_position_embeddings"] == 8192


def test_two_original_lengths_of_a_scaling_become_the_one_that_counts():
    """What is added for older versions would contradict an entry that nobody reads."""
    original = {name: value for name, value in LLAMA3_8B.items() if not name.startswith("rope")}
    original |= {"rope_parameters": LLAMA32_ROPE | {"rope_theta": 5e5}, "original_max_position_embeddings": 4096}
    keys = model_keys(original, "config.json")
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    fields = config_json(config, max_position_embeddings=64, dtype="float32", original=original)
    assert model_keys(fields, "config.json") == keys
    assert keys["rope_scaling"]["original_max_position_embeddings"] == 4096


def test_the_name_of_the_weights_file_is_not_carried_on():
    original = LLAMA3_8B | {"transformers_weights": "model.safetensors"}
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in model_keys(original, "x").items()])
    fields = config_json(config, max_position_embeddings=64, dtype="float32", original=original)
    assert fields.keys() == LLAMA3_8B.keys() | {"dtype"}


def test_the_defaults_are_those_of_base_yml_and_cover_every_key():
    base = load_config()
    sizes = set(model_keys(LLAMA3_8B, "x")) - set(DEFAULTS)
    others = {"model_name", "capacity_factor"}  # a name, and a limit that training sets itself
    assert set(ModelConfig.model_fields) - set(DEFAULTS) - sizes <= others | {
        key for key in ModelConfig.model_fields if key.startswith("lora_")
    }
    mappings = ("mla", "rope_scaling", "position_temperature")
    assert {key: (getattr(base, key) or {} if key in mappings else getattr(base, key))
            for key in DEFAULTS} == dict(DEFAULTS)  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), [
    ({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "torch.float16"}, "float16"), ({}, "float32"),
])  # fmt: skip
def test_the_number_format_of_the_weights(fields, expected):
    assert stored_dtype(fields) == expected


# ---- Models of images and text, and models that are not built ------------------------------------------------------


def test_the_text_part_has_the_fields_of_the_whole_that_are_not_about_images():
    whole = {
        "model_type": "gemma3", "vision_config": {"hidden_size": 9}, "mm_tokens_per_image": 256, "dtype": "bfloat16",
        "text_config": {"hidden_size": 2560, "sliding_window": None, "vocab_size": None},
    }  # fmt: skip
    text = text_fields(whole)
    assert text["model_type"] == "gemma3_text"
    assert (text["hidden_size"], text["num_attention_heads"], text["dtype"]) == (2560, 8, "bfloat16")
    assert text["sliding_window"] is None
    assert "vision_config" not in text
    assert text_fields({"model_type": "llama"}) == {"model_type": "llama"}


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [
        ({}, {}, True),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
        ({}, {"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": True}, {}, True),
    ],
)
def test_the_whole_model_says_whether_its_table_is_tied(outer, inner, tied):
    text = text_fields({"model_type": "gemma3", "text_config": {"hidden_size": 8, **inner}, **outer})
    assert text["tie_word_embeddings"] is tied


def test_what_transformers_does_not_look_for_outside_of_the_text_part_is_refused():
    text = {
        "model_type": "mistral", "hidden_size": 32, "num_attention_heads": 4, "sliding_window": None,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    }  # fmt: skip
    whole = {"model_type": "mistral3", "text_config": text, "sliding_window": 9, "max_position_embeddings": 64}
    with pytest.raises(UserError) as refusal:
        model_keys(whole, "x")
    assert refusal.value.problems == (
        "x: rope_scaling={rope_type: yarn, factor: 2} lacks original_max_position_embeddings.",
        "x: mistral3.sliding_window=9 is not a field of mistral that maxtext_lite knows, and could change the logits. "
        "If it does not, remove it.",
    )


@pytest.mark.parametrize("wrong", [None, {}, [], {"model_type": "llama"}])
def test_another_text_part_is_refused(wrong):
    with pytest.raises(UserError, match="text_config"):
        text_fields({"model_type": "mistral3", "text_config": wrong})


def test_tensors_of_text_have_their_names_and_those_of_images_none():
    for name in ("language_model.model.norm.weight", "model.language_model.norm.weight"):
        assert text_tensor(name) == "model.norm.weight"
    assert text_tensor("language_model.lm_head.weight") == text_tensor("lm_head.weight") == "lm_head.weight"
    for name in ("vision_tower.a", "model.vision_tower.a", "multi_modal_projector.b", "model.multi_modal_projector.b"):
        assert text_tensor(name) is None


def test_what_is_built_has_no_reason_not_to_be():
    assert not [kind for kind in (*FAMILIES, *TOWERS) if unbuilt(kind)]
    assert not unbuilt("lama")
    for kind, word in (("mamba2", "state"), ("jamba", "some of"), ("qwen2_vl", "images"), ("gemma3n", "shared caches"),
                       ("whisper", "sound"), ("roberta", "directions"), ("bloom", "ALiBi")):  # fmt: skip
        assert word in unbuilt(kind)
