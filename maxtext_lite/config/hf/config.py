"""A Hugging Face model's config.json, read into the keys of the Model section and written from them.

Each family (`model_type`) is a list of parts; a part owns some fields of config.json and some keys, and knows both
directions. A field that no part owns and that is not known to leave the logits alone is refused: a model that is read
wrongly looks like one that is bad.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from maxtext_lite.config.errors import UserError, any_of, value_text
from maxtext_lite.config.hf.fields import DEFAULTS, WITHOUT_EFFECT, Fields, JsonObject, Keys, same_architecture
from maxtext_lite.config.hf.parts import (
    Activation,
    Bias,
    Defaulted,
    Every,
    ExpertGroups,
    Fixed,
    Heads,
    LatentWidths,
    LearnedPositions,
    Only,
    Part,
    QueryScalar,
    Rename,
    SoftCaps,
)
from maxtext_lite.config.hf.positions import LayerTypes, RopeByLayerType, RopeFields, WithoutRotation
from maxtext_lite.config.hf.weight_files import weight_files
from maxtext_lite.config.json_file import check_file, is_there, read_object
from maxtext_lite.config.schema import ModelConfig


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
        Only("decoder_sparse_step", 1), Only("mlp_only_layers", []),
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
        ExpertGroups(), Only("scoring_func", "softmax"), Only("norm_topk_prob", False),
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
}  # fmt: skip
"""What can be read and written, by model_type. Where two would do for a model, the first is written."""

_ALSO_WITHOUT_EFFECT: Mapping[str, frozenset[str]] = {
    "gpt_oss": frozenset({"initial_context_length"}),
}


def family_of(fields: JsonObject, where: str) -> str:
    """The model_type, which is one of FAMILIES.

    Raises:
      UserError: it is not; names those that are, and `where` it stands.
    """
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind
    raise UserError(
        f"{where}: model_type={value_text(kind)} is not one that maxtext_lite knows.{_misspelled(kind)} "
        f"It knows {', '.join(FAMILIES)}."
    )


def _misspelled(kind: object) -> str:
    """The clause ` Did you mean 'x'?`, where no letter differs: llava is another model, not a misspelled llama."""

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    meant = [known for known in FAMILIES if isinstance(kind, str) and plain(kind) == plain(known)]
    return f" Did you mean '{meant[0]}'?" if meant else ""


def model_keys(fields: JsonObject, where: str) -> Keys:
    """Every key of the Model section that decides parameters or logits, as a config.json states it.

    Args:
      where: what messages call the config.json.
    Raises:
      UserError: with every field that is missing, that cannot be expressed, or of which nothing is known.
    """
    left, keys = _read(fields, where)
    problems = [*left.problems, *left.unknown(fields["model_type"])]
    if problems:
        raise UserError([f"{where}: {problem}" for problem in problems])
    return keys


def field_names(fields: JsonObject) -> dict[str, str]:
    """For each key that a config.json decides by a field of its own, that field's name."""
    return _read(fields, "")[0].names


