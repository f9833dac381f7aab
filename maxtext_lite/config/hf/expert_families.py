"""The families of Hugging Face models with experts that came after the first ones, each as its parts of config.json."""

from collections.abc import Mapping

from maxtext_lite.config.hf.family import (
    BIASES,
    CLIP,
    EXPERT_WIDTH,
    EXPERTS_PER_TOKEN,
    NORMED_HEADS,
    RANGE,
    SILU,
    Family,
    family,
    ties,
)
from maxtext_lite.config.hf.layer_lists import ChunkedLayers, FirstDense, InterleavedStep, LayerInterval, SparseStep
from maxtext_lite.config.hf.parts import Activation, Bias, Defaulted, Every, Fixed, Heads, Ignored, Only, Rename
from maxtext_lite.config.hf.positions import LayerTypes, RopeFields
from maxtext_lite.config.hf.terms import Inverse, MultipliedRope, RotaryDim, SharedWidth, Switch

_SIGMOID_ROUTING = (
    Fixed(routed_score_func="sigmoid", routed_bias=True),
    Rename(n_routed_experts="num_experts"), EXPERTS_PER_TOKEN,
    Defaulted("n_shared_experts", "shared_experts", 1),
    Defaulted("routed_scaling_factor", "routed_scaling_factor", 1.0),
    Defaulted("n_group", "n_routing_groups", 1), Defaulted("topk_group", "topk_routing_group", 1),
    Only("scoring_func", "sigmoid"), Only("topk_method", "noaux_tc"),
)  # fmt: skip
_SIGMOID_MIXTURE = (*_SIGMOID_ROUTING, EXPERT_WIDTH)
_GRANITE = (
    BIASES, RopeFields(10_000.0), SILU, Heads(), Rename(num_local_experts="num_experts"), EXPERTS_PER_TOKEN,
    Fixed(routed_score_func="softmax", norm_topk_prob=True),
    Defaulted("embedding_multiplier", "embedding_multiplier", 1.0),
    Defaulted("residual_multiplier", "residual_multiplier", 1.0),
    Inverse("logits_scaling", "logits_multiplier"),
    Inverse("attention_multiplier", "query_pre_attn_scalar", power=-2),
)  # fmt: skip

