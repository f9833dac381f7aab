"""Lines of files, the places that messages name, and files that are refused."""

import gzip
import json
import os

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data import text_files
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.text_files import (
    find_files,
    json_lines,
    read_documents,
    read_text,
)
from maxtext_lite.data.tokenizer import ByteTokenizer

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")


def lines(tmp_path, content, name="d.jsonl"):
    (tmp_path / name).write_bytes(content)
    return list(json_lines(name, tmp_path / name, wanted="a story"))


@pytest.mark.parametrize("piece", [1, 3, 2**20])
def test_lines_are_objects_with_their_places(piece, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_PIECE", piece)
    text = '\ufeff{"a": 1}\n\n{"a": "x\u2028y"}\r\n  \n{"a": null}'.encode()
    expected = [
        ("d.jsonl:1", {"a": 1}),
        ("d.jsonl:3", {"a": "x\u2028y"}),
        ("d.jsonl:5", {"a": None}),
    ]
    assert lines(tmp_path, text) == lines(tmp_path, text + b"\n") == expected
    zipped = lines(tmp_path, gzip.compress(text), name="d.jsonl.gz")
    assert [value for _, value in zipped] == [value for _, value in expected]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=["cut", "NaN", "twice", "deep", "digits"],
)
def test_a_line_without_an_object_is_named(line, tmp_path):
    with pytest.raises(UserError, match=r"d\.jsonl:2: "):
        lines(tmp_path, b"{}\n" + line + b"\n")


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b"{}" * 99)[:-9],
        gzip.compress(b"{}") + b"more",
    ],
    ids=["not gzip", "cut short", "followed by more"],
)
def test_a_damaged_gzip_is_named(content, tmp_path):
    with pytest.raises(UserError, match=r"d\.jsonl\.gz"):
        lines(tmp_path, content, "d.jsonl.gz")
    with pytest.raises(UserError, match=r"d\.jsonl\.gz"):
        read_text("d.jsonl.gz", tmp_path / "d.jsonl.gz")


def test_a_path_that_is_not_a_file_is_named_without_waiting(tmp_path):
    place = tmp_path / "data" / "a.jsonl"
    place.parent.mkdir()
    place.symlink_to(tmp_path / "gone")
    for path in (
        place,
        place.parent,
        f"{place.parent}/*",
    ):  # not passed over: a part of the data would be missing
        with pytest.raises(UserError, match="gone"):
            find_files("dataset_path", str(path))
    place.unlink()
    os.mkfifo(place)
    for path in (place, "~nobody-of-this-name/x", "x" * 5000 + "/*.txt"):
        with pytest.raises(UserError, match=r"dataset_path|jsonl"):
            find_files("dataset_path", str(path))


ROWS = [{"text": "one"}, {"text": "two\r\nlines"}]
LINES = b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, ROWS)).encode()


def with_a_large_window(content):
    """As zstd --long=31 writes it."""
    how = zstandard.ZstdCompressionParameters(window_log=28, compression_level=1)
    writer = zstandard.ZstdCompressor(compression_params=how).compressobj()
    return writer.compress(content) + writer.flush()


KINDS = {
    "d.JSONL": LINES,
    "d.ndjson": LINES,
    "d.json": LINES,
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "array.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "d.jsonl.zst": with_a_large_window(LINES),
    "d.parquet": None,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_has_the_same_rows_and_others_are_named(
    name, tmp_path, capsys
):
    path = tmp_path / name
    if KINDS[name] is None:
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        path.write_bytes(KINDS[name])
    for other in ("table.csv", "notes.md"):
        (tmp_path / other).touch()
    files = find_files("input", str(tmp_path))
    assert "2 files not read: notes.md, table.csv" in capsys.readouterr().err
    rows = [row for _, row in json_lines(str(path), path, wanted="a text")]
    assert rows == ROWS
    texts = list(read_documents(files, TextEncoder(load_config(), ByteTokenizer())))
    assert texts == [row["text"] for row in ROWS]
