"""The families of Hugging Face models that can be read and written, each as its parts of config.json."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

from maxtext_lite.config.keys import ModelConfig
from maxtext_lite.hf.fields import Fields, JsonObject, Keys, is_whole
from maxtext_lite.hf.parts import (
    CHUNKED,
    GLOBAL,
    RANGE,
    SIZES,
    Activation,
    Bias,
    Defaulted,
    Every,
    ExpertGroups,
    Family,
    Fixed,
    Heads,
    Ignored,
    LatentWidths,
    LayerTypes,
    LearnedPositions,
    Only,
    OrNull,
    Part,
    QueryScalar,
    Rename,
    RopeByLayerType,
    RopeFields,
    WithoutRotation,
    family,
    is_unsaid,
    layer_kinds,
    pattern_of,
    rotated_layers,
    ties,
)


class OldGelu(Part):
    """Gemma 1's activation: its `gelu` means the tanh approximation, and `hidden_activation` may only repeat it."""

    _MEANT = "gelu_pytorch_tanh"

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        value, other = fields.take("hidden_act", self._MEANT), fields.take("hidden_activation", self._MEANT)
        for name, stated in (("hidden_act", value), ("hidden_activation", other)):
            if stated not in ("gelu", self._MEANT):
                fields.refuse(name, stated, f"cannot be expressed: it must be {self._MEANT}.")
        return {"mlp_activation": "gelu_tanh"}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        del config
        return {"hidden_act": self._MEANT}


class Switch(Part):
    """A field that is true or false, and a key with a value for each.

    Args:
      also: other keys that follow the field, with their values for true and for false.
    """

    def __init__(self, name: str, key: str, on: object, off: object, *, default: bool = False, **also: Any) -> None:
        self._name, self._key, self._values, self._default, self._also = name, key, (on, off), default, also

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        is_off = not fields.flag(self._name, self._default)
        fields.names |= {self._key: self._name}
        return {self._key: self._values[is_off]} | {key: values[is_off] for key, values in self._also.items()}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        return {self._name: getattr(config, self._key) == self._values[0]}


class OutBias(Part):
    """Seed-OSS's biases, of queries, keys and values, and of the output."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        inner, out = fields.flag("attention_bias", True), fields.flag("attention_out_bias", False)
        if out and not inner:
            fields.refuse("attention_out_bias", out, "cannot be expressed without attention_bias.")
        return {"attention_bias": "all" if inner and out else "qkv" if inner else "none"}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        return {"attention_bias": config.attention_bias != "none", "attention_out_bias": config.attention_bias == "all"}


def _rounded(value: float) -> float:
    """To 12 digits: far finer than float32, and few enough that the inverse gives the original number."""
    return float(f"{value:.12g}")


def _is_real(value: object) -> TypeGuard[int | float]:
    """Whether a field's value is a number from 0 to 1e15."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


class Inverse(Part):
    """A field that is 1 over a key, or 1 over a key's square root.

    Args:
      power: -1, or -2 if the field multiplies scores and the key's square root divides them.
    """

    def __init__(self, name: str, key: str, *, power: int = -1) -> None:
        self._name, self._key, self._power = name, key, power

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        value = fields.take(self._name, 1.0)
        fields.names[self._key] = self._name
        if not _is_real(value) or not value:
            fields.refuse(self._name, value, "is not a number above 0.")
            value = 1
        return {self._key: float(value) ** self._power if self._power == -1 else _rounded(float(value) ** self._power)}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        value = getattr(config, self._key) or config.head_dim  # query_pre_attn_scalar=0 means head_dim
        return {self._name: _rounded(value ** (1 / self._power))}


_MAPPINGS = ("rope_parameters", "rope_scaling")


def _taken(fields: Fields, entry: str) -> Any:
    """An entry of the last of _MAPPINGS that has it, marked as read in both; None if it is missing."""
    value = None
    for name in _MAPPINGS:
        value = fields.take_entry(name, entry, value)
    return value


def _with_entries(fields: JsonObject, entries: JsonObject) -> JsonObject:
    """The fields with more entries in each of _MAPPINGS that is there."""
    return fields | {name: fields[name] | entries for name in _MAPPINGS if isinstance(fields.get(name), dict)}


