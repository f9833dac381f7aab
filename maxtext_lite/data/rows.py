"""Rows of `max_target_length` tokens, cut from tokenized documents or filled with whole sequences.

All documents form one flat array, the *stream*, each followed by an end-of-text token. A row is a stretch of it: the
inputs are stream[start:stop], and the target of each input is the next token, even if that begins the next row. So
every token is a target in exactly one row, except the first of a document, which has no predecessor.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.cache import Arrays, IndexPlace, stored_arrays


class TokenStream(Protocol):
    """A sequence of token ids whose slices are arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


_DOCUMENTS_AT_ONCE = 2**20

FIELDS = ("tokens", "targets", "segments", "positions", "weights")
"""The arrays of an example."""
REFERENCE = "reference"
"""Another array of examples for DPO: at the first token of each sequence, the summed log-probability that the
reference gives its answers; 0 elsewhere."""


def count_by_length(document_starts: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Documents by the power of two that their tokens reach, int64 [64], and the fewest and the most tokens."""
    counts = np.zeros(64, np.int64)
    longest = 0
    shortest = 2**62
    for first in range(0, len(document_starts) - 1, _DOCUMENTS_AT_ONCE):
        lengths = np.diff(document_starts[first : first + _DOCUMENTS_AT_ONCE + 1])
        counts += np.bincount(np.frexp(lengths.astype(np.float64))[1] - 1, minlength=64)
        longest = max(longest, int(lengths.max()))
        shortest = min(shortest, int(lengths.min()))
    return counts, shortest, longest


def field_dtype(name: str) -> type[np.generic]:
    """int32 for all FIELDS except the weights, otherwise float32."""
    return np.int32 if name in FIELDS[:-1] else np.float32


class Documents(NamedTuple):
    """The documents in some rows, in any order. The padding of a row counts as one, as it does for attention.

    Attributes:
      lengths: tokens of each document in its row; int64.
      rows: index of its row among the requested rows; int64.
      padding: whether it is the padding of its row; bool.
    """

    lengths: np.ndarray
    rows: np.ndarray
    padding: np.ndarray


class _Stretches:
    """Rows of one stretch of the stream each, in its order."""

    document_starts: np.ndarray
    num_tokens: int

    def spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream position of each row's first input, and the one after its last."""
        raise NotImplementedError

    def build(self, stream: TokenStream, row: int) -> dict[str, np.ndarray]:
        """A row, as `build_row` describes it."""
        start, stop = np.concatenate(self.spans(np.array([row]))).tolist()
        return build_row(stream, self.document_starts, start=start, stop=stop, num_tokens=self.num_tokens)

    def count_targets(self, rows: np.ndarray) -> int:
        """Target tokens of these rows; repeated rows count repeatedly."""
        starts, stops = self.spans(rows)
        return int(count_targets(self.document_starts, start=starts, stop=stops).sum())

    def count_targets_between(self, first: int, stop: int) -> int:
        """Target tokens of rows `first` to `stop - 1`, in constant memory."""
        starts, stops = self.spans(np.array([first, stop - 1]))
        return int(count_targets(self.document_starts, start=starts[0], stop=stops[1]))

    def documents(self, rows: np.ndarray) -> Documents:
        """The documents in these rows, without reading a token."""
        starts, stops = self.spans(rows)
        document_starts = np.asarray(self.document_starts)
        # The document in which each row begins, and those that begin later in it.
        first = document_starts.searchsorted(starts, side="right")
        last = document_starts.searchsorted(stops)
        within, owners = ranges(first, last - first)
        begun = np.minimum(document_starts[first], stops) - starts
        later = np.minimum(document_starts[within + 1], stops[owners]) - document_starts[within]
        lengths = np.concatenate([begun, later])
        owners = np.concatenate([np.arange(len(rows)), owners])
        return with_padding(lengths, owners, len(rows), self.num_tokens)


@dataclasses.dataclass(frozen=True)
class PackedRows(_Stretches):
    """Rows cut from the stream every `num_tokens` tokens; documents may share a row, and the last row is padded.

    Attributes:
      document_starts: where each document starts in the stream, then the stream's length; int64, increasing.
      num_tokens: tokens of a row.
    """

    document_starts: np.ndarray
    num_tokens: int

    def __len__(self) -> int:
        # The stream's last token has no target, so it does not make a row by itself.
        return -(-(int(self.document_starts[-1]) - 1) // self.num_tokens) if len(self.document_starts) > 1 else 0

    def spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream position of each row's first input, and the one after its last."""
        starts = rows * self.num_tokens
        return starts, np.minimum(starts + self.num_tokens, self.document_starts[-1])


@dataclasses.dataclass(frozen=True)
class DocumentRows(_Stretches):
    """Rows of one document each: a document starts a row and continues in further rows; the rest is padding.

    Attributes:
      document_starts, num_tokens: as in `PackedRows`.
      first_rows: the first row of each document, then the number of rows; int64.
    """

    document_starts: np.ndarray
    num_tokens: int
    first_rows: np.ndarray

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream position of each row's first input, and the one after its last."""
        first_rows = np.asarray(self.first_rows)
        document_starts = np.asarray(self.document_starts)
        documents = np.searchsorted(first_rows, rows, side="right") - 1
        starts = document_starts[documents] + (rows - first_rows[documents]) * self.num_tokens
        return starts, np.minimum(starts + self.num_tokens, document_starts[documents + 1])


def build_row(
    stream: TokenStream, document_starts: np.ndarray, *, start: int, stop: int, num_tokens: int
) -> dict[str, np.ndarray]:
    """The example whose inputs are stream[start:stop], padded at the end to `num_tokens`.

    Args:
      stream: token ids of all documents, each followed by its end-of-text token.
      document_starts: as in `PackedRows`.
    Returns:
      Arrays [num_tokens]. `tokens`; `targets`, the next token of the same document, or 0; `segments`, the number of the
      document within the row, from 1, 0 for padding; `positions`, from 0 in each segment, 0 for padding; all int32.
      `weights`, float32: 1 where there is a target, 0 on end-of-text and padding.
    """
    used = stop - start
    tokens, targets, segments, positions = np.zeros((4, num_tokens), np.int32)
    weights = np.zeros(num_tokens, np.float32)
    read = stream[start : stop + 1]  # one token short if the row ends with the stream
    tokens[:used] = read[:used]
    targets[: len(read) - 1] = read[1:]
    weights[:used] = 1.0

    # Documents that start after the row's first token; one that starts at `stop` only ends the document before it.
    document_starts = np.asarray(document_starts)
    first, last = document_starts.searchsorted((start, stop), side="right")
    starts = document_starts[first:last] - start
    targets[starts - 1] = 0
    weights[starts - 1] = 0.0
    bounds = [0, *starts[starts < used].tolist(), used]
    places = _places(num_tokens)
    for segment, (begin, end) in enumerate(itertools.pairwise(bounds), start=1):
        segments[begin:end] = segment
        positions[begin:end] = places[: end - begin]
    return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions, "weights": weights}


def segments_row(sequences: Iterable[tuple[np.ndarray, np.ndarray | float]], num_tokens: int) -> dict[str, np.ndarray]:
    """The example of whole sequences, each a segment, padded at the end to `num_tokens`.

    Args:
      sequences: the token ids of each sequence, all but the last of which are inputs; and the weights of its targets,
        all but the first.
    Returns:
      Arrays as of `build_row`.
    """
    tokens, targets, segments, positions = np.zeros((4, num_tokens), np.int32)
    weights = np.zeros(num_tokens, np.float32)
    used = 0
    places = _places(num_tokens)
    for segment, (token_ids, target_weights) in enumerate(sequences, start=1):
        slots = len(token_ids) - 1
        here = slice(used, used + slots)
        tokens[here] = token_ids[:-1]
        targets[here] = token_ids[1:]
        weights[here] = target_weights
        segments[here] = segment
        positions[here] = places[:slots]
        used += slots
    return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions, "weights": weights}


