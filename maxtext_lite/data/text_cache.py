"""Plain text as tokens, in memory or, if it is large, tokenized once into a cache.

An entry of the cache is a directory named after the SHA-256 of the files, their kinds and the tokenizer. It has the
tokens, where each document starts, and facts about them; it appears under its name when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_lite.config import DataConfig, UserError
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import full_text
from maxtext_lite.config.json_file import read_object, user_path
from maxtext_lite.config.keys import RunConfig
from maxtext_lite.console import complain
from maxtext_lite.data.cache import (
    ABOUT,
    CACHE_VARIABLE,
    Arrays,
    IndexPlace,
    cache_directory,
    file_sha256,
    join_parts,
    locked,
    make_directory,
    map_array,
    token_dtype,
    write_parts,
)
from maxtext_lite.data.rows import TokenizedDocuments, TokenStream
from maxtext_lite.data.text_encoder import TextEncoder, spelled_notes
from maxtext_lite.data.text_files import TEXT_SUFFIXES, batches, is_kind, read_documents

LEAST_BYTES = 2**25
"""The least size of a text worth caching. A smaller one is tokenized faster than a cache is checked."""
_FORMAT = 3
_DOCUMENTS_PER_ENCODING = 4096  # these two bound the memory of the tokenizer library's results
_CHARACTERS_PER_ENCODING = 2**22
_IDS_AT_ONCE = 2**22
_SECONDS_BETWEEN_LINES = 30.0


def tokenized_text(
    config: DataConfig,
    encoder: TextEncoder,
    files: list[tuple[str, Path]],
) -> TokenizedDocuments:
    """The text of these files, if it is large from the cache, made first if it is missing or damaged.

    Other processes wait while it is made.

    Raises:
      UserError: a file cannot be read, or a line of it is bad.
    """
    if isinstance(config, RunConfig) and sum(file.stat().st_size for _, file in files) >= LEAST_BYTES:
        cached = _cached(config, encoder, files)
        if cached is not None:
            return cached
    text = join_parts(_encoded(encoder, files))
    tokens, starts, spelled = text.values()
    notes = spelled_notes(int(spelled.sum()), encoder.in_text)
    return TokenizedDocuments(tokens, starts, text_fingerprint(tokens, starts, encoder), notes=notes)


def _dtype(encoder: TextEncoder) -> np.dtype[Any]:
    return np.dtype(token_dtype(encoder.tokenizer.vocab_size))


def _encoded(encoder: TextEncoder, files: list[tuple[str, Path]]) -> Iterator[Arrays]:
    """The tokens, the starts of documents, and numbers of special tokens that they spell, in parts."""
    num_tokens = 0
    start = said = time.monotonic()
    yield {"tokens": np.zeros(0, _dtype(encoder)), "starts": np.zeros(1, np.int64), "spelled": np.zeros(1, np.int64)}
    for texts in batches(read_documents(files, encoder), _DOCUMENTS_PER_ENCODING, _CHARACTERS_PER_ENCODING):
        part = encoder.documents(texts, _dtype(encoder))
        stops = num_tokens + np.cumsum(part.lengths[part.lengths > 0])
        num_tokens += len(part.stream)
        yield {"tokens": part.stream, "starts": stops, "spelled": np.array([part.num_spelled])}
        if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            complain(f"{num_tokens:,} tokens so far, {num_tokens / (said - start):,.0f} tokens/s")


def _cached(
    config: RunConfig,
    encoder: TextEncoder,
    files: list[tuple[str, Path]],
) -> TokenizedDocuments | None:
    """The text from the cache, tokenized into it first if missing; None if no cache can be written."""
    # Beside the runs, where many hosts see it and there is room for it.
    beside = config.base_output_directory
    if os.environ.get(CACHE_VARIABLE) or not beside or is_bucket(beside):
        root = cache_directory("text")
    else:
        root = user_path(beside) / ".cache" / "text"
    entry: Path | None = None
    try:
        entry = root / _key(files, encoder)
        with locked(entry):
            if entry.is_dir():
                try:
                    return _opened(entry, encoder)
                except UserError as error:
                    complain(f"warning: the cached text is damaged and will be made again: {' '.join(error.problems)}")
                    shutil.rmtree(entry)
            for unfinished in root.glob(f".{entry.name}.*"):  # of a process that was killed
                shutil.rmtree(unfinished, ignore_errors=True)
            complain(f"tokenizing the text once, into {full_text(entry)}; the next start reads it from there")
            make_directory(entry, lambda made: _write(made, encoder, files))
            return _opened(entry, encoder)
    except OSError as error:
        with contextlib.suppress(UserError):
            if entry and entry.is_dir():  # in a cache that this process may only read
                return _opened(entry, encoder)
        complain(
            f"warning: the text cannot be cached in {full_text(root)} ({error.strerror}): it is tokenized at every "
            f"start. {CACHE_VARIABLE} names another directory."
        )
        return None


def _key(files: list[tuple[str, Path]], encoder: TextEncoder) -> str:
    settings = json.dumps(encoder.settings) if encoder.settings else ""
    key = hashlib.sha256(f"{_FORMAT}:{encoder.tokenizer.fingerprint}:{settings}".encode())
    for name, file in files:
        kind = max((suffix for suffix in TEXT_SUFFIXES if is_kind(name, (suffix,))), key=len)
        key.update(f"{kind}:{file_sha256(file)};".encode())
    return key.hexdigest()[:32]


def _write(
    made: Path,
    encoder: TextEncoder,
    files: list[tuple[str, Path]],
) -> dict[str, Any]:
    """Writes the arrays of a text; returns its fingerprint."""
    write_parts(made, _encoded(encoder, files))
    tokens, starts, _ = _mapped(made, encoder)
    return {"fingerprint": text_fingerprint(tokens, starts, encoder)}


def _mapped(entry: Path, encoder: TextEncoder) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = map_array(entry / "tokens", _dtype(encoder).str)
    return tokens, map_array(entry / "starts.i64"), map_array(entry / "spelled.i64")


def text_fingerprint(stream: TokenStream, document_starts: np.ndarray, encoder: TextEncoder) -> str:
    """A hash of a text's tokens and documents, and of the tokenizer."""
    content = hashlib.sha256(f"{encoder.tokenizer.fingerprint}:{_dtype(encoder)}:{len(document_starts)}:".encode())
    content.update(np.ascontiguousarray(document_starts, np.int64).data)
    for start in range(0, len(stream), _IDS_AT_ONCE):
        content.update(np.ascontiguousarray(stream[start : start + _IDS_AT_ONCE]).data)
    return content.hexdigest()


def _opened(entry: Path, encoder: TextEncoder) -> TokenizedDocuments:
    """An entry of the cache; reads all of it to verify its fingerprint.

    Raises:
      UserError: it is damaged.
    """
    try:
        about = read_object(entry / ABOUT)
        stream, starts, spelled = _mapped(entry, encoder)
        fingerprint = text_fingerprint(stream, starts, encoder)
        if fingerprint != about["fingerprint"]:
            raise UserError(f"{entry} is not what was written.")
        place = IndexPlace(entry / "rows", fingerprint)
        notes = (f"read from the cache {entry}", *spelled_notes(int(spelled.sum()), encoder.in_text))
        return TokenizedDocuments(stream, starts, fingerprint, place, notes)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{entry} is damaged ({error!r}).") from None
