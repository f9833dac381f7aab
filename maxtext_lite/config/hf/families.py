"""The families of Hugging Face models that can be read and written, each as its parts of config.json."""

from collections.abc import Mapping

from maxtext_lite.config.hf.expert_families import EXPERT_FAMILIES
from maxtext_lite.config.hf.family import (
    BIASES,
    CLIP,
    EXPERT_WIDTH,
    EXPERTS_PER_TOKEN,
    NORMED_HEADS,
    RANGE,
    SILU,
    SIZES,
    Family,
    family,
    ties,
)
from maxtext_lite.config.hf.layer_lists import FirstDense, SparseStep
from maxtext_lite.config.hf.parts import (
    Activation,
    Bias,
    Defaulted,
    Every,
    ExpertGroups,
    Fixed,
    Heads,
    Ignored,
    LatentWidths,
    LearnedPositions,
    Only,
    OrNull,
    Part,
    QueryScalar,
    Rename,
)
from maxtext_lite.config.hf.positions import LayerTypes, RopeByLayerType, RopeFields, WithoutRotation
from maxtext_lite.config.hf.terms import Inverse, OldGelu, OutBias, PositionScaling, Switch

_GEMMA_ACTIVATION = Activation("hidden_activation", "gelu_pytorch_tanh")
_GEMMA_NORMS = Fixed(normalization="rms_norm_plus_one", norm_placement="both", scale_embeddings=True)
_NOT_BIDIRECTIONAL = Only("use_bidirectional_attention", False)
_MIXTURE = Fixed(routed_score_func="softmax", norm_topk_prob=True)
_MLP_BIAS = Defaulted("mlp_bias", "mlp_bias", False)
_PHI3_TYPES = {"su": "longrope", "yarn": "longrope"}
_MINISTRAL3_SCALING = {
    "rope_theta": 1_000_000.0, "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
}  # fmt: skip
_APERTUS_SCALING = {
    "rope_theta": 12_000_000.0, "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
_GPT_OSS_SCALING = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


_PLAIN_MLP = Fixed(gated_mlp=False)
_SQUARED = Activation("hidden_act", "relu2")
_LAYER_NORMS = Fixed(normalization="layer_norm")
_MEAN_NORMS = Fixed(normalization="layer_norm_no_bias", parallel_block="one_norm")
_LOGIT_SCALE = Defaulted("logit_scale", "logits_multiplier", 0.0625)
_PARALLEL = ("use_parallel_residual", "parallel_block")


def _final_cap(default: float) -> Part:
    return OrNull("final_logit_softcapping", "final_logits_soft_cap", default)


def _use_bias(default: bool) -> Part:
    return Switch("use_bias", "attention_bias", "all", "none", default=default, mlp_bias=(True, False))


def _layer_normed(architecture: str, *parts: Part, tied: bool = False, epsilon_name: str = "layer_norm_eps") -> Family:
    return family(architecture, *parts, epsilon=1e-5, tied=tied, epsilon_name=epsilon_name)


def _deepseek(architecture: str, *parts: Part) -> Family:
    return Family(architecture, (
        SIZES,
        RANGE,
        ties(False),
        # The norms of the latent vectors have this epsilon whatever config.json says of the others.
        Only("rms_norm_eps", 1e-6, key="normalization_layer_epsilon"),
        LatentWidths(),
        SILU,
        Only("attention_bias", False),
        Only("mlp_bias", False),
        Only("moe_layer_freq", 1),
        RopeFields(10_000.0),
        Rename(n_routed_experts="num_experts"),
        EXPERTS_PER_TOKEN,
        EXPERT_WIDTH,
        *parts,
    ))  # fmt: skip


FAMILIES: Mapping[str, Family] = {
    "llama": family(
        "LlamaForCausalLM", Heads(), SILU, BIASES, _MLP_BIAS, RopeFields(10_000.0),
        Only("rope_interleaved", False),
    ),
    "mistral": family(
        "MistralForCausalLM", Heads(kv_heads=8), SILU, RopeFields(10_000.0), LayerTypes("window", 4096)
    ),
    "qwen2": family(
        "Qwen2ForCausalLM", Heads(kv_heads=32), SILU, Fixed(attention_bias="qkv"), RopeFields(10_000.0),
        LayerTypes("switched", 4096),
    ),
    "qwen3": family(
        "Qwen3ForCausalLM", Heads(kv_heads=32, head_dim=128), SILU, BIASES, NORMED_HEADS,
        RopeFields(10_000.0), LayerTypes("switched", 4096),
    ),
    "gemma2": family(
        "Gemma2ForCausalLM", Heads(kv_heads=4, head_dim=256), _GEMMA_ACTIVATION, BIASES, _GEMMA_NORMS,
        OrNull("attn_logit_softcapping", "attn_logits_soft_cap", 50.0), _final_cap(30.0), QueryScalar(),
        RopeFields(10_000.0), LayerTypes("alternating", 4096), _NOT_BIDIRECTIONAL, tied=True,
    ),
    "gemma3_text": family(
        "Gemma3ForCausalLM", Heads(kv_heads=4, head_dim=256), _GEMMA_ACTIVATION, BIASES, _GEMMA_NORMS,
        NORMED_HEADS, Only("attn_logit_softcapping", None), _final_cap(0.0), QueryScalar(),
        LayerTypes("sixth", 4096), RopeByLayerType(), _NOT_BIDIRECTIONAL, tied=True,
    ),
    "phi3": family(
        "Phi3ForCausalLM", Heads(), SILU, RopeFields(10_000.0, partial=1.0, original=4096, types=_PHI3_TYPES),
        LayerTypes("window", 0), epsilon=1e-5,
    ),
    "smollm3": family(
        "SmolLM3ForCausalLM", Heads(kv_heads=4), SILU, BIASES, _MLP_BIAS,
        RopeFields(2_000_000.0), WithoutRotation(), tied=True,
    ),
    "olmo2": family(
        "Olmo2ForCausalLM", Heads(), SILU, BIASES, RopeFields(10_000.0),
        Fixed(norm_placement="post", qk_norm="all_heads"), epsilon=1e-5,
    ),
    "gpt2": Family("GPT2LMHeadModel", (
        Rename(vocab_size="vocab_size", n_embd="base_emb_dim", n_layer="base_num_decoder_layers"),
        LearnedPositions(),
        Defaulted("layer_norm_epsilon", "normalization_layer_epsilon", 1e-5), RANGE, ties(True),
        Activation("activation_function", "gelu_new"),
        Fixed(normalization="layer_norm", gated_mlp=False, mlp_bias=True, attention_bias="all"),
        Only("scale_attn_weights", True), Defaulted("scale_attn_by_inverse_layer_idx", "inverse_layer_scaling", False),
        Only("reorder_and_upcast_attn", False),
    )),
    "mixtral": family(
        "MixtralForCausalLM", Heads(kv_heads=8), SILU, RopeFields(1_000_000.0),
        LayerTypes("window", 0), Rename(num_local_experts="num_experts"), EXPERTS_PER_TOKEN, _MIXTURE,
        Only("router_jitter_noise", 0.0), epsilon=1e-5,
    ),
    "qwen3_moe": family(
        "Qwen3MoeForCausalLM", Heads(kv_heads=4), SILU, BIASES, NORMED_HEADS,
        RopeFields(10_000.0), LayerTypes("switched window", 4096),
        Every("num_experts", "num_local_experts", key="num_experts"), EXPERTS_PER_TOKEN, EXPERT_WIDTH,
        Fixed(routed_score_func="softmax"), Defaulted("norm_topk_prob", "norm_topk_prob", False),
        SparseStep(),
    ),
    "gpt_oss": family(
        "GptOssForCausalLM", Heads(kv_heads=8, head_dim=64), Fixed(mlp_activation="clamped_silu", attention_sinks=True,
        expert_bias=True), Only("hidden_act", "silu"), Bias("attention_bias", "all", default=True),
        RopeFields(150_000.0, scaling=_GPT_OSS_SCALING),
        LayerTypes("alternating", 128), Every("num_local_experts", "num_experts", key="num_experts"),
        Every("num_experts_per_tok", "experts_per_token", key="num_experts_per_tok"), _MIXTURE,
        Only("swiglu_alpha", 1.702), Only("swiglu_limit", 7.0), Ignored("initial_context_length"), epsilon=1e-5,
    ),
    "deepseek_v2": _deepseek(
        "DeepseekV2ForCausalLM", Fixed(routed_score_func="softmax", norm_topk_prob=False),
        ExpertGroups(), Only("scoring_func", "softmax"), Ignored("norm_topk_prob"),
        Defaulted("routed_scaling_factor", "routed_scaling_factor", 1.0),
        Defaulted("n_shared_experts", "shared_experts", 2),
        FirstDense(0),
    ),
    "deepseek_v3": _deepseek(
        "DeepseekV3ForCausalLM", Fixed(routed_score_func="sigmoid", routed_bias=True),
        Only("topk_method", "noaux_tc"), Only("scoring_func", "sigmoid"), Only("rope_interleave", True),
        Defaulted("norm_topk_prob", "norm_topk_prob", True),
        Defaulted("routed_scaling_factor", "routed_scaling_factor", 2.5),
        Defaulted("n_shared_experts", "shared_experts", 1),
        FirstDense(3),
        Defaulted("n_group", "n_routing_groups", 8), Defaulted("topk_group", "topk_routing_group", 4),
    ),
    "gemma": family(
        "GemmaForCausalLM", Heads(kv_heads=16, head_dim=256), OldGelu(), BIASES, RopeFields(10_000.0),
        Fixed(normalization="rms_norm_plus_one", scale_embeddings=True), _NOT_BIDIRECTIONAL, tied=True,
    ),
    "ministral": family(
        "MinistralForCausalLM", Heads(kv_heads=8), SILU, RopeFields(10_000.0), LayerTypes("window by layer", 4096)
    ),
    "ministral3": family(
        "Ministral3ForCausalLM", Heads(kv_heads=8, head_dim=128), SILU,
        PositionScaling(10_000.0, scaling=_MINISTRAL3_SCALING), LayerTypes("window", 0), epsilon=1e-5,
    ),
    "olmo": Family("OlmoForCausalLM", (
        SIZES, RANGE, ties(False), Heads(), SILU, BIASES, RopeFields(10_000.0),
        CLIP,
        Fixed(normalization="layer_norm_plain", normalization_layer_epsilon=1e-5),
    )),
    "olmo3": family(
        "Olmo3ForCausalLM", Heads(), SILU, BIASES, LayerTypes("fixed fourth", 4096),
        RopeByLayerType(500_000.0, 500_000.0, has_field=False),
        Fixed(norm_placement="post", qk_norm="all_heads"), epsilon=1e-5,
    ),
    "granite": family(
        "GraniteForCausalLM", Heads(), SILU, BIASES, _MLP_BIAS, RopeFields(10_000.0),
        Defaulted("embedding_multiplier", "embedding_multiplier", 1.0),
        Defaulted("residual_multiplier", "residual_multiplier", 1.0),
        Inverse("logits_scaling", "logits_multiplier"),
        Inverse("attention_multiplier", "query_pre_attn_scalar", power=-2),
    ),
    "glm": family(
        "GlmForCausalLM", Heads(kv_heads=2, head_dim=128), SILU, Bias("attention_bias", "qkv", default=True),
        RopeFields(10_000.0, partial=0.5), epsilon=1.5625e-07,
    ),
    "glm4": family(
        "Glm4ForCausalLM", Heads(kv_heads=2, head_dim=128), SILU, Bias("attention_bias", "qkv", default=True),
        RopeFields(10_000.0, partial=0.5), Fixed(norm_placement="both"), epsilon=1.5625e-07,
    ),
    "cohere": _layer_normed(
        "CohereForCausalLM", Heads(), SILU, BIASES, _MEAN_NORMS, _LOGIT_SCALE, RopeFields(500_000.0),
        Switch("use_qk_norm", "qk_norm", "each_head", "none"), tied=True,
    ),
    "cohere2": _layer_normed(
        "Cohere2ForCausalLM", Heads(), SILU, BIASES, _MEAN_NORMS, _LOGIT_SCALE,
        RopeFields(10_000.0), LayerTypes("fourth", 4096, rotated="never"), tied=True,
    ),
    "phi": _layer_normed(
        "PhiForCausalLM", Heads(), Activation("hidden_act", "gelu_new"), _LAYER_NORMS, _PLAIN_MLP,
        Fixed(attention_bias="all", mlp_bias=True, logits_bias=True, parallel_block="one_norm"),
        Switch("qk_layernorm", "qk_norm", "head", "none"), RopeFields(10_000.0, partial=0.5),
    ),
    "starcoder2": _layer_normed(
        "Starcoder2ForCausalLM", Heads(kv_heads=2), Activation("hidden_act", "gelu_pytorch_tanh"), _LAYER_NORMS,
        _PLAIN_MLP, _use_bias(True), RopeFields(10_000.0), LayerTypes("window", 0),
        tied=True, epsilon_name="norm_epsilon",
    ),
    "stablelm": _layer_normed(
        "StableLmForCausalLM", Heads(kv_heads=32, shared_out=True), SILU, _LAYER_NORMS, Bias("use_qkv_bias", "qkv"),
        Switch("qk_layernorm", "qk_norm", "each_head", "none"), Switch(*_PARALLEL, "one_norm", "none"),
        RopeFields(10_000.0, partial=0.25),
    ),
    "gpt_neox": _layer_normed(
        "GPTNeoXForCausalLM", Heads(shared_out=True, grouped=False), Activation("hidden_act", "gelu"), _LAYER_NORMS,
        _PLAIN_MLP,
        Fixed(mlp_bias=True), Bias("attention_bias", "all", default=True),
        Switch(*_PARALLEL, "two_norms", "none", default=True),
        RopeFields(10_000.0, partial=0.25, names=("rotary_emb_base", "rotary_pct")),
    ),
    "nemotron": _layer_normed(
        "NemotronForCausalLM", Heads(), _SQUARED, _PLAIN_MLP, BIASES, _MLP_BIAS,
        Fixed(normalization="layer_norm_plus_one"), RopeFields(10_000.0, partial=0.5), epsilon_name="norm_eps",
    ),
    "ernie4_5": family(
        "Ernie4_5ForCausalLM", Heads(kv_heads=2, head_dim=128), SILU, _use_bias(False), RopeFields(500_000.0),
        epsilon=1e-5, tied=True,
    ),
    "seed_oss": family(
        "SeedOssForCausalLM", Heads(kv_heads=8, head_dim=128), SILU, OutBias(), _MLP_BIAS, RopeFields(10_000.0)
    ),
    "hunyuan_v1_dense": family(
        "HunYuanDenseV1ForCausalLM", Heads(), SILU, BIASES, Fixed(qk_norm="head_after_rope"),
        RopeFields(10_000.0, alpha=True), Only("use_qk_norm", True), epsilon=1e-5,
    ),
    "exaone4": family(
        "Exaone4ForCausalLM", Heads(kv_heads=32), SILU, NORMED_HEADS, Fixed(norm_placement="post"),
        RopeFields(10_000.0), LayerTypes("fourth", 4096, rotated="alone"), epsilon=1e-5,
    ),
    "apertus": family(
        "ApertusForCausalLM", Heads(), Activation("hidden_act", "xielu"), _PLAIN_MLP, BIASES, NORMED_HEADS,
        RopeFields(12_000_000.0, scaling=_APERTUS_SCALING), epsilon=1e-5,
    ),
    "arcee": family(
        "ArceeForCausalLM", Heads(), _SQUARED, _PLAIN_MLP, BIASES, _MLP_BIAS, RopeFields(10_000.0), epsilon=1e-5
    ),
    "helium": family(
        "HeliumForCausalLM", Heads(kv_heads=20, head_dim=128), SILU, Bias("attention_bias", "qkv"), _MLP_BIAS,
        RopeFields(100_000.0), epsilon=1e-8,
    ),
    **EXPERT_FAMILIES,
}  # fmt: skip
"""What can be read and written, by model_type. Where two would do for a model, the first is written."""
