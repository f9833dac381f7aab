import numpy as np
import pytest

from maxtext_lite.data.best_fit import fill_rows
from maxtext_lite.data.sources import rows_of

END = 99
# Three documents: 1 2 3, then 4, then 5 6 7 8 9; each with its end-of-text token.
STREAM = np.array([1, 2, 3, END, 4, END, 5, 6, 7, 8, 9, END], np.uint16)
STARTS = np.array([0, 4, 6, 12], np.int64)
DTYPES = dict.fromkeys(["tokens", "targets", "segments", "positions"], np.int32) | {
    "weights": np.float32
}


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
    [(rows_of(True, STARTS, 5), PACKED), (rows_of(False, STARTS, 4), OF_DOCUMENTS)],
)
def test_rows_by_hand(layout, expected):
    """Tokens, targets, segments, positions and weights of each row."""
    lines = expected.strip().split("\n")
    assert len(layout) == len(lines)
    for number, line in enumerate(lines):
        row = layout.build(STREAM, number)
        assert {name: values.dtype for name, values in row.items()} == DTYPES
        for name, numbers in zip(DTYPES, line.split("|"), strict=True):
            assert row[name].tolist() == [int(number) for number in numbers.split()], (
                name
            )


def test_sequences_fill_rows_by_hand():
    # Rows of 10 slots: 6 opens a row; 5 opens another; 4 fits both and fills the first; 3 goes to the second, which
    # then has 2 left; 10 opens a third; 2 fills the second; 1 opens a fourth.
    for packing, expected in (
        (True, [[0, 2], [1, 3, 5], [4], [6]]),
        (False, [[i] for i in range(7)]),
    ):
        rows = fill_rows(np.array([6, 5, 4, 3, 10, 2, 1]), 10, packing=packing)
        assert [rows.of(row).tolist() for row in range(len(rows))] == expected
