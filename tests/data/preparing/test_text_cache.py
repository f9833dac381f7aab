"""A cached text has the rows and fingerprint of the text itself, and a damaged one is not used."""

import gzip
import os
import resource
import shutil
import signal

import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.data import text_cache
from maxtext_lite.data.sources import open_sources
from tests.prepared import flipped
from tests.run_directories import write_lines

TEXTS = [f"text {number} " + "x" * (number * 37 % 90) for number in range(120)]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The config of a text in two kinds of file, of which seven documents are encoded at once."""
    monkeypatch.delenv(text_cache.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(text_cache, "_DOCUMENTS_PER_ENCODING", 7)
    (tmp_path / "in").mkdir()
    texts = [{"text": text} for text in [*TEXTS, ""]]
    write_lines(tmp_path / "in" / "a.jsonl", texts)
    (tmp_path / "in" / "b.txt.gz").write_bytes(gzip.compress("Größe".encode() * 100))
    keys = [
        "eval_fraction=0.1",
        "max_target_length=64",
        f"base_output_directory={tmp_path / 'runs'}",
    ]
    return load_config(None, [f"dataset_path={tmp_path / 'in'}", *keys])


@pytest.fixture
def large(monkeypatch):
    """Every text is cached, however small."""
    monkeypatch.setattr(text_cache, "LEAST_BYTES", 1)


def entry_of(tmp_path):
    (entry,) = (
        path
        for path in (tmp_path / "runs" / ".cache" / "text").iterdir()
        if path.is_dir()
    )
    return entry


def test_a_cached_text_is_the_text(config, tmp_path, monkeypatch, capsys):
    in_memory = open_sources(config)
    assert not (tmp_path / "runs").exists(), "a small text is not cached"
    monkeypatch.setattr(text_cache, "LEAST_BYTES", 1)
    for line in ("tokenizing the text once, into ", ""):
        cached = open_sources(config)
        assert capsys.readouterr().err.startswith(line)
        for one, other in zip(cached, in_memory, strict=True):
            assert one.fingerprint == other.fingerprint
            assert (len(one), one.num_target_tokens) == (
                len(other),
                other.num_target_tokens,
            )
            for example in range(len(one)):
                np.testing.assert_equal(one[example], other[example])
        assert cached[0].notes == (f"read from the cache {entry_of(tmp_path)}",)
        monkeypatch.setattr(
            text_cache, "_write", None
        )  # the second start makes nothing
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("large")
def test_another_text_or_tokenizer_has_another_place(config, tmp_path, monkeypatch):
    monkeypatch.setenv(text_cache.CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    fingerprint = open_sources(config)[0].fingerprint
    path = tmp_path / "in" / "a.jsonl"  # as many bytes, at the same time
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"text 1 ", b"Text 1 "))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_sources(config)[0].fingerprint != fingerprint
    assert len(list((tmp_path / "elsewhere" / "text").glob("*.lock"))) == 2
    assert not (tmp_path / "runs").exists()


DAMAGES = {
    "flipped": ("tokens", flipped),
    "truncated": ("starts.i64", lambda content: content[:-9]),
    "about": ("index.json", lambda content: b'{"spelled": []}'),
}


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_text_is_made_again(damage, config, tmp_path, capsys):
    fingerprint = open_sources(config)[0].fingerprint
    entry = entry_of(tmp_path)
    before = {path.name: path.read_bytes() for path in entry.iterdir()}
    name, change = DAMAGES[damage]
    path = sorted(entry.glob(name))[0]
    path.write_bytes(change(path.read_bytes()))
    capsys.readouterr()
    assert open_sources(config)[0].fingerprint == fingerprint
    assert "warning: " in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == before


@pytest.mark.usefixtures("large")
def test_a_full_disk_leaves_nothing_and_the_text_is_tokenized_in_memory(
    config, tmp_path, capsys
):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    in_memory = len(open_sources(config)[0])
    shutil.rmtree(tmp_path / "runs")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # of any file
    try:
        assert len(open_sources(config)[0]) == in_memory
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be cached" in capsys.readouterr().err
    left = (tmp_path / "runs" / ".cache" / "text").iterdir()
    assert [path for path in left if path.suffix != ".lock"] == []


@pytest.mark.usefixtures("large")
def test_what_a_killed_process_left_is_removed(config, tmp_path):
    open_sources(config)
    entry = entry_of(tmp_path)
    shutil.rmtree(entry)
    (entry.parent / f".{entry.name}.killed").mkdir()
    open_sources(config)
    assert entry_of(tmp_path) == entry
