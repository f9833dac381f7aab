"""Datasets fetched from a bucket: once, complete, and as the manifest says; anything else is named."""

import collections
import concurrent.futures
import json
import shutil

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data import fetched
from maxtext_lite.data.cache import CACHE_VARIABLE
from maxtext_lite.data.fetched import find_prepared
from maxtext_lite.data.manifest import DOCUMENTS_FILE, MANIFEST_FILE, file_sha256
from maxtext_lite.data.token_stream import open_prepared
from tests.prepared import byte_shards, write_prepared
from tests.stores import Memory

TEXTS = ["one", "two words", "x" * 5000, "the last document", "another" * 9, "end"]
IDS = [token for text in TEXTS for token in [*text.encode(), 256]]
URL = "s3://bucket/data"
SHARDS = [f"0000{number}.array_record" for number in range(3)]


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """A prepared dataset in a bucket, and an empty cache."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    write_prepared(tmp_path / "data", byte_shards(TEXTS, 3))
    stated = json.loads((tmp_path / "data" / MANIFEST_FILE).read_text())
    stated["documents_sha256"] = file_sha256(tmp_path / "data" / DOCUMENTS_FILE)
    (tmp_path / "data" / MANIFEST_FILE).write_text(json.dumps(stated))
    memory = Memory(monkeypatch)
    memory.files.put(f"{tmp_path / 'data'}/", "/bucket/data/", recursive=True)
    memory.calls.clear()
    return memory


def ids():
    stream, starts = open_prepared("dataset_path", *find_prepared("dataset_path", URL + "/"))
    assert starts.tolist() == np.cumsum([0, *(len(text) + 1 for text in TEXTS)]).tolist()
    return stream[:].tolist()


def changed(bucket, name, content):
    bucket.files.pipe_file(f"/bucket/data/{name}", content)
    with pytest.raises(UserError) as caught:
        find_prepared("dataset_path", URL)
    return str(caught.value)


def test_the_second_start_fetches_only_the_manifest(bucket, tmp_path, capsys):
    assert ids() == IDS
    assert collections.Counter(name for _, name in bucket.calls) == dict.fromkeys(
        [MANIFEST_FILE, DOCUMENTS_FILE, *SHARDS], 1
    )
    size = sum(len(content) for name, content in bucket.content(URL).items() if name in SHARDS)
    said = capsys.readouterr().err
    assert said.startswith(f"fetching 3 shards of {URL}, {size:,} bytes, once, into {tmp_path / 'cache' / 'buckets'}/")
    bucket.calls.clear()
    assert ids() == IDS
    assert bucket.calls == [("cat_file", MANIFEST_FILE)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("killed_at", [DOCUMENTS_FILE, SHARDS[1]])
def test_the_remains_of_a_killed_start_are_fetched_again(bucket, killed_at, monkeypatch):
    monkeypatch.setattr(fetched, "_FETCHED_AT_ONCE", 1)
    fetch = bucket.files.get_file

    def half(name, to):
        fetch(name, to)
        if name.endswith(killed_at):
            with open(to, "rb+") as file:  # noqa: PTH123
                file.truncate(file.seek(0, 2) // 2)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bucket.files, "get_file", half)
        with pytest.raises(KeyboardInterrupt):
            find_prepared("dataset_path", URL)
    bucket.calls.clear()
    assert ids() == IDS
    again = [name for method, name in bucket.calls if method == "get_file"]
    assert killed_at in again
    assert (SHARDS[0] in again) == (killed_at == DOCUMENTS_FILE)  # which comes before the shards


def test_a_process_that_starts_meanwhile_waits_and_fetches_nothing(bucket):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [future.result() for future in [pool.submit(ids) for _ in range(4)]] == [IDS] * 4
    fetched_names = [name for method, name in bucket.calls if method == "get_file"]
    assert sorted(fetched_names) == sorted([DOCUMENTS_FILE, *SHARDS])


def test_a_changed_object_is_named_and_not_kept(bucket, tmp_path):
    before = bucket.content(URL)
    shard = before[SHARDS[1]]
    middle = len(shard) // 2
    flipped = shard[:middle] + bytes([shard[middle] ^ 1]) + shard[middle + 1 :]
    is_other = "is not the file that manifest.json was written for: its SHA-256 differs."
    assert changed(bucket, SHARDS[1], flipped) == f"{URL}/{SHARDS[1]} {is_other}"
    size = f"{len(shard) - 1:,} bytes; manifest.json says {len(shard):,}."
    assert changed(bucket, SHARDS[1], shard[:-1]) == f"{URL}/{SHARDS[1]} has {size}"
    bucket.files.rm(f"/bucket/data/{SHARDS[1]}")
    with pytest.raises(UserError, match=rf"^{URL}/{SHARDS[1]} is not there; manifest\.json lists it\.$"):
        find_prepared("dataset_path", URL)
    bucket.files.pipe_file(f"/bucket/data/{SHARDS[1]}", shard)
    shutil.rmtree(tmp_path / "cache")
    documents = before[DOCUMENTS_FILE]
    moved = documents[:8] + bytes([documents[8] ^ 1]) + documents[9:]
    assert changed(bucket, DOCUMENTS_FILE, moved) == f"{URL}/{DOCUMENTS_FILE} {is_other}"
    bucket.files.pipe_file(f"/bucket/data/{DOCUMENTS_FILE}", documents)
    assert ids() == IDS


def test_an_invalid_manifest_is_named(bucket):
    content = bucket.content(URL)[MANIFEST_FILE]
    where = f"{URL}/{MANIFEST_FILE}"
    assert changed(bucket, MANIFEST_FILE, b"{") == f"{where}: not JSON (Expecting property name enclosed in double " + (
        "quotes at column 2)."
    )
    assert changed(bucket, MANIFEST_FILE, b'{"format": 7}').startswith(f"{where}: format=7 is not known")
    outside = content.replace(SHARDS[1].encode(), b"../1.array_record")
    assert "'../1.array_record' is not the name of a file beside it" in changed(bucket, MANIFEST_FILE, outside)
    bucket.files.rm("/bucket/data", recursive=True)
    with pytest.raises(UserError, match=rf"^dataset_path={where} cannot be reached: "):
        find_prepared("dataset_path", URL)


def test_another_dataset_under_the_address_and_a_damaged_copy_are_fetched(bucket, tmp_path):
    directory, _ = find_prepared("dataset_path", URL)
    (directory / SHARDS[0]).write_bytes(b"damaged")
    assert ids() == IDS
    write_prepared(tmp_path / "other", byte_shards(["something else"] * 3, 3))
    bucket.files.put(f"{tmp_path / 'other'}/", "/bucket/data/", recursive=True)
    other, _ = find_prepared("dataset_path", URL)
    assert other != directory
    assert len(open_prepared("dataset_path", other)[0]) == 3 * 15


def test_data_too_large_for_the_disk_are_refused_before_fetching(bucket, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(UserError, match=r"bytes to be fetched, and .* has room for 1\.$"):
        find_prepared("dataset_path", URL)
    assert not any(name in SHARDS for _, name in bucket.calls)


def test_a_local_directory_is_used_in_place(tmp_path):
    assert find_prepared("dataset_path", str(tmp_path)) == (tmp_path, None)
