"""The families of Hugging Face models that can be read and written, each as its parts of config.json."""

from collections.abc import Mapping
from dataclasses import dataclass

from maxtext_lite.config.hf.mlp_layers import InterleavedStep, LayerInterval, SparseStep
from maxtext_lite.config.hf.parts import (
    Activation,
    Bias,
    Clip,
    Defaulted,
    Every,
    ExpertGroups,
    Fixed,
    Heads,
    Ignored,
    LatentWidths,
    LearnedPositions,
    Only,
    Optional,
    Part,
    QueryScalar,
    Rename,
    SoftCaps,
)
from maxtext_lite.config.hf.positions import ChunkedLayers, LayerTypes, RopeByLayerType, RopeFields, WithoutRotation


@dataclass(frozen=True)
class Family:
    """What a model_type is.

    Attributes:
      architecture: the class that transformers makes of it.
      parts: the fields of config.json and what they mean; those of a later part win.
    """

    architecture: str
    parts: tuple[Part, ...]


_SIZES = Rename(
    vocab_size="vocab_size", hidden_size="base_emb_dim", intermediate_size="base_mlp_dim",
    num_hidden_layers="base_num_decoder_layers",
)  # fmt: skip
_RANGE = Defaulted("initializer_range", "initializer_range", 0.02)


def _epsilon(default: float) -> Part:
    return Defaulted("rms_norm_eps", "normalization_layer_epsilon", default)


def _tied(default: bool) -> Part:
    return Defaulted("tie_word_embeddings", "logits_via_embedding", default)


def _family(architecture: str, *parts: Part, epsilon: float = 1e-6, tied: bool = False) -> Family:
    return Family(architecture, (_SIZES, _RANGE, _epsilon(epsilon), _tied(tied), *parts))


_LLAMA_BIASES = Bias("attention_bias", "all")
_SILU = Activation("hidden_act", "silu")
_GEMMA_ACTIVATION = Activation("hidden_activation", "gelu_pytorch_tanh")
_GEMMA_NORMS = Fixed(normalization="rms_norm_plus_one", norm_placement="both", scale_embeddings=True)
_NOT_BIDIRECTIONAL = Only("use_bidirectional_attention", False)
_MIXTURE = Fixed(routed_score_func="softmax", norm_topk_prob=True)
_MLP_BIAS = Defaulted("mlp_bias", "mlp_bias", False)
_EXPERTS_PER_TOKEN = Rename(num_experts_per_tok="num_experts_per_tok")
_EXPERT_WIDTH = Rename(moe_intermediate_size="base_moe_mlp_dim")
_NORMED_HEADS = Fixed(qk_norm="head")
_SIGMOID_MIXTURE = (
    Fixed(routed_score_func="sigmoid", routed_bias=True),
    Rename(n_routed_experts="num_experts"), _EXPERTS_PER_TOKEN, _EXPERT_WIDTH,
    Defaulted("n_shared_experts", "shared_experts", 1),
    Defaulted("routed_scaling_factor", "routed_scaling_factor", 1.0),
    Defaulted("n_group", "n_routing_groups", 1), Defaulted("topk_group", "topk_routing_group", 1),
    Only("scoring_func", "sigmoid"), Only("topk_method", "noaux_tc"),
)  # fmt: skip
_GPT_OSS_SCALING = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _deepseek(architecture: str, *parts: Part) -> Family:
    return Family(architecture, (
        _SIZES,
        _RANGE,
        _tied(False),
        # The norms of the latent vectors have this epsilon whatever config.json says of the others.
        Only("rms_norm_eps", 1e-6, key="normalization_layer_epsilon"),
        LatentWidths(),
        _SILU,
        Only("attention_bias", False),
        Only("mlp_bias", False),
        Only("moe_layer_freq", 1),
        RopeFields(10_000.0),
        Rename(n_routed_experts="num_experts"),
        _EXPERTS_PER_TOKEN,
        _EXPERT_WIDTH,
        *parts,
    ))  # fmt: skip


