"""What is read from files, beyond what the tests of sources read: lines, and the places that messages name."""

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.files import check_unicode, find_files, json_lines


def test_lines_are_objects_with_their_places():
    text = '{"a": 1}\n\n{"a": "x\u2028y"}\r\n  \n{"a": null}'
    assert list(json_lines("d.jsonl", text, wanted="anything")) == [
        ("d.jsonl:1", {"a": 1}), ("d.jsonl:3", {"a": "x\u2028y"}), ("d.jsonl:5", {"a": None}),
    ]  # fmt: skip


@pytest.mark.parametrize(("line", "reason"), [
    ("{", r"not JSON \(Expecting property name enclosed in double quotes at column 2\)"),
    ("[1]", "not a JSON object with a story"),
    ("7", "not a JSON object with a story"),
])  # fmt: skip
def test_a_line_that_is_no_object_is_named(line, reason):
    with pytest.raises(UserError, match=rf"d.jsonl:2: {reason}\.$"):
        list(json_lines("d.jsonl", f"{{}}\n{line}\n", wanted="a story"))


def test_half_a_surrogate_pair_is_no_text():
    check_unicode("here", "text", "\U0001f600")
    with pytest.raises(UserError, match=r'here: "text" is not valid Unicode'):
        check_unicode("here", "text", "\ud83d")


def test_files_come_in_the_order_of_their_names(tmp_path):
    for name in ("b.jsonl", "a.txt", "c.md"):
        (tmp_path / name).write_text("x")
    assert [file.name for _, file in find_files("dataset_path", str(tmp_path))] == ["a.txt", "b.jsonl"]
    with pytest.raises(UserError, match=r"cannot read .*c\.md"):
        find_files("dataset_path", str(tmp_path / "c.md"))
