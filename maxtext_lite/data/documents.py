"""The documents of files of text, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

from maxtext_lite.config import UserError
from maxtext_lite.config.registry import load
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.text_files import (
    PLAIN_SUFFIXES,
    ROWS_SUFFIXES,
    check_unicode,
    is_kind,
    json_object,
    read_lines,
    read_text,
)

Document = TypeVar("Document", bound=Sized)
Entry = bytes | Callable[[], dict[str, Any]]
"""A line of JSON, or a function that reads a row's values by column."""


def read_documents(files: Iterable[tuple[str, Path]], encoder: TextEncoder) -> Iterator[str]:
    """The documents of files from `find_files` as training reads them, including empty ones.

    Raises:
      UserError: a file cannot be read, or a line has no document.
    """
    for name, file in files:
        if is_kind(name, PLAIN_SUFFIXES):
            yield read_document(name, file, encoder)
            continue
        for where, entry in read_entries(name, file, "text"):
            yield text_of(where, entry, "text", encoder)


def read_document(name: str, file: Path, encoder: TextEncoder) -> str:
    """A file of plain text, which is one document."""
    text = read_text(name, file)
    encoder.check(name, text)
    return text


def read_entries(
    name: str,
    file: Path,
    field: str,
    *,
    optional: Sequence[str] = (),
    groups: range | None = None,
) -> Iterator[tuple[str, Entry]]:
    """The lines of a file that are not blank, or its rows, each after its place.

    Args:
      field: of a row, which must be there; `optional`: further ones that are read.
      groups: row groups of Parquet; None: all.
    """
    if is_kind(name, ROWS_SUFFIXES):
        rows = load("rows", "columns")(name, str(file), required=field, optional=optional, groups=groups)
        for number, row in enumerate(rows, start=1):
            yield f"{name}: row {number}", row
        return
    for number, line in enumerate(read_lines(name, file), start=1):
        if line.strip():
            yield f"{name}:{number}", line


def object_of(where: str, entry: Entry, wanted: str) -> dict[str, Any]:
    """The values of a line or row by name. Raises UserError as `json_object`."""
    if isinstance(entry, bytes):
        return json_object(where, entry, wanted=wanted)
    try:
        return entry()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error.reason}).") from None


def text_of(where: str, entry: Entry, field: str, encoder: TextEncoder) -> str:
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
