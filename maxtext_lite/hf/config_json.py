"""A Hugging Face config.json to keys and back, with the format of quantized weights."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from maxtext_lite.config.errors import UserError, any_of, value_text
from maxtext_lite.config.keys import ModelConfig
from maxtext_lite.hf.fields import (
    WITHOUT_EFFECT,
    Fields,
    JsonObject,
    Keys,
    is_whole,
    same_architecture,
    without_experts,
)

if TYPE_CHECKING:
    from maxtext_lite.hf.parts import Family


FIELD = "quantization_config"

_SKIPPED = frozenset({"modules_to_not_convert"})
# The known entries of each format: the tensors say the same, or they are about activations, caches and kernels, which a
# run here does not take from the checkpoint. Any other entry could change the numbers and is refused.
FORMATS: Mapping[str, frozenset[str]] = {
    "mxfp4": _SKIPPED | {"dequantize"},
    "fp8": _SKIPPED | {"activation_scheme", "dequantize", "fmt", "ignored_layers", "scale_fmt", "weight_block_size"},
    "fbgemm_fp8": _SKIPPED | {"activation_scale_ub"},
    "compressed-tensors": frozenset({
        "config_groups", "dequantize", "format", "global_compression_ratio", "ignore", "kv_cache_scheme",
        "quantization_status", "run_compressed", "sparsity_config", "use_optimized_inference", "version",
    }),
    "bitsandbytes": frozenset({
        "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
        "llm_int8_skip_modules", "llm_int8_threshold", "load_in_4bit", "load_in_8bit",
    }),
}  # fmt: skip
"""The formats that are read, by quant_method, with the entries of `quantization_config` that each may have."""

_NEAREST = {
    "mxfp8": "fp8",
    "nvfp4": "mxfp4",
}  # of any other compressed-tensors, which stores the results of GPTQ and AWQ too
_STORED_AS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
_WEIGHTS = {"type": ("int", "float"), "strategy": ("tensor", "channel", "group", "block")}


def quantization_of(fields: JsonObject) -> JsonObject:
    """The `quantization_config` of a config.json, with its quant_method; {} if it has none or no object."""
    stated = fields.get(FIELD)
    if not isinstance(stated, dict):
        return {}
    found = {name: value for name, value in cast("dict[str, Any]", stated).items() if value is not None}
    if "quant_method" not in found and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        found["quant_method"] = "bitsandbytes"  # which its first versions did not name
    return found


def check_quantization(fields: Fields) -> None:
    """Reads `quantization_config`, and notes its problems."""
    stated = fields.take(FIELD)
    if stated is None or stated == {}:
        return
    found = quantization_of({FIELD: stated})
    method = found.pop("quant_method", None)
    if not isinstance(method, str) or method not in FORMATS:
        nearest = _NEAREST.get(str(method), "compressed-tensors")
        said = f"quant_method={value_text(method)}" if found or method else value_text(stated)
        fields.problems.append(
            f"{FIELD}: {said} is not a format that is read: it must be {any_of(list(FORMATS))}. Nearest that work: "
            f"{nearest}, or the model in bfloat16 without {FIELD}."
        )
        return
    found = {name: value for name, value in found.items() if value is not False and value not in ([], {})}
    unknown = [name for name in found if name not in FORMATS[method]]
    if unknown:
        _refuse(fields, method, unknown[0], found[unknown[0]], "is not known, and could change the weights.")
    if method == "fp8" and not _is_block(found.get("weight_block_size", [128, 128])):
        _refuse(fields, method, "weight_block_size", found["weight_block_size"], "is not two integers of at least 1.")
    if method == "compressed-tensors":
        _check_groups(fields, found)


def _is_block(value: object) -> bool:
    sizes = cast("list[Any]", value) if isinstance(value, list) else []
    return len(sizes) == 2 and all(type(size) is int and 1 <= size < 2**31 for size in sizes)


def _refuse(fields: Fields, method: str, name: str, value: object, why: str) -> None:
    fields.problems.append(f"{FIELD} ({method}): {name}={value_text(value)} {why}")


def _check_groups(fields: Fields, found: JsonObject) -> None:
    """Notes the problems of compressed-tensors' groups."""
    method = "compressed-tensors"
    stored = found.get("format")
    if stored not in _STORED_AS:
        _refuse(fields, method, "format", stored, f"is not read: it must be {any_of(_STORED_AS)}.")
    if found.get("quantization_status", "compressed") != "compressed":
        status = found["quantization_status"]
        _refuse(fields, method, "quantization_status", status, "is not read: it must be compressed.")
    sparsity: object = found.get("sparsity_config", {"format": "dense"})
    if not isinstance(sparsity, dict) or cast("JsonObject", sparsity).get("format") != "dense":
        _refuse(fields, method, "sparsity_config", found["sparsity_config"], "is not read: its format must be dense.")
    groups = weight_groups(found)
    if not groups:
        _refuse(fields, method, "config_groups", found.get("config_groups"), "has no group with weights.")
    for group in groups:
        for name, allowed in _WEIGHTS.items():
            value = group.get(name)
            if value is not None and value not in allowed:
                _refuse(fields, method, name, value, f"of weights is not read: it must be {any_of(allowed)}.")
        bits, least = group.get("num_bits", 8), 8 if group.get("type") == "float" else 1
        if type(bits) is not int or not least <= bits <= 8:
            _refuse(fields, method, "num_bits", bits, "of weights is not read.")
        if group.get("strategy") == "block" and not _is_block(group.get("block_structure")):
            _refuse(fields, method, "block_structure", group.get("block_structure"), "is not two integers.")


