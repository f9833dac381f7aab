"""Cuts tokenized documents into rows of `max_target_length` tokens, any row at random, none stored.

All documents lie in one flat array, the *stream*, each followed by an end-of-text token. A row is a stretch of it: the
inputs are stream[start:stop] and the target of each input is the token after it, also where that is the first token of
the next row. So every token but a document's first, which has no predecessor, is a target in exactly one row.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np


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
