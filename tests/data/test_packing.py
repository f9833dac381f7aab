import collections

import numpy as np
import pytest

from maxtext_lite.data.packing import DocumentRows, PackedRows, build_row, count_targets, fill_rows

END = 99
# Three documents: 1 2 3, then 4, then 5 6 7 8 9; each with its end-of-text token.
STREAM = np.array([1, 2, 3, END, 4, END, 5, 6, 7, 8, 9, END], np.uint16)
STARTS = np.array([0, 4, 6, 12], np.int64)
LAYOUTS = [PackedRows, DocumentRows]


def all_rows(layout, stream, starts):
    spans = [layout.span(row) for row in range(len(layout))]
    return [build_row(stream, starts, start=a, stop=b, num_tokens=layout.num_tokens) for a, b in spans]


def assert_row(row, **expected):
    assert {name: values.tolist() for name, values in row.items()} == expected
    assert {name: values.dtype for name, values in row.items()} == {
        "tokens": np.int32,
        "targets": np.int32,
        "segments": np.int32,
        "positions": np.int32,
        "weights": np.float32,
    }


def test_packed_rows_by_hand():
    rows = all_rows(PackedRows(STARTS, 5), STREAM, STARTS)
    assert len(rows) == 3
    assert_row(
        rows[0],
        tokens=[1, 2, 3, END, 4],
        targets=[2, 3, END, 0, END],
        segments=[1, 1, 1, 1, 2],
        positions=[0, 1, 2, 3, 0],
        weights=[1, 1, 1, 0, 1],
    )
    assert_row(
        rows[1],
        tokens=[END, 5, 6, 7, 8],
        targets=[0, 6, 7, 8, 9],
        segments=[1, 2, 2, 2, 2],
        positions=[0, 0, 1, 2, 3],
        weights=[0, 1, 1, 1, 1],
    )
    assert_row(
        rows[2],
        tokens=[9, END, 0, 0, 0],
        targets=[END, 0, 0, 0, 0],
        segments=[1, 1, 0, 0, 0],
        positions=[0, 1, 0, 0, 0],
        weights=[1, 0, 0, 0, 0],
    )


def test_document_rows_by_hand():
    rows = all_rows(DocumentRows(STARTS, 4), STREAM, STARTS)
    assert len(rows) == 4
    assert_row(
        rows[0],
        tokens=[1, 2, 3, END],
        targets=[2, 3, END, 0],
        segments=[1, 1, 1, 1],
        positions=[0, 1, 2, 3],
        weights=[1, 1, 1, 0],
    )
    assert_row(
        rows[1],
        tokens=[4, END, 0, 0],
        targets=[END, 0, 0, 0],
        segments=[1, 1, 0, 0],
        positions=[0, 1, 0, 0],
        weights=[1, 0, 0, 0],
    )
    assert_row(
        rows[2],
        tokens=[5, 6, 7, 8],
        targets=[6, 7, 8, 9],
        segments=[1, 1, 1, 1],
        positions=[0, 1, 2, 3],
        weights=[1, 1, 1, 1],
    )
    assert_row(
        rows[3],
        tokens=[9, END, 0, 0],
        targets=[END, 0, 0, 0],
        segments=[1, 1, 0, 0],
        positions=[0, 1, 0, 0],
        weights=[1, 0, 0, 0],
    )


@pytest.mark.parametrize("layout_type", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 32, 1000])
@pytest.mark.parametrize("lengths", [[2], [2, 2, 2], [33], [2, 65, 3, 32, 7, 2, 128], "random"], ids=str)
def test_every_token_but_a_documents_first_is_a_target_exactly_once(layout_type, num_tokens, lengths):
    if lengths == "random":
        lengths = np.random.default_rng(0).integers(2, 60, size=80)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    stream = np.arange(starts[-1], dtype=np.int32)  # a token is its own place in the stream
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    rows = all_rows(layout_type(starts, num_tokens), stream, starts)

    pairs = collections.Counter()
    for row in rows:
        real = row["weights"] > 0
        pairs.update(zip(row["tokens"][real].tolist(), row["targets"][real].tolist(), strict=True))
    assert pairs == {(place - 1, place): 1 for place in stream.tolist() if place not in starts}

    for row in rows:
        used = row["segments"] > 0
        tokens, segments, positions = row["tokens"][used], row["segments"][used], row["positions"][used]
        assert not used[len(tokens) :].any()  # padding only at the end
        assert not any(row[name][~used].any() for name in row)
        documents = document_of[tokens]
        np.testing.assert_array_equal(segments, documents - documents[0] + 1)
        np.testing.assert_array_equal(positions, [sum(documents[:i] == d) for i, d in enumerate(documents)])
        if num_tokens > 1:
            assert row["weights"].sum() > 0  # no row without a target
    assert sum(row["weights"].sum() for row in rows) == len(stream) - len(lengths)


