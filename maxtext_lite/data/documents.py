"""The documents of files of text, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, TypeVar

from maxtext_lite.config import UserError
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.text_files import (
    PLAIN_SUFFIXES,
    Entry,
    check_unicode,
    is_kind,
    object_of,
    read_entries,
    read_text,
)

Document = TypeVar("Document", bound=Sized)


def read_documents(files: Iterable[tuple[str, Path]], encoder: TextEncoder) -> Iterator[str]:
    """The documents of files from `find_files` as training reads them, including empty ones.

    Raises:
      UserError: a file cannot be read, or a line has no document.
    """
    for name, file in files:
        if is_kind(name, PLAIN_SUFFIXES):
            yield read_document(name, file, encoder)
            continue
        for where, entry in read_entries(name, file, required="text", optional=()):
            yield text_of(where, entry, "text", encoder)


def read_document(name: str, file: Path, encoder: TextEncoder) -> str:
    """A file of plain text, which is one document."""
    text = read_text(name, file)
    encoder.check(name, text)
    return text


def text_of(
    where: str,
    entry: Entry,
    field: str,
    encoder: TextEncoder,
) -> str:
    """The text in a field of a line or row.

    Raises:
      UserError: there is none, or it cannot be encoded.
    """
    wanted = f'a string under "{field}"'
    text = _value(object_of(where, entry, wanted), field)
    if not isinstance(text, str):
        raise UserError(f"{where}: not {'a JSON object' if isinstance(entry, bytes) else 'a row'} with {wanted}.")
    check_unicode(where, field, text)
    encoder.check(where, text)
    return text


def _value(line: dict[str, Any], field: str) -> object:
    """The value of a field, or by its path of a field of objects: meta.text."""
    if field in line:
        return line[field]
    value: Any = line
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def batches(
    documents: Iterable[Document],
    most: int,
    most_characters: int,
) -> Iterator[list[Document]]:
    """Documents in order, in batches for a call of the tokenizer: of `most`, or of enough characters."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if len(batch) == most or characters >= most_characters:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch
