"""Directories in emulated buckets, gs and s3: the same writes, reads and refusals, and datasets."""

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.cache import CACHE_VARIABLE
from maxtext_lite.data.prepared import open_prepared
from maxtext_lite.preparation.fetched import BucketDirectory, find_prepared
from maxtext_lite.preparation.shards import verify
from tests.bucket_emulator import bucket_server
from tests.prepared import byte_shards, flipped, write_prepared
from tests.stores import s3_server

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sending a large body:ResourceWarning"
)  # by gcsfs, of its own parts


@pytest.fixture(scope="module", params=["gs", "s3"])
def scheme(request):
    if request.param == "gs":
        pytest.importorskip("gcp_storage_emulator")
        made, files = bucket_server(), pytest.importorskip("gcsfs").GCSFileSystem
    else:
        pytest.importorskip("moto")
        made, files = s3_server(), pytest.importorskip("s3fs").S3FileSystem
    with made as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        files.clear_instance_cache()
        if request.param == "s3":  # the other begins with one
            files().mkdir("bucket")
        yield request.param
        files.clear_instance_cache()


@pytest.fixture
def bucket(scheme, tmp_path):
    return BucketDirectory("output", f"{scheme}://bucket/{tmp_path.name}")


def test_objects_are_written_listed_read_and_removed(bucket, tmp_path):
    assert bucket.listed() == {}
    bucket.remove([])
    bucket.create("plan", b"first")
    bucket.create("plan", b"second")
    assert bucket.read("plan") == b"first"
    content = np.random.default_rng(0).bytes(6_000_000)  # more than goes in one part
    (tmp_path / "file").write_bytes(content)
    bucket.upload(tmp_path / "file", "below/file")
    listed = bucket.listed()
    assert {name: size for name, (size, _) in listed.items()} == {
        "below/file": 6_000_000,
        "plan": 5,
    }
    assert len({known_by for _, known_by in listed.values()}) == 2
    parts = bucket.read_parts(
        ["below/file", "plan", "below/file"], [0, 1, 5_999_000], [7, 4096, 6_000_000]
    )
    assert parts == [content[:7], b"irst", content[5_999_000:]]
    bucket.fetch("below/file", tmp_path / "copy")
    bucket.fetch_all(["below/file", "plan"], tmp_path / "all")
    for copy in ("copy", "all/below/file"):
        assert (tmp_path / copy).read_bytes() == content
    assert (tmp_path / "all" / "plan").read_bytes() == b"first"
    bucket.remove(["plan", "below/file"])
    assert bucket.listed() == {}


def test_a_dataset_is_read_as_from_a_local_directory(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    manifest = write_prepared(
        tmp_path / "data", byte_shards(["one", "two words", "x" * 20_000, "end"], 2)
    )
    names = [shard.file for shard in manifest.shards]
    for file in (tmp_path / "data").iterdir():
        bucket.upload(file, file.name)
    in_place = bucket.url.startswith("gs:")
    directory, shards = find_prepared("dataset_path", bucket.url)
    assert [(directory / name).exists() for name in names] == [not in_place] * 2
    stream, starts = open_prepared("dataset_path", directory, shards)
    expected, expected_starts = open_prepared("dataset_path", tmp_path / "data")
    for part in (slice(0, 9), slice(5_000, 13_000), slice(len(expected) - 3, None)):
        np.testing.assert_array_equal(stream[part], expected[part])
    np.testing.assert_array_equal(starts, expected_starts)
    assert list(verify(stream, starts)) == list(verify(expected, expected_starts))

    shard = (tmp_path / "data" / names[1]).read_bytes()
    (tmp_path / "other").write_bytes(flipped(shard, 5))
    bucket.upload(tmp_path / "other", names[1])
    if in_place:
        with pytest.raises(UserError) as caught:
            find_prepared("dataset_path", bucket.url)
        assert f"{bucket.url}/{names[1]}" in str(caught.value)
    else:  # what has been fetched is whole
        assert find_prepared("dataset_path", bucket.url) == (directory, None)