class PositionScaling(RopeFields):
    """Ministral 3's rotation, and queries that grow with each multiple of its original length."""

    _ENTRY = "llama_4_scaling_beta"

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        scale = 0.1 if is_unsaid(fields) else _taken(fields, self._ENTRY)
        _taken(fields, "max_position_embeddings")  # not read by transformers
        keys = super().read(fields)
        length = keys["rope_scaling"].get("original_max_position_embeddings")
        if not _is_real(scale) or length is None:
            fields.refuse(self._ENTRY, scale, "must be a number beside an original_max_position_embeddings.")
            return keys
        return {**keys, "position_temperature": {"scale": float(scale), "floor_scale": length} if scale else {}}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        tuning = config.position_temperature
        return _with_entries(super().write(config), {self._ENTRY: tuning.scale if tuning else 0.0})


class MultipliedRope(RopeFields):
    """Phi-3.5-MoE's rotation: longrope with a multiplier of cosines and sines for short and for long documents.

    transformers uses the short factors at every length, and so does this.
    """

    _ENTRIES = ("short_mscale", "long_mscale")

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        values = [_taken(fields, entry) for entry in self._ENTRIES]
        _taken(fields, "long_factor")
        keys = dict(super().read(fields))
        scaling = keys["rope_scaling"]
        if scaling.get("rope_type") != "longrope":
            if scaling:
                fields.refuse("rope_scaling", scaling["rope_type"], "cannot be expressed: it must be longrope.")
            return keys
        short, long = values
        if not _is_real(short) or not short or short != long:
            why = "cannot be expressed: it must be a number above 0, and both the same."
            fields.refuse("short_mscale and long_mscale", values, why)
            return keys
        factors = {"long_factor": scaling.get("short_factor"), "attention_factor": float(short)}
        return keys | {"rope_scaling": scaling | factors}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        fields, scaling = super().write(config), config.rope_scaling
        return _with_entries(fields, dict.fromkeys(self._ENTRIES, scaling.attention_factor)) if scaling else fields


class RotaryDim(RopeFields):
    """MiniMax's rotation, whose share of a head is also stated in dims."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        keys, width = dict(super().read(fields)), fields.size("head_dim", 128)
        dims = fields.whole("rotary_dim", width)
        if dims != width and keys["partial_rotary_factor"] not in (1.0, dims / width):
            fields.refuse("rotary_dim", dims, f"contradicts partial_rotary_factor={keys['partial_rotary_factor']}.")
        return keys if dims == width else keys | {"partial_rotary_factor": dims / width}


class SharedWidth(Part):
    """Granite's width of the shared expert; 0: there is none."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        width = fields.whole("shared_intermediate_size", 0, least=0)
        fields.names["base_shared_mlp_dim"] = "shared_intermediate_size"
        return {"shared_experts": int(width > 0), "base_shared_mlp_dim": width or -1}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        return {"shared_intermediate_size": config.shared_mlp_dim}


def layers_with_experts(config: ModelConfig) -> list[bool]:
    """Whether each layer has experts."""
    kinds, first = config.mlp_kinds, config.first_num_dense_layers
    if config.num_experts == 1:
        first = config.base_num_decoder_layers
    layers = range(config.base_num_decoder_layers)
    return [layer >= first and kinds[layer % len(kinds)] == "moe" for layer in layers]


def _keys(has_experts: Sequence[bool], fields: Fields, name: str) -> Keys:
    """The keys for these layers: the number of dense layers before all others, maybe none, or a pattern.

    Args:
      name: the field that decides.
    """
    fields.names |= {"first_num_dense_layers": name, "mlp_pattern": name}
    first = next((layer for layer, has in enumerate(has_experts) if has), len(has_experts))
    if all(has_experts[first:]):
        return {"first_num_dense_layers": first, "mlp_pattern": "moe"}
    kinds = ["moe" if has else "dense" for has in has_experts]
    return {"first_num_dense_layers": 0, "mlp_pattern": pattern_of(kinds)}


def _numbers(name: str, fields: Fields) -> list[int] | None:
    """A field's value, a list of layers' numbers; None if it is missing."""
    stated = fields.listed(name)
    wrong = [each for each in stated or () if isinstance(each, bool) or not isinstance(each, int)]
    if wrong:
        fields.refuse(name, wrong[0], "is not the number of a layer.")
        return None
    return stated


