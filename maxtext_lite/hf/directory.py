"""Hugging Face directories, and runs that came from one: their files, and the keys that they decide."""

from collections.abc import Mapping
from pathlib import Path

from maxtext_lite.config.bucket import any_path, local_copy
from maxtext_lite.config.errors import Refusal, UserError, any_of, value_text
from maxtext_lite.config.json_file import check_file, is_there, read_object, read_text
from maxtext_lite.config.keys import TOKENIZER_FILES, ModelConfig, RunConfig
from maxtext_lite.config.load import RUN_FILE, Provided
from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.config.yaml import parse_mapping
from maxtext_lite.hf.adapter import CONFIG, adapter_of, missing_base
from maxtext_lite.hf.config_json import config_json, field_names, model_keys, stored_dtype
from maxtext_lite.hf.fields import JsonObject, Keys, same_architecture
from maxtext_lite.hf.safetensors import weight_files

CARRIED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Files that are copied along with a model's weights; all but the first are about its tokens."""

TOKENIZER_KEYS = ("tokenizer_type", "tokenizer_path")


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
    checkpoint to resume they belong to another start.

    Raises:
      UserError: it is in a bucket that cannot be read.
    """
    return next(filter(None, map(hf_directory, paths_of_model(config))), None)


def paths_of_model(config: RunConfig) -> list[str]:
    """Where the files of a run's model may be: load_parameters_path, and the copy of a run that resumes.

    Raises:
      UserError: a path is in a bucket that cannot be read.
    """
    run = f"{config.base_output_directory}/{config.run_name}"
    resumes = not config.starts_over and steps_in(any_path(run, "base_output_directory") / "checkpoints")
    return [path for path in (config.load_parameters_path, f"{run}/hf" if resumes else "") if path]


def has_hf_weights(path: str | Path) -> bool:
    """Whether `path` is a Hugging Face directory, with weights in safetensors, or an adapter to one.

    Raises:
      UserError: its weights are pickled or missing, one of its files is not a file, or the adapter cannot be read.
    """
    root = local_copy(path, "load_parameters_path")
    if adapter := adapter_of(root):
        if has_hf_weights(adapter.base):
            return True
        hint = " Name an export of that run." if is_there(adapter.base / "config.yml") else ""
        raise UserError(f"{root / CONFIG}: base_model_name_or_path={adapter.base} has no config.json.{hint}")
    if not is_there(root / "config.json") or (root / "checkpoints").is_dir():
        return False
    check_file(root / "config.json")
    if weight_files(root):
        return True
    pickled = sorted(file.name for file in root.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickled:
        raise UserError(f"{root}: {any_of(pickled[:3])} is pickled, and could run any code. Get .safetensors.")
    raise UserError(f"{root} has a config.json, but no .safetensors file with weights.")


def tokenizer_keys(directory: Path) -> dict[str, str]:
    """The tokenizer keys for the files of a Hugging Face directory; {} if it has none."""
    for kind, name in TOKENIZER_FILES.items():
        if is_there(directory / name):
            return {"tokenizer_type": kind, "tokenizer_path": str(directory / name)}
    return {}


def run_config_json(
    directory: Path | None, config: ModelConfig, *, num_positions: int, dtype: str, end_of_text_id: int | None = None
) -> JsonObject:
    """`config_json` of a run's or an imported model, with the fields of the config.json that it came with, if any.

    Args:
      directory: that has the config.json, as in `hf_directory`; None: there is none.
      num_positions: in training; the model may have come with more.
    Raises:
      UserError: as `config_json`.
    """
    carried = hf_directory(directory) if directory else None
    original = read_object(carried / "config.json") if carried else {}
    return config_json(
        config.with_plain_multipliers(),
        max_position_embeddings=num_positions,
        dtype=dtype,
        original=original,
        end_of_text_id=end_of_text_id,
    )


# ---- The keys: the layer between a model's file and what the user states --------------------------------------------


def provide(path: str, stated: Mapping[str, tuple[object, str]], max_target_length: object) -> Provided | None:
    """The keys that a Hugging Face directory, an adapter, an imported model or a run decides for a config.

    Args:
      stated: the keys that the user's files, command line or model_name state, with where.
      max_target_length: its value if the user does not state it.
    Returns:
      All keys of the architecture; `dtype`, if the weights are stored in bfloat16; and the tokenizer, unless one is
      stated. Also a refusal for each stated key that contradicts the architecture. Of a model without a config.json,
      the tokenizer alone; None: it has none either.
    """
    directory = hf_directory(path)
    if directory is not None:
        return _of_config_json(path, directory, stated, max_target_length)
    if missing_base(path) is not None:
        # The config.yml of a run says what the model is.
        refusals = [] if stated.keys() >= ModelConfig.model_fields.keys() else _missing_base_refusals(path)
        return Provided(path, {}, refusals)
    tokenizer = tokenizer_values(path, stated)
    return Provided(f"{path}/hf", tokenizer) if tokenizer else None


def _of_config_json(
    path: str, directory: Path, stated: Mapping[str, tuple[object, str]], max_target_length: object
) -> Provided:
    origin = str(directory / "config.json")
    try:
        has_hf_weights(path)
        adapter = adapter_of(path)
        fields = read_object(directory / "config.json")
        keys = model_keys(fields, origin)
    except UserError as error:
        return Provided(origin, {}, _refusals(error))

    def contradiction(key: str, other: str, advice: str) -> Refusal:
        value, where = stated[key]
        return Refusal(key, f"{key}={value_text(value)} ({where}) contradicts {other}. Remove it; {advice}.")

    advice = "load_parameters_path decides the architecture"
    refusals = [
        contradiction(key, f"{origin}, which has {value_text(value)}", advice)
        for key, value in keys.items()
        if key in stated and not _agrees(key, stated[key][0], keys)
    ]
    values = dict(keys)
    if adapter:
        values |= adapter.keys
        advice = f"to train something else, merge the adapter: convert import {adapter.directory} OUT"
        refusals += [
            contradiction(key, f"{adapter.directory / CONFIG}, by which it is {value_text(value)}", advice)
            for key, value in adapter.keys.items()
            if key in stated and _plain(stated[key][0]) != _plain(value)
        ]
    if stored_dtype(fields) == "bfloat16":
        values["dtype"] = "bfloat16"
    rows = keys["trainable_position_size"]
    if rows and isinstance(max_target_length, int) and rows < max_target_length:
        values["max_target_length"] = rows
    if not any(key in stated for key in TOKENIZER_KEYS):
        values |= tokenizer_values(path, stated)
        if "tokenizer_type" not in values and (directory / "vocab.json").is_file():
            what = f"{directory} has a vocab.json, but no tokenizer.json: save it as that, or state tokenizer_path."
            refusals.append(Refusal("tokenizer_path", what))
    return Provided(origin, values, refusals, field_names(fields))


def _missing_base_refusals(path: str) -> list[Refusal]:
    """The refusals of an adapter whose base model is not there."""
    try:
        adapter_of(path)
    except UserError as error:
        return _refusals(error)
    return []


def _refusals(error: UserError) -> list[Refusal]:
    return [Refusal("load_parameters_path", problem) for problem in error.problems]


def tokenizer_values(path: str, stated: Mapping[str, object]) -> dict[str, str | bool]:
    """The tokenizer of an adapter, of the model that it came with, or of a run from scratch; {} if one is stated.

    With that of a run comes its add_bos=false, which the tokenizer's files cannot say.
    """
    if any(key in stated for key in TOKENIZER_KEYS):
        return {}
    adapter = adapter_of(path)
    if adapter and (own := tokenizer_keys(adapter.directory)):
        return {**own}
    root = local_copy(path, "load_parameters_path")
    found: dict[str, str | bool] = {**tokenizer_keys(hf_directory(path) or root / "hf")}
    if found and "add_bos" not in stated and is_there(root / RUN_FILE):
        of_run = dict(parse_mapping(read_text(root / RUN_FILE)))
        if "add_bos" in of_run and of_run["add_bos"].value is False:
            found["add_bos"] = False
    return found


def _plain(value: object) -> object:
    """A LoRA key's value, with targets in sorted order."""
    return sorted(name.strip() for name in value.split(",")) if isinstance(value, str) else value


def _agrees(key: str, value: object, keys: Keys) -> bool:
    decided = keys[key]
    if key == "initializer_range" or value == decided:  # no parameter is initialised
        return True
    if value is None and decided == {}:  # two ways to state none
        return True
    are_numbers = isinstance(value, int | float) and isinstance(decided, int | float)
    if type(value) is not type(decided) and not are_numbers:
        return False
    return not same_architecture(keys, {**keys, key: value})