@pytest.mark.parametrize("num_tokens", [3, 4, 11, 12, 13])
def test_all_packed_rows_except_the_last_are_full(num_tokens):
    layout = PackedRows(STARTS, num_tokens)
    used = [int((row["segments"] > 0).sum()) for row in all_rows(layout, STREAM, STARTS)]
    # 12 tokens; the last one starts no row of its own, as it has no target.
    assert used == {3: [3, 3, 3, 3], 4: [4, 4, 4], 11: [11], 12: [12], 13: [12]}[num_tokens]


def test_document_rows_never_share_documents():
    for row in all_rows(DocumentRows(STARTS, 3), STREAM, STARTS):
        assert row["segments"].max() == 1


@pytest.mark.parametrize("start", range(12))
def test_count_targets_is_the_sum_of_the_weights(start):
    for stop in range(start + 1, 13):
        row = build_row(STREAM, STARTS, start=start, stop=stop, num_tokens=16)
        by_hand = sum(1 for place in range(start, stop) if STREAM[place] != END)
        assert count_targets(STARTS, start=start, stop=stop) == row["weights"].sum() == by_hand


@pytest.mark.parametrize("layout_type", LAYOUTS)
@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_targets_of_rows_are_the_sums_of_the_weights(num_tokens, layout_type):
    layout = layout_type(STARTS, num_tokens)
    weights = [int(row["weights"].sum()) for row in all_rows(layout, STREAM, STARTS)]
    assert [layout.count_targets(np.array([row])) for row in range(len(layout))] == weights
    twice = np.arange(len(layout)).repeat(2)
    assert layout.count_targets(twice) == 2 * sum(weights)
    for first in range(len(layout)):
        assert layout.count_targets_between(first, len(layout)) == sum(weights[first:])


@pytest.mark.parametrize("layout_type", LAYOUTS)
def test_no_documents_make_no_rows(layout_type):
    assert len(layout_type(np.zeros(1, np.int64), 8)) == 0


def test_rows_are_filled_by_hand():
    # Rows of 10 slots: 6 opens a row; 5 opens another; 4 fits both and fills the first; 3 goes to the second, which
    # then has 2 left; 10 opens a third; 2 fills the second; 1 opens a fourth.
    rows = fill_rows(np.array([6, 5, 4, 3, 10, 2, 1]), 10, packing=True)
    assert [rows.of(row).tolist() for row in range(len(rows))] == [[0, 2], [1, 3, 5], [4], [6]]
    apart = fill_rows(np.array([6, 5, 4]), 10, packing=False)
    assert [apart.of(row).tolist() for row in range(len(apart))] == [[0], [1], [2]]


@pytest.mark.parametrize("num_tokens", [1, 7, 100])
def test_every_sequence_joins_the_fullest_row_with_room(num_tokens):
    lengths = np.random.default_rng(num_tokens).integers(1, num_tokens + 1, 200)
    rows = fill_rows(lengths, num_tokens, packing=True)
    filled: list[int] = []
    row_of = {int(number): row for row in range(len(rows)) for number in rows.of(row)}
    assert sorted(row_of) == list(range(200))
    for number, length in enumerate(lengths.tolist()):
        row = row_of[number]
        best = max((used for used in filled if used + length <= num_tokens), default=0)
        if row == len(filled):
            filled.append(0)
        assert filled[row] == best
        filled[row] += length
    assert max(filled) <= num_tokens
