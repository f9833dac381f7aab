"""Prepared datasets: the manifest and the shards.

A prepared dataset is a directory. It contains ArrayRecord shards, whose records are consecutive stretches of a stream
of token ids; the places where documents start in the stream of all shards (`DOCUMENTS_FILE`); and `manifest.json`,
written last.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pydantic
from pydantic import NonNegativeInt, PositiveInt, Strict

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import check_file, is_directory, is_there, path_below, read_object
from maxtext_lite.data.cache import map_array, token_dtype
from maxtext_lite.data.text_files import DOCUMENTS_FILE

MANIFEST_FILE = "manifest.json"

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
      bytes: size of the file.
      ends: SHA-256 of the file's first and last 4,096 bytes, which quickly tells files apart.
    """

    file: _Text
    documents: _Count
    tokens: _Count
    sha256: _Text
    content: _Text
    bytes: _Count
    ends: _Text


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


def size_and_ends(file: Path) -> tuple[int, str]:
    """`Shard.bytes` and `Shard.ends` of a file, without reading the rest of it."""
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(0)
        content = hashlib.sha256(opened.read(END_BYTES))
        opened.seek(max(size - END_BYTES, 0))
        content.update(opened.read(END_BYTES))
    return size, content.hexdigest()


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


# pyright: reportAttributeAccessIssue=false
# array_record has no annotations.


_MOST_OPEN_SHARDS = 64
_MOST_RECORDS = 512  # of 4,096 ids: 4 to 8 MiB
_AT_RANDOM = "readahead_buffer_size:0,max_parallelism:0"  # no threads, no read-ahead
_READER_BUFFER = 32768  # bytes; the chunk of a record fits
_AGAIN = "Copy or prepare the data again."


@dataclasses.dataclass(frozen=True)
class RecordStream:
    """The token ids of all shards of a prepared dataset, in order.

    Pickles without open files. Any number of threads may read from it.
    """

    directory: Path
    manifest: Manifest

    def __len__(self) -> int:
        return self._starts[-1]

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Where each shard starts in the stream, then the length of the stream."""
        return [0, *itertools.accumulate(shard.tokens for shard in self.manifest.shards)]

    def __getitem__(self, part: slice) -> np.ndarray:
        """Token ids in the manifest's dtype.

        Raises:
          UserError: a record is damaged, or its shard is missing; names both.
        """
        start, stop, _ = part.indices(len(self))
        pieces: list[np.ndarray] = []
        while start < stop:
            shard = bisect.bisect_right(self._starts, start) - 1
            size = self.manifest.tokens_per_record
            number, first = divmod(start - self._starts[shard], size)
            record = _record(self.directory, self.manifest.shards[shard], number, size, self.dtype)
            pieces.append(record[first : first + stop - start])
            start += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, self.manifest.dtype), *pieces])

    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the ids in its records."""
        return np.dtype(self.manifest.dtype).newbyteorder("<")


# The hashes in a shard tell it from another of its name: a file that was replaced is opened again.
@functools.lru_cache(maxsize=_MOST_RECORDS)
def _record(
    directory: Path,
    shard: Shard,
    number: int,
    size: int,
    dtype: np.dtype[Any],
) -> np.ndarray:
    """A record of a shard whose records have `size` token ids, except the last."""
    file = directory / shard.file
    due = min(size, shard.tokens - number * size)
    try:
        (content,) = _reader(directory, shard, size).read(number, number + 1)
    except (RuntimeError, ValueError, IndexError, OSError) as error:
        reason = str(error).partition(";")[0]
        raise UserError(f"{file}: record {number} is damaged ({reason}). {_AGAIN}") from None
    if len(content) != due * dtype.itemsize:
        raise UserError(
            f"{file}: record {number} has {len(content)} bytes, not those of {due} token ids of {dtype.name}. {_AGAIN}"
        )
    return np.frombuffer(content, dtype)


@functools.lru_cache(maxsize=_MOST_OPEN_SHARDS)
def _reader(directory: Path, shard: Shard, size: int) -> Any:
    return open_shard(directory / shard.file, -(-shard.tokens // size))


def num_records(shard: Shard, manifest: Manifest) -> int:
    """Records of a shard."""
    return -(-shard.tokens // manifest.tokens_per_record)


def open_shard(file: Path, records: int, options: str = _AT_RANDOM) -> Any:
    """An ArrayRecordReader for a file with this many records.

    Args:
      options: options of ArrayRecord.
    Raises:
      UserError: the file is missing, truncated, not an ArrayRecord file, or has another number of records.
    """
    from array_record.python import array_record_module

    if not is_bucket(file):
        check_file(file)
    try:
        reader = array_record_module.ArrayRecordReader(
            str(file), options=options, file_reader_buffer_size=_READER_BUFFER
        )
        found = reader.num_records() if reader.ok() else None
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{file}: cannot be read ({str(error).partition(';')[0]}).") from None
    if found is None or (found == 0 and records):
        or_gone = "missing, " if is_bucket(file) else ""  # ArrayRecord does not tell these apart in a bucket
        raise UserError(f"{file}: {or_gone}truncated, or not an ArrayRecord file. {_AGAIN}")
    if found != records:
        raise UserError(f"{file} has {found} records; {MANIFEST_FILE} says {records}.")
    return reader


def open_prepared(
    key: str,
    path: Path,
    shards: Path | None = None,
) -> tuple[RecordStream, np.ndarray]:
    """The stream of a prepared dataset, and where each document starts, then its length; int64, memory-mapped.

    This reads the manifest, and of every shard its size and ends.

    Args:
      key: what messages call the directory.
      shards: where the shards are, if elsewhere; they have been checked.
    Raises:
      UserError: it is not a prepared dataset, or a file is missing, truncated or from another dataset; names the file.
    """
    if not is_directory(path):
        raise UserError(f"{key}={str(path)!r} is not a directory that `python -m maxtext_lite.prepare` made.")
    if not is_there(path / MANIFEST_FILE):
        raise UserError(
            f"{key}={str(path)!r} has no {MANIFEST_FILE}, which `python -m maxtext_lite.prepare` writes last: it is no "
            "prepared dataset, or not finished. Run the command that makes it, until its end."
        )
    manifest = read_manifest(path)
    for shard in manifest.shards if shards is None else ():
        file = path / shard.file
        check_file(file)
        size, ends = size_and_ends(file)
        if size != shard.bytes:
            raise UserError(f"{file} has {size:,} bytes; {MANIFEST_FILE} says {shard.bytes:,}.")
        if ends != shard.ends:
            raise UserError(f"{file} is not the file that {MANIFEST_FILE} was written for: its ends differ.")
    return RecordStream(shards or path, manifest), _document_starts(path / DOCUMENTS_FILE, manifest)


def _document_starts(file: Path, manifest: Manifest) -> np.ndarray:
    check_file(file)
    due = 8 * (manifest.documents + 1)
    size = file.stat().st_size
    if size != due:
        raise UserError(f"{file} has {size:,} bytes; {MANIFEST_FILE} says {manifest.documents:,} documents: {due:,}.")
    starts = map_array(file)
    if (starts[0], starts[-1]) != (0, manifest.tokens):
        raise UserError(f"{file} covers {starts[-1]:,} token ids; {MANIFEST_FILE} says {manifest.tokens:,}.")
    return starts
