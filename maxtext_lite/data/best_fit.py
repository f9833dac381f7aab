"""Rows of whole documents or sequences, filled by "best fit"."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxtext_lite.data.cache import Arrays, IndexPlace, stored_arrays
from maxtext_lite.data.rows import Documents, Rows, Stretches, ranges, with_padding

_WINDOW_DOCUMENTS = 2**16  # fitted into rows together: tens of MB, and rows at least 98 % full
_WINDOW_TOKENS = 2**27  # at most, unless a single document has more


@dataclasses.dataclass(frozen=True)
class BestFitRows(Rows):
    """Rows of whole documents, fitted to leave little padding; documents longer than a row are cut.

    A document of L tokens takes L - 1 slots, because its last token is only a target. A longer one fills rows of its
    own, and its remainder is fitted in like a document.

    Attributes:
      starts: where each piece starts in the stream; row by row, and in stream order within a row; int64 [pieces].
      slots_before: slots of all pieces before each one, then those of all; int64 [pieces + 1].
      first_pieces: the first piece of each row, then the number of pieces; int64 [rows + 1].
      cut_documents: documents in more than one piece.
    """

    document_starts: np.ndarray
    num_tokens: int
    starts: np.ndarray
    slots_before: np.ndarray
    first_pieces: np.ndarray
    cut_documents: int

    def __len__(self) -> int:
        return len(self.first_pieces) - 1

    @property
    def notes(self) -> tuple[str, ...]:
        """The share of padding, and the documents that are cut."""
        share = int(self.slots_before[-1]) / max(len(self) * self.num_tokens, 1)
        return (
            f"{share:.2%} of the rows' tokens are of documents, the rest is padding; documents longer than "
            f"max_target_length={self.num_tokens}, which are cut: {self.cut_documents:,}.",
        )

    def describe(self) -> dict[str, int]:
        return {"cut_documents": self.cut_documents}

    @property
    def place(self) -> str:
        """How to remake the index, if it is in files."""
        file = self.starts.filename if isinstance(self.starts, np.memmap) else None
        return f": delete {Path(file).parent}" if file else ""

    def stretches(self, rows: np.ndarray) -> Stretches:
        """The pieces of each row."""
        first_pieces = np.asarray(self.first_pieces)
        slots_before = np.asarray(self.slots_before)
        pieces, owners = ranges(first_pieces[rows], first_pieces[rows + 1] - first_pieces[rows])
        slots = slots_before[pieces + 1] - slots_before[pieces]
        return Stretches(np.asarray(self.starts)[pieces], slots, owners)

    def stretches_of_row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and slots of one row's pieces, faster than `stretches`."""
        first, stop = self.first_pieces[row : row + 2].tolist()
        slots_before = np.asarray(self.slots_before[first : stop + 1])
        return np.asarray(self.starts[first:stop]), np.diff(slots_before)

    def count_targets(self, rows: np.ndarray) -> int:
        """Target tokens of these rows, one per input; repeated rows count repeatedly."""
        return int(self.stretches(rows).slots.sum())

    def count_targets_between(self, first: int, stop: int) -> int:
        """Target tokens of rows `first` to `stop - 1`."""
        before = self.slots_before[self.first_pieces[first]]
        return int(self.slots_before[self.first_pieces[stop]] - before)


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

    def documents(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        num_tokens: int,
    ) -> Documents:
        """The sequences in these rows of `num_tokens` slots; sequence n takes starts[n + 1] - starts[n] - 1 of them."""
        first = self.starts[rows]
        places, owners = ranges(first, self.starts[rows + 1] - first)
        numbers = self.members[places]
        slots = starts[numbers + 1] - starts[numbers] - 1
        return with_padding(slots, owners, len(rows), num_tokens)


def fill_rows(
    lengths: np.ndarray,
    num_tokens: int,
    *,
    packing: bool,
) -> FilledRows:
    """Rows filled by "best fit": each sequence in turn joins the fullest row that it fits, or opens one.

    Rows keep the order in which they were opened: the first rows contain the first sequences.

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


def best_fit_rows(document_starts: np.ndarray, num_tokens: int, place: IndexPlace | None) -> BestFitRows:
    """The rows of a stream; arguments as in `sources.rows_of`."""
    fitted = stored_arrays(place, f"fitted-{num_tokens}", _fitted_windows(document_starts, num_tokens))
    starts, slots_before, first_pieces, cut_documents = fitted
    cut = int(cut_documents.sum())
    return BestFitRows(document_starts, num_tokens, starts, slots_before, first_pieces, cut)


def _fitted_windows(document_starts: np.ndarray, num_tokens: int) -> Iterator[Arrays]:
    """The arrays of `BestFitRows` for groups of documents, each fitted into rows of its own."""
    first = 0
    count = len(document_starts) - 1
    slots_before = num_pieces = np.zeros(1, np.int64)
    none = np.zeros(0, np.int64)
    yield {"starts": none, "slots_before": slots_before, "first_pieces": num_pieces, "cut_documents": none}
    while first < count:
        most_tokens = document_starts[first] + _WINDOW_TOKENS
        stop = int(np.searchsorted(np.asarray(document_starts), most_tokens, "right")) - 1
        stop = min(max(stop, first + 1), first + _WINDOW_DOCUMENTS, count)
        documents = np.asarray(document_starts[first : stop + 1])
        starts, slots, keys = _fitted(documents, num_tokens)
        first = stop
        if not len(starts):  # every document is a single token
            continue
        slots_before = slots_before[-1] + np.cumsum(slots)
        row_ends = np.append(np.flatnonzero(np.diff(keys)) + 1, len(keys))
        num_pieces = num_pieces[-1] + row_ends
        is_cut = np.diff(documents) - 1 > num_tokens
        cut = np.array([is_cut.sum()], np.int64)
        yield {"starts": starts, "slots_before": slots_before, "first_pieces": num_pieces, "cut_documents": cut}


def _fitted(document_starts: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(starts and slots of pieces row by row, the row of each: where the first of its longest pieces starts).

    The rest of a document after whole rows joins the fullest row that it fits, the longest rest first. Rows are in the
    order of their longest pieces, so the last rows contain documents of every length.
    """
    starts = document_starts[:-1]
    slots = np.diff(document_starts) - 1
    whole, rest = np.divmod(slots, num_tokens)
    before = np.cumsum(whole) - whole
    number = np.arange(whole.sum()) - np.repeat(before, whole)
    whole_starts = np.repeat(starts, whole) + num_tokens * number
    has_rest = np.flatnonzero(rest)
    rest_starts = (starts + whole * num_tokens)[has_rest]
    rest = rest[has_rest]
    longest_first = np.argsort(-rest, kind="stable")
    rows = fill_rows(rest[longest_first], num_tokens, packing=True)
    members = longest_first[rows.members]
    longest = members[rows.starts[:-1]]
    keys = np.repeat(rest_starts[longest], np.diff(rows.starts))
    starts = np.concatenate([whole_starts, rest_starts[members]])
    whole_slots = np.full(len(whole_starts), num_tokens)
    slots = np.concatenate([whole_slots, rest[members]])
    keys = np.concatenate([whole_starts, keys])
    order = np.lexsort((starts, keys))
    return starts[order], slots[order], keys[order]