class FirstDense(Part):
    """DeepSeek's: the layers from `first_k_dense_replace` on have experts."""

    keys = MappingProxyType({"first_k_dense_replace": "first_num_dense_layers"})

    def __init__(self, default: int) -> None:
        self._default = default

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        self._note_names(fields)
        return {"first_num_dense_layers": fields.take("first_k_dense_replace", self._default)}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        return {"first_k_dense_replace": (*layers_with_experts(config), True).index(True)}


class SparseStep(Part):
    """Qwen's: every `decoder_sparse_step`th layer has experts, except `mlp_only_layers`."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        step, dense = fields.whole("decoder_sparse_step", 1), _numbers("mlp_only_layers", fields) or []
        has = [layer not in dense and (layer + 1) % step == 0 for layer in range(fields.num_layers)]
        return _keys(has, fields, "mlp_only_layers" if dense else "decoder_sparse_step")

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        dense = [layer for layer, has in enumerate(layers_with_experts(config)) if not has]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


class LayerInterval(Part):
    """Ernie's: of the layers from `moe_layer_start_index` to `moe_layer_end_index`, every `moe_layer_interval`th."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        layers, every = fields.num_layers, fields.whole("moe_layer_interval", 1)
        start, end = (
            fields.whole("moe_layer_start_index", 1, least=0),
            fields.whole("moe_layer_end_index", -1, least=-1),
        )
        end = layers - 1 if end == -1 else end
        has = [start <= layer <= end and (layer + 1) % every == 0 for layer in range(layers)]
        return _keys(has, fields, "moe_layer_start_index" if start or every == 1 else "moe_layer_interval")

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        has = layers_with_experts(config)
        numbers = [layer for layer, each in enumerate(has) if each] or [len(has)]
        start, end = numbers[0], numbers[-1]
        fitting = [
            every
            for every in range(1, len(has) + 1)
            if numbers == [layer for layer in range(start, end + 1) if (layer + 1) % every == 0]
        ]
        every = fitting[0] if fitting else 1  # a round trip then fails, and the family is not written
        return {"moe_layer_start_index": start, "moe_layer_end_index": end, "moe_layer_interval": every}


class InterleavedStep(Part):
    """Llama 4's: `moe_layers`, or every `interleave_moe_layer_step`th layer."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        step, stated = fields.whole("interleave_moe_layer_step", 1), _numbers("moe_layers", fields)
        layers = range(fields.num_layers)
        has = [(layer + 1) % step == 0 if stated is None else layer in stated for layer in layers]
        return _keys(has, fields, "interleave_moe_layer_step" if stated is None else "moe_layers")

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        numbers = [layer for layer, has in enumerate(layers_with_experts(config)) if has]
        return {"interleave_moe_layer_step": 1, "moe_layers": numbers}


class ChunkedLayers(Part):
    """Llama 4's layers: rotated ones attend within chunks. Every fourth, or those with a 0 in `no_rope_layers`, is not
    rotated and attends to everything, with queries that may grow with their positions."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        layers, rotated = fields.num_layers, rotated_layers(fields, fields.listed("no_rope_layers") or None)
        types = fields.listed("layer_types")
        if types is not None:
            fields.check_layer_types(types, layers, 1, (CHUNKED, GLOBAL))
        types = types if types and len(types) == layers else [CHUNKED if turned else GLOBAL for turned in rotated]
        kinds = [kind if turned else "nope" for kind, turned in zip(types, rotated, strict=True)]
        odd = [layer for layer in range(layers) if types[layer] == CHUNKED and not rotated[layer]]
        if odd:
            fields.refuse(
                "no_rope_layers", rotated, f"cannot be expressed: layer {odd[0]} has chunks, but no rotation."
            )
        fields.names |= {"layer_pattern": "layer_types", "chunk_attn_window_size": "attention_chunk_size"}
        fields.names["position_temperature"] = "attn_scale"
        chunk = fields.whole("attention_chunk_size", None if fields.is_null("attention_chunk_size") else 8192)
        tuning = {"scale": fields.take("attn_scale", 0.1), "floor_scale": fields.whole("floor_scale", 8192)}
        tuning |= {"offset": 1, "layers": "nope"}
        is_tuned = bool(fields.whole("attn_temperature_tuning", least=0) if is_whole(
            fields.peek("attn_temperature_tuning", True), 0
        ) else fields.flag("attn_temperature_tuning", True))  # fmt: skip
        return {
            "layer_pattern": pattern_of(kinds),
            "chunk_attn_window_size": chunk if CHUNKED in kinds else 0,
            "position_temperature": tuning if is_tuned and "nope" in kinds else {},
        }

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        kinds, tuning = layer_kinds(config), config.position_temperature
        tuned = {} if tuning is None else {"attn_scale": tuning.scale, "floor_scale": tuning.floor_scale}
        return {
            "no_rope_layers": [int(kind != "nope") for kind in kinds],
            "layer_types": [GLOBAL if kind == "nope" else kind for kind in kinds],
            "attention_chunk_size": config.chunk_attn_window_size or 8192,
            "attn_temperature_tuning": tuning is not None,
        } | tuned


