"""Whole shards: the hashes of their contents, and the check of a dataset against its manifest."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.cache import file_sha256
from maxtext_lite.data.prepared import (
    DOCUMENTS_FILE,
    MANIFEST_FILE,
    RecordStream,
    Shard,
    num_records,
    open_shard,
    size_and_ends,
)

_IN_ORDER = "readahead_buffer_size:4M,max_parallelism:1"  # two requests to a bucket, instead of one for each record
_RECORDS_AT_A_TIME = 512
_DOCUMENTS_AT_A_TIME = 2**20


def stored_shard(directory: Path, file: str, *, documents: int, tokens: int, content: str) -> Shard:
    """The entry of a finished shard; reads its whole file."""
    size, ends = size_and_ends(directory / file)
    return Shard(file, documents, tokens, file_sha256(directory / file), content, size, ends)


def content_of(
    file: Path, records: int, lengths: Iterable[np.ndarray], see: Callable[[bytes], object] = lambda record: None
) -> str:
    """`Shard.content` of a shard; reads its whole file.

    Args:
      lengths: lengths of its documents, in parts.
      see: called with every record.
    Raises:
      UserError: the file cannot be read, or has another number of records.
    """
    content = hashlib.sha256()
    reader = open_shard(file, records, _IN_ORDER)
    for part in lengths:
        content.update(part.astype("<i8").tobytes())
    try:
        for start in range(0, records, _RECORDS_AT_A_TIME):
            for record in reader.read(start, min(start + _RECORDS_AT_A_TIME, records)):
                content.update(record)
                see(record)
        reader.close()
    except (RuntimeError, IndexError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({str(error).partition(';')[0]}).") from None
    return content.hexdigest()


def verify(
    stream: RecordStream, starts: np.ndarray, see: Callable[[np.ndarray], object] = lambda ids: None
) -> Iterator[str]:
    """Reads a whole prepared dataset; yields the name of each file that proves correct.

    Args:
      stream, starts: as from `open_prepared`.
      see: called with all token ids, a record at a time.
    Raises:
      UserError: a file is not what the manifest says; names it.
    """
    manifest = stream.manifest
    document = 0
    for shard in manifest.shards:
        file = stream.directory / shard.file
        if file_sha256(file) != shard.sha256:
            raise UserError(f"{file}: the SHA-256 of its bytes is not the one in {MANIFEST_FILE}.")
        lengths = _lengths(stream, starts, document, document + shard.documents)
        document += shard.documents
        content = content_of(
            file, num_records(shard, manifest), lengths, lambda record: see(np.frombuffer(record, stream.dtype))
        )
        if content != shard.content:
            raise UserError(f"{file} or {DOCUMENTS_FILE}: its documents are not those of {MANIFEST_FILE}.")
        yield shard.file
    yield DOCUMENTS_FILE


def _lengths(stream: RecordStream, starts: np.ndarray, first: int, stop: int) -> Iterator[np.ndarray]:
    """Tokens of each of these documents, in parts."""
    for at in range(first, stop, _DOCUMENTS_AT_A_TIME):
        lengths = np.diff(starts[at : min(at + _DOCUMENTS_AT_A_TIME, stop) + 1])
        if lengths.min(initial=1) < 1:
            file = stream.directory / DOCUMENTS_FILE
            raise UserError(f"{file}: documents do not follow each other from number {at} on.")
        yield lengths
