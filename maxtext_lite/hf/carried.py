"""The files copied along with a model's weights: config.json, tokenizer and chat template."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from maxtext_lite.config import DataConfig, UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.hf.config import CARRIED, tokenizer_keys
from maxtext_lite.config.hf.fields import is_whole
from maxtext_lite.config.json_file import check_file, is_there, read_object, user_path


def carry_files(source: Path, destination: Path, *, but: Iterable[str] = ()) -> list[str]:
    """Copies the files of CARRIED that `source` has, except `but`; returns their names.

    Raises:
      UserError: one of them is not a file.
    """
    names = [name for name in CARRIED if name not in set(but) and is_there(source / name)]
    for name in names:
        check_file(source / name)
    destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, destination / name)
    return names


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


_TOKENIZER_FILES = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}


def tokenizer_file(config: DataConfig) -> Path | None:
    """The file that `tokenizer_path` names; None if it is no longer there."""
    path = user_path(config.tokenizer_path) if config.tokenizer_path else None
    name = _TOKENIZER_FILES.get(config.tokenizer_type, "")
    file = path / name if path and path.is_dir() else path
    return file if file and file.is_file() else None


def carry_tokenizer(out: Path, carried: Path | None, config: DataConfig) -> None:
    """Copies the tokenizer's files: those that came with the model, or the one that the config names."""
    if carried:
        carry_files(carried, out, but=["config.json"])
    file = tokenizer_file(config)
    if file and not tokenizer_keys(out):
        carry_files(file.parent, out, but=["config.json", "generation_config.json"])
        shutil.copyfile(file, out / _TOKENIZER_FILES[config.tokenizer_type])
