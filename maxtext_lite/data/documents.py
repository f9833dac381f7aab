"""The documents of a piece of input, one after the other, and messages about lines without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.text_encoder import EncodedDocuments, TextEncoder
from maxtext_lite.data.text_files import (
    BYTE_ORDER_MARK,
    PLAIN_SUFFIXES,
    ROWS_SUFFIXES,
    check_unicode,
    is_kind,
    json_object,
    read_lines,
    read_text,
)

DIVIDED = (".jsonl", ".ndjson")
"""Suffixes of files whose lines may be divided among pieces."""
WHOLE = -1
"""`Piece.stop` of a file that is read as a whole, so that its lines are known by number."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a file.

    Attributes:
      start, stop: for a file of lines, those that begin at these bytes; for Parquet, its row groups; else all of it.
    """

    name: str
    path: str
    start: int
    stop: int


class Conversations(Protocol):
    """Renders conversations as documents.

    Attributes:
      optional: fields of a line or row beside its turns.
    """

    optional: tuple[str, ...]

    def document(self, where: str, key: str, value: Mapping[str, Any]) -> str:
        """The text of the conversation in a line or row, whose turns are under `key`."""
        ...

    def encode(self, texts: Sequence[str], dtype: np.dtype[Any]) -> EncodedDocuments:
        """The tokens of such texts, as `TextEncoder.documents`."""
        ...


Document = TypeVar("Document", bound=Sized)


class BadLine(NamedTuple):
    """A line or row without a document; `problem` says which and why."""

    problem: str


def read_documents(files: Iterable[tuple[str, Path]], encoder: TextEncoder) -> Iterator[str]:
    """The documents of files from `find_files` as training reads them, including empty ones.

    Raises:
      UserError: a file cannot be read, or a line has no document.
    """
    pieces = (Piece(name, str(file), 0, WHOLE) for name, file in files)
    return DocumentReader(encoder).texts(pieces)


class DocumentReader:
    """Reads the documents of pieces.

    Attributes:
      encoder: of texts.
    Args:
      field: of a line or row, with its text or its turns.
      conversations: renders turns; None: lines and rows have texts.
    """

    def __init__(self, encoder: TextEncoder, field: str = "text", conversations: Conversations | None = None) -> None:
        self.encoder = encoder
        self._field = field
        self._conversations = conversations
        self._optional = conversations.optional if conversations else ()

    def read(self, piece: Piece) -> Iterator[str | BadLine]:
        """Each document as it stands, including empty ones; blank lines are skipped.

        Raises:
          UserError: the file cannot be read, or is a .txt that is not UTF-8.
        """
        if is_kind(piece.name, PLAIN_SUFFIXES):
            text = read_text(piece.name, Path(piece.path))
            self.encoder.check(piece.name, text)
            yield text
            return
        if is_kind(piece.name, ROWS_SUFFIXES):
            from maxtext_lite.data.row_files import read_rows

            since = f" from row group {piece.start}" if piece.start else ""
            groups = None if piece.stop == WHOLE else range(piece.start, piece.stop)
            rows = read_rows(piece.name, piece.path, required=self._field, optional=self._optional, groups=groups)
            for row, value in enumerate(rows, start=1):
                yield self._document(f"{piece.name}: row {row}{since}", value)
            return
        if is_kind(piece.name, DIVIDED) and piece.stop != WHOLE:
            where = f"{piece.name}: line at byte "
            lines = _range_lines(piece)
        else:
            where = f"{piece.name}:"
            lines = enumerate(read_lines(piece.name, Path(piece.path)), start=1)
        for place, line in lines:
            if line.strip():
                yield self._document(f"{where}{place}", line)

    def encode(self, texts: Sequence[str], dtype: np.dtype[Any]) -> EncodedDocuments:
        """The tokens of such documents."""
        encode = self.encoder.documents if self._conversations is None else self._conversations.encode
        return encode(texts, dtype)

    def texts(self, pieces: Iterable[Piece]) -> Iterator[str]:
        """The documents of pieces as they stand, including empty ones.

        Raises:
          UserError: as from `read`, or a line has no document.
        """
        for piece in pieces:
            for document in self.read(piece):
                if isinstance(document, BadLine):
                    raise UserError(document.problem)
                yield document

    def _document(self, where: str, given: bytes | Callable[[], dict[str, Any]]) -> str | BadLine:
        wanted = f'{"a list" if self._conversations else "a string"} under "{self._field}"'
        of = "a JSON object" if isinstance(given, bytes) else "a row"
        try:
            line = json_object(where, given, wanted=wanted) if isinstance(given, bytes) else given()
            if self._conversations:
                return self._conversations.document(where, self._field, line)
            value = _value(line, self._field)
            if not isinstance(value, str):
                raise UserError(f"{where}: not {of} with {wanted}.")
            check_unicode(where, self._field, value)
            self.encoder.check(where, value)
        except UnicodeDecodeError as error:
            return BadLine(f"{where}: not UTF-8 text ({error.reason}).")
        except UserError as error:
            return BadLine(" ".join(error.problems))
        return value


def batches(documents: Iterable[Document], most: int, most_characters: int) -> Iterator[list[Document]]:
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


def _value(line: dict[str, Any], field: str) -> object:
    """The value of a field, or by its path of a field of objects: meta.text."""
    if field in line:
        return line[field]
    value: Any = line
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _range_lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(first byte, line) of each line that begins in the piece; the last one may end beyond it."""
    try:
        with Path(piece.path).open("rb") as opened:
            place = piece.start
            if place:  # skip the rest of a line that begins before the piece
                opened.seek(place - 1)
                place += len(opened.readline()) - 1
            while place < piece.stop and (line := opened.readline()):
                yield place, line.removesuffix(b"\n").removeprefix(b"" if place else BYTE_ORDER_MARK)
                place += len(line)
    except OSError as error:
        raise UserError(f"{piece.name}: cannot be read ({error}).") from error