FAMILIES: Mapping[str, Family] = {
    "llama": _family(
        "LlamaForCausalLM", Heads(), _SILU, _LLAMA_BIASES, _MLP_BIAS, RopeFields(10_000.0),
        Only("rope_interleaved", False),
    ),
    "mistral": _family(
        "MistralForCausalLM", Heads(kv_heads=8), _SILU, RopeFields(10_000.0), LayerTypes("window", 4096)
    ),
    "qwen2": _family(
        "Qwen2ForCausalLM", Heads(kv_heads=32), _SILU, Fixed(attention_bias="qkv"), RopeFields(10_000.0),
        LayerTypes("switched", 4096),
    ),
    "qwen3": _family(
        "Qwen3ForCausalLM", Heads(kv_heads=32, head_dim=128), _SILU, _LLAMA_BIASES, _NORMED_HEADS,
        RopeFields(10_000.0), LayerTypes("switched", 4096),
    ),
    "gemma2": _family(
        "Gemma2ForCausalLM", Heads(kv_heads=4, head_dim=256), _GEMMA_ACTIVATION, _LLAMA_BIASES, _GEMMA_NORMS,
        SoftCaps(50.0, 30.0), QueryScalar(), RopeFields(10_000.0), LayerTypes("alternating", 4096),
        _NOT_BIDIRECTIONAL, tied=True,
    ),
    "gemma3_text": _family(
        "Gemma3ForCausalLM", Heads(kv_heads=4, head_dim=256), _GEMMA_ACTIVATION, _LLAMA_BIASES, _GEMMA_NORMS,
        _NORMED_HEADS, SoftCaps(0.0, 0.0), QueryScalar(), LayerTypes("sixth", 4096), RopeByLayerType(),
        _NOT_BIDIRECTIONAL, tied=True,
    ),
    "phi3": _family(
        "Phi3ForCausalLM", Heads(), _SILU, RopeFields(10_000.0, partial=True),
        LayerTypes("window", 0), epsilon=1e-5,
    ),
    "smollm3": _family(
        "SmolLM3ForCausalLM", Heads(kv_heads=4), _SILU, _LLAMA_BIASES, _MLP_BIAS,
        RopeFields(2_000_000.0), WithoutRotation(), tied=True,
    ),
    "olmo2": _family(
        "Olmo2ForCausalLM", Heads(), _SILU, _LLAMA_BIASES, RopeFields(10_000.0),
        Fixed(norm_placement="post", qk_norm="all_heads"), epsilon=1e-5,
    ),
    "gpt2": Family("GPT2LMHeadModel", (
        Rename(vocab_size="vocab_size", n_embd="base_emb_dim", n_layer="base_num_decoder_layers"),
        LearnedPositions(),
        Defaulted("layer_norm_epsilon", "normalization_layer_epsilon", 1e-5), _RANGE, _tied(True),
        Activation("activation_function", "gelu_new"),
        Fixed(normalization="layer_norm", gated_mlp=False, mlp_bias=True, attention_bias="all"),
        Only("scale_attn_weights", True), Only("scale_attn_by_inverse_layer_idx", False),
        Only("reorder_and_upcast_attn", False),
    )),
    "mixtral": _family(
        "MixtralForCausalLM", Heads(kv_heads=8), _SILU, RopeFields(1_000_000.0),
        LayerTypes("window", 0), Rename(num_local_experts="num_experts"), _EXPERTS_PER_TOKEN, _MIXTURE,
        Only("router_jitter_noise", 0.0), epsilon=1e-5,
    ),
    "qwen3_moe": _family(
        "Qwen3MoeForCausalLM", Heads(kv_heads=4), _SILU, _LLAMA_BIASES, _NORMED_HEADS,
        RopeFields(10_000.0), LayerTypes("switched window", 4096),
        Every("num_experts", "num_local_experts", key="num_experts"), _EXPERTS_PER_TOKEN, _EXPERT_WIDTH,
        Fixed(routed_score_func="softmax"), Defaulted("norm_topk_prob", "norm_topk_prob", False),
        SparseStep(),
    ),
    "gpt_oss": _family(
        "GptOssForCausalLM", Heads(kv_heads=8, head_dim=64), Fixed(mlp_activation="clamped_silu", attention_sinks=True,
        expert_bias=True), Only("hidden_act", "silu"), Bias("attention_bias", "all", default=True),
        RopeFields(150_000.0, scaling=_GPT_OSS_SCALING),
        LayerTypes("alternating", 128), Every("num_local_experts", "num_experts", key="num_experts"),
        Every("num_experts_per_tok", "experts_per_token", key="num_experts_per_tok"), _MIXTURE,
        Only("swiglu_alpha", 1.702), Only("swiglu_limit", 7.0), epsilon=1e-5,
    ),
    "deepseek_v2": _deepseek(
        "DeepseekV2ForCausalLM", Fixed(routed_score_func="softmax", norm_topk_prob=False),
        ExpertGroups(), Only("scoring_func", "softmax"), Ignored("norm_topk_prob"),
        Defaulted("routed_scaling_factor", "routed_scaling_factor", 1.0),
        Defaulted("n_shared_experts", "shared_experts", 2),
        Defaulted("first_k_dense_replace", "first_num_dense_layers", 0),
    ),
    "deepseek_v3": _deepseek(
        "DeepseekV3ForCausalLM", Fixed(routed_score_func="sigmoid", routed_bias=True),
        Only("topk_method", "noaux_tc"), Only("scoring_func", "sigmoid"), Only("rope_interleave", True),
        Defaulted("norm_topk_prob", "norm_topk_prob", True),
        Defaulted("routed_scaling_factor", "routed_scaling_factor", 2.5),
        Defaulted("n_shared_experts", "shared_experts", 1),
        Defaulted("first_k_dense_replace", "first_num_dense_layers", 3),
        Defaulted("n_group", "n_routing_groups", 8), Defaulted("topk_group", "topk_routing_group", 4),
    ),
    "qwen2_moe": _family(
        "Qwen2MoeForCausalLM", Heads(kv_heads=16), _SILU, Bias("qkv_bias", "qkv", default=True),
        RopeFields(10_000.0), LayerTypes("switched alternating", 4096), Rename(num_experts="num_experts"), _EXPERTS_PER_TOKEN,
        _EXPERT_WIDTH, Fixed(routed_score_func="softmax", shared_experts=1, shared_expert_gate=True),
        Defaulted("shared_expert_intermediate_size", "base_shared_mlp_dim", 5632),
        Defaulted("norm_topk_prob", "norm_topk_prob", False), SparseStep(),
    ),
    "glm4_moe": _family(
        "Glm4MoeForCausalLM", Heads(kv_heads=8), _SILU, Bias("attention_bias", "qkv"),
        Optional("use_qk_norm", "qk_norm", "head", "none", default=False),
        RopeFields(10_000.0, partial=True, share=0.5), *_SIGMOID_MIXTURE,
        Defaulted("norm_topk_prob", "norm_topk_prob", True),
        Defaulted("first_k_dense_replace", "first_num_dense_layers", 1), epsilon=1e-5,
    ),
    "dots1": _family(
        "Dots1ForCausalLM", Heads(), _SILU, _LLAMA_BIASES, _NORMED_HEADS, RopeFields(10_000.0),
        LayerTypes("from", 4096), *_SIGMOID_MIXTURE, Defaulted("norm_topk_prob", "norm_topk_prob", False),
        Defaulted("first_k_dense_replace", "first_num_dense_layers", 0),
    ),
    "solar_open": _family(
        "SolarOpenForCausalLM", Heads(kv_heads=8, head_dim=128), _SILU, Bias("attention_bias", "qkv"),
        RopeFields(1_000_000.0, partial=True), *_SIGMOID_MIXTURE, Defaulted("norm_topk_prob", "norm_topk_prob", True),
        Ignored("first_k_dense_replace", "intermediate_size", "use_qk_norm"), epsilon=1e-5,
    ),
    "minimax_m2": _family(
        "MiniMaxM2ForCausalLM", Heads(kv_heads=8, head_dim=128), _SILU, Fixed(
            qk_norm="all_heads", routed_score_func="sigmoid", routed_bias=True, norm_topk_prob=True
        ), RopeFields(5_000_000.0, partial=True), Every("num_local_experts", "num_experts", key="num_experts"),
        _EXPERTS_PER_TOKEN, Only("use_qk_norm", True), Only("qk_norm_type", "per_layer"),
        Only("scoring_func", "sigmoid"), Only("use_routing_bias", True), Only("shared_intermediate_size", 0),
        Only("router_jitter_noise", 0.0), Ignored("num_mtp_modules", "mtp_transformer_layers", "use_mtp"),
    ),
    "ernie4_5_moe": _family(
        "Ernie4_5_MoeForCausalLM", Heads(kv_heads=4), _SILU, Only("use_bias", False), RopeFields(500_000.0),
        Every("moe_num_experts", "num_experts", "num_local_experts", key="num_experts"),
        Every("moe_k", "num_experts_per_tok", key="num_experts_per_tok"), _EXPERT_WIDTH,
        Fixed(routed_score_func="softmax", routed_bias=True, norm_topk_prob=True), Only("moe_norm_min", 1e-12),
        Defaulted("moe_num_shared_experts", "shared_experts", 2), LayerInterval(),
        Ignored("moe_capacity", "moe_gate", "moe_use_aux_free"), epsilon=1e-5, tied=True,
    ),
    "olmoe": _family(
        "OlmoeForCausalLM", Heads(), _SILU, _LLAMA_BIASES, RopeFields(10_000.0), Fixed(qk_norm="all_heads"),
        Every("num_experts", "num_local_experts", key="num_experts"), _EXPERTS_PER_TOKEN,
        Fixed(routed_score_func="softmax"), Defaulted("norm_topk_prob", "norm_topk_prob", False),
        Clip(), epsilon=1e-5,
    ),
    "flex_olmo": _family(
        "FlexOlmoForCausalLM", Heads(), _SILU, _LLAMA_BIASES, RopeFields(500_000.0),
        Fixed(norm_placement="post", qk_norm="all_heads", routed_score_func="softmax"),
        Every("num_experts", "num_local_experts", key="num_experts"), _EXPERTS_PER_TOKEN,
        Defaulted("norm_topk_prob", "norm_topk_prob", False),
    ),
    "llama4_text": Family("Llama4ForCausalLM", (
        Rename(vocab_size="vocab_size", hidden_size="base_emb_dim", intermediate_size="base_moe_mlp_dim",
               num_hidden_layers="base_num_decoder_layers"),
        Defaulted("intermediate_size_mlp", "base_mlp_dim", 16384), _RANGE, _epsilon(1e-5), _tied(False),
        Heads(kv_heads=8, head_dim=128), Activation("hidden_act", "silu"), Bias("attention_bias", "all"),
        RopeFields(500_000.0), ChunkedLayers(), InterleavedStep(),
        Optional("use_qk_norm", "qk_norm", "l2_after_rope", "none", default=True),
        Fixed(routed_score_func="sigmoid", norm_topk_prob=False, apply_router_weight_on_input=True, shared_experts=1),
        Rename(num_local_experts="num_experts"), Defaulted("num_experts_per_tok", "num_experts_per_tok", 1),
        Only("router_jitter_noise", 0.0), Ignored("for_llm_compressor"),
    )),
    "hunyuan_v1_moe": _family(
        "HunYuanMoEV1ForCausalLM", Heads(), _SILU, _LLAMA_BIASES, RopeFields(10_000.0),
        Fixed(qk_norm="head_after_rope", routed_score_func="softmax", norm_topk_prob=True, shared_experts=1),
        Every("num_experts", "num_local_experts", key="num_experts"),
        Every("moe_topk", "num_experts_per_tok", key="num_experts_per_tok"), epsilon=1e-5,
    ),
}  # fmt: skip
"""What can be read and written, by model_type. Where two would do for a model, the first is written."""
