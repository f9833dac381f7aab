"""The manifest of a prepared dataset, which `prepare` writes and every reader opens first.

A prepared dataset is a directory. It contains ArrayRecord shards, whose records are consecutive stretches of a stream
of token ids; the places where documents start in the stream of all shards (`DOCUMENTS_FILE`); and `manifest.json`,
written last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import NonNegativeInt, PositiveInt, Strict

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import path_below, read_object

MANIFEST_FILE = "manifest.json"
DOCUMENTS_FILE = "documents.i64"
"""Where each document starts in the stream, then the length of the stream: little-endian int64 [documents + 1]."""
TOKENS_PER_RECORD = 4096
"""Size of every record of a shard except its last: a row of 2,048 tokens spans at most two records."""

_FORMAT = 1
END_BYTES = 4096
"""Bytes at either end of a shard that `Shard.ends` covers."""

_Text = Annotated[str, Strict()]
_Count = Annotated[NonNegativeInt, Strict()]


@pydantic.dataclasses.dataclass(frozen=True)
class Shard:
    """One file of a prepared dataset.

    Attributes:
      file: its name within the dataset's directory.
      documents: documents that start in it; no document continues in another shard.
      tokens: token ids, including end-of-text.
      sha256: hash of the file's bytes.
      content: SHA-256 of the lengths of its documents, int64, and then its token ids in the manifest's dtype, both
        little-endian: the same for the same text, however it is stored.
      bytes: size of the file; 0: unknown.
      ends: SHA-256 of the file's first and last 4,096 bytes, which quickly tells files apart; "": unknown.
    """

    file: _Text
    documents: _Count
    tokens: _Count
    sha256: _Text
    content: _Text
    bytes: _Count = 0
    ends: _Text = ""


@pydantic.dataclasses.dataclass(frozen=True)
class Manifest:
    """A prepared dataset, without its tokens.

    Attributes:
      tokenizer: `Tokenizer.fingerprint`.
      vocab_size: the tokenizer's; every token id is smaller.
      dtype: dtype of the token ids in records: uint16 for a vocabulary of at most 65,536 entries, otherwise int32.
      tokens_per_record: size of all records of a shard except the last.
      shards: in the order of the stream.
      documents_sha256: hash of the bytes of `DOCUMENTS_FILE`; "": unknown.
      begin_ids: the tokens with which documents begin; None: as a chat template renders them.
      add_eos: whether documents end with end-of-text.
      special_tokens_in_text: what the special tokens that texts spell have become; "": unknown.
      spelled_special_tokens: how many there were.
    """

    tokenizer: _Text
    vocab_size: _Count
    dtype: _Text
    tokens_per_record: Annotated[PositiveInt, Strict()]
    shards: tuple[Shard, ...]
    documents_sha256: _Text = ""
    begin_ids: tuple[_Count, ...] | None = ()
    add_eos: Annotated[bool, Strict()] = True
    special_tokens_in_text: Literal["", "plain", "encode", "refuse"] = ""
    spelled_special_tokens: _Count = 0

    @pydantic.model_validator(mode="after")
    def _check_dtype(self) -> Self:
        if self.dtype != token_dtype(self.vocab_size):
            raise ValueError(f"dtype={value_text(self.dtype)} is wrong for vocab_size={self.vocab_size}")
        return self

    @property
    def documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Token ids of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """Equal for the same documents in the same order, tokenized the same way and split into the same shards."""
        content = hashlib.sha256(f"{self.tokenizer}:{self.dtype}:".encode())
        for shard in self.shards:
            content.update(f"{shard.documents}:{shard.tokens}:{shard.content};".encode())
        return content.hexdigest()

    @property
    def derived(self) -> dict[str, object]:
        """The figures that `manifest.json` states beside the rest, for readers."""
        return {"documents": self.documents, "tokens": self.tokens, "fingerprint": self.fingerprint}


def stored_shard(directory: Path, file: str, *, documents: int, tokens: int, content: str) -> Shard:
    """The entry of a finished shard, whose whole file is read."""
    size, ends = size_and_ends(directory / file)
    return Shard(file, documents, tokens, file_sha256(directory / file), content, size, ends)


def file_sha256(file: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def size_and_ends(file: Path) -> tuple[int, str]:
    """`Shard.bytes` and `Shard.ends` of a file, without reading the rest of it."""
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(0)
        content = hashlib.sha256(opened.read(END_BYTES))
        opened.seek(max(size - END_BYTES, 0))
        content.update(opened.read(END_BYTES))
    return size, content.hexdigest()


def token_dtype(vocab_size: int) -> str:
    """The dtype for the ids of a vocabulary, of the fewest bytes."""
    return "uint16" if vocab_size <= 2**16 else "int32"


def manifest_text(manifest: Manifest) -> str:
    """The content of `manifest.json`."""
    return json.dumps({"format": _FORMAT} | manifest.derived | dataclasses.asdict(manifest), indent=1) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a prepared dataset.

    Raises:
      UserError: it is missing, damaged, or of an unknown format.
    """
    path = directory / MANIFEST_FILE
    return manifest_of(path, read_object(path))


def manifest_of(path: object, stated: dict[str, Any]) -> Manifest:
    """The manifest in a file's JSON; errors call the file `path`."""
    if stated.get("format") != _FORMAT:
        raise UserError(f"{path}: format={stated.get('format')!r} is not known; this version reads format {_FORMAT}.")
    try:
        manifest = pydantic.TypeAdapter(Manifest).validate_python(stated)
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        what = ".".join(map(str, wrong["loc"])) or "its values"
        raise UserError(f"{path}: not a manifest of prepare ({what}: {wrong['msg']}).") from None
    for shard in manifest.shards:
        path_below(Path(), shard.file, path)
    for key, value in manifest.derived.items():
        if stated.get(key) != value:
            raise UserError(f"{path}: {key}={stated.get(key)!r} contradicts its shards, which make {value!r}.")
    return manifest
