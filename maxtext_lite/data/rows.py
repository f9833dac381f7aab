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
from typing import NamedTuple, Protocol

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.cache import Arrays, IndexPlace, stored_arrays


class TokenStream(Protocol):
    """A sequence of token ids whose slices are arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class TokenizedDocuments:
    """The tokens of documents, without the empty ones.

    Attributes:
      stream: those of all documents.
      starts: where each document starts, then the length of the stream; int64.
      fingerprint: of tokens and documents, recorded in a run's checkpoints.
      place: place for indices of their rows; None: they are in memory.
      notes: sentences on where they come from.
    """

    stream: TokenStream
    starts: np.ndarray
    fingerprint: str
    place: IndexPlace | None = None
    notes: tuple[str, ...] = ()


_DOCUMENTS_AT_ONCE = 2**20

FIELDS = ("tokens", "targets", "segments", "positions", "weights")
"""The arrays of an example."""
REFERENCE = "reference"
"""A further array of DPO's examples, the reference's log-probabilities. The first token of each sequence has the sum
over its answers; the others have 0."""


def count_by_length(document_starts: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Documents by the power of two that their tokens reach, int64 [64], and the fewest and the most tokens."""
    counts = np.zeros(64, np.int64)
    longest = 0
    shortest = 2**62
    for first in range(0, len(document_starts) - 1, _DOCUMENTS_AT_ONCE):
        lengths = np.diff(document_starts[first : first + _DOCUMENTS_AT_ONCE + 1])
        _, exponents = np.frexp(lengths.astype(np.float64))
        counts += np.bincount(exponents - 1, minlength=64)
        longest = max(longest, int(lengths.max()))
        shortest = min(shortest, int(lengths.min()))
    return counts, shortest, longest


def field_dtype(name: str) -> type[np.generic]:
    """int32 for all FIELDS except the weights, otherwise float32."""
    return np.int32 if name in FIELDS[:-1] else np.float32


class Documents(NamedTuple):
    """The documents in some rows, in any order. A row's padding counts as one, as for attention.

    Attributes:
      lengths: tokens of each document in its row; int64.
      rows: index of its row among the requested rows; int64.
      padding: whether it is the padding of its row; bool.
    """

    lengths: np.ndarray
    rows: np.ndarray
    padding: np.ndarray


class Stretches(NamedTuple):
    """Ranges of the stream with the inputs of some rows, each row's one after the other.

    Attributes:
      starts: where each starts in the stream; int64.
      slots: its inputs; int64.
      owners: index of its row among the requested rows; int64.
    """

    starts: np.ndarray
    slots: np.ndarray
    owners: np.ndarray


