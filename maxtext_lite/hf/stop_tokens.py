"""The tokens that end a model's texts, by the files that came with it."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import local_copy
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import is_there, read_bytes, read_object
from maxtext_lite.config.keys import TOKENIZER_FILES
from maxtext_lite.data import Tokenizer
from maxtext_lite.hf.adapter import adapter_of, missing_base
from maxtext_lite.hf.fields import Keys, is_whole


def stop_tokens(paths: Iterable[str | Path], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end a model's texts: those that its files state, and end-of-text.

    Args:
      paths: of runs, imported models, Hugging Face directories or adapters.
    Raises:
      UserError: a file cannot be read, or its eos_token_id is not a token or a list of tokens.
    """
    stated: list[int] = []
    for path in paths:
        root = local_copy(path, "load_parameters_path")
        adapter = adapter_of(root) if missing_base(root) is None else None
        roots = [root, adapter.base] if adapter else [root]  # an adapter's own files come before its base model's
        for each in roots:
            stated += _stop_ids_with(each, tokenizer) + _stop_ids_with(each / "hf", tokenizer)
    return tuple(dict.fromkeys([*stated, tokenizer.end_of_text_id]))


def stop_ids_of(directory: Path) -> list[int]:
    """The tokens that end a text, by generation_config.json and config.json.

    Raises:
      UserError: one of the two is not a JSON object, or its eos_token_id is not a token or a list of tokens.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if is_there(directory / name):
            fields = read_object(directory / name)
            stated = stop_ids_in(fields)
            if not all(is_whole(each, 0) for each in stated):
                value = value_text(fields["eos_token_id"])
                raise UserError(f"{directory / name}: eos_token_id={value} is not a token's number, or a list of them.")
            ids += stated
    return list(dict.fromkeys(ids))


def stop_ids_in(fields: Keys) -> list[Any]:
    """The eos_token_id in a model's file, as a list."""
    value = fields.get("eos_token_id", [])
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _stop_ids_with(directory: Path, tokenizer: Tokenizer) -> list[int]:
    """`stop_ids_of`; with another tokenizer than the directory's, those that are special tokens of both."""
    ids = stop_ids_of(directory)
    return ids if has_tokenizer(directory, tokenizer.fingerprint) else special_among(ids, tokenizer)


def special_among(token_ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    """Those that are special or added tokens of the tokenizer."""
    return [each for each in token_ids if each in tokenizer.control_ids]


def has_tokenizer(directory: Path, known_by: str) -> bool:
    """Whether a directory's tokenizer is the one known by this SHA-256; a directory without one goes with bytes."""
    files = [directory / name for name in TOKENIZER_FILES.values() if is_there(directory / name)]
    return any(file_hash(file) in known_by for file in files) if files else known_by == "byte"


def file_hash(file: Path) -> str:
    """The SHA-256 of a tokenizer's file."""
    return hashlib.sha256(read_bytes(file)).hexdigest()
