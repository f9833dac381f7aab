"""The families of Hugging Face models that can be read and written, each as its parts of config.json."""

from collections.abc import Mapping
from dataclasses import dataclass

from maxtext_lite.config.keys import ModelConfig
from maxtext_lite.hf.fields import DEFAULTS, Fields, JsonObject
from maxtext_lite.hf.layers import (
    ChunkedLayers,
    FirstDense,
    InterleavedStep,
    LayerInterval,
    LayerTypes,
    SparseStep,
    WithoutRotation,
)
from maxtext_lite.hf.parts import (
    Choice,
    Defaulted,
    Every,
    ExpertGroups,
    Fixed,
    Heads,
    Ignored,
    Inverse,
    LatentWidths,
    LearnedPositions,
    Only,
    OrNull,
    OutBias,
    Part,
    QueryScalar,
    Rename,
    SharedWidth,
    activation,
    attention_biases,
    switch,
)
from maxtext_lite.hf.rotation import MultipliedRope, PositionScaling, RopeByLayerType, RopeFields, RotaryDim


@dataclass(frozen=True)
class Family:
    """A model_type.

    Attributes:
      architecture: its class in transformers.
      parts: the fields of config.json and their meaning; a later part wins.
    """

    architecture: str
    parts: tuple[Part, ...]

    def read(self, fields: Fields) -> JsonObject:
        """Every key; those that no field decides have their DEFAULTS."""
        keys = dict(DEFAULTS)
        for part in self.parts:
            keys |= part.read(fields)
        # With is_causal=false, transformers lets each token of any model see the later ones too.
        Only("is_causal", True).read(fields)
        return keys

    def write(self, config: ModelConfig) -> JsonObject:
        """The fields that state the keys."""
        fields: JsonObject = {}
        for part in self.parts:
            fields |= part.write(config)
        return fields


_SIZES = Rename(
    vocab_size="vocab_size", hidden_size="base_emb_dim", intermediate_size="base_mlp_dim",
    num_hidden_layers="base_num_decoder_layers",
)  # fmt: skip
_RANGE = Defaulted("initializer_range", "initializer_range", 0.02)


def _ties(default: bool) -> Part:
    return Defaulted("tie_word_embeddings", "logits_via_embedding", default)


def _norms(epsilon: float, name: str = "rms_norm_eps") -> Part:
    return Defaulted(name, "normalization_layer_epsilon", epsilon)


_SILU = activation("hidden_act", "silu")
_HEADS = Heads()
_ROPE = RopeFields(10_000.0)
_NORMS = _norms(1e-6)


def family(
    architecture: str,
    *parts: Part,
    sizes: Part = _SIZES,
    norms: Part = _NORMS,
    heads: Part = _HEADS,
    act: Part = _SILU,
    rope: Part = _ROPE,
    tied: bool = False,
) -> Family:
    """A family of Llama's kind where nothing else is stated; `tied` applies if config.json does not say."""
    return Family(architecture, (sizes, _RANGE, norms, _ties(tied), heads, act, *parts, rope))


