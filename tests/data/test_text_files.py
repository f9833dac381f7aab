"""Lines of files, the places that messages name, and files that are refused."""

import gzip
import os

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.text_files import check_unicode, find_files, json_lines, read_text


def lines(tmp_path, content, name="d.jsonl", wanted="anything"):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(json_lines(name, tmp_path / name, wanted=wanted))


@pytest.mark.parametrize("piece", [1, 3, 2**20])
def test_lines_are_objects_with_their_places(piece, tmp_path, monkeypatch):
    monkeypatch.setattr("maxtext_lite.data.text_files._PIECE", piece)
    text = '\ufeff{"a": 1}\n\n{"a": "x\u2028y"}\r\n  \n{"a": null}'
    expected = [("d.jsonl:1", {"a": 1}), ("d.jsonl:3", {"a": "x\u2028y"}), ("d.jsonl:5", {"a": None})]
    assert lines(tmp_path, text) == expected
    assert lines(tmp_path, text + "\n") == expected
    zipped = lines(tmp_path, gzip.compress(text.encode()), name="d.jsonl.gz")
    assert [value for _, value in zipped] == [value for _, value in expected]


@pytest.mark.parametrize(("line", "reason"), [
    (b"{", r"not JSON \(Expecting property name enclosed in double quotes at column 2\)"),
    (b"[1]", "not a JSON object with a story"),
    (b"7", "not a JSON object with a story"),
    (b'{"a": NaN}', r"not JSON \(NaN is not a JSON value\)"),
    (b'{"a": 1, "a": 2}', r"not JSON \(the key 'a' occurs twice in one object\)"),
    (b'{"a":' + b"[" * 200_000, r"not JSON \(it is nested more than 100 levels deep\)"),
    (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", r"not JSON \(it is nested more than 100 levels deep\)"),
    (b'{"a": ' + b"9" * 5000 + b"}", r"not JSON \(it has a number of more than 4,300 digits"),
    (b'{"a": "\xff"}', r"not UTF-8 text \(byte 7 of the line: invalid start byte\)"),
    (b"\0\0", r"not JSON \(Expecting value at column 1\)"),
])  # fmt: skip
def test_a_line_without_an_object_is_named(line, reason, tmp_path):
    with pytest.raises(UserError, match=rf"d.jsonl:2: {reason}.*\.$"):
        lines(tmp_path, b"{}\n" + line + b"\n", wanted="a story")


def test_a_line_that_does_not_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("maxtext_lite.data.text_files.LONGEST_LINE", 2**20)
    assert len(lines(tmp_path, '{"a": "' + "x" * 2**19 + '"}\n{}')) == 2
    with pytest.raises(UserError, match=r"d\.jsonl:2: the line has more than 1 MiB\."):
        lines(tmp_path, '{}\n{"a": "' + "x" * 2**22 + '"}')


@pytest.mark.parametrize("name", ["d.txt.gz", "d.jsonl.gz"])
def test_a_decompression_bomb_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr("maxtext_lite.data.text_files._SMALL", 2**20)
    content = gzip.compress(b'{"a": "' + b"x" * 2**23 + b'"}')
    with pytest.raises(UserError, match=rf"{name}: expands to more than 1 MiB, 100 times its size, which no text does"):
        lines(tmp_path, content, name) if "json" in name else read_text(name, file(tmp_path, name, content))


def file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"{}" * 99, mtime=0)[:-9], gzip.compress(b"{}", mtime=0) + b"more"],
    ids=["empty", "not gzip", "cut short", "followed by more"],
)
def test_a_damaged_gzip_is_named(content, tmp_path):
    if content:
        with pytest.raises(UserError, match=r"d\.jsonl\.gz: cannot be read"):
            lines(tmp_path, content, "d.jsonl.gz")
    else:
        assert lines(tmp_path, content, "d.jsonl.gz") == []  # as gzip reads it


def test_a_path_that_is_not_a_file_is_named_without_waiting(tmp_path):
    place = tmp_path / "data" / "a.jsonl"
    place.parent.mkdir()
    place.symlink_to(tmp_path / "gone")
    for path in (place, place.parent, f"{place.parent}/*"):  # not passed over: a part of the data would be missing
        with pytest.raises(UserError, match=r"a\.jsonl is a link to .*gone, which is not there"):
            find_files("dataset_path", str(path))
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(UserError, match=r"a\.jsonl is a pipe or a device, not a file"):
        find_files("dataset_path", str(place))


def test_half_a_surrogate_pair_is_refused():
    check_unicode("here", "text", "\U0001f600")
    with pytest.raises(UserError, match=r'here: "text" is not valid Unicode'):
        check_unicode("here", "text", "\ud83d")


def test_files_come_in_the_order_of_their_names(tmp_path):
    for name in ("b.jsonl", "a.txt", "c.md"):
        (tmp_path / name).write_text("x")
    assert [file.name for _, file in find_files("dataset_path", str(tmp_path))] == ["a.txt", "b.jsonl"]
    with pytest.raises(UserError, match=r"cannot read .*c\.md"):
        find_files("dataset_path", str(tmp_path / "c.md"))


def test_an_impossible_file_name_is_missing():
    for path in ("~nobody-of-this-name/x", "x" * 5000 + "/*.txt"):
        with pytest.raises(UserError, match=r"there is no such file|matches no file"):
            find_files("dataset_path", path)
