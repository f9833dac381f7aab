"""Rows by an index: best fit by brute force, the same in files and in memory, made once and completely."""

import collections
import os
import pickle
import stat

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data import row_index
from maxtext_lite.data.cache import CACHE_VARIABLE
from maxtext_lite.data.packing import DocumentRows
from maxtext_lite.data.row_index import IndexPlace, rows_of


def stream_of(lengths):
    """A stream whose tokens are their own places, and where its documents start."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.arange(starts[-1], dtype=np.int32), starts


def test_rows_by_hand():
    # Slots: 9 -> two rows of 4 and a rest of 1; 3; 4; 2; 1. The longest rest first: 4 | 3 | 2 | then 1 and 1, each in
    # the fullest row with room: the first document's rest to 3, the last document to 2.
    stream, starts = stream_of([10, 4, 5, 3, 2])
    rows = rows_of("best_fit", starts, 4)
    built = [rows.build(stream, row) for row in range(len(rows))]
    assert [row["tokens"].tolist() for row in built] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 10, 11, 12],
        [14, 15, 16, 17],
        [19, 20, 22, 0],
    ]
    assert [row["targets"].tolist() for row in built] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 11, 12, 13],
        [15, 16, 17, 18],
        [20, 21, 23, 0],
    ]
    assert built[2]["segments"].tolist() == [1, 2, 2, 2]
    assert built[2]["positions"].tolist() == [0, 0, 1, 2]
    assert built[4]["weights"].tolist() == [1, 1, 1, 0]
    assert built[4]["segments"].tolist() == [1, 1, 2, 0]
    assert {name: x.dtype for name, x in built[4].items()} == dict.fromkeys(built[4], np.int32) | {
        "weights": np.float32
    }
    assert rows.note == (
        "95.00% of the rows' tokens are of documents, the rest is padding; 1 documents are longer than "
        "max_target_length=4 and are cut."
    )


def test_documents_of_one_token_make_no_row(monkeypatch):
    monkeypatch.setattr(row_index, "_WINDOW_DOCUMENTS", 2)
    stream, starts = stream_of([1, 1, 3, 1, 1, 1, 1, 2])
    rows = rows_of("best_fit", starts, 4)
    assert [rows.build(stream, row)["targets"].tolist() for row in range(len(rows))] == [[3, 4, 0, 0], [10, 0, 0, 0]]
    assert len(rows_of("best_fit", stream_of([1] * 5)[1], 4)) == 0


@pytest.mark.parametrize("num_tokens", [3, 64])
@pytest.mark.parametrize("window", [1, 20, 2**16])
def test_every_target_is_in_one_row_and_no_fitting_document_is_cut(num_tokens, window, monkeypatch):
    monkeypatch.setattr(row_index, "_WINDOW_DOCUMENTS", window)
    rng = np.random.default_rng(num_tokens)
    lengths = np.concatenate([rng.integers(2, 40, 70), rng.integers(2, 400, 8)])
    rng.shuffle(lengths)
    stream, starts = stream_of(lengths)
    rows = rows_of("best_fit", starts, num_tokens)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    pairs, pieces_of = collections.Counter(), collections.Counter()
    targets = []
    for number in range(len(rows)):
        row = rows.build(stream, number)
        real = row["weights"] > 0
        np.testing.assert_array_equal(real, row["segments"] > 0)
        targets.append(int(real.sum()))
        pairs.update(zip(row["tokens"][real].tolist(), row["targets"][real].tolist(), strict=True))
        for segment in range(1, row["segments"].max() + 1):
            places = row["tokens"][row["segments"] == segment]
            np.testing.assert_array_equal(places, places[0] + np.arange(len(places)))
            np.testing.assert_array_equal(row["positions"][row["segments"] == segment], np.arange(len(places)))
            assert len(set(document_of[places].tolist())) == 1
            pieces_of[int(document_of[places[0]])] += 1
    assert pairs == {(place - 1, place): 1 for place in stream.tolist() if place not in starts}
    assert pieces_of == {number: -(-(int(length) - 1) // num_tokens) for number, length in enumerate(lengths)}
    assert rows.cut_documents == sum(length - 1 > num_tokens for length in lengths.tolist())

    for number in range(len(rows)):
        assert rows.count_targets(np.array([number, number])) == 2 * targets[number]
        assert rows.count_targets_between(number, len(rows)) == sum(targets[number:])


def test_rows_are_full_for_documents_of_any_length():
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.1, 5000), 2, 10**6).astype(int)
    for num_tokens in (256, 2048):
        rows = rows_of("best_fit", stream_of(lengths)[1], num_tokens)
        assert rows.count_targets_between(0, len(rows)) > 0.98 * len(rows) * num_tokens


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(row_index, "_WINDOW_DOCUMENTS", 30)
    monkeypatch.setattr(row_index, "_DOCUMENTS_AT_A_TIME", 7)
    (tmp_path / "data").mkdir()
    return IndexPlace(tmp_path / "data" / "rows", "0123456789abcdef0123")


LENGTHS = np.random.default_rng(1).integers(2, 90, 100)


@pytest.mark.parametrize("packing", ["best_fit", False])
def test_an_index_in_files_gives_the_rows_of_one_in_memory(packing, place):
    stream, starts = stream_of(LENGTHS)
    in_memory, stored = rows_of(packing, starts, 32), rows_of(packing, starts, 32, place)
    assert len(pickle.dumps(stored)) < 3000
    copy = pickle.loads(pickle.dumps(stored))
    again = rows_of(packing, starts, 32, place)
    for rows in (stored, copy, again):
        assert len(rows) == len(in_memory)
        for number in range(len(rows)):
            for name, values in in_memory.build(stream, number).items():
                np.testing.assert_array_equal(rows.build(stream, number)[name], values)
    assert stored.count_targets(np.arange(len(stored))) == len(stream) - len(LENGTHS)


def files_of(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_an_index_is_made_once_for_each_length_and_is_the_same_wherever_it_is_made(place, tmp_path):
    _, starts = stream_of(LENGTHS)
    rows_of("best_fit", starts, 32, place)
    names = sorted(path.name for path in place.beside.iterdir())
    assert names == ["best_fit-32-0123456789abcdef"]
    made = files_of(place.beside)
    before = (place.beside / names[0] / "rows.i64").stat().st_mtime_ns
    rows_of("best_fit", starts, 32, place)
    assert (place.beside / names[0] / "rows.i64").stat().st_mtime_ns == before
    rows_of("best_fit", starts, 16, place)
    rows_of(False, starts, 32, place)
    assert len(list(place.beside.iterdir())) == 3
    elsewhere = IndexPlace(tmp_path / "elsewhere", place.fingerprint)
    rows_of("best_fit", starts, 32, elsewhere)
    assert files_of(elsewhere.beside) == made
    assert not (tmp_path / "cache").exists()


def test_the_index_is_cached_if_the_data_directory_is_read_only(place, tmp_path, monkeypatch):
    data = place.beside.parent
    asked = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(data) and asked(path, mode))  # root may all
    stream, starts = stream_of(LENGTHS)
    rows = rows_of("best_fit", starts, 32, place)
    assert not list(data.iterdir())
    assert [path.name for path in (tmp_path / "cache" / "rows").iterdir()] == ["best_fit-32-0123456789abcdef"]
    assert len(rows.build(stream, 0)["tokens"]) == 32
    assert stat.S_IMODE((tmp_path / "cache" / "rows" / "best_fit-32-0123456789abcdef").stat().st_mode) == 0o755


def test_an_index_made_by_another_process_meanwhile_is_used(place):
    _, starts = stream_of(LENGTHS)

    def write(path):
        rows_of("best_fit", starts, 32, place)  # the other process, which is done first
        (path / "x").write_bytes(b"unfinished")
        return {}

    index = place.get("best_fit-32", write)
    assert sorted(path.name for path in index.iterdir()) == ["index.json", "pieces.i64", "rows.i64"]
    assert [path.name for path in place.beside.iterdir()] == [index.name]


def test_an_index_that_could_not_be_made_leaves_nothing(place):
    def write(path):
        (path / "x").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        place.get("best_fit-32", write)
    assert not list(place.beside.iterdir())


def test_a_damaged_index_is_named(place):
    stream, starts = stream_of(LENGTHS)
    rows_of("best_fit", starts, 32, place)
    index = place.beside / "best_fit-32-0123456789abcdef"
    pieces = (index / "pieces.i64").read_bytes()
    (index / "pieces.i64").write_bytes(pieces[:-16])
    with pytest.raises(UserError) as caught:
        rows_of("best_fit", starts, 32, place)
    assert str(caught.value) == (
        f"{index / 'pieces.i64'} has {len(pieces) - 16:,} bytes, not {len(pieces):,}: delete {index} to remake it."
    )
    for at in (8, 15):  # slots of the first piece; 2**63 of them
        changed = bytearray(pieces)
        changed[at] ^= 64
        (index / "pieces.i64").write_bytes(changed)
        with pytest.raises(UserError, match=f"the index of row 0 is damaged: delete {index}"):
            rows_of("best_fit", starts, 32, place).build(stream, 0)


def test_no_documents_make_no_rows(place):
    none = np.zeros(1, np.int64)
    assert [len(rows_of("best_fit", none, 8, where)) for where in (None, place)] == [0, 0]
    assert len(rows_of(False, none, 8, place)) == 0


def test_rows_of_one_document_each_need_no_memory_for_all(place):
    _, starts = stream_of(LENGTHS)
    rows = rows_of(False, starts, 32, place)
    assert isinstance(rows, DocumentRows)
    assert isinstance(rows.known_first_rows, np.memmap)
