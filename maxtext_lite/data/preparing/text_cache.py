"""Plain text tokenized once: its prepared dataset in a cache, identified by the content of the text.

An entry is a directory named after the SHA-256 of the files, their kinds and the tokenizer. It contains a prepared
dataset and, written last, `text.json`: the fingerprint that the text has without a cache, and checksums of its files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np

from maxtext_lite.config import DataConfig, UserError
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import full_text
from maxtext_lite.config.json_file import read_object, user_path
from maxtext_lite.config.sections import RunConfig
from maxtext_lite.config.whole_file import write_whole
from maxtext_lite.data.cache import CACHE_VARIABLE, cache_directory, locked
from maxtext_lite.data.manifest import DOCUMENTS_FILE, MANIFEST_FILE, file_sha256
from maxtext_lite.data.packing import TokenStream
from maxtext_lite.data.row_index import IndexPlace
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.text_files import TEXT_SUFFIXES, is_kind
from maxtext_lite.data.token_stream import open_prepared
from maxtext_lite.process.output import complain

LEAST_BYTES = 2**25
"""Size of a text from which a cache is worthwhile; a smaller one is tokenized faster than a cache is checked."""
_ABOUT = "text.json"
_FORMAT = 1
_IDS_AT_ONCE = 2**22


@dataclasses.dataclass(frozen=True)
class CachedText:
    """A text in the cache.

    Attributes:
      fingerprint: the same as for the text in memory.
      place: place for indices of its rows.
      note: says where it is.
      spelled_special_tokens: how many special tokens its documents spell.
    """

    stream: TokenStream
    document_starts: np.ndarray
    fingerprint: str
    place: IndexPlace
    note: str
    spelled_special_tokens: int


def cached_text(config: DataConfig, encoder: TextEncoder, files: list[tuple[str, Path]]) -> CachedText | None:
    """The text of these files from the cache, made first if it is missing or damaged.

    Other processes wait while it is made.

    Returns:
      None if the files are small, or if the text is not cached and no cache can be written.
    Raises:
      UserError: a file cannot be read, or a line of it is bad.
    """
    if not isinstance(config, RunConfig) or sum(file.stat().st_size for _, file in files) < LEAST_BYTES:
        return None
    # Beside the runs, where many hosts see it and there is room for it.
    beside = None if os.environ.get(CACHE_VARIABLE) else config.base_output_directory
    root = cache_directory("text") if not beside or is_bucket(beside) else user_path(beside) / ".cache" / "text"
    with contextlib.ExitStack() as stack:
        entry = root / _key(files, encoder)
        try:
            stack.enter_context(locked(entry))
        except OSError as error:
            with contextlib.suppress(FileNotFoundError):
                return _opened(entry)  # another process made it
            complain(
                f"warning: the text cannot be cached in {full_text(root)} ({error.strerror}): it is "
                f"tokenized at every start. {CACHE_VARIABLE} names another directory."
            )
            return None
        try:
            return _opened(entry)
        except FileNotFoundError:
            complain(f"tokenizing the text once, into {full_text(entry)}; the next start reads it from there")
        except UserError as error:
            complain(f"warning: the cached text is damaged and will be made again: {' '.join(error.problems)}")
            shutil.rmtree(entry)
        _make(entry, config, encoder, files)
        return _opened(entry)


def _key(files: list[tuple[str, Path]], encoder: TextEncoder) -> str:
    settings = json.dumps(encoder.settings) if encoder.settings else ""
    key = hashlib.sha256(f"{_FORMAT}:{encoder.tokenizer.fingerprint}:{settings}".encode())
    for name, file in files:
        kind = next(suffix for suffix in sorted(TEXT_SUFFIXES, key=len, reverse=True) if is_kind(name, (suffix,)))
        key.update(f"{kind}:{_sha256(file)};".encode())
    return key.hexdigest()[:32]


def _sha256(file: Path) -> str:
    try:
        return file_sha256(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error}).") from error


def _make(entry: Path, config: DataConfig, encoder: TextEncoder, files: list[tuple[str, Path]]) -> None:
    from maxtext_lite.data.preparing.dataset import prepare_dataset  # here, because most runs make none
    from maxtext_lite.data.preparing.keys import PrepareConfig

    prepared = PrepareConfig.model_construct(
        input=[str(file) for _, file in files],
        output=str(entry),
        tokenizer_type=config.tokenizer_type,
        tokenizer_path=config.tokenizer_path,
        add_bos=config.add_bos,
        add_eos=config.add_eos,
        special_tokens_in_text=config.special_tokens_in_text,
    )
    try:
        outcome = prepare_dataset(prepared, tokenizer=encoder.tokenizer, say=complain)
    except UserError as error:
        if not any("was begun differently" in problem for problem in error.problems):
            raise
        shutil.rmtree(entry)  # left by a killed run, from the same text in other files
        outcome = prepare_dataset(prepared, tokenizer=encoder.tokenizer, say=complain)
    assert outcome is not None
    stream, starts = open_prepared("dataset_path", entry)
    fingerprint = text_fingerprint(stream, starts, tokenizer=outcome.manifest.tokenizer, dtype=outcome.manifest.dtype)
    names = [MANIFEST_FILE, DOCUMENTS_FILE, *(shard.file for shard in outcome.manifest.shards)]
    about = {"fingerprint": fingerprint, "sha256": {name: _sha256(entry / name) for name in names}}
    write_whole(entry / _ABOUT, json.dumps(about, indent=1).encode())


def text_fingerprint(stream: TokenStream, document_starts: np.ndarray, *, tokenizer: str, dtype: str) -> str:
    """The fingerprint of a text's tokens and documents, recorded in a run's checkpoints."""
    content = hashlib.sha256(f"{tokenizer}:{dtype}:{len(document_starts)}:".encode())
    content.update(np.ascontiguousarray(document_starts, np.int64).data)
    for start in range(0, len(stream), _IDS_AT_ONCE):
        content.update(np.ascontiguousarray(stream[start : start + _IDS_AT_ONCE]).data)
    return content.hexdigest()


def _opened(entry: Path) -> CachedText:
    """A complete entry.

    Raises:
      FileNotFoundError: there is none, or it is incomplete.
      UserError: it is damaged.
    """
    if not (entry / _ABOUT).exists():
        raise FileNotFoundError(entry)
    about = read_object(entry / _ABOUT)
    try:
        for name, expected in about["sha256"].items():
            if _sha256(entry / name) != expected:
                raise UserError(f"{entry / name} is not what was written.")
        stream, starts = open_prepared("dataset_path", entry)
        place = IndexPlace(entry / "rows", stream.manifest.fingerprint)
        spelled = stream.manifest.spelled_special_tokens
        return CachedText(stream, starts, about["fingerprint"], place, f"read from the cache {entry}", spelled)
    except (KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{entry / _ABOUT} is damaged ({error!r}).") from None