def weight_groups(quantization: JsonObject) -> list[JsonObject]:
    """The `weights` of each of compressed-tensors' `config_groups`."""
    groups = quantization.get("config_groups")
    values: list[Any] = list(cast("dict[str, Any]", groups).values()) if isinstance(groups, dict) else []
    weights = [cast("dict[str, Any]", group).get("weights") for group in values if isinstance(group, dict)]
    return [cast("dict[str, Any]", each) for each in weights if isinstance(each, dict) and each]


WEIGHTS_FIELD = "transformers_weights"
"""The field that names the file with the weights, or its index; transformers then reads no other."""


def _families() -> "Mapping[str, Family]":
    """FAMILIES, which are not made for a run without such a model."""
    from maxtext_lite.hf.families import FAMILIES

    return FAMILIES


def family_of(fields: JsonObject, where: str) -> str:
    """The model_type, one of FAMILIES.

    Raises:
      UserError: it is not one of them; lists them, and says `where`.
    """
    kind = text_fields(fields).get("model_type")
    if isinstance(kind, str) and kind in _families():
        return kind
    if reason := unbuilt(kind):
        raise UserError(f"{where}: model_type={value_text(kind)}: {reason}")
    raise UserError(
        f"{where}: model_type={value_text(kind)} is not one that maxtext_lite knows.{_misspelled(kind)} "
        f"It knows {', '.join(_families())}."
    )


def _misspelled(kind: object) -> str:
    """The clause ` Did you mean 'x'?` for a name with the same letters: llava is no misspelled llama."""

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    meant = [known for known in _families() if isinstance(kind, str) and plain(kind) == plain(known)]
    return f" Did you mean '{meant[0]}'?" if meant else ""


def model_keys(fields: JsonObject, where: str) -> Keys:
    """Every key of the Model section that decides parameters or logits, as a config.json states it.

    Args:
      where: what messages call the config.json.
    Raises:
      UserError: lists every field that is missing, unknown or cannot be expressed.
    """
    left, keys = _read(fields, where)
    problems = [*left.problems, *left.unknown(family_of(fields, where))]
    if problems:
        raise UserError([f"{where}: {problem}" for problem in problems])
    return keys


def field_names(fields: JsonObject) -> dict[str, str]:
    """The field of config.json that decides each key, for the keys that have one."""
    return _read(fields, "")[0].names


def _read(fields: JsonObject, where: str) -> tuple[Fields, Keys]:
    """The fields that no part has read, with the problems of the others, and the keys that those decide."""
    kind = family_of(fields, where)
    left = Fields(text_fields(fields))
    keys = _families()[kind].read(left)
    first = keys["first_num_dense_layers"]
    if left.num_layers and is_whole(first, left.num_layers) and is_whole(keys["num_experts"], 1):
        keys = without_experts(keys)
    elif keys["num_experts"] == 1 and (name := left.names.get("num_experts")):
        left.refuse(name, 1, "cannot be expressed in a layer with experts. Nearest that works: 2.")
    left.check_stored(_families()[kind].architecture)
    check_quantization(left)
    left.check_keys(keys)
    left.drop(WITHOUT_EFFECT)
    return left, keys


_SCALED_BY_LENGTH = ("dynamic", "yarn", "longrope")
"""Scalings whose factor some versions of transformers take from max_position_embeddings."""


