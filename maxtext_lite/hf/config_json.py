"""A Hugging Face config.json to keys and back, with the format of quantized weights."""

import contextlib
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from maxtext_lite.config.errors import UserError, any_of, value_text
from maxtext_lite.config.keys import ModelConfig
from maxtext_lite.hf.families import FAMILIES
from maxtext_lite.hf.fields import (
    TABLE,
    WEIGHTS_FIELD,
    WITHOUT_EFFECT,
    Fields,
    JsonObject,
    Keys,
    is_off,
    is_whole,
    same_architecture,
    without_experts,
)

FIELD = "quantization_config"

FORMATS: Mapping[str, list[str]] = {method: names.split() for method, names in TABLE["quantized"].items()}
"""The formats that are read, by quant_method, with the entries of `quantization_config` that each may have."""

_NEAREST = {"mxfp8": "fp8", "nvfp4": "mxfp4"}  # of any other compressed-tensors, which stores GPTQ and AWQ too

_Block = Annotated[list[Annotated[int, Field(ge=1, lt=2**31)]], Field(min_length=2, max_length=2)]


class _Float8(BaseModel, strict=True):
    weight_block_size: _Block | None = None


class WeightGroup(BaseModel, strict=True):
    """How compressed-tensors stores the weights of one of its `config_groups`."""

    num_bits: Annotated[int, Field(ge=1, le=8)] = 8
    type: Literal["int", "float"] | None = None
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block"] | None = None
    block_structure: _Block | None = None

    @model_validator(mode="after")
    def _check(self) -> "WeightGroup":
        if self.type == "float" and self.num_bits != 8:
            raise ValueError("type=float is read with num_bits=8")
        if self.strategy == "block" and self.block_structure is None:
            raise ValueError("strategy=block needs a block_structure")
        return self


class _Group(BaseModel, strict=True):
    weights: WeightGroup | None = None


class _Sparsity(BaseModel, strict=True):
    format: Literal["dense"] = "dense"


class _CompressedTensors(BaseModel, strict=True):
    format: Literal["int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"]
    quantization_status: Literal["compressed"] = "compressed"
    sparsity_config: _Sparsity = _Sparsity()
    config_groups: dict[str, _Group]


def quantization_of(fields: JsonObject) -> JsonObject:
    """The `quantization_config` of a config.json, with its quant_method; {} if it has none or no object."""
    stated = fields.get(FIELD)
    if not isinstance(stated, dict):
        return {}
    found = {name: value for name, value in stated.items() if value is not None}
    if "quant_method" not in found and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        found["quant_method"] = "bitsandbytes"  # which its first versions did not name
    return found


def weight_groups(quantization: JsonObject) -> list[WeightGroup]:
    """The groups of compressed-tensors that have weights; none for other formats."""
    if quantization["quant_method"] != "compressed-tensors":
        return []
    groups = _CompressedTensors.model_validate(quantization).config_groups.values()
    return [group.weights for group in groups if group.weights is not None]


def check_quantization(fields: Fields) -> None:
    """Reads `quantization_config`, and notes its problems."""
    stated = fields.take(FIELD, {})
    if stated == {}:
        return
    found = quantization_of({FIELD: stated})
    method = found.get("quant_method")
    if method not in list(FORMATS):
        shown = f"{FIELD}: quant_method" if found else FIELD
        nearest = _NEAREST.get(str(method), "compressed-tensors")
        why = f"is not read: it must be {any_of(list(FORMATS))}. Nearest that work: {nearest}, or bfloat16 weights."
        fields.refuse(shown, method if found else stated, why)
        return
    where = f"{FIELD} ({method}): "
    for name, value in found.items():
        if name not in FORMATS[method] and name != "quant_method" and not is_off(value):
            fields.refuse(where + name, value, "is not known, and could change the weights.")
    try:
        if method == "fp8":
            _Float8.model_validate(found)
        elif not weight_groups(found) and method == "compressed-tensors":
            fields.refuse(f"{where}config_groups", found["config_groups"], "has no group with weights.")
    except ValidationError as error:
        for detail in error.errors():
            name = ".".join(map(str, detail["loc"]))
            fields.refuse(where + name, detail["input"], f"is not read: {detail['msg']}.")


