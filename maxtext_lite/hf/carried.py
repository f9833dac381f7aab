"""The files about a model's tokens: tokenizer and chat template, and what its config.json and others say of them."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from maxtext_lite.config import Config, DataConfig, UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.hf.directory import CARRIED, TOKENIZER_FILES, files_of_model, hf_directory, tokenizer_keys
from maxtext_lite.config.hf.fields import JsonObject, is_whole
from maxtext_lite.config.json_file import is_there, read_bytes, read_object, user_path
from maxtext_lite.config.whole_file import write_whole
from maxtext_lite.data import Tokenizer, load_tokenizer

_MODEL_FILES = ("config.json", "generation_config.json")
_TOKENIZER_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def stop_ids_of(directory: Path) -> list[int]:
    """The tokens that end a text, by generation_config.json and config.json.

    Raises:
      UserError: one of the two is not a JSON object, or its eos_token_id is not a token or a list of tokens.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if is_there(directory / name):
            value: Any = read_object(directory / name).get("eos_token_id")
            stated = value if isinstance(value, list) else [] if value is None else [value]
            if not all(is_whole(each, 0) for each in stated):
                raise UserError(
                    f"{directory / name}: eos_token_id={value_text(value)} is not a token's number, or a list of them."
                )
            ids += stated
    return list(dict.fromkeys(ids))


def stop_ids_with(directory: Path, tokenizer: Tokenizer) -> list[int]:
    """`stop_ids_of`; with another tokenizer than the directory's, those that are special tokens of both."""
    ids = stop_ids_of(directory)
    return ids if _has_tokenizer(directory, tokenizer.fingerprint) else _special(ids, tokenizer)


def _special(ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    return [each for each in ids if each in tokenizer.special_ids]


def _has_tokenizer(directory: Path, known_by: str) -> bool:
    """Whether a directory's tokenizer is the one known by this SHA-256; a directory without one goes with bytes."""
    files = [directory / name for name in TOKENIZER_FILES.values() if is_there(directory / name)]
    return any(_sha256(file) in known_by for file in files) if files else known_by == "byte"


def _sha256(file: Path) -> str:
    return hashlib.sha256(read_bytes(file)).hexdigest()


def tokenizer_file(config: DataConfig) -> Path | None:
    """The file that `tokenizer_path` names; None if it is not there, or for byte."""
    path = user_path(config.tokenizer_path) if config.tokenizer_path else None
    name = TOKENIZER_FILES.get(config.tokenizer_type, "")
    file = path / name if path and path.is_dir() else path
    return file if file and file.is_file() else None


def end_of_text_of(config: Config) -> int | None:
    """The end-of-text of a config's tokenizer; None if it names none, or the model has no such token.

    Raises:
      UserError: the tokenizer cannot be read.
    """
    if config.tokenizer_type != "byte" and not config.tokenizer_path:
        return None
    end = load_tokenizer(config).end_of_text_id
    return end if end < config.vocab_size else None


def store_files(config: Config, out: Path) -> None:
    """Stores the tokenizer and the chat template of a model, and the config.json that it came with, if any.

    What an earlier start stored is removed where it is no longer in use.

    Raises:
      UserError: a file cannot be read.
    """
    origin = files_of_model(config)
    contents = _token_files(config, origin) | (_model_files(config, origin) if origin else {})
    _write(out, contents)
    for name in CARRIED:
        if name not in contents:
            (out / name).unlink(missing_ok=True)


def carry_tokens(config: Config, carried: Path | None, out: Path) -> None:
    """Writes the tokenizer and the chat template of a config, and the generation_config.json of its model.

    Args:
      carried: the directory of the files that came with the model; None if it was trained from scratch.
    """
    contents = _token_files(config, carried)
    if carried and is_there(carried / "generation_config.json"):
        contents["generation_config.json"] = read_bytes(carried / "generation_config.json")
    _write(out, contents)


def carry_own_tokens(config: DataConfig, base: Path, out: Path) -> None:
    """Writes the tokenizer and the chat template of adapters that were not trained with those of their base."""
    contents, stored = _token_files(config, None), hf_directory(base) or base / "hf"
    if any(not is_there(stored / name) or read_bytes(stored / name) != each for name, each in contents.items()):
        _write(out, contents)


def _token_files(config: DataConfig, origin: Path | None) -> dict[str, bytes]:
    """The tokenizer and the chat template in use, by their names among CARRIED.

    Args:
      origin: the directory of the files that came with the model; None if it was trained from scratch.
    """
    file = tokenizer_file(config)
    directory = file.parent if file else origin if origin and not tokenizer_keys(origin) else None
    names = [name for name in CARRIED if name not in _MODEL_FILES] if directory else []
    contents = {name: read_bytes(directory / name) for name in names if directory and is_there(directory / name)}
    if file:
        if config.tokenizer_type == "sentencepiece":
            contents.pop("tokenizer.json", None)
        contents[TOKENIZER_FILES[config.tokenizer_type]] = read_bytes(file)
    if config.chat_template:
        contents[_TEMPLATE] = _template(config.chat_template)
        contents.pop("chat_template.json", None)
        about = read_object(directory / _TOKENIZER_CONFIG) if directory and _TOKENIZER_CONFIG in contents else {}
        if about.pop("chat_template", None):
            contents[_TOKENIZER_CONFIG] = _json(about)
    return contents


def _template(path: str) -> bytes:
    try:
        return read_bytes(user_path(path))
    except UserError as error:
        raise UserError(f"chat_template={value_text(path)} cannot be read: {error}") from None


def _model_files(config: Config, origin: Path) -> dict[str, bytes]:
    """The files in which a directory describes its model, with the tokens of the config's tokenizer."""
    names = [name for name in _MODEL_FILES if is_there(origin / name)]
    file = tokenizer_file(config)
    missing = config.tokenizer_type != "byte" and file is None  # of data that need none
    if missing or _has_tokenizer(origin, _sha256(file) if file else "byte"):
        return {name: read_bytes(origin / name) for name in names}
    tokenizer = load_tokenizer(config)
    ends = _special(stop_ids_of(origin), tokenizer)
    if (end := end_of_text_of(config)) is not None and end not in ends:
        ends.append(end)
    return {name: _json(_with_tokens(read_object(origin / name), ends, tokenizer)) for name in names}


def _with_tokens(fields: JsonObject, ends: list[int], tokenizer: Tokenizer) -> JsonObject:
    """The fields of a file about a model, with the tokens that end a text, and others only if they are special."""
    ids: JsonObject = {"eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None}
    for name in ("bos_token_id", "pad_token_id"):
        value = fields.get(name)
        ids[name] = value if is_whole(value, 0) and value in tokenizer.special_ids else None
    fields = fields | ids
    text = fields.get("text_config")
    return fields | {"text_config": _with_tokens(text, ends, tokenizer)} if isinstance(text, dict) else fields


def _json(fields: JsonObject) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def _write(out: Path, contents: Mapping[str, bytes]) -> None:
    """Writes files, each whole or not at all; one that has its content already, such as its own source, stays."""
    if contents:
        out.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        file = out / name
        if not file.is_file() or file.read_bytes() != content:
            write_whole(file, content)
