"""Cuts tokenized documents into rows of `max_target_length` tokens, or fills rows with whole sequences.

All documents lie in one flat array, the *stream*, each followed by an end-of-text token. A row is a stretch of it: the
inputs are stream[start:stop] and the target of each input is the token after it, also where that is the first token of
the next row. So every token but a document's first, which has no predecessor, is a target in exactly one row.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple, Protocol

import numpy as np


class TokenStream(Protocol):
    """A sequence of token ids, whose slices are arrays of them: an array, or one that reads them from files."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """Token ids, of an integer dtype; a slice has no step."""
        ...


FIELDS = ("tokens", "targets", "segments", "positions", "weights")
"""The arrays of an example."""
REFERENCE = "reference"
"""A further array of examples for DPO: at the first token of each sequence, the reference's summed log-probability of
its answers; 0 elsewhere."""


def field_dtype(name: str) -> type[np.generic]:
    """int32 for FIELDS but the weights, otherwise float32."""
    return np.int32 if name in FIELDS[:-1] else np.float32


class Documents(NamedTuple):
    """The documents in some rows, in any order. A row's padding counts as one: attention takes it for one.

    Attributes:
      lengths: tokens of each in its row; int64.
      rows: the place of its row among those that were asked for; int64.
    """

    lengths: np.ndarray
    rows: np.ndarray


class Rows(Protocol):
    """Which stretches of a stream each row holds; picklable."""

    @property
    def num_tokens(self) -> int:
        """Tokens a row, T."""
        ...

    def __len__(self) -> int: ...

    def build(self, stream: TokenStream, row: int) -> dict[str, np.ndarray]:
        """A row, as `build_row` describes it."""
        ...

    def count_targets(self, rows: np.ndarray) -> int:
        """Target tokens of these rows, each counted as often as it stands there."""
        ...

    def count_targets_between(self, first: int, stop: int) -> int:
        """Target tokens of rows `first` to `stop - 1`, in constant memory."""
        ...

    def documents(self, rows: np.ndarray) -> Documents:
        """The documents in these rows, without reading a token."""
        ...


class _Stretches:
    """Rows that are one stretch of the stream each, in its order."""

    document_starts: np.ndarray
    num_tokens: int

    def span(self, row: int) -> tuple[int, int]:
        """First stream position of the row's inputs, and the one after the last."""
        starts, stops = self.spans(np.array([row]))
        return int(starts[0]), int(stops[0])

    def spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`span` of each of these rows."""
        raise NotImplementedError

    def build(self, stream: TokenStream, row: int) -> dict[str, np.ndarray]:
        """See `Rows`."""
        start, stop = self.span(row)
        return build_row(stream, self.document_starts, start=start, stop=stop, num_tokens=self.num_tokens)

    def count_targets(self, rows: np.ndarray) -> int:
        """See `Rows`."""
        starts, stops = self.spans(rows)
        return int(count_targets(self.document_starts, start=starts, stop=stops).sum())

    def count_targets_between(self, first: int, stop: int) -> int:
        """See `Rows`."""
        start, end = self.span(first)[0], self.span(stop - 1)[1]
        return int(count_targets(self.document_starts, start=start, stop=end))

    def documents(self, rows: np.ndarray) -> Documents:
        """See `Rows`."""
        starts, stops = self.spans(rows)
        document_starts, places = np.asarray(self.document_starts), np.arange(len(rows))
        first, last = document_starts.searchsorted(starts, side="right"), document_starts.searchsorted(stops)
        within, owners = ranges(first, last - first)
        # A row begins, documents begin in it, its padding begins, and it ends.
        bounds = np.concatenate([starts, document_starts[within], stops, starts + self.num_tokens])
        owners = np.concatenate([places, owners, places, places])
        order = np.lexsort((bounds, owners))
        is_first = order < len(rows)
        return Documents(np.diff(bounds[order])[~is_first[1:]], owners[order][~is_first])


@dataclasses.dataclass(frozen=True)
class PackedRows(_Stretches):
    """Rows that cut the stream every `num_tokens` tokens; several documents may share a row. The last row is padded.

    Attributes:
      document_starts: where each document starts in the stream, then the stream's length; int64, increasing.
      num_tokens: tokens a row.
    """

    document_starts: np.ndarray
    num_tokens: int

    def __len__(self) -> int:
        # The stream's last token is never an input that has a target, so it alone makes no row.
        return -(-(int(self.document_starts[-1]) - 1) // self.num_tokens) if len(self.document_starts) > 1 else 0

    def spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`span` of each of these rows."""
        starts = rows * self.num_tokens
        return starts, np.minimum(starts + self.num_tokens, self.document_starts[-1])