def family_of(fields: JsonObject, where: str) -> str:
    """The model_type, one of FAMILIES.

    Raises:
      UserError: it is not one of them; lists them, and says `where`.
    """
    kind = text_fields(fields).get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind
    stated = f"{where}: model_type={value_text(kind)}"
    for reason, pattern in TABLE["not_built"].items():
        if isinstance(kind, str) and re.match(pattern, kind):
            raise UserError(f"{stated}: {reason}.")
    letters = re.sub(r"[\W_]", "", str(kind).lower())
    meant = [f" Did you mean '{known}'?" for known in FAMILIES if known.replace("_", "") == letters]
    raise UserError(f"{stated} is not one that maxtext_lite knows.{''.join(meant)} It knows {', '.join(FAMILIES)}.")


def model_keys(fields: JsonObject, where: str) -> Keys:
    """Every key of the Model section that decides parameters or logits, from a config.json.

    Args:
      where: what messages call the config.json.
    Raises:
      UserError: lists every field that is missing, unknown or cannot be expressed.
    """
    read, keys = _read(fields, where)
    problems = [*read.problems, *read.unknown(family_of(fields, where))]
    if problems:
        raise UserError([f"{where}: {problem}" for problem in problems])
    return keys


def field_names(fields: JsonObject) -> dict[str, str]:
    """The field of config.json that decides each key, for the keys that have one."""
    return _read(fields, "")[0].names


def _read(stated: JsonObject, where: str) -> tuple[Fields, Keys]:
    """The fields with their problems, and the keys that they decide."""
    kind = family_of(stated, where)
    family = FAMILIES[kind]
    fields = Fields(text_fields(stated))
    keys = family.read(fields)
    first = keys["first_num_dense_layers"]
    if fields.num_layers and is_whole(first, fields.num_layers) and is_whole(keys["num_experts"], 1):
        keys = without_experts(keys)
    elif keys["num_experts"] == 1 and "num_experts" in fields.names:
        why = "cannot be expressed in a layer with experts. Nearest that works: 2."
        fields.refuse(fields.names["num_experts"], 1, why)
    fields.check_stored(family.architecture, kind)
    check_quantization(fields)
    fields.check_keys(keys)
    fields.drop(WITHOUT_EFFECT)
    return fields, keys


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
    original = text_fields({name: value for name, value in original.items() if name not in (FIELD, WEIGHTS_FIELD)})
    positions = max(Fields(original).size("max_position_embeddings", 1), max_position_embeddings)
    differing: list[list[str]] = []
    refused: list[list[str]] = []
    for kind in [family_of(original, "config.json")] if original else FAMILIES:
        fields = {"architectures": [FAMILIES[kind].architecture], "model_type": kind, **FAMILIES[kind].write(config)}
        if "n_positions" not in fields:
            fields = {"max_position_embeddings": positions, **fields}
        try:
            problems = _differences(fields, config)
        except UserError as error:
            refused.append([problem.partition(" Nearest that work")[0] for problem in error.problems])
            continue
        if not problems:
            return _with_original(fields, original, config, positions, end_of_text_id) | {
                "dtype": dtype,
                "torch_dtype": dtype,
            }
        differing.append(problems)
    raise UserError(min(differing or refused, key=len))


def _differences(fields: JsonObject, config: ModelConfig) -> list[str]:
    """The keys that do not survive a round trip through these fields, each in a sentence.

    Raises:
      UserError: the fields are not those of a model.
    """
    named = f"model_type={fields['model_type']}"
    keys = model_keys(fields, named)
    here = {key: getattr(config, key) for key in keys}
    differing = same_architecture(keys, here)
    return [f"{named} has no place for {key}={value_text(here[key])}." for key in differing]


