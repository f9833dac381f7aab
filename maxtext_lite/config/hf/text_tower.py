"""Models of which only the text part is built, and models that are not built, with the reason."""

import re
from collections.abc import Mapping
from typing import cast

from maxtext_lite.config.errors import UserError, value_text
from maxtext_lite.config.hf.families import FAMILIES
from maxtext_lite.config.hf.fields import WITHOUT_EFFECT, JsonObject

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
    return {**towers[inner], **outer, **nulls, **text, **tied, "architectures": [FAMILIES[inner].architecture]}


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
