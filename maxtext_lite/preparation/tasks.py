"""The inputs of `prepare`: split into tasks that depend only on the files, not on the workers, and their documents."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.text_encoder import EncodedDocuments, TextEncoder
from maxtext_lite.data.text_files import (
    BYTE_ORDER_MARK,
    PLAIN_SUFFIXES,
    Entry,
    find_files,
    is_kind,
    object_of,
    read_document,
    read_entries,
    text_of,
)
from maxtext_lite.preparation.row_files import check_column, parquet_file

DIVIDED = (".jsonl", ".ndjson")
"""Suffixes of files whose lines may be divided among pieces."""
WHOLE = -1
"""`Piece.stop` of a file that is read as a whole: its lines are then known by number."""


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


class BadLine(NamedTuple):
    """A line or row without a document; `problem` says which and why."""

    problem: str


class DocumentReader:
    """Reads the documents of pieces.

    Attributes:
      encoder: of texts.
    Args:
      field: of a line or row, with its text or its turns.
      conversations: a `conversations.Renderer`, which renders turns; None: lines and rows have texts.
    """

    def __init__(self, encoder: TextEncoder, field: str = "text", conversations: Any = None) -> None:
        self.encoder = encoder
        self._field = field
        self._conversations = conversations

    def read(self, piece: Piece) -> Iterator[str | BadLine]:
        """Each document unchanged, including empty ones; blank lines are skipped.

        Raises:
          UserError: the file cannot be read, or is a .txt that is not UTF-8.
        """
        if is_kind(piece.name, PLAIN_SUFFIXES):
            yield read_document(piece.name, Path(piece.path), self.encoder)
            return
        for where, entry in self._entries(piece):
            try:
                yield self._document(where, entry)
            except UserError as error:
                yield BadLine(" ".join(error.problems))

    def _entries(self, piece: Piece) -> Iterator[tuple[str, Entry]]:
        is_part = piece.stop != WHOLE
        if is_part and is_kind(piece.name, DIVIDED):
            for place, line in _range_lines(piece):
                if line.strip():
                    yield f"{piece.name}: line at byte {place}", line
            return
        optional = self._conversations.optional if self._conversations else ()
        groups = range(piece.start, piece.stop) if is_part else None
        since = f" from row group {piece.start}" if piece.start else ""
        file = Path(piece.path)
        entries = read_entries(piece.name, file, required=self._field, optional=optional, groups=groups)
        for where, entry in entries:
            yield f"{where}{since}", entry

    def _document(self, where: str, entry: Entry) -> str:
        if self._conversations is None:
            return text_of(where, entry, self._field, self.encoder)
        values = object_of(where, entry, f'a list under "{self._field}"')
        return self._conversations.document(where, self._field, values)

    def encode(self, texts: Sequence[str], dtype: np.dtype[Any]) -> EncodedDocuments:
        """The tokens of such documents."""
        encode = self.encoder.documents if self._conversations is None else self._conversations.encode
        return encode(texts, dtype)

    def texts(self, pieces: Iterable[Piece]) -> Iterator[str]:
        """The documents of pieces unchanged, including empty ones.

        Raises:
          UserError: as from `read`, or a line has no document.
        """
        for piece in pieces:
            for document in self.read(piece):
                if isinstance(document, BadLine):
                    raise UserError(document.problem)
                yield document


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


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file of the input, in the state it was found in.

    Attributes:
      name: for messages.
      path: absolute.
      num_bytes, changed_ns: size and time of the last change.
    """

    name: str
    path: str
    num_bytes: int
    changed_ns: int


@dataclasses.dataclass(frozen=True)
class Task:
    """The input of one shard.

    Attributes:
      number: counted from 0, in the order of the stream.
      num_bytes: bytes as stored.
    """

    number: int
    pieces: tuple[Piece, ...]
    num_bytes: int


def find_inputs(paths: list[str]) -> list[InputFile]:
    """The files of these paths, in their order; within a directory or a glob sorted by name.

    Raises:
      UserError: there is no file, one is of another kind, or one occurs twice.
    """
    files: dict[Path, InputFile] = {}
    for name, file in [file for path in paths for file in find_files("input", path)]:
        path = file.resolve()
        if path in files:
            raise UserError(f"input: {name!r} is read twice.")
        status = path.stat()
        files[path] = InputFile(name, str(path), status.st_size, status.st_mtime_ns)
    return [*files.values()]


def split_into_tasks(files: list[InputFile], *, task_bytes: int, field: str) -> list[Task]:
    """The tasks: ranges of `task_bytes` of large files, and small files combined up to that size.

    Args:
      field: the column that rows must have.
    """
    tasks: list[Task] = []
    pieces: list[Piece] = []
    total = 0
    for piece, num_bytes in [piece for file in files for piece in _pieces(file, task_bytes, field)]:
        if pieces and total + num_bytes > task_bytes:
            tasks.append(Task(len(tasks), tuple(pieces), total))
            pieces = []
            total = 0
        pieces.append(piece)
        total += num_bytes
    if pieces:
        tasks.append(Task(len(tasks), tuple(pieces), total))
    return tasks


def _pieces(file: InputFile, task_bytes: int, field: str) -> Iterator[tuple[Piece, int]]:
    """Each part of a file, with its bytes."""
    if is_kind(file.name, (".parquet",)):
        yield from _row_groups(file, task_bytes, field)
    elif is_kind(file.name, DIVIDED):
        for start in range(0, file.num_bytes, task_bytes):
            stop = min(start + task_bytes, file.num_bytes)
            yield Piece(file.name, file.path, start, stop), stop - start
    else:
        yield Piece(file.name, file.path, 0, file.num_bytes), file.num_bytes


def _row_groups(file: InputFile, task_bytes: int, field: str) -> Iterator[tuple[Piece, int]]:
    with parquet_file(file.name, file.path) as opened:
        check_column(file.name, opened.schema_arrow, field)
        sizes = [opened.metadata.row_group(group).total_byte_size for group in range(opened.num_row_groups)]
    start = 0
    total = 0
    for group, size in enumerate(sizes):
        if group > start and total + size > task_bytes:
            yield Piece(file.name, file.path, start, group), total
            start = group
            total = 0
        total += size
    if sizes:
        yield Piece(file.name, file.path, start, len(sizes)), total
