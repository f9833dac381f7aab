"""Megatron's tokenized datasets, PREFIX.bin and PREFIX.idx, read in place without a copy.

Where documents start, and a hash of their content, are computed once, as in `rows`; that reads everything.
"""

import dataclasses
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_lite.config import DataConfig, UserError
from maxtext_lite.config.json_file import check_file, read_object, user_path
from maxtext_lite.config.keys import SourceKind
from maxtext_lite.data.cache import ABOUT, IndexPlace, map_array
from maxtext_lite.data.prepared import size_and_ends
from maxtext_lite.data.rows import TokenizedDocuments
from maxtext_lite.data.sources import Opened, open_rows
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.tokenizer import Tokenizer

MEGATRON = SourceKind("maxtext_lite.preparation.megatron:open_megatron_rows", is_mixable=True)

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, documents
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
_AT_A_TIME = 2**20


def open_megatron(key: str, path: str, tokenizer: Tokenizer) -> TokenizedDocuments:
    """The documents of PREFIX.bin and PREFIX.idx.

    Args:
      key: what messages call the path.
      path: path of either file.
    Raises:
      UserError: a file is missing, truncated or of another kind, or contains ids that the tokenizer lacks.
    """
    prefix = user_path(path)
    if prefix.suffix not in (".bin", ".idx"):
        raise UserError(f"{key}={path!r} is not PREFIX.bin or PREFIX.idx, the two files of a Megatron dataset.")
    tokens, index = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    for file in (tokens, index):
        check_file(file)
    dtype, lengths, pointers, documents = _read_index(index)
    due = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if len(lengths) else 0
    if tokens.stat().st_size != due:
        raise UserError(f"{tokens} has {tokens.stat().st_size:,} bytes; {index} says {due:,}.")
    stream = map_array(tokens, dtype.str)
    # The files count as unchanged as long as their sizes, ends and times are.
    known = [(*size_and_ends(file), file.stat().st_mtime_ns) for file in (tokens, index)]
    known_by = hashlib.sha256(json.dumps([known, tokenizer.end_of_text_id]).encode()).hexdigest()
    beside = prefix.with_suffix(".rows")

    def write(made: Path) -> dict[str, Any]:
        starts = _document_starts(index, dtype, lengths, pointers, documents)
        starts.tofile(made / "documents.i64")
        return _read_through(stream, starts, tokenizer.end_of_text_id)

    made = IndexPlace(beside, known_by).get("documents", write)
    about = read_object(made / ABOUT)
    if not 0 <= about["least_id"] <= about["largest_id"] < tokenizer.vocab_size:
        raise UserError(
            f"{tokens} contains token ids from {about['least_id']} to {about['largest_id']}; those of the config's "
            f"tokenizer are 0 to {tokenizer.vocab_size - 1}."
        )
    starts = map_array(made / "documents.i64")
    unended = about["unended_documents"]
    note = f"{unended:,} of {len(starts) - 1:,} documents do not end with the end-of-text token."
    place = IndexPlace(beside, about["content"])
    fingerprint = f"{tokenizer.fingerprint}:{about['content']}"
    return TokenizedDocuments(stream, starts, fingerprint, place, (note,) if unended else ())


def open_megatron_rows(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    key: str,
    path: str,
    eval_fraction: float = 0.0,
    vocab_size: int | None = None,
) -> Opened:
    """The rows of a Megatron dataset; arguments and errors as for `sources.open_text`."""
    del vocab_size
    encoder = TextEncoder(config, tokenizer)
    found = open_megatron(key, path, tokenizer)
    if not np.array_equal(found.stream[: len(encoder.begin_ids)], encoder.begin_ids):
        note = "the first document does not begin as this tokenizer begins texts; add_bos=false says so."
        found = dataclasses.replace(found, notes=(*found.notes, note))
    return open_rows(config, found, f"{key}={path!r} has no document of two tokens.", eval_fraction)


def _read_index(file: Path) -> tuple[np.dtype[Any], np.ndarray, np.ndarray, np.ndarray]:
    """(dtype of the ids, length of each sequence, its first byte, first sequence of each document and then the end).

    Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py, `_IndexWriter`.
    """
    with file.open("rb") as opened:
        header = opened.read(_HEADER.size).ljust(_HEADER.size, b"\0")
    magic, version, code, sequences, documents = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in _DTYPES:
        raise UserError(f"{file} is not a version 1 Megatron index of integers.")
    due = _HEADER.size + 12 * sequences + 8 * documents
    size = file.stat().st_size
    if size != due:
        raise UserError(f"{file} has {size:,} bytes; its header says {due:,}.")

    def part(at: int, dtype: str, count: int) -> np.ndarray:
        return np.memmap(file, dtype, "r", at, (count,)) if count else np.zeros(0, dtype)

    lengths = part(_HEADER.size, "<i4", sequences)
    pointers = part(_HEADER.size + 4 * sequences, "<i8", sequences)
    return np.dtype(_DTYPES[code]), lengths, pointers, part(_HEADER.size + 12 * sequences, "<i8", documents)


def _document_starts(
    file: Path, dtype: np.dtype[Any], lengths: np.ndarray, pointers: np.ndarray, documents: np.ndarray
) -> np.ndarray:
    """`MegatronDocuments.document_starts`; refuses sequences and documents with gaps between them."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    follow = (
        len(documents) > 0 and documents[0] == 0 and documents[-1] == len(lengths) and (np.diff(documents) >= 0).all()
    )
    if not follow or (lengths < 0).any() or (pointers != ends[:-1] * dtype.itemsize).any():
        raise UserError(f"{file}: its documents do not follow each other in the .bin file.")
    return np.unique(ends[documents]).astype("<i8")  # a document without tokens starts where the next one does


def _read_through(stream: np.ndarray, starts: np.ndarray, end_of_text_id: int) -> dict[str, Any]:
    content = hashlib.sha256(np.diff(starts).astype("<i8").tobytes())
    content.update(stream.dtype.str.encode())
    bounds: list[int] = []
    for first in range(0, len(stream), _AT_A_TIME):
        ids = np.asarray(stream[first : first + _AT_A_TIME])
        bounds += (int(ids.min()), int(ids.max()))
        content.update(ids.tobytes())
    unended = 0
    for first in range(1, len(starts), _AT_A_TIME):
        unended += int((np.asarray(stream)[starts[first : first + _AT_A_TIME] - 1] != end_of_text_id).sum())
    return {
        "least_id": min(bounds, default=0),
        "largest_id": max(bounds, default=0),
        "unended_documents": unended,
        "content": content.hexdigest(),
    }