_NORMS_5 = _norms(1e-5)
_LAYER_NORM_5 = _norms(1e-5, "layer_norm_eps")
_HALF_ROPE = RopeFields(10_000.0, partial=0.5)
_BIASES = attention_biases("attention_bias", "all")
_INNER_BIASES = attention_biases("attention_bias", "qkv")
_MLP_BIAS = Defaulted("mlp_bias", "mlp_bias", False)
_NORMED_HEADS = Fixed(qk_norm="head")
_POST_NORMED = Fixed(norm_placement="post", qk_norm="all_heads")
_HEAD_NORM_SWITCH = switch("use_qk_norm", "qk_norm", "head", "none")
_CLIP = OrNull("clip_qkv", "clip_qkv", 0.0)
_EXPERTS_PER_TOKEN = Rename(num_experts_per_tok="num_experts_per_tok")
_EXPERTS = Every("num_experts", "num_local_experts", key="num_experts")
_LOCAL_EXPERTS = Rename(num_local_experts="num_experts")
_EXPERT_WIDTH = Rename(moe_intermediate_size="base_moe_mlp_dim")
_SOFTMAX_ROUTING = Fixed(routed_score_func="softmax")
_MIXTURE = Fixed(routed_score_func="softmax", norm_topk_prob=True)
_GEMMA_ACTIVATION = activation("hidden_activation", "gelu_pytorch_tanh")
# Gemma 1 says `gelu` for the tanh approximation, and its `hidden_activation` may only repeat it.
_OLD_GELU = Choice(
    "hidden_act", "mlp_activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}
)
_GEMMA_NORMS = Fixed(normalization="rms_norm_plus_one", norm_placement="both", scale_embeddings=True)
_CAUSAL_GEMMA = Only("use_bidirectional_attention", False)
_NO_JITTER = Only("router_jitter_noise", 0.0)
_PHI3_TYPES = {"su": "longrope", "yarn": "longrope"}
_MINISTRAL3_SCALING = {
    "rope_theta": 1_000_000.0, "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_APERTUS_SCALING = {
    "rope_theta": 12_000_000.0, "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
_GPT_OSS_SCALING = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_SWITCHED = LayerTypes(4096, switched=True, since=28)
_WINDOW_IF_STATED = LayerTypes(0, listed=False)


def _norm_topk(default: bool) -> Part:
    return Defaulted("norm_topk_prob", "norm_topk_prob", default)


def _scaling_factor(default: float) -> Part:
    return Defaulted("routed_scaling_factor", "routed_scaling_factor", default)


def _shared_experts(default: int) -> Part:
    return Defaulted("n_shared_experts", "shared_experts", default)


def _groups(groups: int, chosen: int) -> tuple[Part, ...]:
    return (
        Defaulted("n_group", "n_routing_groups", groups),
        Defaulted("topk_group", "topk_routing_group", chosen),
        Only("topk_method", "noaux_tc"),
        Only("scoring_func", "sigmoid"),
        Fixed(routed_score_func="sigmoid", routed_bias=True),
    )


def _final_cap(default: float) -> Part:
    return OrNull("final_logit_softcapping", "final_logits_soft_cap", default)


def _use_bias(default: bool) -> tuple[Part, ...]:
    return (
        attention_biases("use_bias", "all", default=default),
        switch("use_bias", "mlp_bias", True, False, default=default),
    )


def _parallel(on: str, *, default: bool = False) -> Part:
    return switch("use_parallel_residual", "parallel_block", on, "none", default=default)


_SIGMOID_ROUTING = (
    Rename(n_routed_experts="num_experts"), _EXPERTS_PER_TOKEN, _shared_experts(1), _scaling_factor(1.0),
    *_groups(1, 1),
)  # fmt: skip
_SIGMOID_MIXTURE = (*_SIGMOID_ROUTING, _EXPERT_WIDTH)
_GRANITE_SCALES = (
    Defaulted("embedding_multiplier", "embedding_multiplier", 1.0),
    Defaulted("residual_multiplier", "residual_multiplier", 1.0),
    Inverse("logits_scaling", "logits_multiplier"),
    Inverse("attention_multiplier", "query_pre_attn_scalar", power=-0.5),
)
_GRANITE_MOE = (_BIASES, _LOCAL_EXPERTS, _EXPERTS_PER_TOKEN, _MIXTURE, *_GRANITE_SCALES)
_PLAIN_MLP = Fixed(gated_mlp=False)
_SQUARED = activation("hidden_act", "relu2")
_LAYER_NORMS = Fixed(normalization="layer_norm")
_COHERE = (
    _BIASES,
    Fixed(normalization="layer_norm_no_bias", parallel_block="one_norm"),
    Defaulted("logit_scale", "logits_multiplier", 0.0625),
)
_HUNYUAN_ROPE = RopeFields(10_000.0, alpha=True)


def _deepseek(architecture: str, *parts: Part) -> Family:
    return family(
        architecture, Only("attention_bias", False), Only("mlp_bias", False), Only("moe_layer_freq", 1),
        Rename(n_routed_experts="num_experts"), _EXPERTS_PER_TOKEN, _EXPERT_WIDTH, *parts,
        # The norms of the latent vectors have this epsilon whatever config.json says of the others.
        norms=Only("rms_norm_eps", 1e-6, key="normalization_layer_epsilon"), heads=LatentWidths(),
    )  # fmt: skip


FAMILIES: Mapping[str, Family] = {
    "llama": family("LlamaForCausalLM", _BIASES, _MLP_BIAS, Only("rope_interleaved", False)),
    "mistral": family("MistralForCausalLM", LayerTypes(4096, listed=False), heads=Heads(8)),
    "qwen2": family("Qwen2ForCausalLM", Fixed(attention_bias="qkv"), _SWITCHED, heads=Heads(32)),
    "qwen3": family("Qwen3ForCausalLM", _BIASES, _NORMED_HEADS, _SWITCHED, heads=Heads(32, 128)),
    "gemma2": family(
        "Gemma2ForCausalLM", _BIASES, _GEMMA_NORMS, OrNull("attn_logit_softcapping", "attn_logits_soft_cap", 50.0),
        _final_cap(30.0), QueryScalar(), LayerTypes(4096, every=2), _CAUSAL_GEMMA, Ignored("hidden_act"),
        heads=Heads(4, 256), act=_GEMMA_ACTIVATION, tied=True,
    ),
    "gemma3_text": family(
        "Gemma3ForCausalLM", _BIASES, _GEMMA_NORMS, _NORMED_HEADS, Only("attn_logit_softcapping", None),
        _final_cap(0.0), QueryScalar(), LayerTypes(4096, every=6, has_pattern=True), _CAUSAL_GEMMA,
        Ignored("hidden_act"), heads=Heads(4, 256), act=_GEMMA_ACTIVATION, rope=RopeByLayerType(), tied=True,
    ),
    "phi3": family(
        "Phi3ForCausalLM", _WINDOW_IF_STATED, norms=_NORMS_5,
        rope=RopeFields(10_000.0, partial=1.0, original=4096, types=_PHI3_TYPES),
    ),
    "smollm3": family(
        "SmolLM3ForCausalLM", _BIASES, _MLP_BIAS, WithoutRotation(), heads=Heads(4), rope=RopeFields(2_000_000.0),
        tied=True,
    ),
    "olmo2": family("Olmo2ForCausalLM", _BIASES, _POST_NORMED, norms=_NORMS_5),
    "gpt2": Family("GPT2LMHeadModel", (
        Rename(vocab_size="vocab_size", n_embd="base_emb_dim", n_layer="base_num_decoder_layers"),
        LearnedPositions(), _norms(1e-5, "layer_norm_epsilon"), _RANGE, _ties(True),
        activation("activation_function", "gelu_new"),
        Fixed(normalization="layer_norm", gated_mlp=False, mlp_bias=True, attention_bias="all"),
        Only("scale_attn_weights", True), Defaulted("scale_attn_by_inverse_layer_idx", "inverse_layer_scaling", False),
        Only("reorder_and_upcast_attn", False),
    )),
    "mixtral": family(
        "MixtralForCausalLM", _WINDOW_IF_STATED, _LOCAL_EXPERTS, _EXPERTS_PER_TOKEN, _MIXTURE, _NO_JITTER,
        norms=_NORMS_5, heads=Heads(8), rope=RopeFields(1_000_000.0),
    ),
    "qwen3_moe": family(
        "Qwen3MoeForCausalLM", _BIASES, _NORMED_HEADS, LayerTypes(4096, switched=True, listed=False),
        Ignored("max_window_layers"), _EXPERTS, _EXPERTS_PER_TOKEN, _EXPERT_WIDTH, _SOFTMAX_ROUTING,
        _norm_topk(False), SparseStep(), heads=Heads(4),
    ),
    "gpt_oss": family(
        "GptOssForCausalLM", Fixed(mlp_activation="clamped_silu", attention_sinks=True, expert_bias=True),
        attention_biases("attention_bias", "all", default=True), LayerTypes(128, every=2),
        Every("num_local_experts", "num_experts", key="num_experts"),
        Every("num_experts_per_tok", "experts_per_token", key="num_experts_per_tok"), _MIXTURE,
        Only("swiglu_alpha", 1.702), Only("swiglu_limit", 7.0), Ignored("initial_context_length"),
        norms=_NORMS_5, heads=Heads(8, 64), act=Only("hidden_act", "silu"),
        rope=RopeFields(150_000.0, scaling=_GPT_OSS_SCALING),
    ),
    "deepseek_v2": _deepseek(
        "DeepseekV2ForCausalLM", Fixed(routed_score_func="softmax", norm_topk_prob=False), ExpertGroups(),
        Only("scoring_func", "softmax"), Ignored("norm_topk_prob"), _scaling_factor(1.0), _shared_experts(2),
        FirstDense(0),
    ),
    "deepseek_v3": _deepseek(
        "DeepseekV3ForCausalLM", *_groups(8, 4), Only("rope_interleave", True), _norm_topk(True), _scaling_factor(2.5),
        _shared_experts(1), FirstDense(3),
    ),
    "gemma": family(
        "GemmaForCausalLM", Only("hidden_activation", "gelu_pytorch_tanh"), _BIASES,
        Fixed(normalization="rms_norm_plus_one", scale_embeddings=True), _CAUSAL_GEMMA, heads=Heads(16, 256),
        act=_OLD_GELU, tied=True,
    ),
    "ministral": family("MinistralForCausalLM", LayerTypes(4096), heads=Heads(8)),
    "ministral3": family(
        "Ministral3ForCausalLM", _WINDOW_IF_STATED, norms=_NORMS_5, heads=Heads(8, 128),
        rope=PositionScaling(10_000.0, scaling=_MINISTRAL3_SCALING),
    ),
    "olmo": family(
        "OlmoForCausalLM", _BIASES, _CLIP, Fixed(normalization="layer_norm_plain"),
        norms=Fixed(normalization_layer_epsilon=1e-5),
    ),
    "olmo3": family(
        "Olmo3ForCausalLM", _BIASES, LayerTypes(4096, every=4), _POST_NORMED, norms=_NORMS_5,
        rope=RopeByLayerType(500_000.0, 500_000.0, has_field=False),
    ),
    "granite": family("GraniteForCausalLM", _BIASES, _MLP_BIAS, *_GRANITE_SCALES),
    "glm": family(
        "GlmForCausalLM", attention_biases("attention_bias", "qkv", default=True), norms=_norms(1.5625e-07),
        heads=Heads(2, 128), rope=_HALF_ROPE,
    ),
    "glm4": family(
        "Glm4ForCausalLM", attention_biases("attention_bias", "qkv", default=True), Fixed(norm_placement="both"),
        norms=_norms(1.5625e-07), heads=Heads(2, 128), rope=_HALF_ROPE,
    ),
    "cohere": family(
        "CohereForCausalLM", *_COHERE, switch("use_qk_norm", "qk_norm", "each_head", "none"), norms=_LAYER_NORM_5,
        rope=RopeFields(500_000.0), tied=True,
    ),
    "cohere2": family(
        "Cohere2ForCausalLM", *_COHERE, LayerTypes(4096, every=4, has_pattern=True, rotated="never"),
        norms=_LAYER_NORM_5, tied=True,
    ),
    "phi": family(
        "PhiForCausalLM", _LAYER_NORMS, _PLAIN_MLP,
        Fixed(attention_bias="all", mlp_bias=True, logits_bias=True, parallel_block="one_norm"),
        switch("qk_layernorm", "qk_norm", "head", "none"), norms=_LAYER_NORM_5,
        act=activation("hidden_act", "gelu_new"), rope=_HALF_ROPE,
    ),
    "starcoder2": family(
        "Starcoder2ForCausalLM", _LAYER_NORMS, _PLAIN_MLP, *_use_bias(True), _WINDOW_IF_STATED,
        norms=_norms(1e-5, "norm_epsilon"), heads=Heads(2), act=activation("hidden_act", "gelu_pytorch_tanh"),
        tied=True,
    ),
    "stablelm": family(
        "StableLmForCausalLM", _LAYER_NORMS, attention_biases("use_qkv_bias", "qkv"),
        switch("qk_layernorm", "qk_norm", "each_head", "none"), _parallel("one_norm"), norms=_LAYER_NORM_5,
        heads=Heads(32, shared_out=True), rope=RopeFields(10_000.0, partial=0.25),
    ),
    "gpt_neox": family(
        "GPTNeoXForCausalLM", _LAYER_NORMS, _PLAIN_MLP, Fixed(mlp_bias=True),
        attention_biases("attention_bias", "all", default=True), _parallel("two_norms", default=True),
        norms=_LAYER_NORM_5, heads=Heads(shared_out=True, grouped=False), act=activation("hidden_act", "gelu"),
        rope=RopeFields(10_000.0, partial=0.25, theta_name="rotary_emb_base", partial_name="rotary_pct"),
    ),
    "nemotron": family(
        "NemotronForCausalLM", _PLAIN_MLP, _BIASES, _MLP_BIAS, Fixed(normalization="layer_norm_plus_one"),
        norms=_norms(1e-5, "norm_eps"), act=_SQUARED, rope=_HALF_ROPE,
    ),
    "ernie4_5": family(
        "Ernie4_5ForCausalLM", *_use_bias(False), norms=_NORMS_5, heads=Heads(2, 128), rope=RopeFields(500_000.0),
        tied=True,
    ),
    "seed_oss": family("SeedOssForCausalLM", OutBias(), _MLP_BIAS, heads=Heads(8, 128)),
    "hunyuan_v1_dense": family(
        "HunYuanDenseV1ForCausalLM", _BIASES, Fixed(qk_norm="head_after_rope"), Only("use_qk_norm", True),
        norms=_NORMS_5, rope=_HUNYUAN_ROPE,
    ),
    "exaone4": family(
        "Exaone4ForCausalLM", Fixed(qk_norm="head", norm_placement="post"),
        LayerTypes(4096, every=4, has_pattern=True, rotated="alone"), norms=_NORMS_5, heads=Heads(32),
    ),
    "apertus": family(
        "ApertusForCausalLM", _PLAIN_MLP, _BIASES, _NORMED_HEADS, norms=_NORMS_5, act=activation("hidden_act", "xielu"),
        rope=RopeFields(12_000_000.0, scaling=_APERTUS_SCALING),
    ),
    "arcee": family("ArceeForCausalLM", _PLAIN_MLP, _BIASES, _MLP_BIAS, norms=_NORMS_5, act=_SQUARED),
    "helium": family(
        "HeliumForCausalLM", _INNER_BIASES, _MLP_BIAS, norms=_norms(1e-8), heads=Heads(20, 128),
        rope=RopeFields(100_000.0),
    ),
    "qwen2_moe": family(
        "Qwen2MoeForCausalLM", attention_biases("qkv_bias", "qkv", default=True),
        LayerTypes(4096, switched=True, every=2, since=28), Rename(num_experts="num_experts"), _EXPERTS_PER_TOKEN,
        _EXPERT_WIDTH, Fixed(routed_score_func="softmax", shared_experts=1, shared_expert_gate=True),
        Defaulted("shared_expert_intermediate_size", "base_shared_mlp_dim", 5632), _norm_topk(False), SparseStep(),
        heads=Heads(16),
    ),
    "glm4_moe": family(
        "Glm4MoeForCausalLM", _INNER_BIASES, _HEAD_NORM_SWITCH, *_SIGMOID_MIXTURE, _norm_topk(True), FirstDense(1),
        norms=_NORMS_5, heads=Heads(8), rope=_HALF_ROPE,
    ),
    "dots1": family(
        "Dots1ForCausalLM", _BIASES, _NORMED_HEADS, LayerTypes(4096, since=62), *_SIGMOID_MIXTURE, _norm_topk(False),
        FirstDense(0),
    ),
    "solar_open": family(
        "SolarOpenForCausalLM", _INNER_BIASES, *_SIGMOID_ROUTING, _norm_topk(True),
        Ignored("first_k_dense_replace", "intermediate_size", "use_qk_norm"),
        sizes=Rename(vocab_size="vocab_size", hidden_size="base_emb_dim", moe_intermediate_size="base_mlp_dim",
                     num_hidden_layers="base_num_decoder_layers"),
        norms=_NORMS_5, heads=Heads(8, 128), rope=RopeFields(1_000_000.0),
    ),
    "minimax_m2": family(
        "MiniMaxM2ForCausalLM",
        Fixed(qk_norm="all_heads", routed_score_func="sigmoid", routed_bias=True, norm_topk_prob=True),
        Every("num_local_experts", "num_experts", key="num_experts"), _EXPERTS_PER_TOKEN,
        Only("use_qk_norm", True), Only("qk_norm_type", "per_layer"), Only("scoring_func", "sigmoid"),
        Only("use_routing_bias", True), Only("shared_intermediate_size", 0), _NO_JITTER,
        Ignored("num_mtp_modules", "mtp_transformer_layers", "use_mtp", "attn_type_list"), heads=Heads(8, 128),
        rope=RotaryDim(5_000_000.0, partial=1.0),
    ),
    "ernie4_5_moe": family(
        "Ernie4_5_MoeForCausalLM", Only("use_bias", False),
        Every("moe_num_experts", "num_experts", "num_local_experts", key="num_experts"),
        Every("moe_k", "num_experts_per_tok", key="num_experts_per_tok"), _EXPERT_WIDTH,
        Fixed(routed_score_func="softmax", routed_bias=True, norm_topk_prob=True), Only("moe_norm_min", 1e-12),
        Defaulted("moe_num_shared_experts", "shared_experts", 2), LayerInterval(),
        Ignored("moe_capacity", "moe_gate", "moe_use_aux_free"), norms=_NORMS_5, heads=Heads(4),
        rope=RopeFields(500_000.0), tied=True,
    ),
    "olmoe": family(
        "OlmoeForCausalLM", _BIASES, Fixed(qk_norm="all_heads"), _EXPERTS, _EXPERTS_PER_TOKEN, _SOFTMAX_ROUTING,
        _norm_topk(False), _CLIP, norms=_NORMS_5,
    ),
    "flex_olmo": family(
        "FlexOlmoForCausalLM", _BIASES, _POST_NORMED, _SOFTMAX_ROUTING, _EXPERTS, _EXPERTS_PER_TOKEN,
        _norm_topk(False), rope=RopeFields(500_000.0),
    ),
    "llama4_text": family(
        "Llama4ForCausalLM", Defaulted("intermediate_size_mlp", "base_mlp_dim", 16384), _BIASES, ChunkedLayers(),
        InterleavedStep(), switch("use_qk_norm", "qk_norm", "l2_after_rope", "none", default=True),
        Fixed(routed_score_func="sigmoid", norm_topk_prob=False, apply_router_weight_on_input=True, shared_experts=1),
        _LOCAL_EXPERTS, Defaulted("num_experts_per_tok", "num_experts_per_tok", 1), _NO_JITTER,
        Ignored("for_llm_compressor"),
        sizes=Rename(vocab_size="vocab_size", hidden_size="base_emb_dim", intermediate_size="base_moe_mlp_dim",
                     num_hidden_layers="base_num_decoder_layers"),
        norms=_NORMS_5, heads=Heads(8, 128), rope=RopeFields(500_000.0),
    ),
    "hunyuan_v1_moe": family(
        "HunYuanMoEV1ForCausalLM", _BIASES,
        Fixed(qk_norm="head_after_rope", routed_score_func="softmax", norm_topk_prob=True, shared_experts=1),
        _EXPERTS, Every("moe_topk", "num_experts_per_tok", key="num_experts_per_tok"), norms=_NORMS_5,
        rope=_HUNYUAN_ROPE,
    ),
    "granitemoe": family("GraniteMoeForCausalLM", *_GRANITE_MOE),
    "granitemoeshared": family("GraniteMoeSharedForCausalLM", *_GRANITE_MOE, SharedWidth()),
    "phimoe": family(
        "PhimoeForCausalLM", _BIASES, _WINDOW_IF_STATED,
        Fixed(normalization="layer_norm", routed_score_func="sparsemixer", norm_topk_prob=False), _LOCAL_EXPERTS,
        Only("num_experts_per_tok", 2, key="num_experts_per_tok"), Only("router_jitter_noise", 0.01),
        Defaulted("lm_head_bias", "logits_bias", False),
        Ignored("input_jitter_noise", "hidden_dropout", "expert_dropout"), norms=_NORMS_5, heads=Heads(8),
        rope=MultipliedRope(1_000_000.0),
    ),
}  # fmt: skip
"""What can be read and written, by model_type. Where two would do for a model, the first is written."""