def _read(fields: JsonObject, where: str) -> tuple[Fields, Keys]:
    """What is left of the fields, with what is wrong with the others, and the keys that those decide."""
    kind = family_of(fields, where)
    left, keys = Fields(fields), dict(DEFAULTS)
    for part in FAMILIES[kind].parts:
        keys |= part.read(left)
    left.check_stored(FAMILIES[kind].architecture)
    left.check_keys(keys)
    left.drop(WITHOUT_EFFECT | _ALSO_WITHOUT_EFFECT.get(kind, frozenset()))
    return left, keys


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
      original: the config.json that the model was imported with, {} where it was not: its other fields are kept,
        and its model_type, which is otherwise the first of FAMILIES that expresses the keys.
      end_of_text_id: the token that ends a text, where `original` names none.
    Raises:
      UserError: no family, or not that of `original`, expresses the keys; names those in the way.
    """
    kinds = [family_of(original, "config.json")] if original else list(FAMILIES)
    nearest: list[str] | None = None
    for kind in kinds:
        family = FAMILIES[kind]
        written: JsonObject = {}
        for part in family.parts:
            written |= part.write(config)
        positions = {"max_position_embeddings": max_position_embeddings} if "n_positions" not in written else {}
        # Said even where there are none: the tokens that transformers takes otherwise are those of the family's models.
        tokens = {"bos_token_id": None, "eos_token_id": end_of_text_id, "pad_token_id": None}
        fields = {"architectures": [family.architecture], "model_type": kind, **positions, **written}
        problems = _differing(fields, config)
        if not problems:
            about = {"dtype": dtype, "torch_dtype": dtype}
            if original and not _differing(original, config):
                return {**_of_old_versions(fields), **original, **about}
            kept = {name: value for name, value in original.items() if name not in ("rope_scaling", "rope_parameters")}
            return {**tokens, **kept, **fields, **about}
        if nearest is None or len(problems) < len(nearest):  # the family that comes nearest says what is in the way
            nearest = [f"model_type={kind} has no place for {problem}." for problem in problems]
    raise UserError(nearest or [])


def run_config_json(
    directory: Path, config: ModelConfig, *, num_positions: int, dtype: str, end_of_text_id: int | None = None
) -> JsonObject:
    """`config_json` of the model of a run or imported directory, which keeps what it came with, where it came with it.

    Args:
      num_positions: that it is trained with; the model may have come with more.
    Raises:
      UserError: as `config_json`.
    """
    carried = hf_directory(directory)
    original = read_object(carried / "config.json") if carried else {}
    return config_json(
        config,
        max_position_embeddings=max(Fields(original).size("max_position_embeddings", 1), num_positions),
        dtype=dtype,
        original=original,
        end_of_text_id=end_of_text_id,
    )


def _of_old_versions(fields: JsonObject) -> JsonObject:
    return {name: fields[name] for name in ("rope_theta", "rope_scaling") if name in fields}


def _differing(fields: JsonObject, config: ModelConfig) -> list[str]:
    """The keys that do not survive being written and read."""
    try:
        keys = model_keys(fields, "config.json")
    except UserError as error:
        return list(error.problems)
    here = {key: getattr(config, key) for key in keys}
    return [f"{key}={value_text(here[key])}" for key in same_architecture(keys, here)]


CARRIED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Files that go with a model from directory to directory, beside its weights: all but the first about its tokens."""


def hf_directory(path: str | Path) -> Path | None:
    """Where the config.json and tokenizer of `path` lie; None where it has none.

    They lie in a Hugging Face directory itself, and in hf/ of a run or an imported model that came from one.
    """
    root = Path(path)
    if is_there(root / "config.json"):
        return root
    return root / "hf" if is_there(root / "hf" / "config.json") else None


_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def has_hf_weights(path: str | Path) -> bool:
    """Whether `path` is a Hugging Face directory, with weights in safetensors.

    Raises:
      UserError: its weights are pickled or none, one of its files is not a file, or it is, or has, a PEFT adapter.
    """
    root = Path(path)
    adapter = [name for name in _ADAPTER if is_there(root / name)]
    if adapter:
        raise UserError(
            f"{root}: {adapter[0]} belongs to an adapter in PEFT's layout, which is not read. Merge it into its model "
            "(merge_and_unload of peft) and save that."
        )
    if not is_there(root / "config.json") or (root / "checkpoints").is_dir():
        return False
    check_file(root / "config.json")
    if weight_files(root):
        return True
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in root.glob(pattern))
    if pickled:
        raise UserError(
            f"{root}: {any_of(pickled[:3])} is pickled: reading it can run whatever code its author put there. "
            "Ask for the model's .safetensors files."
        )
    raise UserError(f"{root} has a config.json, but no .safetensors file with weights.")


def stored_dtype(fields: JsonObject) -> str:
    """The number format that config.json names for the weights, "float32" where it names none."""
    return str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")


def tokenizer_keys(directory: Path) -> dict[str, str]:
    """The tokenizer keys of the files in a Hugging Face directory; {} where there are none."""
    for kind, name in (("huggingface", "tokenizer.json"), ("sentencepiece", "tokenizer.model")):
        if is_there(directory / name):
            return {"tokenizer_type": kind, "tokenizer_path": str(directory / name)}
    return {}