@functools.lru_cache(maxsize=4)
def _places(num_tokens: int) -> np.ndarray:
    return np.arange(num_tokens, dtype=np.int32)


def count_targets(document_starts: np.ndarray, *, start: int | np.ndarray, stop: int | np.ndarray) -> np.ndarray:
    """Target tokens of the inputs stream[start:stop], or of each of several: all except the last of each document."""
    next_starts = np.asarray(document_starts)[1:]
    ends = np.searchsorted(next_starts, stop, side="right") - np.searchsorted(next_starts, start, side="right")
    return np.asarray(stop - start - ends)


def ranges(first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the numbers first[i] to first[i] + counts[i] - 1 for each i in turn, the i of each number); int64."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return (first - np.cumsum(counts) + counts)[owners] + np.arange(len(owners)), owners


def with_padding(slots: np.ndarray, owners: np.ndarray, num_rows: int, num_tokens: int) -> Documents:
    """Documents that take these slots of their rows, and the padding of each row."""
    left = num_tokens - np.bincount(owners, weights=slots, minlength=num_rows).astype(np.int64)
    padding = np.arange(len(slots) + num_rows) >= len(slots)
    return Documents(np.concatenate([slots, left]), np.concatenate([owners, np.arange(num_rows)]), padding)


@dataclasses.dataclass(frozen=True)
class FilledRows:
    """Rows of whole sequences.

    Attributes:
      members: numbers of the sequences, row by row, increasing within a row; int64.
      starts: where each row starts in `members`, then the length of `members`; int64.
    """

    members: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, row: int) -> np.ndarray:
        """Numbers of the sequences in a row."""
        return self.members[self.starts[row] : self.starts[row + 1]]

    def documents(self, rows: np.ndarray, starts: np.ndarray, num_tokens: int) -> Documents:
        """The sequences in these rows of `num_tokens` slots; sequence n takes starts[n + 1] - starts[n] - 1 of them."""
        places, owners = ranges(self.starts[rows], self.starts[rows + 1] - self.starts[rows])
        numbers = self.members[places]
        return with_padding(starts[numbers + 1] - starts[numbers] - 1, owners, len(rows), num_tokens)


