"""The documents of a piece of input, one after the other, and messages about lines without one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxtext_lite.config import UserError
from maxtext_lite.data.conversations import UNRENDERED, Renderer
from maxtext_lite.data.preparing.keys import PrepareConfig
from maxtext_lite.data.preparing.tasks import WHOLE, Piece, check_column, parquet_file
from maxtext_lite.data.text_files import (
    BYTE_ORDER_MARK,
    LONGEST_LINE,
    check_unicode,
    extra_module,
    json_object,
    read_lines,
    read_text,
)
from maxtext_lite.data.tokenizer import Tokenizer

_ROWS_AT_ONCE = 1024
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # optional in Arrow's format, but every writer's close() adds it


class BadLine(NamedTuple):
    """A line or row without a document; `problem` says which and why."""

    problem: str


class DocumentReader:
    """Reads the documents of pieces according to the config."""

    def __init__(self, config: PrepareConfig, tokenizer: Tokenizer) -> None:
        self._field = config.field
        self._renderer = Renderer(config, tokenizer, begins_as_elsewhere=False) if config.chat else None
        self._columns = list(dict.fromkeys([config.field, *(UNRENDERED if config.chat else ())]))

    def read(self, piece: Piece) -> Iterator[str | BadLine]:
        """Each document as it stands, including empty ones; blank lines are skipped.

        Raises:
          UserError: the file cannot be read, is a .txt that is not UTF-8, or has a line that is too long.
        """
        if piece.name.endswith((".txt", ".txt.gz", ".txt.zst")):
            yield read_text(piece.name, Path(piece.path))
            return
        if piece.name.endswith((".parquet", ".arrow")):
            since = f" from row group {piece.start}" if piece.start else ""
            for row, value in enumerate(self._rows(piece), start=1):
                yield self._document(f"{piece.name}: row {row}{since}", value)
            return
        of_range = piece.name.endswith(".jsonl") and piece.stop != WHOLE
        lines = _range_lines(piece) if of_range else enumerate(read_lines(piece.name, Path(piece.path)), start=1)
        for place, line in lines:
            if line.strip():
                yield self._document(f"{piece.name}{': line at byte ' if of_range else ':'}{place}", line)

    def texts(self, pieces: Iterable[Piece]) -> Iterator[str]:
        """The documents of pieces as they stand, including empty ones.

        Raises:
          UserError: as from `read`, or a line has no document.
        """
        for document in (each for piece in pieces for each in self.read(piece)):
            if isinstance(document, BadLine):
                raise UserError(document.problem)
            yield document

    def _document(self, where: str, given: bytes | Callable[[], dict[str, Any]]) -> str | BadLine:
        wanted = f'{"a list" if self._renderer else "a string"} under "{self._field}"'
        of = "a JSON object" if isinstance(given, bytes) else "a row"
        try:
            line = json_object(where, given, wanted=wanted) if isinstance(given, bytes) else given()
            if self._renderer:
                return self._renderer.document(where, self._field, line)
            value = line.get(self._field)
            if not isinstance(value, str):
                raise UserError(f"{where}: not {of} with {wanted}.")
            check_unicode(where, self._field, value)
        except UnicodeDecodeError as error:
            return BadLine(f"{where}: not UTF-8 text ({error.reason}).")
        except UserError as error:
            return BadLine(" ".join(error.problems))
        return value

    def _rows(self, piece: Piece) -> Iterator[Callable[[], dict[str, Any]]]:
        """For each row, a function that returns its values by column, of those that matter."""
        arrow = extra_module(piece.name, "pyarrow")
        try:
            with contextlib.ExitStack() as stack:
                if piece.name.endswith(".parquet"):
                    opened = stack.enter_context(parquet_file(piece.name, piece.path))
                    names = [name for name in self._columns if name in opened.schema_arrow.names]
                    groups = range(piece.start, piece.stop)
                    batches = opened.iter_batches(_ROWS_AT_ONCE, groups, names, use_threads=False)
                else:
                    batches = _arrow_batches(stack.enter_context(arrow.memory_map(piece.path)), arrow)
                for batch in batches:
                    names = [name for name in self._columns if name in batch.schema.names]
                    for name in (self._field, *names):
                        check_column(piece.name, batch.schema, name)
                    for values in zip(*(batch.column(name) for name in names), strict=True):
                        yield functools.partial(_row, names, values)
        except (OSError, EOFError, arrow.ArrowException) as error:
            raise UserError(f"{piece.name}: cannot be read ({error}).") from error


def _row(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    return {name: value.as_py() for name, value in zip(names, values, strict=True)}


def _arrow_batches(opened: Any, arrow: Any) -> Iterator[Any]:
    """The batches of a file in Arrow's stream format, which Hugging Face writes, or in its file format."""
    if opened.read(6) == b"ARROW1":
        opened.seek(0)
        reader = arrow.ipc.open_file(opened)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        return
    opened.seek(max(opened.size() - len(_END_OF_STREAM), 0))
    if opened.read() != _END_OF_STREAM:  # pyarrow would take a cut between two batches for the end
        raise EOFError("it is cut short")
    opened.seek(0)
    yield from arrow.ipc.open_stream(opened)


def _range_lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(first byte, line) of each line that begins in the piece; the last one may end beyond it."""
    try:
        with Path(piece.path).open("rb") as opened:
            place = piece.start
            if place:  # skip the rest of a line that begins before the piece
                opened.seek(place - 1)
                place += len(_one_line(piece, opened, place - 1)) - 1
            while place < piece.stop and (line := _one_line(piece, opened, place)):
                yield place, line.removesuffix(b"\n").removeprefix(b"" if place else BYTE_ORDER_MARK)
                place += len(line)
    except OSError as error:
        raise UserError(f"{piece.name}: cannot be read ({error}).") from error


def _one_line(piece: Piece, opened: Any, place: int) -> bytes:
    line = opened.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise UserError(f"{piece.name}: the line at byte {place} has more than {LONGEST_LINE // 2**20} MiB.")
    return line
