"""Token ids of prepared datasets: equal to those written in any slice, and refused if a file has changed."""

import concurrent.futures
import contextlib
import functools
import json
import pickle
import re
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext_lite.config import UserError
from maxtext_lite.data import token_stream
from maxtext_lite.data.manifest import DOCUMENTS_FILE, MANIFEST_FILE, read_manifest
from maxtext_lite.data.token_stream import RecordStream, map_array, open_prepared, verify
from tests.mutations import changed
from tests.prepared import byte_shards, write_prepared

TEXTS = ["one", "two words", "x" * 50, "", "the last document of the first shard", "another" * 9, "end"]
IDS = [token for text in TEXTS for token in [*text.encode(), 256]]


@pytest.fixture(params=["group_size:1", "group_size:1,uncompressed"])
def prepared(request, tmp_path):
    write_prepared(tmp_path / "d", byte_shards(TEXTS, 3), tokens_per_record=16, options=request.param)
    return tmp_path / "d"


def refusal(directory):
    with pytest.raises(UserError) as caught:
        open_prepared("dataset_path", directory)
    return str(caught.value)


def test_every_slice_is_what_was_written(prepared):
    stream, starts = open_prepared("dataset_path", prepared)
    assert len(stream) == len(IDS)
    assert starts.tolist() == np.cumsum([0, *(len(text) + 1 for text in TEXTS)]).tolist()
    for start in range(len(IDS) + 1):
        for stop in range(start, len(IDS) + 3, 7):
            found = stream[start:stop]
            assert found.tolist() == IDS[start:stop]
            assert found.dtype == np.uint16


def test_threads_and_a_pickled_copy_read_the_same(prepared, monkeypatch):
    stream, starts = open_prepared("dataset_path", prepared)
    # Neither shards nor records stay: what other threads read from is let go of all the time.
    for name in ("_reader", "_record"):
        monkeypatch.setattr(token_stream, name, functools.lru_cache(1)(getattr(token_stream, name).__wrapped__))
    stored = pickle.dumps((stream, starts))
    assert len(stored) < 2000  # no token, no document, nothing that is open
    copy, copied_starts = pickle.loads(stored)
    np.testing.assert_array_equal(copied_starts, starts)
    bounds = [sorted(pair) for pair in np.random.default_rng(0).integers(0, len(IDS), (400, 2)).tolist()]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda pair: copy[pair[0] : pair[1]].tolist(), bounds))
    assert found == [IDS[start:stop] for start, stop in bounds]


def test_parts_of_mapped_numbers_are_pickled_as_numbers(tmp_path):
    np.arange(50, dtype="<i8").tofile(tmp_path / "n")
    mapped = map_array(tmp_path / "n")
    for part in (mapped[3:9], mapped + 1, mapped[:]):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(part)), np.asarray(part))


def test_reading_keeps_little_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, 2**20).tolist() for _ in range(2)]
    write_prepared(tmp_path, [[document] for document in documents])
    stream, _ = open_prepared("dataset_path", tmp_path)
    tracemalloc.start()
    for start in rng.integers(0, len(stream) - 2048, 2000).tolist():
        stream[start : start + 2048]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1.2 * token_stream._MOST_RECORDS * 8192  # bytes of a record's ids


def test_changed_files_are_refused_by_name(prepared, tmp_path):
    shard = prepared / "00001.array_record"
    content = shard.read_bytes()

    shard.unlink()
    assert refusal(prepared) == f"{shard}: No such file or directory."
    shard.write_bytes(content[:-1])
    assert refusal(prepared) == f"{shard} has {len(content) - 1:,} bytes; manifest.json says {len(content):,}."
    shard.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
    assert refusal(prepared) == f"{shard} is not the file that manifest.json was written for: its ends differ."
    other = (prepared / "00000.array_record").read_bytes()
    assert len(other) == len(content)  # ArrayRecord rounds up to blocks: the size alone would not tell
    shard.write_bytes(other)
    assert refusal(prepared) == f"{shard} is not the file that manifest.json was written for: its ends differ."
    shard.write_bytes(content)

    documents = prepared / DOCUMENTS_FILE
    starts = documents.read_bytes()
    documents.write_bytes(starts[:-8])
    assert refusal(prepared) == f"{documents} has 56 bytes; manifest.json says 7 documents: 64."
    documents.write_bytes(starts[:-8] + (5).to_bytes(8, "little"))
    assert refusal(prepared) == f"{documents} covers 5 token ids; manifest.json says {len(IDS)}."
    documents.write_bytes(starts)
    open_prepared("dataset_path", prepared)

    (prepared / MANIFEST_FILE).unlink()
    assert refusal(prepared).startswith(
        f"dataset_path='{prepared}' has no manifest.json, which `python -m maxtext_lite.pr"
    )
    gone = tmp_path / "gone"
    assert refusal(gone) == f"dataset_path='{gone}' is not a directory that `python -m maxtext_lite.prepare` made."


