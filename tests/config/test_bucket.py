"""Which paths are in buckets, and the message where the library for them is not installed."""

import importlib.util
from pathlib import Path

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import any_path, bucket_scheme, is_bucket, reaching, remove_objects


@pytest.mark.parametrize(
    ("path", "scheme"),
    [
        ("gs://b/runs", "gs"),
        ("s3://b", "s3"),
        ("runs", ""),
        ("/gs/b", ""),
        ("gs:/b", ""),
        ("ftp://a", ""),
        ("a://b", ""),
    ],
)
def test_a_bucket_is_what_begins_with_a_scheme_that_is_known(path: str, scheme: str):
    assert (bucket_scheme(path), is_bucket(path)) == (scheme, scheme != "")


def test_a_local_path_is_pathlibs():
    assert type(any_path("runs/a", "key")) is type(Path())


@pytest.mark.parametrize(("url", "extra"), [("gs://b/x", "gcs"), ("s3://b/x", "s3")])
def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, url: str, extra: str):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"^some_key={url} needs .*: pip install 'maxtext-lite\[{extra}\]'\.$"):
        any_path(url, "some_key")


@pytest.mark.parametrize("mark", "*?[]#")
def test_a_path_in_a_bucket_has_no_mark_of_a_pattern(mark: str):
    """fsspec would glob: to remove gs://b/r[1] would remove gs://b/r1."""
    with pytest.raises(UserError) as refused:
        any_path(f"gs://b/r{mark}1", "some_key")
    assert str(refused.value) == (
        f"some_key=gs://b/r{mark}1 has {mark} in a path of a bucket, where * ? [ ] # name other files. "
        "Nearest that works: gs://b/r_1."
    )
    assert any_path(f"runs/r{mark}1", "some_key").name == f"r{mark}1"


@pytest.mark.parametrize("error", [ValueError("Invalid bucket name"), OSError("Invalid bucket name")])
def test_what_a_store_answers_is_one_line(error: Exception):
    with pytest.raises(UserError, match=r"^some_key=gs://B!/x cannot be reached: Invalid bucket name\.$"):
        with reaching("gs://B!/x", "some_key"):
            raise error


def test_an_error_beside_a_bucket_is_ours():
    with pytest.raises(KeyError):
        with reaching("gs://b/x", "some_key"):
            raise KeyError("x")


def test_a_directory_with_the_name_of_a_pattern_is_not_removed_with_those_that_match(bucket: Path):
    (bucket / "acb" / "a").write_text("-")
    with pytest.raises(UserError, match=r"^path=gs://.*/a\?b has \? in a path of a bucket"):
        remove_objects(bucket / "a?b")
    assert (bucket / "acb" / "a").exists()
    remove_objects(bucket / "acb")
    assert not (bucket / "acb" / "a").exists()
