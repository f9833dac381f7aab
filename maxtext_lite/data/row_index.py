"""Rows that need an index: those of `packing: best_fit`, and rows of one document each.

An index is made once for a dataset and a row length, in files beside the data, or in the cache if that directory cannot
be written. It is a pure function of where documents start, so it does not matter which process makes it.
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
    segments_row,
    with_padding,
)
from maxtext_lite.data.token_stream import map_array

_WINDOW_DOCUMENTS = 2**16  # fitted into rows together: tens of MB, and rows at least 98 % full
_WINDOW_TOKENS = 2**27  # at most, unless a single document has more
_DOCUMENTS_AT_A_TIME = 2**20
ABOUT = "index.json"
"""The file of an index that is written last: sizes of the other files, and facts about the rows."""


@dataclasses.dataclass(frozen=True)
class FittedRows:
    """Rows of whole documents, fitted so that little padding remains; documents longer than a row are cut.

    A document of L tokens takes L - 1 slots, because its last token is only a target. A longer one fills rows of its
    own, and its remainder is fitted in like a document.

    Attributes:
      pieces: where each piece starts in the stream, and its slots; row by row, and in stream order within a row; int64
        [P, 2].
      rows: for each row, its first piece, and the target tokens of all rows before it; int64 [rows + 1, 2].
      num_tokens: slots of a row.
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
        """The share of padding, and the documents that are cut."""
        share = int(self.rows[-1, 1]) / max(len(self) * self.num_tokens, 1)
        return (
            f"{share:.2%} of the rows' tokens are of documents, the rest is padding; documents longer than "
            f"max_target_length={self.num_tokens}, which are cut: {self.cut_documents:,}."
        )

    def build(self, stream: TokenStream, row: int) -> dict[str, np.ndarray]:
        """A row, as `packing.build_row` describes it; each piece is a segment, and every used slot has a target.

        Raises:
          UserError: the index does not belong to this stream.
        """
        (first, before), (stop, after) = self.rows[row : row + 2].tolist()
        pieces = self.pieces[first:stop].tolist()
        read_all = [stream[start : start + slots + 1] for start, slots in pieces]
        if not 0 < sum(map(len, read_all)) - len(pieces) == after - before <= self.num_tokens:
            raise UserError(f"the index of row {row} is damaged{_where(self.rows)}.")
        return segments_row([(read, 1.0) for read in read_all], self.num_tokens)

    def count_targets(self, rows: np.ndarray) -> int:
        """See `packing.Rows`."""
        before = np.asarray(self.rows)[:, 1]
        return int((before[rows + 1] - before[rows]).sum())

    def count_targets_between(self, first: int, stop: int) -> int:
        """See `packing.Rows`."""
        return int(self.rows[stop, 1] - self.rows[first, 1])

    def documents(self, rows: np.ndarray) -> Documents:
        """See `packing.Rows`; a document that is cut counts as its pieces."""
        first = np.asarray(self.rows)[:, 0]
        pieces, owners = ranges(first[rows], first[rows + 1] - first[rows])
        return with_padding(np.asarray(self.pieces)[pieces, 1], owners, len(rows), self.num_tokens)


def _where(numbers: np.ndarray) -> str:
    return f": delete {Path(numbers.filename).parent}" if isinstance(numbers, np.memmap) and numbers.filename else ""


def rows_of(packing: bool | str, document_starts: np.ndarray, num_tokens: int, place: IndexPlace | None = None) -> Rows:
    """The rows of a stream.

    Args:
      packing: the value of the key.
      place: where to keep the index of rows that need one; None: in memory.
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
    """Where the indices of a dataset are kept.

    Attributes:
      beside: a directory for them beside the data; it need not exist.
      fingerprint: fingerprint of the data.
    """

    beside: Path
    fingerprint: str

    def get(self, name: str, write: Callable[[Path], dict[str, Any]]) -> Path:
        """The directory of an index, which is made if it does not exist.

        Args:
          write: fills a directory; returns facts for `ABOUT`.
        Raises:
          UserError: it can be written neither beside the data nor into the cache, or is incomplete.
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
            return make_directory(place / name, write)


def make_directory(final: Path, write: Callable[[Path], dict[str, Any]]) -> Path:
    """A directory that appears under its name only when it is complete, even if several processes make it at once.

    Args:
      write: as of `IndexPlace.get`.
    """
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
            if not is_directory(final):  # otherwise another process was first, with the same index
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return final


def _checked(index: Path) -> Path:
    for name, size in read_object(index / ABOUT)["bytes"].items():
        file = index / name
        check_file(file)
        if file.stat().st_size != size:
            raise UserError(f"{file} has {file.stat().st_size:,} bytes, not {size:,}: delete {index} to remake it.")
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
    rows: np.ndarray  # the end of each of its rows, in pieces and in targets of all windows so far
    cut: int


def _windows(document_starts: np.ndarray, num_tokens: int) -> Iterator[_Window]:
    """Consecutive groups of documents, each fitted into rows of its own: `FittedRows.pieces` and `rows[1:]`."""
    first, count, end = 0, len(document_starts) - 1, np.zeros(2, np.int64)
    while first < count:
        stop = int(np.searchsorted(np.asarray(document_starts), document_starts[first] + _WINDOW_TOKENS, "right")) - 1
        stop = min(max(stop, first + 1), first + _WINDOW_DOCUMENTS, count)
        starts = np.asarray(document_starts[first : stop + 1])
        first, (pieces, keys) = stop, _fitted(starts, num_tokens)
        if not len(pieces):  # every document is a single token
            continue
        row_ends = np.append(np.flatnonzero(np.diff(keys)) + 1, len(keys))
        rows = end + np.stack([row_ends, np.cumsum(pieces[:, 1])[row_ends - 1]], axis=1)
        yield _Window(pieces, rows, int((np.diff(starts) - 1 > num_tokens).sum()))
        end = rows[-1]


def _fitted(document_starts: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(pieces row by row, the row of each); a row is identified by where the first of its longest pieces starts.

    What remains of a document after whole rows joins the fullest row that has room for it, the longest remainder first.
    Rows are in the order of their longest pieces, so that the last rows contain documents of every length.
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
