"""Token ids of prepared datasets: equal to those written in any slice, and refused if a file has changed."""

import concurrent.futures
import dataclasses
import functools
import json
import pickle
import shutil

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data import prepared as token_stream
from maxtext_lite.data.prepared import (
    DOCUMENTS_FILE,
    MANIFEST_FILE,
    Manifest,
    Shard,
    manifest_text,
    open_prepared,
    read_manifest,
)
from tests.prepared import byte_shards, flipped, write_prepared

TEXTS = [
    "one",
    "two words",
    "x" * 50,
    "",
    "the last document of the first shard",
    "another" * 9,
    "end",
]
IDS = [token for text in TEXTS for token in [*text.encode(), 256]]


@pytest.fixture
def prepared(tmp_path):
    write_prepared(tmp_path / "d", byte_shards(TEXTS, 3), tokens_per_record=16)
    return tmp_path / "d"


@pytest.fixture
def refusal(prepared):
    def refused():
        with pytest.raises(UserError) as caught:
            open_prepared("dataset_path", prepared)
        return str(caught.value)

    return refused


@pytest.mark.fast
def test_every_slice_is_what_was_written(prepared):
    stream, starts = open_prepared("dataset_path", prepared)
    assert len(stream) == len(IDS)
    assert (
        starts.tolist() == np.cumsum([0, *(len(text) + 1 for text in TEXTS)]).tolist()
    )
    for start in range(len(IDS) + 1):
        for stop in range(start, len(IDS) + 3, 7):
            found = stream[start:stop]
            assert found.tolist() == IDS[start:stop]
            assert found.dtype == np.uint16


def test_threads_and_a_pickled_copy_read_the_same(prepared, monkeypatch):
    stream, starts = open_prepared("dataset_path", prepared)
    # Neither shards nor records stay: what other threads read from is let go of all the time.
    for name in ("_reader", "_record"):
        monkeypatch.setattr(
            token_stream,
            name,
            functools.lru_cache(1)(getattr(token_stream, name).__wrapped__),
        )
    stored = pickle.dumps((stream, starts))
    assert len(stored) < 2000  # no token, no document, nothing that is open
    copy, copied_starts = pickle.loads(stored)
    np.testing.assert_array_equal(copied_starts, starts)
    bounds = [
        sorted(pair)
        for pair in np.random.default_rng(0).integers(0, len(IDS), (400, 2)).tolist()
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda pair: copy[pair[0] : pair[1]].tolist(), bounds))
    assert found == [IDS[start:stop] for start, stop in bounds]


def test_changed_files_are_refused_by_name(prepared, refusal):
    shard, documents = prepared / "00001.array_record", prepared / DOCUMENTS_FILE
    content, starts = shard.read_bytes(), documents.read_bytes()
    other = (prepared / "00000.array_record").read_bytes()
    assert len(other) == len(
        content
    )  # ArrayRecord rounds up to blocks: the size alone would not tell
    for changed_shard in (
        content[:-1],
        flipped(content, 5),
        other,
    ):
        shard.write_bytes(changed_shard)
        assert refusal().startswith(str(shard))
    shard.write_bytes(content)
    for changed_starts in (starts[:-8], starts[:-8] + (5).to_bytes(8, "little")):
        documents.write_bytes(changed_starts)
        assert refusal().startswith(str(documents))
    documents.write_bytes(starts)
    open_prepared("dataset_path", prepared)
    shard.unlink()
    assert refusal().startswith(str(shard))
    (prepared / MANIFEST_FILE).unlink()
    assert refusal().startswith("dataset_path=")
    shutil.rmtree(prepared)
    assert refusal().startswith("dataset_path=")


# ---- The manifest ----

SHARDS = (
    Shard("00000.array_record", 3, 100, "ab", "cd", 8, "9a"),
    Shard("00001.array_record", 1, 50, "ef", "01", 9, "9b"),
)
MANIFEST = Manifest("byte", 257, "uint16", 4096, SHARDS)


def test_a_manifest_is_read_back(tmp_path):
    stated = json.loads(manifest_text(MANIFEST))
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(stated))
    assert read_manifest(tmp_path) == MANIFEST
    assert (MANIFEST.documents, MANIFEST.tokens) == (4, 150)


def test_the_fingerprint_is_of_the_content_and_not_of_the_files():
    renamed = tuple(
        dataclasses.replace(shard, file=f"x{shard.file}", sha256="00")
        for shard in SHARDS
    )
    assert (
        dataclasses.replace(MANIFEST, shards=renamed).fingerprint
        == MANIFEST.fingerprint
    )
    others = [dataclasses.replace(MANIFEST, tokenizer="other")]
    for shards in (
        SHARDS[::-1],
        SHARDS[:1],
        (SHARDS[0], dataclasses.replace(SHARDS[1], content="02")),
    ):
        others.append(dataclasses.replace(MANIFEST, shards=shards))
    assert len({other.fingerprint for other in [MANIFEST, *others]}) == 5


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"tokens": 151}, {"shards": [{}]}], ids=str
)
def test_a_damaged_manifest_is_refused(change, tmp_path):
    stated = json.loads(manifest_text(MANIFEST)) | change
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(stated))
    with pytest.raises(UserError, match=MANIFEST_FILE):
        read_manifest(tmp_path)