def test_another_number_of_records_is_refused_if_the_size_is_unknown(prepared):
    stated = json.loads((prepared / MANIFEST_FILE).read_text())
    for shard in stated["shards"]:
        del shard["bytes"], shard["ends"]
    (prepared / MANIFEST_FILE).write_text(json.dumps(stated))
    open_prepared("dataset_path", prepared)
    shard = prepared / "00001.array_record"
    content = shard.read_bytes()
    shutil.copy(prepared / "00000.array_record", shard)
    assert refusal(prepared) == f"{shard} has 1 records; manifest.json says 4."
    shard.write_bytes(content[:-1])
    assert refusal(prepared) == f"{shard}: truncated, or not an ArrayRecord file. Copy or prepare the data again."


def test_a_flipped_byte_is_named_or_does_not_matter(prepared):
    """Flips in every region of a shard: wherever the ids could change, the record is refused."""
    shard = prepared / "00000.array_record"
    content = shard.read_bytes()
    in_use = [at for at, byte in enumerate(content) if byte]  # between, ArrayRecord pads with zeros
    rng = np.random.default_rng(0)
    messages = []
    for at in sorted({*in_use[:20], *in_use[-20:], *rng.choice(in_use, 60).tolist(), len(content) // 2 + 9999}):
        shard.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        token_stream._reader.cache_clear()  # what is open under this name was the whole file
        token_stream._record.cache_clear()
        stream = RecordStream(prepared, read_manifest(prepared))
        try:
            assert stream[: stream.manifest.shards[0].tokens].tolist() == IDS[: stream.manifest.shards[0].tokens]
        except UserError as error:
            messages.append(str(error))
        with pytest.raises(UserError, match=str(shard)):
            list(verify(*open_prepared("input", prepared)))
    unreadable = f"{shard}: truncated, or not an ArrayRecord file. Copy or prepare the data again."
    damaged = re.compile(rf"{shard}: record 0 is damaged \(.*hash mismatch.*\)\. Copy or prepare the data again\.")
    assert unreadable in messages
    assert any(map(damaged.fullmatch, messages))
    assert all(message == unreadable or damaged.fullmatch(message) for message in messages)
    assert len(messages) > 20


def test_verify_reads_everything(prepared):
    assert list(verify(*open_prepared("input", prepared))) == [f"0000{i}.array_record" for i in range(3)] + [
        DOCUMENTS_FILE
    ]
    documents = prepared / DOCUMENTS_FILE
    starts = map_array(documents).copy()
    for change in (1, -1):
        moved = starts.copy()
        moved[2] += change
        moved.tofile(documents)
        with pytest.raises(UserError, match=r"00000\.array_record or documents\.i64: its documents are not those"):
            list(verify(*open_prepared("input", prepared)))
    moved = starts.copy()
    moved[1] = 0
    moved.tofile(documents)
    with pytest.raises(UserError, match=r"documents\.i64: documents do not follow each other from number 0 on"):
        list(verify(*open_prepared("input", prepared)))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_manifest_is_one_or_refused(tmp_path, data):
    directory, right = tmp_path / "prepared", tmp_path / "right.json"
    if not right.exists():
        write_prepared(directory, [[[1, 2, 3], [4]], [[5, 6]]])
        shutil.copy(directory / MANIFEST_FILE, right)
    stated = data.draw(changed(json.loads(right.read_text())))
    (directory / MANIFEST_FILE).write_bytes(json.dumps(stated).encode("utf-8", "surrogatepass"))
    with contextlib.suppress(UserError):
        stream, starts = open_prepared("dataset_path", directory)
        assert stream[0 : len(stream)].tolist() == [1, 2, 3, 4, 5, 6][: starts[-1]]