def config_json(
    config: ModelConfig,
    *,
    max_position_embeddings: int,
    dtype: str,
    original: JsonObject,
    end_of_text_id: int | None = None,
) -> JsonObject:
    """The config.json of a model with these keys, which transformers 4 and 5 read alike.

    Args:
      max_position_embeddings: the least number of positions; that of `original` counts if it is larger.
      original: the config.json that the model was imported with, or {}. Its model_type and its other fields are kept;
        without it, the model_type is the first of FAMILIES that expresses the keys.
      end_of_text_id: the token that ends a text, if `original` names none.
    Raises:
      UserError: no family, or not that of `original`, expresses the keys; names the keys in the way.
    """
    # What is written is plain numbers, in files of the usual names.
    without = {name: value for name, value in original.items() if name not in (FIELD, WEIGHTS_FIELD)}
    original = text_fields(without)
    longest = max(Fields(original).size("max_position_embeddings", 1), max_position_embeddings)
    kinds = [family_of(original, "config.json")] if original else list(_families())
    obstacles: list[_Obstacles] = []
    for kind in kinds:
        family = _families()[kind]
        written = family.write(config)
        positions = {"max_position_embeddings": longest} if "n_positions" not in written else {}
        # Written even as null: transformers would otherwise fill in the tokens of the family's own models.
        tokens = {"bos_token_id": None, "eos_token_id": end_of_text_id, "pad_token_id": None}
        fields = {"architectures": [family.architecture], "model_type": kind, **positions, **written}
        obstacles.append(_obstacles(fields, config))
        if not obstacles[-1].problems:
            about = {"dtype": dtype, "torch_dtype": dtype}
            longer = _with_positions(original, longest, config)
            unchanged = {**_of_old_versions(fields), **longer, **about}
            if original and not _obstacles(unchanged, config).problems:
                return unchanged
            kept = {name: value for name, value in original.items() if name not in ("rope_scaling", "rope_parameters")}
            return {**tokens, **kept, **fields, **about}
    # The nearest family says what is in the way.
    raise UserError(min(obstacles, key=lambda found: (found.is_refused, len(found.problems))).problems)


def _with_positions(original: JsonObject, count: int, config: ModelConfig) -> JsonObject:
    """The fields with this many positions, unless a scaling of rotary positions depends on their number."""
    name, scaling = "max_position_embeddings", config.rope_scaling
    if name not in original or (scaling and scaling.rope_type in _SCALED_BY_LENGTH):
        return original
    return {**original, name: count}


def _of_old_versions(fields: JsonObject) -> JsonObject:
    old = ("rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct")
    return {name: fields[name] for name in old if name in fields}


class _Obstacles(NamedTuple):
    """Why a config.json does not express a model.

    Attributes:
      is_refused: whether it would not be read at all, so that there may be more than these.
      problems: each in a sentence that begins with its model_type.
    """

    is_refused: bool
    problems: list[str]


def _obstacles(fields: JsonObject, config: ModelConfig) -> _Obstacles:
    """The keys that do not survive a round trip through these fields."""
    named = f"model_type={fields['model_type']}"
    try:
        keys = model_keys(fields, named)
    except UserError as error:
        return _Obstacles(True, [problem.partition(" Nearest that work")[0] for problem in error.problems])
    here = {key: getattr(config, key) for key in keys}
    differing = same_architecture(keys, here)
    return _Obstacles(False, [f"{named} has no place for {key}={value_text(here[key])}." for key in differing])


def stored_dtype(fields: JsonObject) -> str:
    """The number format of the weights by config.json; of quantized weights, once they are dequantized.

    If it names none, "float32", or "bfloat16" for quantized weights.
    """
    fields = text_fields(fields)
    default = "bfloat16" if quantization_of(fields) else "float32"
    return str(fields.get("dtype") or fields.get("torch_dtype") or default).removeprefix("torch.")


# ---- Models of images and text, and models that are not built ------------------------------------------------------

