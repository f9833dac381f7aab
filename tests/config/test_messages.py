"""What a message shows of a value: exact, on one line of bounded length, without secrets; and files that are none."""

import errno
import importlib.util
import json
import os
import pickle
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
    did_you_mean,
    echoed,
    full_text,
    nearest_clause,
    number_text,
    rounded_text,
    unwhole_text,
    value_text,
    without_secrets,
    writing,
)
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("3.5", "3.5"),
        ("10/3", "3.333"),
        ("30003/10000", "3.0003"),
        ("1000000001/1000000000", "1.000000001"),
        ("1000000000000000001/2", "500000000000000000.5"),
    ],
)
def test_what_is_not_whole_does_not_look_whole(value, text):
    assert unwhole_text(Fraction(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(16), "16"),
        (16.0, "16"),
        (Fraction(1, 4), "0.25"),
        (Fraction(-3, 8), "-0.375"),
        (Fraction(1, 3), "1/3"),
        (Fraction(1, 4096), "0.000244140625"),
        (1e-8, "1e-08"),
        (Fraction(1, 10**15), "1e-15"),
        (Fraction(10000000001, 4096), "10000000001/4096"),
        (Fraction(10**16), "10000000000000000"),
    ],
)
def test_numbers_are_shown_as_a_config_holds_them(value, text):
    assert number_text(value) == text


@given(st.fractions())
def test_the_text_of_a_fraction_is_exact(value):
    assert Fraction(number_text(value)) == value


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (25510.204, 4, "25510"),
        (9999.5, 4, "10000"),
        (12.3456, 4, "12.35"),
        (1234.5, 3, "1234"),
        (999.6, 3, "1000"),
        (3.5e14, 4, "350000000000000"),
        (1e18, 4, "1e+18"),
        (1e-9, 4, "1e-09"),
    ],
)
def test_a_large_number_for_reading_has_no_exponent(value, digits, text):
    assert rounded_text(value, digits) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb\x1b[31m\x00", "a\\nb\\x1b[31m\\x00"),
        ("\udc80", "\\udc80"),
        ("a" * 120, "a" * 120),
        ("a" * 5000, "a" * 60 + "... (5,000 characters)"),
        (10**400, "1.000000e+400"),
        ([1, None, "x"], "[1, null, x]"),
        ({"a\n": {"b": True}}, "{a\\n: {b: true}}"),
        (["x"] * 2000, "[x" + ", x" * 19 + ",... (6,000 characters)"),
        ("http://me:pass@host:8000/v1", "http://***@host:8000/v1"),
        ("https://token@host/x", "https://***@host/x"),
        (
            "https://h/x?X-Amz-Credential=C/1&part=2",
            "https://h/x?X-Amz-Credential=***&part=2",
        ),
        (
            "s3://AKIA:pa/ss@bucket/data",
            "s3://AKIA:pa/ss@bucket/data",
        ),  # no name and password: a bucket has no slash
        ("abfs://container@account/x", "abfs://container@account/x"),
        ("gs://bucket/run@2024", "gs://bucket/run@2024"),
        ("me@host and key=value", "me@host and key=value"),
    ],
    ids=range(15),
)
def test_a_value_is_shown_on_one_line_of_bounded_length_without_secrets(value, text):
    assert value_text(value) == text
    assert len(text) < 160
    if "@" in str(value):
        assert without_secrets(value) == full_text(value) == text


def test_a_message_is_one_line_without_control_characters_and_without_endless_words():
    assert echoed("a\nb") == "a b"
    assert (
        echoed("steps\x1b[31m=\r5\u202e\x00\udc80")
        == r"steps\x1b[31m=\r5\u202e\x00\udc80"
    )
    assert (
        echoed(f"steps={'a' * 5000} is text")
        == f"steps={'a' * 54}[4,916 characters]{'a' * 30} is text"
    )
    assert len(echoed("word " * 10_000)) < 4100


def test_only_near_names_and_each_value_once_are_proposed():
    assert did_you_mean("stps", ["steps", "seed"]) == " Did you mean 'steps'?"
    assert did_you_mean("zzz", ["steps", "seed"]) == ""
    clauses = [nearest_clause(values) for values in ([], [2, 2], [2, 4], [True, "x=1"])]
    assert [clause.partition(": ")[2] for clause in clauses] == [
        "",
        "2.",
        "2 or 4.",
        "true or x=1.",
    ]


def test_a_user_error_holds_all_problems_and_pickles():
    error = UserError(["one.", "two."])
    assert str(error) == "one.\ntwo."
    assert (
        pickle.loads(pickle.dumps(error)).problems == error.problems == ("one.", "two.")
    )
    assert UserError("one.").problems == ("one.",)


def test_what_cannot_be_written_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(UserError, match=r"file/inside .*Not a directory"),
        writing(tmp_path),
    ):
        (tmp_path / "file" / "inside").write_text("x")
    with (
        pytest.raises(UserError, match=r"^run .*No space left on device"),
        writing("run"),
    ):
        raise OSError(
            errno.ENOSPC, os.strerror(errno.ENOSPC)
        )  # as for a file that is open already
    with pytest.raises(UserError, match=r"^to .*Input/output error"), writing("run"):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "from", None, "to")


# ---- JSON from other programs --------------------------------------------------------------------------------------


def test_json_is_read_as_its_library_reads_it():
    value = {"a": [1, 2.5, None, True, "é\u2028"], "b": {"c": {}}}
    assert parse_json(json.dumps(value)) == value
    nested = "[" * MOST_LEVELS + "]" * MOST_LEVELS
    assert parse_json(nested) == json.loads(nested)
    assert parse_json(f'{{"text": "{"[" * 1000}", "b": 1}}') == {
        "text": "[" * 1000,
        "b": 1,
    }
    assert parse_json('{"a": NaN}', allow_nan=True)["a"] != 0


@pytest.mark.parametrize(
    "text",
    [
        "[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1),
        "[" * 200_000,
        '{"a":' * 200_000,
        '{"b": {"c": 2, "c": 2}}',
        "[NaN]",
        "[-Infinity]",
        "{\n  'a': 1}",
        "{",
        "9" * 5000,
        "",
        "\0" * 9,
        "\ufeff{}",
    ],
    ids=range(12),
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


def test_names_that_no_file_can_have_are_not_there(tmp_path):
    long = tmp_path / ("x" * 5000)
    assert (is_there(long), is_directory(long)) == (False, False)
    with pytest.raises(UserError, match="File name too long"):
        check_file(long)
    assert user_path("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
    assert user_path("~/x") == Path.home() / "x"


# ---- Buckets -------------------------------------------------------------------------------------------------------


def test_a_bucket_is_what_begins_with_a_scheme_that_is_known():
    schemes = {
        "gs://b/runs": "gs",
        "s3://b": "s3",
        "runs": "",
        "/gs/b": "",
        "gs:/b": "",
        "ftp://a": "",
        "a://b": "",
    }
    assert {path: bucket_scheme(path) for path in schemes} == schemes
    assert [is_bucket(path) for path in schemes] == [
        scheme != "" for scheme in schemes.values()
    ]
    assert type(any_path("runs/a", "key")) is type(Path())


@pytest.mark.parametrize(("url", "extra"), [("gs://b/x", "gcs"), ("s3://b/x", "s3")])
def test_without_the_extra_the_error_says_what_to_install(monkeypatch, url, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"^some_key={url} .*maxtext-lite\[{extra}\]"):
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
