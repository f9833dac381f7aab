"""Rows of every packing have every target once; an index of rows is the same in files and in memory, made once."""

import collections
import os
import pickle

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from maxtext_lite.config import UserError
from maxtext_lite.data import best_fit
from maxtext_lite.data import rows as row_index
from maxtext_lite.data.cache import CACHE_VARIABLE, IndexPlace
from maxtext_lite.data.sources import rows_of


def stream_of(lengths):
    """A stream whose tokens are their own places, and where its documents start."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.arange(starts[-1], dtype=np.int32), starts


@pytest.mark.fast
def test_rows_by_hand():
    # Slots: 9 -> two rows of 4 and a rest of 1; 3; 4; 2; 1. The longest rest first: 4 | 3 | 2 | then 1 and 1, each in
    # the fullest row with room: the first document's rest to 3, the last document to 2.
    stream, starts = stream_of([10, 4, 5, 3, 2])
    rows = rows_of("best_fit", starts, 4)
    built = [rows.build(stream, row) for row in range(len(rows))]
    found = [" ".join(map(str, row["tokens"])) for row in built]
    assert found == ["0 1 2 3", "4 5 6 7", "8 10 11 12", "14 15 16 17", "19 20 22 0"]


@pytest.mark.parametrize("packing", [True, False, "best_fit"])
@pytest.mark.parametrize("num_tokens", [1, 3, 64])
def test_every_token_but_a_documents_first_is_a_target_exactly_once(
    packing, num_tokens, monkeypatch
):
    """And best fit cuts no document that fits."""
    monkeypatch.setattr(best_fit, "_WINDOW_DOCUMENTS", 20)
    rng = np.random.default_rng(num_tokens)
    lengths = np.concatenate([rng.integers(2, 40, 40), rng.integers(2, 200, 5)])
    rng.shuffle(lengths)
    stream, starts = stream_of(lengths)
    rows = rows_of(packing, starts, num_tokens)
    built = [rows.build(stream, number) for number in range(len(rows))]
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    learned, targets, pieces_of = [], [], collections.Counter()
    for row in built:
        real, used = row["weights"] > 0, row["segments"] > 0
        assert not any(values[~used].any() for values in row.values())
        assert used[: used.sum()].all()  # padding only at the end
        assert_array_equal(row["targets"][real], row["tokens"][real] + 1)
        targets.append(int(real.sum()))
        learned += row["targets"][real].tolist()
        for segment in range(1, row["segments"].max() + 1):
            here = row["segments"] == segment
            places, count = row["tokens"][here], here.sum()
            assert_array_equal(places, places[0] + np.arange(count))
            assert_array_equal(row["positions"][here], np.arange(count))
            (document,) = set(document_of[places].tolist())
            pieces_of[document] += 1
    assert sorted(learned) == sorted({*stream.tolist()} - {*starts.tolist()})
    if packing is False:
        assert max(row["segments"].max() for row in built) == 1
    if packing is True:
        assert all((row["segments"] > 0).all() for row in built[:-1])
    if packing == "best_fit":
        inputs = dict(enumerate((lengths - 1).tolist()))
        assert pieces_of == {
            number: -(-n // num_tokens) for number, n in inputs.items()
        }
        assert rows.cut_documents == sum(n > num_tokens for n in inputs.values())
    for number in range(len(rows)):
        assert rows.count_targets(np.array([number, number])) == 2 * targets[number]
        assert rows.count_targets_between(number, len(rows)) == sum(targets[number:])


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(best_fit, "_WINDOW_DOCUMENTS", 30)
    monkeypatch.setattr(row_index, "_DOCUMENTS_AT_A_TIME", 7)
    (tmp_path / "data").mkdir()
    return IndexPlace(tmp_path / "data" / "rows", "0123456789abcdef0123")


LENGTHS = np.random.default_rng(1).integers(2, 90, 100)


@pytest.mark.parametrize("packing", ["best_fit", False])
def test_an_index_in_files_gives_the_rows_of_one_in_memory(packing, place):
    stream, starts = stream_of(LENGTHS)
    in_memory, stored = (
        rows_of(packing, starts, 32),
        rows_of(packing, starts, 32, place),
    )
    assert len(pickle.dumps(stored)) < 3000
    copy = pickle.loads(pickle.dumps(stored))
    again = rows_of(packing, starts, 32, place)
    for rows in (stored, copy, again):
        assert len(rows) == len(in_memory)
        for number in range(len(rows)):
            for name, values in in_memory.build(stream, number).items():
                assert_array_equal(rows.build(stream, number)[name], values)
    assert stored.count_targets(np.arange(len(stored))) == len(stream) - len(LENGTHS)


def files_of(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_an_index_is_made_once_for_each_length_and_is_the_same_wherever_it_is_made(
    place, tmp_path, monkeypatch
):
    _, starts = stream_of(LENGTHS)
    rows_of("best_fit", starts, 32, place)
    made = files_of(place.beside)
    (index,) = place.beside.iterdir()
    before = (index / "starts.i64").stat().st_mtime_ns
    rows_of("best_fit", starts, 32, place)
    assert (index / "starts.i64").stat().st_mtime_ns == before
    rows_of("best_fit", starts, 16, place)
    rows_of(False, starts, 32, place)
    assert len(list(place.beside.iterdir())) == 3
    assert not (tmp_path / "cache").exists()
    elsewhere = IndexPlace(tmp_path / "elsewhere" / "rows", place.fingerprint)
    monkeypatch.setattr(
        os, "access", lambda path, mode: False
    )  # root may write anywhere
    rows_of("best_fit", starts, 32, elsewhere)
    assert not elsewhere.beside.exists()
    assert files_of(tmp_path / "cache" / "rows").items() >= made.items()


def test_a_damaged_index_is_named(place):
    stream, starts = stream_of(LENGTHS)
    rows_of("best_fit", starts, 32, place)
    (index,) = place.beside.iterdir()
    slots = (index / "slots_before.i64").read_bytes()
    (index / "slots_before.i64").write_bytes(slots[:-8])
    with pytest.raises(UserError, match=f"delete {index}"):
        rows_of("best_fit", starts, 32, place)
    for at in (8, 15):  # slots before the second piece; 2**62 more
        changed = bytearray(slots)
        changed[at] ^= 64
        (index / "slots_before.i64").write_bytes(changed)
        with pytest.raises(UserError, match=f"row 0 .*delete {index}"):
            rows_of("best_fit", starts, 32, place).build(stream, 0)
