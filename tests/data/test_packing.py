import collections

import numpy as np
import pytest

from maxtext_lite.data.packing import DocumentRows, PackedRows, build_row, fill_rows

END = 99
# Three documents: 1 2 3, then 4, then 5 6 7 8 9; each with its end-of-text token.
STREAM = np.array([1, 2, 3, END, 4, END, 5, 6, 7, 8, 9, END], np.uint16)
STARTS = np.array([0, 4, 6, 12], np.int64)
LAYOUTS = [PackedRows, DocumentRows]
DTYPES = dict.fromkeys(["tokens", "targets", "segments", "positions"], np.int32) | {
    "weights": np.float32
}


def all_rows(layout, stream, starts):
    spans = [layout.span(row) for row in range(len(layout))]
    return [
        build_row(stream, starts, start=a, stop=b, num_tokens=layout.num_tokens)
        for a, b in spans
    ]


PACKED = """
1 2 3 99 4 | 2 3 99 0 99 | 1 1 1 1 2 | 0 1 2 3 0 | 1 1 1 0 1
99 5 6 7 8 | 0 6 7 8 9 | 1 2 2 2 2 | 0 0 1 2 3 | 0 1 1 1 1
9 99 0 0 0 | 99 0 0 0 0 | 1 1 0 0 0 | 0 1 0 0 0 | 1 0 0 0 0
"""
OF_DOCUMENTS = """
1 2 3 99 | 2 3 99 0 | 1 1 1 1 | 0 1 2 3 | 1 1 1 0
4 99 0 0 | 99 0 0 0 | 1 1 0 0 | 0 1 0 0 | 1 0 0 0
5 6 7 8 | 6 7 8 9 | 1 1 1 1 | 0 1 2 3 | 1 1 1 1
9 99 0 0 | 99 0 0 0 | 1 1 0 0 | 0 1 0 0 | 1 0 0 0
"""


@pytest.mark.fast
@pytest.mark.parametrize(
    ("layout", "expected"),
    [(PackedRows(STARTS, 5), PACKED), (DocumentRows(STARTS, 4), OF_DOCUMENTS)],
)
def test_rows_by_hand(layout, expected):
    """Tokens, targets, segments, positions and weights of each row."""
    for row, line in zip(
        all_rows(layout, STREAM, STARTS), expected.strip().split("\n"), strict=True
    ):
        assert {name: values.dtype for name, values in row.items()} == DTYPES
        for name, numbers in zip(DTYPES, line.split("|"), strict=True):
            assert row[name].tolist() == [int(number) for number in numbers.split()], (
                name
            )


@pytest.mark.parametrize("layout_type", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 32, 1000])
@pytest.mark.parametrize("lengths", [[2], [2, 65, 3, 32, 7, 2, 128]], ids=str)
def test_every_token_but_a_documents_first_is_a_target_exactly_once(
    layout_type, num_tokens, lengths
):
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    stream = np.arange(
        starts[-1], dtype=np.int32
    )  # a token is its own place in the stream
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    layout = layout_type(starts, num_tokens)
    rows = all_rows(layout, stream, starts)

    pairs = collections.Counter()
    for number, row in enumerate(rows):
        real = row["weights"] > 0
        pairs.update(
            zip(
                row["tokens"][real].tolist(), row["targets"][real].tolist(), strict=True
            )
        )
        used = row["segments"] > 0
        tokens, segments, positions = (
            row["tokens"][used],
            row["segments"][used],
            row["positions"][used],
        )
        assert not used[len(tokens) :].any()  # padding only at the end
        assert not any(row[name][~used].any() for name in row)
        documents = document_of[tokens]
        np.testing.assert_array_equal(segments, documents - documents[0] + 1)
        np.testing.assert_array_equal(
            positions, np.arange(len(documents)) - np.searchsorted(documents, documents)
        )
        assert layout.count_targets(np.array([number, number])) == 2 * real.sum()
        assert real.any() or num_tokens == 1
        if layout_type is DocumentRows:
            assert segments.max() == 1
        elif number < len(rows) - 1:
            assert used.all()
    assert pairs == {
        (place - 1, place): 1 for place in stream.tolist() if place not in starts
    }
    weights = [row["weights"].sum() for row in rows]
    for first in (0, len(rows) // 2):
        assert layout.count_targets_between(first, len(rows)) == sum(weights[first:])


def test_sequences_fill_rows_by_hand():
    # Rows of 10 slots: 6 opens a row; 5 opens another; 4 fits both and fills the first; 3 goes to the second, which
    # then has 2 left; 10 opens a third; 2 fills the second; 1 opens a fourth.
    for packing, expected in (
        (True, [[0, 2], [1, 3, 5], [4], [6]]),
        (False, [[i] for i in range(7)]),
    ):
        rows = fill_rows(np.array([6, 5, 4, 3, 10, 2, 1]), 10, packing=packing)
        assert [rows.of(row).tolist() for row in range(len(rows))] == expected