def _with_original(
    fields: JsonObject, original: JsonObject, config: ModelConfig, positions: int, end_of_text_id: int | None
) -> JsonObject:
    """The fields beside those of the original config.json, which is changed as little as possible."""
    old = ("rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct")
    follows = config.rope_scaling is not None and config.rope_scaling.rope_type in _SCALED_BY_LENGTH
    changed = {"max_position_embeddings": positions} if "max_position_embeddings" in original and not follows else {}
    for beside in ({name: fields[name] for name in old if name in fields}, {}):  # old names may contradict new ones
        unchanged = beside | original | changed
        with contextlib.suppress(UserError):
            if original and not _differences(unchanged, config):
                return unchanged
    # Written even as null: transformers would otherwise fill in the tokens of the family's own models.
    tokens = {"bos_token_id": None, "eos_token_id": end_of_text_id, "pad_token_id": None}
    tokens |= TABLE["families"][fields["model_type"]].get("tokens", {})
    kept = {name: value for name, value in original.items() if name not in ("rope_scaling", "rope_parameters")}
    return {**tokens, **kept, **fields}


def stored_dtype(fields: JsonObject) -> str:
    """The number format of the weights by config.json; of quantized weights, once they are dequantized.

    If it names none, "float32", or "bfloat16" for quantized weights.
    """
    fields = text_fields(fields)
    default = "bfloat16" if quantization_of(fields) else "float32"
    return str(fields.get("dtype") or fields.get("torch_dtype") or default).removeprefix("torch.")


# ---- Models of images and text, and models that are not built ------------------------------------------------------

TOWERS: Mapping[str, Mapping[str, JsonObject]] = TABLE["towers"]
"""The text models of a model_type of text and images: the model_types of its text_config, the usual one first. Each has
the defaults that transformers has for its fields."""

_OF_IMAGES = TABLE["of_images"].split()
_OF_ALL = WITHOUT_EFFECT | {"dtype", "torch_dtype", "quantization_config", "auto_map", "tie_word_embeddings"}
# The fields that transformers reads beside text_config too.


def text_fields(fields: JsonObject) -> JsonObject:
    """The fields of a model's text part, as if it were a model; any other model's fields unchanged.

    Raises:
      UserError: its text_config is no object, or of a family that does not go with it.
    """
    kind = fields.get("model_type")
    towers = TOWERS.get(kind) if isinstance(kind, str) else None
    if towers is None:
        return fields
    given = fields.get("text_config")
    if not isinstance(given, dict) or not given:
        raise UserError(f"text_config={value_text(given)} of model_type={kind} is not an object of the text's fields.")
    text = {name: value for name, value in given.items() if value is not None}
    inner = text.get("model_type", next(iter(towers)))
    if inner not in towers:
        raise UserError(f"text_config.model_type={value_text(inner)} of {kind} is none of {', '.join(towers)}.")
    # transformers reads no other field beside text_config. Renamed like this no part reads one, so it is refused.
    outer = {name if name in _OF_ALL else f"{kind}.{name}": fields[name] for name in fields if name not in _OF_IMAGES}
    merged = {"model_type": inner, **towers[inner], **outer, **given, "architectures": [FAMILIES[inner].architecture]}
    # The whole model's field decides whether the table is tied; the text's own counts only without it.
    if outer.get("tie_word_embeddings") is not None:
        merged["tie_word_embeddings"] = outer["tie_word_embeddings"]
    return merged


def text_tensor(name: str) -> str | None:
    """A tensor's name in the text part alone; None for a tensor for images or sound.

    In checkpoints of transformers before version 4.52 the names begin with language_model, since then with
    model.language_model.
    """
    others = "vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision|embed_audio"
    if re.match(rf"(model\.)?({others})\.", name):
        return None
    name = re.sub(r"^language_model\.lm_head\.", "lm_head.", name)
    name = re.sub(r"^language_model\.model\.", "model.", name)
    return re.sub(r"^model\.language_model\.", "model.", name)
