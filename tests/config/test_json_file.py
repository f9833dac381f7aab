"""JSON from other programs, and anything in the place of a file: read, or refused in one line."""

import json
import os
from pathlib import Path

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.json_file import (
    MOST_LEVELS,
    check_file,
    is_directory,
    is_there,
    parse_json,
    read_bytes,
    read_object,
    user_path,
)


def test_json_is_read_as_its_library_reads_it():
    value = {"a": [1, 2.5, None, True, "é\u2028"], "b": {"c": {}}}
    assert parse_json(json.dumps(value)) == value
    nested = "[" * MOST_LEVELS + "]" * MOST_LEVELS
    assert parse_json(f'{{"text": "{"[" * 1000}", "b": 1}}') == {"text": "[" * 1000, "b": 1}
    assert parse_json(nested) == json.loads(nested)
    assert parse_json('{"a": NaN}', allow_nan=True)["a"] != 0


@pytest.mark.parametrize(("text", "reason"), [
    ("[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1), "it is nested more than 100 levels deep"),
    ("[" * 200_000, "it is nested more than 100 levels deep"),
    ('{"a":' * 200_000, "it is nested more than 100 levels deep"),
    ('{"a": 1, "b": {"c": 2, "c": 2}}', "the key 'c' occurs twice in one object"),
    ('{"a": NaN}', "NaN is not a JSON value"),
    ("[-Infinity]", "-Infinity is not a JSON value"),
    ("{\n  'a': 1}", "Expecting property name enclosed in double quotes at line 2 column 3"),
    ("{", "Expecting property name enclosed in double quotes at column 2"),
    ("9" * 5000, r"^it has a number of more than 4,300 digits$"),
])  # fmt: skip
def test_what_is_no_json_or_too_deep_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_what_is_no_file_is_named_before_anything_waits_for_it(tmp_path):
    file = tmp_path / "config.json"
    assert not is_there(file)
    with pytest.raises(UserError, match=r"config\.json: No such file"):
        check_file(file)
    file.symlink_to(tmp_path / "gone")
    assert is_there(file)
    with pytest.raises(UserError, match=r"config\.json is a link to .*gone, which is not there\.$"):
        check_file(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=r"config\.json is a directory, not a file\.$"):
        read_bytes(file)
    file.rmdir()
    os.mkfifo(file)
    with pytest.raises(UserError, match=r"config\.json is a pipe or a device, not a file\.$"):
        read_bytes(file)


@pytest.mark.parametrize(("content", "message"), [
    (b"", r"is not JSON \(Expecting value at column 1\)"), (b"{", "is not JSON"), (b"[]", "is not a JSON object"),
    (b'{"a": "\xff"}', r"is not UTF-8 text \(byte 7: invalid start byte\)"), (b"\0" * 9, "is not JSON"),
    (b"\xef\xbb\xbf{}", "is not JSON"), (b"[" * 200_000, "is nested more than 100 levels deep"),
])  # fmt: skip
def test_a_file_that_is_no_object_is_named(content, message, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"config\.json {message}" if "nested" not in message else message):
        read_object(tmp_path / "config.json")


def test_a_file_far_larger_than_its_kind_is_not_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**28 + 1)  # sparse
    with pytest.raises(UserError, match=r"tokenizer\.json has more than 256 MiB"):
        read_bytes(tmp_path / "tokenizer.json")


def test_names_that_no_file_can_have_are_not_there(tmp_path):
    long = tmp_path / ("x" * 5000)
    assert (is_there(long), is_directory(long)) == (False, False)
    with pytest.raises(UserError, match="File name too long"):
        check_file(long)
    assert user_path("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
    assert user_path("~/x") == Path.home() / "x"