def fill_rows(lengths: np.ndarray, num_tokens: int, *, packing: bool) -> FilledRows:
    """Rows filled by "best fit": each sequence in turn joins the fullest row that has room for it, or opens a new row.

    Rows keep the order in which they were opened, so that the first rows contain the first sequences.

    Args:
      lengths: slots that each sequence takes, from 1 to num_tokens; int64.
      num_tokens: slots of a row.
      packing: whether sequences share rows.
    """
    if not packing:
        return FilledRows(np.arange(len(lengths)), np.arange(len(lengths) + 1))
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(num_tokens + 1)]  # rows by their free slots
    rooms = 0  # bit r is set if some row has r free slots
    for number, length in enumerate(lengths.tolist()):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the smallest that suffices
            row = with_room[room].pop()
            rooms &= ~(int(not with_room[room]) << room)
        else:
            room = num_tokens
            row = len(rows)
            rows.append([])
        rows[row].append(number)
        if left := room - length:
            with_room[left].append(row)
            rooms |= 1 << left
    members = np.array([number for row in rows for number in row], np.int64)
    return FilledRows(members, np.cumsum([0, *map(len, rows)], dtype=np.int64))


_WINDOW_DOCUMENTS = 2**16  # fitted into rows together: tens of MB, and rows at least 98 % full
_WINDOW_TOKENS = 2**27  # at most, unless a single document has more
_DOCUMENTS_AT_A_TIME = 2**20


@dataclasses.dataclass(frozen=True)
class BestFitRows:
    """Rows of whole documents, fitted so that little padding remains; documents longer than a row are cut.

    A document of L tokens takes L - 1 slots, because its last token is only a target. A longer one fills rows of its
    own, and its remainder is fitted in like a document.

    Attributes:
      starts: where each piece starts in the stream; row by row, and in stream order within a row; int64 [pieces].
      slots_before: slots of all pieces before each one, then those of all; int64 [pieces + 1].
      first_pieces: the first piece of each row, then the number of pieces; int64 [rows + 1].
      num_tokens: slots of a row.
      cut_documents: documents in more than one piece.
    """

    starts: np.ndarray
    slots_before: np.ndarray
    first_pieces: np.ndarray
    num_tokens: int
    cut_documents: int

    def __len__(self) -> int:
        return len(self.first_pieces) - 1

    @property
    def note(self) -> str:
        """The share of padding, and the documents that are cut."""
        share = int(self.slots_before[-1]) / max(len(self) * self.num_tokens, 1)
        return (
            f"{share:.2%} of the rows' tokens are of documents, the rest is padding; documents longer than "
            f"max_target_length={self.num_tokens}, which are cut: {self.cut_documents:,}."
        )

    def build(self, stream: TokenStream, row: int) -> dict[str, np.ndarray]:
        """A row, as `rows.build_row` describes it; each piece is a segment, and every used slot has a target.

        Raises:
          UserError: the index does not belong to this stream.
        """
        first, stop = self.first_pieces[row : row + 2].tolist()
        slots = np.diff(self.slots_before[first : stop + 1]).tolist()
        pieces = zip(self.starts[first:stop].tolist(), slots, strict=True)
        read_all = [stream[start : start + count + 1] for start, count in pieces]
        if not 0 < sum(map(len, read_all)) - len(slots) == sum(slots) <= self.num_tokens:
            raise UserError(f"the index of row {row} is damaged{_where(self.starts)}.")
        return segments_row([(read, 1.0) for read in read_all], self.num_tokens)

    def count_targets(self, rows: np.ndarray) -> int:
        """Target tokens of these rows; repeated rows count repeatedly."""
        first_pieces = np.asarray(self.first_pieces)
        slots_before = np.asarray(self.slots_before)
        return int((slots_before[first_pieces[rows + 1]] - slots_before[first_pieces[rows]]).sum())

    def count_targets_between(self, first: int, stop: int) -> int:
        """Target tokens of rows `first` to `stop - 1`."""
        return int(self.slots_before[self.first_pieces[stop]] - self.slots_before[self.first_pieces[first]])

    def documents(self, rows: np.ndarray) -> Documents:
        """The documents in these rows; one that is cut counts as its pieces."""
        first_pieces = np.asarray(self.first_pieces)
        slots_before = np.asarray(self.slots_before)
        pieces, owners = ranges(first_pieces[rows], first_pieces[rows + 1] - first_pieces[rows])
        return with_padding(slots_before[pieces + 1] - slots_before[pieces], owners, len(rows), self.num_tokens)


