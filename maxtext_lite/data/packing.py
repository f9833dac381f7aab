"""Cuts tokenized documents into rows of `max_target_length` tokens, or fills rows with whole sequences.

All documents lie in one flat array, the *stream*, each followed by an end-of-text token. A row is a stretch of it: the
inputs are stream[start:stop] and the target of each input is the token after it, also where that is the first token of
the next row. So every token but a document's first, which has no predecessor, is a target in exactly one row.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

FIELDS = ("tokens", "targets", "segments", "positions", "weights")
"""The arrays of an example."""
REFERENCE = "reference"
"""A further array of examples for DPO: at the first token of each sequence, the reference's summed log-probability of
its answers; 0 elsewhere."""


def field_dtype(name: str) -> type[np.generic]:
    """int32 for FIELDS but the weights, otherwise float32."""
    return np.int32 if name in FIELDS[:-1] else np.float32


@dataclasses.dataclass(frozen=True)
class PackedRows:
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

    def span(self, row: int) -> tuple[int, int]:
        """First stream position of the row's inputs, and the one after the last."""
        start = row * self.num_tokens
        return start, min(start + self.num_tokens, int(self.document_starts[-1]))

    def targets_of_rows(self) -> np.ndarray:
        """Target tokens of each row: all inputs but the last tokens of documents; int64 [rows]."""
        ends = np.bincount((self.document_starts[1:] - 1) // self.num_tokens, minlength=len(self))[: len(self)]
        targets = self.num_tokens - ends
        # Past the stream's end there is nothing; its last token, where it alone is past the rows, is no input.
        targets[-1:] -= max(len(self) * self.num_tokens - int(self.document_starts[-1]), 0)
        return targets


@dataclasses.dataclass(frozen=True)
class DocumentRows:
    """Rows that never hold two documents: a document starts a row and goes on in further ones; the rest is padding.

    Attributes: as of `PackedRows`.
    """

    document_starts: np.ndarray
    num_tokens: int

    @functools.cached_property
    def _first_rows(self) -> np.ndarray:
        # A document's last token, end-of-text, is never an input that has a target, so it alone makes no row.
        rows_of_document = -(-(np.diff(self.document_starts) - 1) // self.num_tokens)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(rows_of_document)])

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def span(self, row: int) -> tuple[int, int]:
        """First stream position of the row's inputs, and the one after the last."""
        document = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        start = int(self.document_starts[document]) + (row - int(self._first_rows[document])) * self.num_tokens
        return start, min(start + self.num_tokens, int(self.document_starts[document + 1]))

    def targets_of_rows(self) -> np.ndarray:
        """Target tokens of each row: `num_tokens`, but of a document's last row what is left; int64 [rows]."""
        targets = np.full(len(self), self.num_tokens)  # and every document has a row
        missing = np.diff(self._first_rows) * self.num_tokens - (np.diff(self.document_starts) - 1)
        targets[self._first_rows[1:] - 1] -= missing
        return targets


def build_row(
    stream: np.ndarray, document_starts: np.ndarray, *, start: int, stop: int, num_tokens: int
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
    tokens[:used] = stream[start:stop]
    following = stream[start + 1 : stop + 1]  # one short where the row ends with the stream
    targets[: len(following)] = following
    weights[:used] = 1.0

    # Documents that start after the row's first token; the one that starts at `stop` only ends the last document.
    first = int(np.searchsorted(document_starts, start, side="right"))
    last = int(np.searchsorted(document_starts, stop, side="right"))
    starts = document_starts[first:last] - start
    targets[starts - 1] = 0
    weights[starts - 1] = 0.0
    inner_starts = starts[starts < used]
    segments[inner_starts] = 1
    segments[:used] = np.cumsum(segments[:used]) + 1
    bounds = np.concatenate([np.zeros(1, np.int64), inner_starts, np.full(1, used, np.int64)])
    positions[:used] = np.arange(used) - np.repeat(bounds[:-1], np.diff(bounds))
    return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions, "weights": weights}


def count_targets(document_starts: np.ndarray, *, start: int, stop: int) -> int:
    """Target tokens of the inputs stream[start:stop]: all but the last token of each document."""
    last_tokens = document_starts[1:] - 1
    ends = int(np.searchsorted(last_tokens, stop) - np.searchsorted(last_tokens, start))
    return stop - start - ends


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