_GEMMA3 = {
    "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip
_MISTRAL3 = {
    "model_type": "mistral", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip
_MINISTRAL3 = _MISTRAL3 | {
    "model_type": "ministral3", "vocab_size": 131_072, "num_hidden_layers": 34,
}  # fmt: skip
_LLAMA4 = {
    "model_type": "llama4_text", "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_local_experts": 16, "tie_word_embeddings": False,
}  # fmt: skip
TOWERS: Mapping[str, Mapping[str, JsonObject]] = {
    "gemma3": {"gemma3_text": _GEMMA3},
    "mistral3": {"mistral": _MISTRAL3, "ministral3": _MINISTRAL3},
    "llama4": {"llama4_text": _LLAMA4},
}
"""For a model_type of text and images: the model_types of its text_config, the usual one first, each with the defaults
that transformers has for its fields."""

_OF_IMAGES = frozenset({
    "text_config", "vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "image_token_id",
    "boi_token_id", "eoi_token_id", "mm_tokens_per_image", "projector_hidden_act", "vision_feature_layer",
    "multimodal_projector_bias", "spatial_merge_size", "initializer_range", "architectures", "model_type",
    "max_position_embeddings",
})  # fmt: skip
_OF_ALL = WITHOUT_EFFECT | {"dtype", "torch_dtype", "quantization_config", "auto_map", "tie_word_embeddings"}
# The fields that transformers reads beside text_config too.


def text_fields(fields: JsonObject) -> JsonObject:
    """The fields of a model's text part, as a model of its own has them; any other model's fields unchanged.

    Raises:
      UserError: its text_config is no object, or of a family that does not go with it.
    """
    kind = fields.get("model_type")
    towers = TOWERS.get(kind) if isinstance(kind, str) else None
    if towers is None:
        return fields
    given: object = fields.get("text_config")
    if not isinstance(given, dict) or not given:
        raise UserError(
            f"text_config={value_text(cast(object, given))} of model_type={kind} is not an object of the text's fields."
        )
    text = {name: value for name, value in cast("JsonObject", given).items() if value is not None}
    inner = text.get("model_type", next(iter(towers)))
    if inner not in towers:
        raise UserError(
            f"text_config.model_type={value_text(inner)} of model_type={kind} is none of {', '.join(towers)}."
        )
    # transformers reads no other field beside text_config. Renamed like this no part reads one, so it is refused.
    outer = {
        name if name in _OF_ALL else f"{kind}.{name}": value for name, value in fields.items() if name not in _OF_IMAGES
    }
    # The whole model's field decides whether the table is tied; the text's own counts only without it.
    tied = {name: outer[name] for name in ("tie_word_embeddings",) if outer.get(name) is not None}
    nulls = {name: None for name, value in cast("JsonObject", given).items() if value is None}
    return {**towers[inner], **outer, **nulls, **text, **tied, "architectures": [_families()[inner].architecture]}


def text_tensor(name: str) -> str | None:
    """A tensor's name in the text part alone; None for a tensor for images.

    In checkpoints of transformers before version 4.52 the names begin with language_model, since then with
    model.language_model.
    """
    if re.match(r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\.", name):
        return None
    name = re.sub(r"^language_model\.lm_head\.", "lm_head.", name)
    name = re.sub(r"^language_model\.model\.", "model.", name)
    return re.sub(r"^model\.language_model\.", "model.", name)


_STATE = "its layers keep a state in place of keys and values, which is not built"
_SEEN = "images are not read, and its text part has no table of names"
_HEARD = "sound is not read"
_BOTH_WAYS = "it reads a text in both directions, or has an encoder: only decoders are built"
_LATENT = "its attention chooses among keys by an index of its own, which is not built"
_REASONS: Mapping[str, str] = {
    r"mamba|falcon_mamba|rwkv|xlstm|recurrent_gemma": _STATE,
    r"jamba|zamba|bamba|falcon_h1|nemotron_h|granitemoehybrid|qwen3_next|qwen3_5|lfm\d|olmo_hybrid|bailing_hybrid":
        f"some of {_STATE}",
    r"kimi_linear|minimax$|hunyuan_hybrid": f"some of {_STATE}",
    r"gemma3n|gemma4": "its embeddings of each layer, streams side by side and shared caches are not built",
    r".*(_vl|vision|llava|vlm|pixtral|paligemma|idefics|internvl|ocr|mllama|chameleon|fuyu|image)": _SEEN,
    r".*(audio|whisper|speech|asr|tts|wav2vec|musicgen|voxtral|omni|hubert|moshi|csm|dia$)": _HEARD,
    r"(ro|de|al|modern)?bert|.*roberta|electra|t5|mt5|umt5|bart|mbart|pegasus|.*t5gemma": _BOTH_WAYS,
    r"deepseek_v32|deepseek_v4|glm_moe_dsa": _LATENT,
    r"(bloom|mpt)$": "its positions are distances added to scores (ALiBi), which are not built",
    r"gptj|codegen|gpt_neo$|opt$|xglm|persimmon|gpt_bigcode|falcon$": "no table of its tensors' names is written",
}  # fmt: skip


def unbuilt(kind: object) -> str:
    """Why a known model_type is not built; "" for any other."""
    for pattern, reason in _REASONS.items():
        if isinstance(kind, str) and re.match(pattern, kind):
            return f"{reason}."
    return ""