@dataclasses.dataclass(frozen=True)
class DocumentRows(_Stretches):
    """Rows that never hold two documents: a document starts a row and goes on in further ones; the rest is padding.

    Attributes:
      document_starts, num_tokens: as of `PackedRows`.
      known_first_rows: what `first_rows` gives, from a file; None: it is made.
    """

    document_starts: np.ndarray
    num_tokens: int
    known_first_rows: np.ndarray | None = None

    @functools.cached_property
    def _first_rows(self) -> np.ndarray:
        if self.known_first_rows is not None:
            return self.known_first_rows
        return np.concatenate([np.zeros(1, np.int64), first_rows(self.document_starts, self.num_tokens)])

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`span` of each of these rows."""
        first_rows, document_starts = np.asarray(self._first_rows), np.asarray(self.document_starts)
        documents = np.searchsorted(first_rows, rows, side="right") - 1
        starts = document_starts[documents] + (rows - first_rows[documents]) * self.num_tokens
        return starts, np.minimum(starts + self.num_tokens, document_starts[documents + 1])


def first_rows(document_starts: np.ndarray, num_tokens: int, before: int = 0) -> np.ndarray:
    """The row after the last of each document, where none holds two and `before` rows come first; int64 [documents]."""
    # A document's last token, end-of-text, is never an input that has a target, so it alone makes no row.
    return before + np.cumsum(-(-(np.diff(document_starts) - 1) // num_tokens), dtype=np.int64)


def build_row(
    stream: TokenStream, document_starts: np.ndarray, *, start: int, stop: int, num_tokens: int
) -> dict[str, np.ndarray]:
    """The example whose inputs are stream[start:stop], padded at the end to `num_tokens`.

    Args:
      stream: token ids of all documents, each with its end-of-text token.
      document_starts: as of `PackedRows`.
    Returns:
      Arrays [num_tokens]. `tokens`; `targets`, the next token of the same document, else 0; `segments`, the document's
      number within the row from 1, 0 on padding; `positions`, from 0 in each segment, 0 on padding; all int32.
      `weights`, float32: 1 where there is a target, 0 on end-of-text and padding.
    """
    used = stop - start
    tokens, targets, segments, positions = np.zeros((4, num_tokens), np.int32)
    weights = np.zeros(num_tokens, np.float32)
    read = stream[start : stop + 1]  # one short where the row ends with the stream
    tokens[:used] = read[:used]
    targets[: len(read) - 1] = read[1:]
    weights[:used] = 1.0

    # Documents that start after the row's first token; the one that starts at `stop` only ends the last document.
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


@functools.lru_cache(maxsize=4)
def _places(num_tokens: int) -> np.ndarray:
    return np.arange(num_tokens, dtype=np.int32)


def count_targets(document_starts: np.ndarray, *, start: int | np.ndarray, stop: int | np.ndarray) -> np.ndarray:
    """Target tokens of the inputs stream[start:stop]: all but the last token of each document; of each pair of ends."""
    next_starts = np.asarray(document_starts)[1:]
    ends = np.searchsorted(next_starts, stop, side="right") - np.searchsorted(next_starts, start, side="right")
    return np.asarray(stop - start - ends)


def ranges(first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the numbers first[i] to first[i] + counts[i] - 1 of each i in turn, the i of each number); int64."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return (first - np.cumsum(counts) + counts)[owners] + np.arange(len(owners)), owners


def with_padding(slots: np.ndarray, owners: np.ndarray, num_rows: int, num_tokens: int) -> Documents:
    """Documents of these slots, and what they leave of each row."""
    left = num_tokens - np.bincount(owners, weights=slots, minlength=num_rows).astype(np.int64)
    return Documents(np.concatenate([slots, left]), np.concatenate([owners, np.arange(num_rows)]))


@dataclasses.dataclass(frozen=True)
class FilledRows:
    """Rows of whole sequences.

    Attributes:
      members: numbers of the sequences, row by row, in a row in increasing order; int64.
      starts: where each row starts in `members`, then their number; int64.
    """

    members: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, row: int) -> np.ndarray:
        """Numbers of the sequences in a row."""
        return self.members[self.starts[row] : self.starts[row + 1]]

    def documents(self, rows: np.ndarray, starts: np.ndarray, num_tokens: int) -> Documents:
        """The sequences in these rows, of which number n takes starts[n + 1] - starts[n] - 1 slots of num_tokens."""
        places, owners = ranges(self.starts[rows], self.starts[rows + 1] - self.starts[rows])
        numbers = self.members[places]
        return with_padding(starts[numbers + 1] - starts[numbers] - 1, owners, len(rows), num_tokens)


def fill_rows(lengths: np.ndarray, num_tokens: int, *, packing: bool) -> FilledRows:
    """Each sequence in turn goes into the fullest row that has room for it, or else opens a row: "best fit".

    Rows are in the order in which they were opened, so that the first rows hold the first sequences.

    Args:
      lengths: slots that each sequence takes, from 1 to num_tokens; int64.
      num_tokens: slots of a row.
      packing: False: a row for each sequence.
    """
    if not packing:
        return FilledRows(np.arange(len(lengths)), np.arange(len(lengths) + 1))
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(num_tokens + 1)]  # rows by the slots that they have left
    rooms = 0  # bit r is set where some row has r slots left
    for number, length in enumerate(lengths.tolist()):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the least that suffices
            row = with_room[room].pop()
            rooms &= ~(int(not with_room[room]) << room)
        else:
            room, row = num_tokens, len(rows)
            rows.append([])
        rows[row].append(number)
        if left := room - length:
            with_room[left].append(row)
            rooms |= 1 << left
    members = np.array([number for row in rows for number in row], np.int64)
    return FilledRows(members, np.cumsum([0, *map(len, rows)], dtype=np.int64))
