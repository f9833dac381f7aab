"""Datasets fetched from a bucket: once, complete, and as the manifest says; anything else is named."""

import json

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFile

from maxtext_lite.config import UserError
from maxtext_lite.data.cache import CACHE_VARIABLE, file_sha256
from maxtext_lite.data.prepared import (
    DOCUMENTS_FILE,
    MANIFEST_FILE,
    open_prepared,
)
from maxtext_lite.preparation import fetched
from maxtext_lite.preparation.fetched import BucketDirectory, find_prepared
from tests.prepared import byte_shards, flipped, write_prepared
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
    stream, starts = open_prepared(
        "dataset_path", *find_prepared("dataset_path", URL + "/")
    )
    assert (
        starts.tolist() == np.cumsum([0, *(len(text) + 1 for text in TEXTS)]).tolist()
    )
    return stream[:].tolist()


def refused():
    with pytest.raises(UserError) as caught:
        find_prepared("dataset_path", URL)
    return str(caught.value)


@pytest.mark.fast
def test_the_second_start_fetches_only_the_manifest(bucket, capsys):
    assert ids() == IDS
    assert sorted(name for _, name in bucket.calls) == sorted(
        [MANIFEST_FILE, DOCUMENTS_FILE, *SHARDS]
    )
    assert capsys.readouterr().err.startswith(f"fetching 3 shards of {URL}, ")
    bucket.calls.clear()
    assert ids() == IDS
    assert bucket.calls == [("cat_file", MANIFEST_FILE)]
    assert capsys.readouterr().err == ""


def test_the_remains_of_a_killed_start_are_fetched_again(bucket, monkeypatch):
    monkeypatch.setattr(fetched, "_FETCHED_AT_ONCE", 1)
    fetch = bucket.files.get_file

    def half(name, to):
        fetch(name, to)
        if name.endswith(SHARDS[1]):
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
    assert SHARDS[1] in again
    assert SHARDS[0] not in again


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        (SHARDS[1], flipped),
        (SHARDS[1], None),
        (DOCUMENTS_FILE, flipped),
        (MANIFEST_FILE, lambda content: b'{"format": 7}'),
        (
            MANIFEST_FILE,
            lambda content: content.replace(SHARDS[1].encode(), b"../1.array_record"),
        ),
    ],
)
def test_a_changed_object_is_named_and_not_kept(bucket, name, damaged):
    content = bucket.content(URL)[name]
    place = f"/bucket/data/{name}"
    if damaged is None:
        bucket.files.rm(place)
    else:
        bucket.files.pipe_file(place, damaged(content))
    assert f"{URL}/{name}" in refused()
    bucket.files.pipe_file(place, content)
    assert ids() == IDS


def test_no_name_of_a_bucket_leads_out_of_the_directory_it_is_fetched_into(
    monkeypatch, tmp_path
):
    files = Memory(monkeypatch).files
    for name in ("plan.json", "../../out.json"):
        key = f"/bucket/run/{name}"
        files.store[key] = MemoryFile(files, key, b"{}")
    directory = BucketDirectory("output", "gs://bucket/run")
    into = tmp_path / "cache" / "data"
    into.mkdir(parents=True)
    with pytest.raises(UserError, match=r"out\.json"):
        directory.fetch_all(list(directory.listed()), into)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