_SILU = Activation("hidden_act", "silu")
_BIASES = Bias("attention_bias", "all")
_NORMED_HEADS = Fixed(qk_norm="head")
_CLIP = OrNull("clip_qkv", "clip_qkv", 0.0)
_EXPERTS_PER_TOKEN = Rename(num_experts_per_tok="num_experts_per_tok")
_EXPERT_WIDTH = Rename(moe_intermediate_size="base_moe_mlp_dim")
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
_SIGMOID_ROUTING = (
    Fixed(routed_score_func="sigmoid", routed_bias=True),
    Rename(n_routed_experts="num_experts"), _EXPERTS_PER_TOKEN,
    Defaulted("n_shared_experts", "shared_experts", 1),
    Defaulted("routed_scaling_factor", "routed_scaling_factor", 1.0),
    Defaulted("n_group", "n_routing_groups", 1), Defaulted("topk_group", "topk_routing_group", 1),
    Only("scoring_func", "sigmoid"), Only("topk_method", "noaux_tc"),
)  # fmt: skip
_SIGMOID_MIXTURE = (*_SIGMOID_ROUTING, _EXPERT_WIDTH)
_GRANITE_SCALES = (
    Defaulted("embedding_multiplier", "embedding_multiplier", 1.0),
    Defaulted("residual_multiplier", "residual_multiplier", 1.0),
    Inverse("logits_scaling", "logits_multiplier"),
    Inverse("attention_multiplier", "query_pre_attn_scalar", power=-2),
)
_GRANITE_MOE = (
    _BIASES, RopeFields(10_000.0), _SILU, Heads(), Rename(num_local_experts="num_experts"), _EXPERTS_PER_TOKEN,
    _MIXTURE, *_GRANITE_SCALES,
)  # fmt: skip
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
    "llama": family(
        "LlamaForCausalLM", Heads(), _SILU, _BIASES, _MLP_BIAS, RopeFields(10_000.0),
        Only("rope_interleaved", False),
    ),
    "mistral": family(
        "MistralForCausalLM", Heads(kv_heads=8), _SILU, RopeFields(10_000.0), LayerTypes("window", 4096)
    ),
    "qwen2": family(
        "Qwen2ForCausalLM", Heads(kv_heads=32), _SILU, Fixed(attention_bias="qkv"), RopeFields(10_000.0),
        LayerTypes("switched", 4096),
    ),
    "qwen3": family(
        "Qwen3ForCausalLM", Heads(kv_heads=32, head_dim=128), _SILU, _BIASES, _NORMED_HEADS,
        RopeFields(10_000.0), LayerTypes("switched", 4096),
    ),
    "gemma2": family(
        "Gemma2ForCausalLM", Heads(kv_heads=4, head_dim=256), _GEMMA_ACTIVATION, _BIASES, _GEMMA_NORMS,
        OrNull("attn_logit_softcapping", "attn_logits_soft_cap", 50.0), _final_cap(30.0), QueryScalar(),
        RopeFields(10_000.0), LayerTypes("alternating", 4096), _NOT_BIDIRECTIONAL, tied=True,
    ),
    "gemma3_text": family(
        "Gemma3ForCausalLM", Heads(kv_heads=4, head_dim=256), _GEMMA_ACTIVATION, _BIASES, _GEMMA_NORMS,
        _NORMED_HEADS, Only("attn_logit_softcapping", None), _final_cap(0.0), QueryScalar(),
        LayerTypes("sixth", 4096), RopeByLayerType(), _NOT_BIDIRECTIONAL, tied=True,
    ),
    "phi3": family(
        "Phi3ForCausalLM", Heads(), _SILU, RopeFields(10_000.0, partial=1.0, original=4096, types=_PHI3_TYPES),
        LayerTypes("window", 0), epsilon=1e-5,
    ),
    "smollm3": family(
        "SmolLM3ForCausalLM", Heads(kv_heads=4), _SILU, _BIASES, _MLP_BIAS,
        RopeFields(2_000_000.0), WithoutRotation(), tied=True,
    ),
    "olmo2": family(
        "Olmo2ForCausalLM", Heads(), _SILU, _BIASES, RopeFields(10_000.0),
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
        "MixtralForCausalLM", Heads(kv_heads=8), _SILU, RopeFields(1_000_000.0),
        LayerTypes("window", 0), Rename(num_local_experts="num_experts"), _EXPERTS_PER_TOKEN, _MIXTURE,
        Only("router_jitter_noise", 0.0), epsilon=1e-5,
    ),
    "qwen3_moe": family(
        "Qwen3MoeForCausalLM", Heads(kv_heads=4), _SILU, _BIASES, _NORMED_HEADS,
        RopeFields(10_000.0), LayerTypes("switched window", 4096),
        Every("num_experts", "num_local_experts", key="num_experts"), _EXPERTS_PER_TOKEN, _EXPERT_WIDTH,
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
        "GemmaForCausalLM", Heads(kv_heads=16, head_dim=256), OldGelu(), _BIASES, RopeFields(10_000.0),
        Fixed(normalization="rms_norm_plus_one", scale_embeddings=True), _NOT_BIDIRECTIONAL, tied=True,
    ),
    "ministral": family(
        "MinistralForCausalLM", Heads(kv_heads=8), _SILU, RopeFields(10_000.0), LayerTypes("window by layer", 4096)
    ),
    "ministral3": family(
        "Ministral3ForCausalLM", Heads(kv_heads=8, head_dim=128), _SILU,
        PositionScaling(10_000.0, scaling=_MINISTRAL3_SCALING), LayerTypes("window", 0), epsilon=1e-5,
    ),
    "olmo": Family("OlmoForCausalLM", (
        SIZES, RANGE, ties(False), Heads(), _SILU, _BIASES, RopeFields(10_000.0),
        _CLIP,
        Fixed(normalization="layer_norm_plain", normalization_layer_epsilon=1e-5),
    )),
    "olmo3": family(
        "Olmo3ForCausalLM", Heads(), _SILU, _BIASES, LayerTypes("fixed fourth", 4096),
        RopeByLayerType(500_000.0, 500_000.0, has_field=False),
        Fixed(norm_placement="post", qk_norm="all_heads"), epsilon=1e-5,
    ),
    "granite": family(
        "GraniteForCausalLM", Heads(), _SILU, _BIASES, _MLP_BIAS, RopeFields(10_000.0),
        *_GRANITE_SCALES,
    ),
    "glm": family(
        "GlmForCausalLM", Heads(kv_heads=2, head_dim=128), _SILU, Bias("attention_bias", "qkv", default=True),
        RopeFields(10_000.0, partial=0.5), epsilon=1.5625e-07,
    ),
    "glm4": family(
        "Glm4ForCausalLM", Heads(kv_heads=2, head_dim=128), _SILU, Bias("attention_bias", "qkv", default=True),
        RopeFields(10_000.0, partial=0.5), Fixed(norm_placement="both"), epsilon=1.5625e-07,
    ),
    "cohere": _layer_normed(
        "CohereForCausalLM", Heads(), _SILU, _BIASES, _MEAN_NORMS, _LOGIT_SCALE, RopeFields(500_000.0),
        Switch("use_qk_norm", "qk_norm", "each_head", "none"), tied=True,
    ),
    "cohere2": _layer_normed(
        "Cohere2ForCausalLM", Heads(), _SILU, _BIASES, _MEAN_NORMS, _LOGIT_SCALE,
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
        "StableLmForCausalLM", Heads(kv_heads=32, shared_out=True), _SILU, _LAYER_NORMS, Bias("use_qkv_bias", "qkv"),
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
        "NemotronForCausalLM", Heads(), _SQUARED, _PLAIN_MLP, _BIASES, _MLP_BIAS,
        Fixed(normalization="layer_norm_plus_one"), RopeFields(10_000.0, partial=0.5), epsilon_name="norm_eps",
    ),
    "ernie4_5": family(
        "Ernie4_5ForCausalLM", Heads(kv_heads=2, head_dim=128), _SILU, _use_bias(False), RopeFields(500_000.0),
        epsilon=1e-5, tied=True,
    ),
    "seed_oss": family(
        "SeedOssForCausalLM", Heads(kv_heads=8, head_dim=128), _SILU, OutBias(), _MLP_BIAS, RopeFields(10_000.0)
    ),
    "hunyuan_v1_dense": family(
        "HunYuanDenseV1ForCausalLM", Heads(), _SILU, _BIASES, Fixed(qk_norm="head_after_rope"),
        RopeFields(10_000.0, alpha=True), Only("use_qk_norm", True), epsilon=1e-5,
    ),
    "exaone4": family(
        "Exaone4ForCausalLM", Heads(kv_heads=32), _SILU, _NORMED_HEADS, Fixed(norm_placement="post"),
        RopeFields(10_000.0), LayerTypes("fourth", 4096, rotated="alone"), epsilon=1e-5,
    ),
    "apertus": family(
        "ApertusForCausalLM", Heads(), Activation("hidden_act", "xielu"), _PLAIN_MLP, _BIASES, _NORMED_HEADS,
        RopeFields(12_000_000.0, scaling=_APERTUS_SCALING), epsilon=1e-5,
    ),
    "arcee": family(
        "ArceeForCausalLM", Heads(), _SQUARED, _PLAIN_MLP, _BIASES, _MLP_BIAS, RopeFields(10_000.0), epsilon=1e-5
    ),
    "helium": family(
        "HeliumForCausalLM", Heads(kv_heads=20, head_dim=128), _SILU, Bias("attention_bias", "qkv"), _MLP_BIAS,
        RopeFields(100_000.0), epsilon=1e-8,
    ),
    "qwen2_moe": family(
        "Qwen2MoeForCausalLM", Heads(kv_heads=16), _SILU, Bias("qkv_bias", "qkv", default=True),
        RopeFields(10_000.0), LayerTypes("switched alternating", 4096), Rename(num_experts="num_experts"),
        _EXPERTS_PER_TOKEN, _EXPERT_WIDTH,
        Fixed(routed_score_func="softmax", shared_experts=1, shared_expert_gate=True),
        Defaulted("shared_expert_intermediate_size", "base_shared_mlp_dim", 5632),
        Defaulted("norm_topk_prob", "norm_topk_prob", False), SparseStep(),
    ),
    "glm4_moe": family(
        "Glm4MoeForCausalLM", Heads(kv_heads=8), _SILU, Bias("attention_bias", "qkv"),
        Switch("use_qk_norm", "qk_norm", "head", "none"),
        RopeFields(10_000.0, partial=0.5), *_SIGMOID_MIXTURE,
        Defaulted("norm_topk_prob", "norm_topk_prob", True),
        FirstDense(1), epsilon=1e-5,
    ),
    "dots1": family(
        "Dots1ForCausalLM", Heads(), _SILU, _BIASES, _NORMED_HEADS, RopeFields(10_000.0),
        LayerTypes("from", 4096), *_SIGMOID_MIXTURE, Defaulted("norm_topk_prob", "norm_topk_prob", False),
        FirstDense(0),
    ),
    "solar_open": Family("SolarOpenForCausalLM", (
        Rename(vocab_size="vocab_size", hidden_size="base_emb_dim", moe_intermediate_size="base_mlp_dim",
               num_hidden_layers="base_num_decoder_layers"),
        RANGE, ties(False), Defaulted("rms_norm_eps", "normalization_layer_epsilon", 1e-5),
        Heads(kv_heads=8, head_dim=128), _SILU, Bias("attention_bias", "qkv"),
        RopeFields(1_000_000.0), *_SIGMOID_ROUTING, Defaulted("norm_topk_prob", "norm_topk_prob", True),
        Ignored("first_k_dense_replace", "intermediate_size", "use_qk_norm"),
    )),
    "minimax_m2": family(
        "MiniMaxM2ForCausalLM", Heads(kv_heads=8, head_dim=128), _SILU,
        Fixed(qk_norm="all_heads", routed_score_func="sigmoid", routed_bias=True, norm_topk_prob=True),
        RotaryDim(5_000_000.0, partial=1.0),
        Every("num_local_experts", "num_experts", key="num_experts"), _EXPERTS_PER_TOKEN,
        Only("use_qk_norm", True), Only("qk_norm_type", "per_layer"), Only("scoring_func", "sigmoid"),
        Only("use_routing_bias", True), Only("shared_intermediate_size", 0), Only("router_jitter_noise", 0.0),
        Ignored("num_mtp_modules", "mtp_transformer_layers", "use_mtp", "attn_type_list"),
    ),
    "ernie4_5_moe": family(
        "Ernie4_5_MoeForCausalLM", Heads(kv_heads=4), _SILU, Only("use_bias", False), RopeFields(500_000.0),
        Every("moe_num_experts", "num_experts", "num_local_experts", key="num_experts"),
        Every("moe_k", "num_experts_per_tok", key="num_experts_per_tok"), _EXPERT_WIDTH,
        Fixed(routed_score_func="softmax", routed_bias=True, norm_topk_prob=True), Only("moe_norm_min", 1e-12),
        Defaulted("moe_num_shared_experts", "shared_experts", 2), LayerInterval(),
        Ignored("moe_capacity", "moe_gate", "moe_use_aux_free"), epsilon=1e-5, tied=True,
    ),
    "olmoe": family(
        "OlmoeForCausalLM", Heads(), _SILU, _BIASES, RopeFields(10_000.0), Fixed(qk_norm="all_heads"),
        Every("num_experts", "num_local_experts", key="num_experts"), _EXPERTS_PER_TOKEN,
        Fixed(routed_score_func="softmax"), Defaulted("norm_topk_prob", "norm_topk_prob", False),
        _CLIP, epsilon=1e-5,
    ),
    "flex_olmo": family(
        "FlexOlmoForCausalLM", Heads(), _SILU, _BIASES, RopeFields(500_000.0),
        Fixed(norm_placement="post", qk_norm="all_heads", routed_score_func="softmax"),
        Every("num_experts", "num_local_experts", key="num_experts"), _EXPERTS_PER_TOKEN,
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
        "HunYuanMoEV1ForCausalLM", Heads(), _SILU, _BIASES, RopeFields(10_000.0, alpha=True),
        Fixed(qk_norm="head_after_rope", routed_score_func="softmax", norm_topk_prob=True, shared_experts=1),
        Every("num_experts", "num_local_experts", key="num_experts"),
        Every("moe_topk", "num_experts_per_tok", key="num_experts_per_tok"), epsilon=1e-5,
    ),
    "granitemoe": family("GraniteMoeForCausalLM", *_GRANITE_MOE),
    "granitemoeshared": family("GraniteMoeSharedForCausalLM", *_GRANITE_MOE, SharedWidth()),
    "phimoe": family(
        "PhimoeForCausalLM", Heads(kv_heads=8), _SILU, _BIASES, MultipliedRope(1_000_000.0),
        LayerTypes("window", 0),
        Fixed(normalization="layer_norm", routed_score_func="sparsemixer", norm_topk_prob=False),
        Rename(num_local_experts="num_experts"), Only("num_experts_per_tok", 2, key="num_experts_per_tok"),
        Only("router_jitter_noise", 0.01), Defaulted("lm_head_bias", "logits_bias", False),
        Ignored("input_jitter_noise", "hidden_dropout", "expert_dropout"), epsilon=1e-5,
    ),
}  # fmt: skip
"""What can be read and written, by model_type. Where two would do for a model, the first is written."""