class Rows:
    """Rows of a stream; picklable.

    Attributes:
      document_starts: where each document starts in the stream, then the stream's length; int64, increasing.
      num_tokens: tokens of a row.
    """

    document_starts: np.ndarray
    num_tokens: int

    def __len__(self) -> int:
        raise NotImplementedError

    def stretches(self, rows: np.ndarray) -> Stretches:
        """The stretches of these rows."""
        raise NotImplementedError

    def stretches_of_row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and slots of one row's stretches."""
        starts, slots, _ = self.stretches(np.array([row]))
        return starts, slots

    def build(self, stream: TokenStream, row: int) -> Arrays:
        """The example of a row: its stretches, each of one or several documents, padded at the end.

        Returns:
          Arrays [num_tokens]. `tokens`; `targets`, the next token of the same document, or 0; `segments`, the number of
          the document within the row, from 1, 0 for padding; `positions`, from 0 in each segment, 0 for padding; all
          int32. `weights`, float32: 1 where there is a target, 0 on end-of-text and padding.
        Raises:
          UserError: the rows do not belong to this stream.
        """
        example = empty_row(self.num_tokens)
        tokens, targets, segments, positions, weights = example.values()
        places = _places(self.num_tokens)
        document_starts = np.asarray(self.document_starts)
        starts, slots = self.stretches_of_row(row)
        # Documents that start after the first token; one that starts at the end only ends the document before it.
        firsts, lasts = document_starts.searchsorted((starts, starts + slots), side="right")
        used = 0
        segment = 0
        parts = zip(starts.tolist(), slots.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
        for start, count, first, last in parts:
            end = used + count
            is_sound = used < end <= self.num_tokens
            read = stream[start : start + count * is_sound + 1]  # one token short if the stretch ends with the stream
            if not is_sound or len(read) < count:
                raise UserError(f"the index of row {row} is damaged{self.place}.")
            tokens[used:end] = read[:count]
            targets[used : used + len(read) - 1] = read[1:]
            weights[used:end] = 1.0
            bounds = [used, end]
            if first < last:
                begun = document_starts[first:last] - start + used
                targets[begun - 1] = 0
                weights[begun - 1] = 0.0
                bounds[1:1] = begun[begun < end].tolist()
            for begin, stop in itertools.pairwise(bounds):
                segment += 1
                segments[begin:stop] = segment
                positions[begin:stop] = places[: stop - begin]
            used = end
        return example

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what is lost or padded."""
        return ()

    def describe(self) -> dict[str, int]:
        """Counts for the description of a source."""
        return {}

    @property
    def place(self) -> str:
        """How to remake a damaged index of the rows, a clause; "" where there is none in files."""
        return ""

    def count_targets(self, rows: np.ndarray) -> int:
        """Target tokens of these rows; repeated rows count repeatedly."""
        starts, slots, _ = self.stretches(rows)
        return int(_targets_between(self.document_starts, starts, starts + slots).sum())

    def count_targets_between(self, first: int, stop: int) -> int:
        """Target tokens of rows `first` to `stop - 1`, in constant memory."""
        starts, slots, _ = self.stretches(np.array([first, stop - 1]))
        return int(_targets_between(self.document_starts, starts[0], starts[1] + slots[1]))

    def documents(self, rows: np.ndarray) -> Documents:
        """The documents in these rows, without reading a token; one that is cut counts as its parts."""
        starts, slots, owners = self.stretches(rows)
        stops = starts + slots
        document_starts = np.asarray(self.document_starts)
        # The document that each stretch begins in, and those that begin later in it.
        first = document_starts.searchsorted(starts, side="right")
        last = document_starts.searchsorted(stops)
        within, places = ranges(first, last - first)
        begun = np.minimum(document_starts[first], stops) - starts
        later = np.minimum(document_starts[within + 1], stops[places]) - document_starts[within]
        lengths = np.concatenate([begun, later])
        owners = np.concatenate([owners, owners[places]])
        return with_padding(lengths, owners, len(rows), self.num_tokens)


@dataclasses.dataclass(frozen=True)
class PackedRows(Rows):
    """Rows cut from the stream every `num_tokens` tokens; documents may share a row, and the last row is padded."""

    document_starts: np.ndarray
    num_tokens: int

    def __len__(self) -> int:
        # The stream's last token has no target, so it does not make a row by itself.
        inputs = max(int(self.document_starts[-1]) - 1, 0)
        return -(-inputs // self.num_tokens)

    def stretches(self, rows: np.ndarray) -> Stretches:
        """One for each row."""
        starts = rows * self.num_tokens
        slots = np.minimum(self.num_tokens, self.document_starts[-1] - starts)
        return Stretches(starts, slots, np.arange(len(rows)))


@dataclasses.dataclass(frozen=True)
class DocumentRows(Rows):
    """Rows of one document each: a document starts a row and continues in further rows; the rest is padding.

    Attributes:
      first_rows: the first row of each document, then the number of rows; int64.
    """

    document_starts: np.ndarray
    num_tokens: int
    first_rows: np.ndarray

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def stretches(self, rows: np.ndarray) -> Stretches:
        """One for each row."""
        first_rows = np.asarray(self.first_rows)
        document_starts = np.asarray(self.document_starts)
        documents = np.searchsorted(first_rows, rows, side="right") - 1
        starts = document_starts[documents] + (rows - first_rows[documents]) * self.num_tokens
        slots = np.minimum(self.num_tokens, document_starts[documents + 1] - starts)
        return Stretches(starts, slots, np.arange(len(rows)))


def empty_row(num_tokens: int) -> Arrays:
    """The arrays of FIELDS, all 0."""
    integers = np.zeros((len(FIELDS) - 1, num_tokens), np.int32)
    weights = np.zeros(num_tokens, np.float32)
    return dict(zip(FIELDS, (*integers, weights), strict=True))


def segments_row(sequences: Iterable[tuple[np.ndarray, np.ndarray | float]], num_tokens: int) -> Arrays:
    """The example of whole sequences, each a segment, padded at the end to `num_tokens`.

    Args:
      sequences: the token ids of each sequence, where all but the last are inputs; and the weights of its targets, all
        but the first.
    Returns:
      Arrays as in `Rows.build`.
    """
    example = empty_row(num_tokens)
    tokens, targets, segments, positions, weights = example.values()
    places = _places(num_tokens)
    used = 0
    for segment, (token_ids, target_weights) in enumerate(sequences, start=1):
        slots = len(token_ids) - 1
        here = slice(used, used + slots)
        tokens[here] = token_ids[:-1]
        targets[here] = token_ids[1:]
        weights[here] = target_weights
        segments[here] = segment
        positions[here] = places[:slots]
        used += slots
    return example


@functools.lru_cache(maxsize=4)
def _places(num_tokens: int) -> np.ndarray:
    return np.arange(num_tokens, dtype=np.int32)


def _targets_between(
    document_starts: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
) -> np.ndarray:
    """Target tokens of each stretch of inputs: all except the last of each document."""
    next_starts = np.asarray(document_starts)[1:]
    ended_before = next_starts.searchsorted(start, side="right")
    ended = next_starts.searchsorted(stop, side="right") - ended_before
    return stop - start - ended


def ranges(first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the numbers first[i] to first[i] + counts[i] - 1 for each i in turn, the i of each number); int64."""
    owners = np.repeat(np.arange(len(counts)), counts)
    offsets = first - np.cumsum(counts) + counts
    return offsets[owners] + np.arange(len(owners)), owners


def with_padding(
    slots: np.ndarray,
    owners: np.ndarray,
    num_rows: int,
    num_tokens: int,
) -> Documents:
    """Documents that take these slots of their rows, and the padding of each row."""
    used = np.bincount(owners, weights=slots, minlength=num_rows).astype(np.int64)
    lengths = np.concatenate([slots, num_tokens - used])
    rows = np.concatenate([owners, np.arange(num_rows)])
    padding = np.arange(len(lengths)) >= len(slots)
    return Documents(lengths, rows, padding)


_DOCUMENTS_AT_A_TIME = 2**20


def document_rows(document_starts: np.ndarray, num_tokens: int, place: IndexPlace | None) -> DocumentRows:
    """Rows of one document each; arguments as in `sources.rows_of`."""
    (first_rows,) = stored_arrays(place, f"none-{num_tokens}", _first_rows(document_starts, num_tokens))
    return DocumentRows(document_starts, num_tokens, first_rows)


def _first_rows(document_starts: np.ndarray, num_tokens: int) -> Iterator[Arrays]:
    """`DocumentRows.first_rows`, in parts."""
    end = np.zeros(1, np.int64)
    yield {"first_rows": end}
    for first in range(0, len(document_starts) - 1, _DOCUMENTS_AT_A_TIME):
        slots = np.diff(document_starts[first : first + _DOCUMENTS_AT_A_TIME + 1]) - 1  # end-of-text makes no row
        part = end + np.cumsum(-(-slots // num_tokens), dtype=np.int64)
        yield {"first_rows": part}
        end = part[-1:]
