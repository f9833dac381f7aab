"""Prepared datasets for tests, written without `prepare`."""

import hashlib
import itertools
import pathlib
from collections.abc import Sequence

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from maxtext_lite.data.cache import token_dtype
from maxtext_lite.data.prepared import (
    DOCUMENTS_FILE,
    MANIFEST_FILE,
    Manifest,
    manifest_text,
)
from maxtext_lite.preparation.shards import stored_shard


def write_prepared(
    directory: pathlib.Path,
    shards: Sequence[Sequence[Sequence[int]]],
    *,
    tokenizer: str = "byte",
    vocab_size: int = 257,
    tokens_per_record: int = 4096,
    options: str = "group_size:1",
) -> Manifest:
    """Writes documents, each with its end-of-text token, by shards; returns the manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
    entries = []
    for number, documents in enumerate(shards):
        name = f"{number:05d}.array_record"
        tokens = np.array(
            [token for document in documents for token in document], dtype
        )
        writer = ArrayRecordWriter(str(directory / name), options)
        for first in range(0, len(tokens), tokens_per_record):
            writer.write(tokens[first : first + tokens_per_record].tobytes())
        writer.close()
        content = hashlib.sha256(
            np.array([len(document) for document in documents], "<i8").tobytes()
        )
        content.update(tokens.tobytes())
        about = {
            "documents": len(documents),
            "tokens": len(tokens),
            "content": content.hexdigest(),
        }
        entries.append(stored_shard(directory, name, **about))
    lengths = [len(document) for documents in shards for document in documents]
    np.cumsum([0, *lengths]).astype("<i8").tofile(directory / DOCUMENTS_FILE)
    manifest = Manifest(
        tokenizer,
        vocab_size,
        token_dtype(vocab_size),
        tokens_per_record,
        tuple(entries),
    )
    (directory / MANIFEST_FILE).write_text(manifest_text(manifest))
    return manifest


def byte_shards(texts: Sequence[str], shards: int) -> list[list[list[int]]]:
    """Texts as documents of the byte tokenizer, in this many shards."""
    documents = [[*text.encode(), 256] for text in texts]
    bounds = [len(documents) * i // shards for i in range(shards + 1)]
    return [documents[a:b] for a, b in itertools.pairwise(bounds)]


def flipped(content: bytes, place: int | None = None) -> bytes:
    """The bytes with one bit changed, in the middle or at a place."""
    place = len(content) // 2 if place is None else place
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