Rows: TypeAlias = PackedRows | DocumentRows | BestFitRows
"""The stretches of a stream that make up each row; picklable."""


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
        (first_rows,) = stored_arrays(place, f"none-{num_tokens}", _first_rows(document_starts, num_tokens))
        return DocumentRows(document_starts, num_tokens, first_rows)
    fitted = stored_arrays(place, f"fitted-{num_tokens}", _fitted_windows(document_starts, num_tokens))
    starts, slots_before, first_pieces, cut_documents = fitted
    return BestFitRows(starts, slots_before, first_pieces, num_tokens, int(cut_documents.sum()))


def _first_rows(document_starts: np.ndarray, num_tokens: int) -> Iterator[Arrays]:
    """`DocumentRows.first_rows`, in parts."""
    end = np.zeros(1, np.int64)
    yield {"first_rows": end}
    for first in range(0, len(document_starts) - 1, _DOCUMENTS_AT_A_TIME):
        slots = np.diff(document_starts[first : first + _DOCUMENTS_AT_A_TIME + 1]) - 1  # end-of-text makes no row
        part = end + np.cumsum(-(-slots // num_tokens), dtype=np.int64)
        yield {"first_rows": part}
        end = part[-1:]


def _fitted_windows(document_starts: np.ndarray, num_tokens: int) -> Iterator[Arrays]:
    """The arrays of `BestFitRows`, of groups of documents that are fitted into rows of their own."""
    first = 0
    count = len(document_starts) - 1
    slots_before = num_pieces = np.zeros(1, np.int64)
    none = np.zeros(0, np.int64)
    yield {"starts": none, "slots_before": slots_before, "first_pieces": num_pieces, "cut_documents": none}
    while first < count:
        stop = int(np.searchsorted(np.asarray(document_starts), document_starts[first] + _WINDOW_TOKENS, "right")) - 1
        stop = min(max(stop, first + 1), first + _WINDOW_DOCUMENTS, count)
        documents = np.asarray(document_starts[first : stop + 1])
        starts, slots, keys = _fitted(documents, num_tokens)
        first = stop
        if not len(starts):  # every document is a single token
            continue
        slots_before = slots_before[-1] + np.cumsum(slots)
        num_pieces = num_pieces[-1] + np.append(np.flatnonzero(np.diff(keys)) + 1, len(keys))
        cut = np.array([(np.diff(documents) - 1 > num_tokens).sum()], np.int64)
        yield {"starts": starts, "slots_before": slots_before, "first_pieces": num_pieces, "cut_documents": cut}


def _fitted(document_starts: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(starts and slots of pieces row by row, the row of each: where the first of its longest pieces starts).

    What remains of a document after whole rows joins the fullest row that has room for it, the longest remainder first.
    Rows are in the order of their longest pieces, so that the last rows contain documents of every length.
    """
    starts = document_starts[:-1]
    slots = np.diff(document_starts) - 1
    whole, rest = np.divmod(slots, num_tokens)
    number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    whole_starts = np.repeat(starts, whole) + num_tokens * number
    has_rest = np.flatnonzero(rest)
    rest_starts = (starts + whole * num_tokens)[has_rest]
    rest = rest[has_rest]
    longest_first = np.argsort(-rest, kind="stable")
    rows = fill_rows(rest[longest_first], num_tokens, packing=True)
    members = longest_first[rows.members]
    keys = np.repeat(rest_starts[members[rows.starts[:-1]]], np.diff(rows.starts))
    starts = np.concatenate([whole_starts, rest_starts[members]])
    slots = np.concatenate([np.full(len(whole_starts), num_tokens), rest[members]])
    keys = np.concatenate([whole_starts, keys])
    order = np.lexsort((starts, keys))
    return starts[order], slots[order], keys[order]
