"""Files made once: their directory, their lock, and writes that appear only when complete."""

import fcntl
from pathlib import Path

import pytest

from maxtext_lite.data import cache
from maxtext_lite.data.cache import CACHE_VARIABLE, cache_directory, locked, write_whole


def test_the_directory_is_the_variables_or_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_directory("rows") == tmp_path / "rows"
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_directory("rows") == Path.home() / ".cache" / "maxtext_lite" / "rows"


def test_an_entry_is_locked_against_others(tmp_path):
    entry = tmp_path / "kind" / "entry"
    with locked(entry), entry.with_suffix(".lock").open("ab") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with entry.with_suffix(".lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_incomplete_write_leaves_no_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "a", b"before")
    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a", b"content")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"before"}
