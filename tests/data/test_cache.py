"""Files made once: their directory and their lock."""

import fcntl
from pathlib import Path

import pytest

from maxtext_lite.data.cache import CACHE_VARIABLE, cache_directory, locked


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
