"""Rows that are found by an index: `packing: best_fit`, and where rows start that hold one document each.

An index is made once for a dataset and a row length, in files beside the data, or in the cache where nothing can be
written there. It is a pure function of where documents start, so it does not matter which process made it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import writing
from maxtext_lite.config.json_file import check_file, is_directory, read_object
from maxtext_lite.data.cache import cache_directory
from maxtext_lite.data.packing import (
    DocumentRows,
    Documents,
    PackedRows,
    Rows,
    TokenStream,
    fill_rows,
    first_rows,
    ranges,
    with_padding,
)
from maxtext_lite.data.token_stream import map_array

_WINDOW_DOCUMENTS = 2**16  # fitted into rows together: a few ten MB, and rows of 98 % and more
_WINDOW_TOKENS = 2**27  # at most, but for a single document
_DOCUMENTS_AT_A_TIME = 2**20
ABOUT = "index.json"
"""The file of an index that is written last: the sizes of the others, and what is known of the rows."""


@dataclasses.dataclass(frozen=True)
class FittedRows:
    """Rows of whole documents, fitted so that little of a row is left over; documents longer than a row are cut.

    A document of L tokens takes L - 1 slots: its last token is a target only. One that takes more than a row has rows
    of its own, and what is left of it is fitted in like a document.

    Attributes:
      pieces: where each piece starts in the stream, and its slots; row by row, in a row as in the stream; int64 [P, 2].
      rows: for each row, the first of its pieces, and the target tokens of the rows before; int64 [rows + 1, 2].
      num_tokens: slots a row.
      cut_documents: documents in more than one piece.
    """

    pieces: np.ndarray
    rows: np.ndarray
    num_tokens: int
    cut_documents: int

    def __len__(self) -> int:
        return len(self.rows) - 1

    @property
    def note(self) -> str:
        """What became of documents and slots."""
        share = int(self.rows[-1, 1]) / max(len(self) * self.num_tokens, 1)
        return (
            f"{share:.2%} of the rows' tokens are of documents, the rest is padding; {self.cut_documents:,} documents "
            f"are longer than max_target_length={self.num_tokens} and are cut."
        )

    def build(self, stream: TokenStream, row: int) -> dict[str, np.ndarray]:
        """A row, as `packing.build_row` describes it; each piece is a segment, and every slot in use has a target.

        Raises:
          UserError: the index is not one of this stream.
        """
        (first, before), (stop, after) = self.rows[row : row + 2].tolist()
        tokens, targets, segments, positions = np.zeros((4, self.num_tokens), np.int32)
        weights = np.zeros(self.num_tokens, np.float32)
        pieces = self.pieces[first:stop].tolist()
        read_all = [stream[start : start + slots + 1] for start, slots in pieces]
        if not 0 < sum(map(len, read_all)) - len(pieces) == after - before <= self.num_tokens:
            raise UserError(f"the index of row {row} is damaged{_where(self.rows)}.")
        used, places = 0, np.arange(self.num_tokens, dtype=np.int32)
        for segment, read in enumerate(read_all, start=1):
            slots = len(read) - 1
            here = slice(used, used + slots)
            tokens[here], targets[here] = read[:-1], read[1:]
            segments[here], positions[here] = segment, places[:slots]
            used += slots
        weights[:used] = 1.0
        return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions, "weights": weights}

    def count_targets(self, rows: np.ndarray) -> int:
        """See `packing.Rows`."""
        before = np.asarray(self.rows)[:, 1]
        return int((before[rows + 1] - before[rows]).sum())

    def count_targets_between(self, first: int, stop: int) -> int:
        """See `packing.Rows`."""
        return int(self.rows[stop, 1] - self.rows[first, 1])

    def documents(self, rows: np.ndarray) -> Documents:
        """See `packing.Rows`; of a document that is cut, its pieces."""
        first = np.asarray(self.rows)[:, 0]
        pieces, owners = ranges(first[rows], first[rows + 1] - first[rows])
        return with_padding(np.asarray(self.pieces)[pieces, 1], owners, len(rows), self.num_tokens)


def _where(numbers: np.ndarray) -> str:
    return f": delete {Path(numbers.filename).parent}" if isinstance(numbers, np.memmap) and numbers.filename else ""


def rows_of(packing: bool | str, document_starts: np.ndarray, num_tokens: int, place: IndexPlace | None = None) -> Rows:
    """The rows of a stream.

    Args:
      packing: the key's value.
      place: of the index, where the rows have one; None: it is kept in memory.
    """
    if packing is True:
        return PackedRows(document_starts, num_tokens)
    if packing is False:
        if place is None:
            return DocumentRows(document_starts, num_tokens)
        index = place.get(f"none-{num_tokens}", lambda path: _write_first_rows(path, document_starts, num_tokens))
        return DocumentRows(document_starts, num_tokens, map_array(index / "first_rows.i64"))
    if place is None:
        windows = list(_windows(document_starts, num_tokens))
        pieces = np.concatenate([np.zeros((0, 2), np.int64), *(window.pieces for window in windows)])
        rows = np.concatenate([np.zeros((1, 2), np.int64), *(window.rows for window in windows)])
        return FittedRows(pieces, rows, num_tokens, sum(window.cut for window in windows))
    index = place.get(f"best_fit-{num_tokens}", lambda path: _write_fitted(path, document_starts, num_tokens))
    pieces, rows = (map_array(index / f"{name}.i64", columns=2) for name in ("pieces", "rows"))
    return FittedRows(pieces, rows, num_tokens, read_object(index / ABOUT)["cut_documents"])


@dataclasses.dataclass(frozen=True)
class IndexPlace:
    """Where the indices of a dataset are.

    Attributes:
      beside: a directory for them beside the data, which may not be there.
      fingerprint: of the data.
    """

    beside: Path
    fingerprint: str

    def get(self, name: str, write: Callable[[Path], dict[str, Any]]) -> Path:
        """The directory of an index, which is written where there is none.

        Args:
          write: fills a directory; returns what `ABOUT` is to say.
        Raises:
          UserError: it can be written neither beside the data nor into the cache, or is not whole.
        """
        name = f"{name}-{self.fingerprint[:16]}"
        cache = cache_directory("rows")
        for place in (self.beside, cache):
            if is_directory(place / name):
                return _checked(place / name)
        existing = next(place for place in (self.beside, *self.beside.parents) if is_directory(place))
        place = self.beside if os.access(existing, os.W_OK) else cache
        with writing(str(place)):
            place.mkdir(parents=True, exist_ok=True)
            return _made(place / name, write)


def _made(final: Path, write: Callable[[Path], dict[str, Any]]) -> Path:
    """The index has its name at once and whole, or not at all."""
    making = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        about = write(making)
        sizes = {path.name: path.stat().st_size for path in making.iterdir()}
        (making / ABOUT).write_text(json.dumps({"bytes": sizes} | about) + "\n")
        making.chmod(0o755)
        for path in making.iterdir():
            with path.open("rb+") as opened:
                os.fsync(opened.fileno())
        try:
            making.rename(final)
        except OSError:
            if not is_directory(final):  # otherwise another process was first, with the same
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return final


def _checked(index: Path) -> Path:
    for name, size in read_object(index / ABOUT)["bytes"].items():
        file = index / name
        check_file(file)
        if file.stat().st_size != size:
            raise UserError(f"{file} has {file.stat().st_size:,} bytes, not {size:,}: delete {index}, it is made anew.")
    return index


def _write_first_rows(path: Path, document_starts: np.ndarray, num_tokens: int) -> dict[str, Any]:
    before = 0
    with (path / "first_rows.i64").open("wb") as file:
        np.zeros(1, "<i8").tofile(file)
        for first in range(0, len(document_starts) - 1, _DOCUMENTS_AT_A_TIME):
            part = first_rows(document_starts[first : first + _DOCUMENTS_AT_A_TIME + 1], num_tokens, before)
            part.astype("<i8").tofile(file)
            before = int(part[-1])
    return {}


def _write_fitted(path: Path, document_starts: np.ndarray, num_tokens: int) -> dict[str, Any]:
    cut = 0
    with (path / "pieces.i64").open("wb") as pieces, (path / "rows.i64").open("wb") as rows:
        np.zeros((1, 2), "<i8").tofile(rows)
        for window in _windows(document_starts, num_tokens):
            window.pieces.astype("<i8").tofile(pieces)
            window.rows.astype("<i8").tofile(rows)
            cut += window.cut
    return {"cut_documents": cut}


class _Window(NamedTuple):
    pieces: np.ndarray
    rows: np.ndarray  # where each of its rows ends, in pieces and targets of all windows so far
    cut: int


def _windows(document_starts: np.ndarray, num_tokens: int) -> Iterator[_Window]:
    """Some documents after the other, fitted into rows of their own: `FittedRows.pieces`, and `rows[1:]`."""
    first, count, end = 0, len(document_starts) - 1, np.zeros(2, np.int64)
    while first < count:
        stop = int(np.searchsorted(np.asarray(document_starts), document_starts[first] + _WINDOW_TOKENS, "right")) - 1
        stop = min(max(stop, first + 1), first + _WINDOW_DOCUMENTS, count)
        starts = np.asarray(document_starts[first : stop + 1])
        pieces, keys = _fitted(starts, num_tokens)
        row_ends = np.append(np.flatnonzero(np.diff(keys)) + 1, len(keys))
        rows = end + np.stack([row_ends, np.cumsum(pieces[:, 1])[row_ends - 1]], axis=1)
        yield _Window(pieces, rows, int((np.diff(starts) - 1 > num_tokens).sum()))
        first, end = stop, rows[-1]


def _fitted(document_starts: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(pieces row by row, the row of each): a row is known by where its longest piece starts, the first of several.

    What a document has beyond whole rows goes, the longest first, into the fullest row that has room for it. Rows are
    in the order of their longest pieces, so that the last rows are of documents of every length.
    """
    starts, slots = document_starts[:-1], np.diff(document_starts) - 1
    whole, rest = np.divmod(slots, num_tokens)
    number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    whole_starts = np.repeat(starts, whole) + num_tokens * number
    has_rest = np.flatnonzero(rest)
    rest_starts, rest = (starts + whole * num_tokens)[has_rest], rest[has_rest]
    longest_first = np.argsort(-rest, kind="stable")
    rows = fill_rows(rest[longest_first], num_tokens, packing=True)
    members = longest_first[rows.members]
    keys = np.repeat(rest_starts[members[rows.starts[:-1]]], np.diff(rows.starts))
    starts = np.concatenate([whole_starts, rest_starts[members]])
    slots = np.concatenate([np.full(len(whole_starts), num_tokens), rest[members]])
    keys = np.concatenate([whole_starts, keys])
    order = np.lexsort((starts, keys))
    return np.stack([starts, slots], axis=1)[order], keys[order]
