"""A Hugging Face model's config.json, read into the keys of the Model section and written from them.

Each family (`model_type`) is a list of parts. A part owns some fields of config.json and some keys, and translates both
ways. A field that no part owns is refused, unless it is known not to change the logits: a misread model looks like a
bad one.
"""

import re
from pathlib import Path
from typing import NamedTuple

from maxtext_lite.config.bucket import any_path, local_copy
from maxtext_lite.config.checkpoint_steps import steps_in
from maxtext_lite.config.errors import UserError, any_of, value_text
from maxtext_lite.config.hf.adapter import CONFIG, adapter_of, missing_base
from maxtext_lite.config.hf.families import FAMILIES
from maxtext_lite.config.hf.fields import (
    WITHOUT_EFFECT,
    Fields,
    JsonObject,
    Keys,
    is_whole,
    same_architecture,
    without_experts,
)
from maxtext_lite.config.hf.quantized import FIELD, check_quantization, quantization_of
from maxtext_lite.config.hf.text_tower import text_fields, unbuilt
from maxtext_lite.config.hf.weight_files import STATED, weight_files
from maxtext_lite.config.json_file import check_file, is_there, read_object
from maxtext_lite.config.sections import ModelConfig, RunConfig


def family_of(fields: JsonObject, where: str) -> str:
    """The model_type, one of FAMILIES.

    Raises:
      UserError: it is not one of them; lists them, and says `where`.
    """
    kind = text_fields(fields).get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind
    if reason := unbuilt(kind):
        raise UserError(f"{where}: model_type={value_text(kind)}: {reason}")
    raise UserError(
        f"{where}: model_type={value_text(kind)} is not one that maxtext_lite knows.{_misspelled(kind)} "
        f"It knows {', '.join(FAMILIES)}."
    )


def _misspelled(kind: object) -> str:
    """The clause ` Did you mean 'x'?` for a name with the same letters: llava is no misspelled llama."""

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    meant = [known for known in FAMILIES if isinstance(kind, str) and plain(kind) == plain(known)]
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
    keys = FAMILIES[kind].read(left)
    first = keys["first_num_dense_layers"]
    if left.num_layers and is_whole(first, left.num_layers) and is_whole(keys["num_experts"], 1):
        keys = without_experts(keys)
    elif keys["num_experts"] == 1 and (name := left.names.get("num_experts")):
        left.refuse(name, 1, "cannot be expressed in a layer with experts. Nearest that works: 2.")
    left.check_stored(FAMILIES[kind].architecture)
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
      original: the config.json that the model was imported with, or {}. Its model_type and its other fields are kept;
        without it, the model_type is the first of FAMILIES that expresses the keys.
      end_of_text_id: the token that ends a text, if `original` names none.
    Raises:
      UserError: no family, or not that of `original`, expresses the keys; names the keys in the way.
    """
    # What is written is plain numbers, in files of the usual names.
    without = {name: value for name, value in original.items() if name not in (FIELD, STATED)}
    original = text_fields(without)
    kinds = [family_of(original, "config.json")] if original else list(FAMILIES)
    nearest: _Obstacles | None = None
    for kind in kinds:
        family = FAMILIES[kind]
        written = family.write(config)
        positions = {"max_position_embeddings": max_position_embeddings} if "n_positions" not in written else {}
        # Written even as null: transformers would otherwise fill in the tokens of the family's own models.
        tokens = {"bos_token_id": None, "eos_token_id": end_of_text_id, "pad_token_id": None}
        fields = {"architectures": [family.architecture], "model_type": kind, **positions, **written}
        found = _obstacles(fields, config)
        if not found.problems:
            about = {"dtype": dtype, "torch_dtype": dtype}
            longer = _with_positions(original, max_position_embeddings, config)
            unchanged = {**_of_old_versions(fields), **longer, **about}
            if original and not _obstacles(unchanged, config).problems:
                return unchanged
            kept = {name: value for name, value in original.items() if name not in ("rope_scaling", "rope_parameters")}
            return {**tokens, **kept, **fields, **about}
        if nearest is None or found.rank < nearest.rank:  # the nearest family says what is in the way
            nearest = found
    raise UserError(nearest.problems if nearest else [])


def _with_positions(original: JsonObject, count: int, config: ModelConfig) -> JsonObject:
    """The fields with at least this many positions, unless a scaling of rotary positions depends on their number."""
    name, scaling = "max_position_embeddings", config.rope_scaling
    if name not in original or (scaling and scaling.rope_type in _SCALED_BY_LENGTH):
        return original
    return {**original, name: max(count, original[name])}


def run_config_json(
    directory: Path | None, config: ModelConfig, *, num_positions: int, dtype: str, end_of_text_id: int | None = None
) -> JsonObject:
    """`config_json` of a run's or an imported model, with the fields of the config.json that it came with, if any.

    Args:
      directory: that has the config.json, as of `hf_directory`; None: there is none.
      num_positions: in training; the model may have come with more.
    Raises:
      UserError: as `config_json`.
    """
    carried = hf_directory(directory) if directory else None
    original = read_object(carried / "config.json") if carried else {}
    return config_json(
        config,
        max_position_embeddings=max(Fields(text_fields(original)).size("max_position_embeddings", 1), num_positions),
        dtype=dtype,
        original=original,
        end_of_text_id=end_of_text_id,
    )


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

    @property
    def rank(self) -> tuple[bool, int]:
        """Less for what is nearer to the model."""
        return self.is_refused, len(self.problems)


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


CARRIED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Files that are copied along with a model's weights; all but the first are about its tokens."""