EXPERT_FAMILIES: Mapping[str, Family] = {
    "qwen2_moe": family(
        "Qwen2MoeForCausalLM", Heads(kv_heads=16), SILU, Bias("qkv_bias", "qkv", default=True),
        RopeFields(10_000.0), LayerTypes("switched alternating", 4096), Rename(num_experts="num_experts"),
        EXPERTS_PER_TOKEN, EXPERT_WIDTH,
        Fixed(routed_score_func="softmax", shared_experts=1, shared_expert_gate=True),
        Defaulted("shared_expert_intermediate_size", "base_shared_mlp_dim", 5632),
        Defaulted("norm_topk_prob", "norm_topk_prob", False), SparseStep(),
    ),
    "glm4_moe": family(
        "Glm4MoeForCausalLM", Heads(kv_heads=8), SILU, Bias("attention_bias", "qkv"),
        Switch("use_qk_norm", "qk_norm", "head", "none"),
        RopeFields(10_000.0, partial=0.5), *_SIGMOID_MIXTURE,
        Defaulted("norm_topk_prob", "norm_topk_prob", True),
        FirstDense(1), epsilon=1e-5,
    ),
    "dots1": family(
        "Dots1ForCausalLM", Heads(), SILU, BIASES, NORMED_HEADS, RopeFields(10_000.0),
        LayerTypes("from", 4096), *_SIGMOID_MIXTURE, Defaulted("norm_topk_prob", "norm_topk_prob", False),
        FirstDense(0),
    ),
    "solar_open": Family("SolarOpenForCausalLM", (
        Rename(vocab_size="vocab_size", hidden_size="base_emb_dim", moe_intermediate_size="base_mlp_dim",
               num_hidden_layers="base_num_decoder_layers"),
        RANGE, ties(False), Defaulted("rms_norm_eps", "normalization_layer_epsilon", 1e-5),
        Heads(kv_heads=8, head_dim=128), SILU, Bias("attention_bias", "qkv"),
        RopeFields(1_000_000.0), *_SIGMOID_ROUTING, Defaulted("norm_topk_prob", "norm_topk_prob", True),
        Ignored("first_k_dense_replace", "intermediate_size", "use_qk_norm"),
    )),
    "minimax_m2": family(
        "MiniMaxM2ForCausalLM", Heads(kv_heads=8, head_dim=128), SILU,
        Fixed(qk_norm="all_heads", routed_score_func="sigmoid", routed_bias=True, norm_topk_prob=True),
        RotaryDim(5_000_000.0, partial=1.0),
        Every("num_local_experts", "num_experts", key="num_experts"), EXPERTS_PER_TOKEN,
        Only("use_qk_norm", True), Only("qk_norm_type", "per_layer"), Only("scoring_func", "sigmoid"),
        Only("use_routing_bias", True), Only("shared_intermediate_size", 0), Only("router_jitter_noise", 0.0),
        Ignored("num_mtp_modules", "mtp_transformer_layers", "use_mtp", "attn_type_list"),
    ),
    "ernie4_5_moe": family(
        "Ernie4_5_MoeForCausalLM", Heads(kv_heads=4), SILU, Only("use_bias", False), RopeFields(500_000.0),
        Every("moe_num_experts", "num_experts", "num_local_experts", key="num_experts"),
        Every("moe_k", "num_experts_per_tok", key="num_experts_per_tok"), EXPERT_WIDTH,
        Fixed(routed_score_func="softmax", routed_bias=True, norm_topk_prob=True), Only("moe_norm_min", 1e-12),
        Defaulted("moe_num_shared_experts", "shared_experts", 2), LayerInterval(),
        Ignored("moe_capacity", "moe_gate", "moe_use_aux_free"), epsilon=1e-5, tied=True,
    ),
    "olmoe": family(
        "OlmoeForCausalLM", Heads(), SILU, BIASES, RopeFields(10_000.0), Fixed(qk_norm="all_heads"),
        Every("num_experts", "num_local_experts", key="num_experts"), EXPERTS_PER_TOKEN,
        Fixed(routed_score_func="softmax"), Defaulted("norm_topk_prob", "norm_topk_prob", False),
        CLIP, epsilon=1e-5,
    ),
    "flex_olmo": family(
        "FlexOlmoForCausalLM", Heads(), SILU, BIASES, RopeFields(500_000.0),
        Fixed(norm_placement="post", qk_norm="all_heads", routed_score_func="softmax"),
        Every("num_experts", "num_local_experts", key="num_experts"), EXPERTS_PER_TOKEN,
        Defaulted("norm_topk_prob", "norm_topk_prob", False),
    ),
    "llama4_text": Family("Llama4ForCausalLM", (
        Rename(vocab_size="vocab_size", hidden_size="base_emb_dim", intermediate_size="base_moe_mlp_dim",
               num_hidden_layers="base_num_decoder_layers"),
        Defaulted("intermediate_size_mlp", "base_mlp_dim", 16384), RANGE, ties(False),
        Defaulted("rms_norm_eps", "normalization_layer_epsilon", 1e-5),
        Heads(kv_heads=8, head_dim=128), Activation("hidden_act", "silu"), Bias("attention_bias", "all"),
        RopeFields(500_000.0), ChunkedLayers(), InterleavedStep(),
        Switch("use_qk_norm", "qk_norm", "l2_after_rope", "none", default=True),
        Fixed(routed_score_func="sigmoid", norm_topk_prob=False, apply_router_weight_on_input=True, shared_experts=1),
        Rename(num_local_experts="num_experts"), Defaulted("num_experts_per_tok", "num_experts_per_tok", 1),
        Only("router_jitter_noise", 0.0), Ignored("for_llm_compressor"),
    )),
    "hunyuan_v1_moe": family(
        "HunYuanMoEV1ForCausalLM", Heads(), SILU, BIASES, RopeFields(10_000.0, alpha=True),
        Fixed(qk_norm="head_after_rope", routed_score_func="softmax", norm_topk_prob=True, shared_experts=1),
        Every("num_experts", "num_local_experts", key="num_experts"),
        Every("moe_topk", "num_experts_per_tok", key="num_experts_per_tok"), epsilon=1e-5,
    ),
    "granitemoe": family("GraniteMoeForCausalLM", *_GRANITE),
    "granitemoeshared": family("GraniteMoeSharedForCausalLM", *_GRANITE, SharedWidth()),
    "phimoe": family(
        "PhimoeForCausalLM", Heads(kv_heads=8), SILU, BIASES, MultipliedRope(1_000_000.0),
        LayerTypes("window", 0),
        Fixed(normalization="layer_norm", routed_score_func="sparsemixer", norm_topk_prob=False),
        Rename(num_local_experts="num_experts"), Only("num_experts_per_tok", 2, key="num_experts_per_tok"),
        Only("router_jitter_noise", 0.01), Defaulted("lm_head_bias", "logits_bias", False),
        Ignored("input_jitter_noise", "hidden_dropout", "expert_dropout"), epsilon=1e-5,
    ),
}  # fmt: skip
"""Those of `config.hf.families.FAMILIES`, by model_type."""
