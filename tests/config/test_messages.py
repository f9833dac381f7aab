"""What a message shows of a value: exact, on one line of bounded length, without secrets; and files that are none."""

import errno
import importlib.util
import os
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtext_lite.config.bucket import (
    any_path,
    bucket_scheme,
    is_bucket,
    reaching,
    remove_objects,
)
from maxtext_lite.config.errors import (
    UserError,
    full_text,
    number_text,
    sanitize_for_terminal,
    value_text,
    without_secrets,
    writing,
)
from maxtext_lite.config.json_file import (
    check_file,
    parse_json,
    read_bytes,
    read_object,
)


@given(st.fractions())
def test_the_text_of_a_fraction_is_exact(value):
    assert Fraction(number_text(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb\x1b[31m\x00", "a\\nb\\x1b[31m\\x00"),
        ("\udc80", "\\udc80"),
        ("a" * 120, "a" * 120),
        ("a" * 5000, "a" * 60 + "... (5,000 characters)"),
        (10**400, "1.000000e+400"),
        ({"a\n": {"b": True}}, "{a\\n: {b: true}}"),
        (["x"] * 2000, "[x" + ", x" * 19 + ",... (6,000 characters)"),
        ("https://token@host/x", "https://***@host/x"),
        (
            "https://h/x?X-Amz-Credential=C/1&part=2",
            "https://h/x?X-Amz-Credential=***&part=2",
        ),
        (
            "s3://AKIA:pa/ss@bucket/data",
            "s3://AKIA:pa/ss@bucket/data",
        ),  # no name and password: a bucket has no slash
        ("gs://bucket/run@2024", "gs://bucket/run@2024"),
        ("me@host and key=value", "me@host and key=value"),
    ],
    ids=range(12),
)
def test_a_value_is_shown_on_one_line_of_bounded_length_without_secrets(value, text):
    assert value_text(value) == text
    assert len(text) < 160
    if "@" in str(value):
        assert without_secrets(value) == full_text(value) == text


def test_a_message_is_one_line_without_control_characters_of_bounded_length():
    assert sanitize_for_terminal("a\nb") == "a b"
    assert (
        sanitize_for_terminal("steps\x1b[31m=\r5\u202e\x00\udc80")
        == r"steps\x1b[31m=\r5\u202e\x00\udc80"
    )
    assert len(sanitize_for_terminal("word " * 10_000)) < 4100


def test_what_cannot_be_written_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(UserError, match=r"file/inside .*Not a directory"),
        writing(tmp_path),
    ):
        (tmp_path / "file" / "inside").write_text("x")
    with pytest.raises(UserError, match=r"^to .*Input/output error"), writing("run"):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "from", None, "to")


# ---- JSON from other programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 200_000,
        '{"b": {"c": 2, "c": 2}}',
        "[NaN]",
        "{\n  'a': 1}",
        "{",
        "9" * 5000,
        "",
        "\ufeff{}",
    ],
    ids=range(8),
)
def test_what_is_no_json_or_too_deep_is_refused(text, tmp_path):
    with pytest.raises(ValueError):  # the library's, or ours
        parse_json(text)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_object(tmp_path / "config.json")


def test_what_is_no_file_is_named_before_anything_waits_for_it(tmp_path):
    file = tmp_path / "config.json"
    for make, wrong in (
        (lambda: None, "No such file"),
        (lambda: file.symlink_to(tmp_path / "gone"), "link"),
        (file.mkdir, "directory"),
        (lambda: os.mkfifo(file), "pipe"),
    ):
        make()
        for read in (check_file, read_bytes):
            with pytest.raises(UserError, match=rf"config\.json.*{wrong}"):
                read(file)
        if file.is_dir():
            file.rmdir()
        file.unlink(missing_ok=True)
    for content in (b"[]", b'{"a": "\xff"}'):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"config\.json"):
            read_object(file)
    with file.open("wb") as opened:
        opened.truncate(2**28 + 1)  # sparse
    with pytest.raises(UserError, match="256 MiB"):
        read_bytes(file)


# ---- Buckets -------------------------------------------------------------------------------------------------------


def test_a_bucket_is_what_begins_with_a_scheme_that_is_known():
    assert [bucket_scheme(path) for path in ("gs://b/runs", "s3://b")] == ["gs", "s3"]
    others = ("runs", "/gs/b", "gs:/b", "ftp://a", "a://b")
    assert not any(map(is_bucket, others))
    assert type(any_path("runs/a", "key")) is type(Path())


@pytest.mark.parametrize(("url", "extra"), [("gs://b/x", "gcs"), ("s3://b/x", "s3")])
def test_without_the_extra_the_error_says_what_to_install(monkeypatch, url, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"^some_key={url} .*\[{extra}\]"):
        any_path(url, "some_key")


@pytest.mark.parametrize("mark", "*?[]#")
def test_a_path_in_a_bucket_has_no_mark_of_a_pattern(mark):
    """fsspec would glob: to remove gs://b/r[1] would remove gs://b/r1."""
    with pytest.raises(
        UserError, match=r"^some_key=.*Nearest that works: gs://b/r_1\.$"
    ):
        any_path(f"gs://b/r{mark}1", "some_key")
    assert any_path(f"runs/r{mark}1", "some_key").name == f"r{mark}1"


@pytest.mark.parametrize(
    "error", [ValueError("Invalid bucket name"), OSError("Invalid bucket name")]
)
def test_what_a_store_answers_is_one_line_and_an_error_beside_it_is_ours(error):
    with pytest.raises(UserError, match=r"^some_key=gs://B!/x .*Invalid bucket name"):
        with reaching("gs://B!/x", "some_key"):
            raise error
    with pytest.raises(KeyError):
        with reaching("gs://b/x", "some_key"):
            raise KeyError("x")


def test_a_directory_with_the_name_of_a_pattern_is_not_removed_with_those_that_match(
    bucket,
):
    (bucket / "acb" / "a").write_text("-")
    with pytest.raises(UserError, match=r"^path=gs://.*/a\?b"):
        remove_objects(bucket / "a?b")
    assert (bucket / "acb" / "a").exists()
    remove_objects(bucket / "acb")
    assert not (bucket / "acb" / "a").exists()