TOKENIZER_FILES = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}
"""The tokenizer's file in such a directory, by tokenizer_type; the first that is there counts."""


def hf_directory(path: str | Path, key: str = "load_parameters_path") -> Path | None:
    """The directory with the config.json and the tokenizer of `path`; None if there is none, or it is not there.

    It is a Hugging Face directory itself, the base model's for an adapter, and hf/ of a run or an imported model that
    came from one.

    Raises:
      UserError: it is in a bucket that cannot be read; names `key`.
    """
    root = local_copy(path, key)
    if missing_base(root) is not None:
        return None
    if adapter := adapter_of(root):
        root = adapter.base
    if is_there(root / "config.json"):
        return root
    return root / "hf" if is_there(root / "hf" / "config.json") else None


def files_of_model(config: RunConfig) -> Path | None:
    """The `hf_directory` of a run's model, which came from elsewhere then; None if it was trained from scratch.

    A run that resumes has a copy of the files, for when load_parameters_path is not stated, or is gone. Without a
    checkpoint to resume they are those of another start.

    Raises:
      UserError: it is in a bucket that cannot be read.
    """
    path = config.load_parameters_path
    if path and (origin := hf_directory(path)):
        return origin
    run, key = f"{config.base_output_directory}/{config.run_name}", "base_output_directory"
    return hf_directory(f"{run}/hf", key) if steps_in(any_path(run, key) / "checkpoints") else None


def has_hf_weights(path: str | Path) -> bool:
    """Whether `path` is a Hugging Face directory, with weights in safetensors, or an adapter to one.

    Raises:
      UserError: its weights are pickled or missing, one of its files is not a file, or the adapter cannot be read.
    """
    root = local_copy(path, "load_parameters_path")
    if adapter := adapter_of(root):
        if has_hf_weights(adapter.base):
            return True
        run = " It is a run directory: convert export it, and name that." * is_there(adapter.base / "config.yml")
        raise UserError(f"{root / CONFIG}: base_model_name_or_path={adapter.base} has no config.json.{run}")
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
    """The number format of the weights by config.json; of quantized weights, once they are dequantized.

    If it names none, "float32", or "bfloat16" for quantized weights.
    """
    fields = text_fields(fields)
    default = "bfloat16" if quantization_of(fields) else "float32"
    return str(fields.get("dtype") or fields.get("torch_dtype") or default).removeprefix("torch.")


def tokenizer_keys(directory: Path) -> dict[str, str]:
    """The tokenizer keys for the files of a Hugging Face directory; {} if it has none."""
    for kind, name in TOKENIZER_FILES.items():
        if is_there(directory / name):
            return {"tokenizer_type": kind, "tokenizer_path": str(directory / name)}
    return {}
