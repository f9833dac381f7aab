import errno
import os
import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtext_lite.config.errors import (
    Refusal,
    UserError,
    WrongType,
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


@pytest.mark.parametrize(("value", "text"), [
    ("3.5", "3.5"), ("10/3", "3.333"), ("30003/10000", "3.0003"), ("1000000001/1000000000", "1.000000001"),
    ("3333333333/10", "333333333.3"), ("1000000000000000001/2", "500000000000000000.5"),
])  # fmt: skip
def test_what_is_not_whole_does_not_look_whole(value, text):
    assert unwhole_text(Fraction(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (16, "16"), (Fraction(16), "16"), (16.0, "16"), (Fraction(1, 4), "0.25"), (Fraction(-3, 8), "-0.375"),
        (Fraction(1, 3), "1/3"), (Fraction(1, 4096), "0.000244140625"), (Fraction(5, 12), "5/12"), (1e-8, "1e-08"),
        (0.003, "0.003"), (Fraction(0), "0"), (-1, "-1"), (Fraction("5.960464477539063e-08"), "5.960464477539063e-08"),
        (Fraction(5960464477539063, 10**30), "5.960464477539063e-15"), (Fraction(1, 10**15), "1e-15"),
        (Fraction(10000000001, 4096), "10000000001/4096"), (Fraction(10**16), "10000000000000000"),
        (Fraction(10000000001, 4), "2500000000.25"),
        (Fraction(12345678901234567891, 10**19), "12345678901234567891/10000000000000000000"),
    ],
)  # fmt: skip
def test_numbers_are_shown_as_a_config_holds_them(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize(("value", "digits", "text"), [
    (25510.204, 4, "25510"), (9999.49, 4, "9999"), (9999.5, 4, "10000"), (-123456.7, 4, "-123457"),
    (12.3456, 4, "12.35"),
    (1234.5, 3, "1234"), (999.6, 3, "1000"), (3.5e14, 4, "350000000000000"), (1e18, 4, "1e+18"), (1e-9, 4, "1e-09"),
])  # fmt: skip
def test_a_large_number_for_reading_has_no_exponent(value, digits, text):
    assert rounded_text(value, digits) == text


@given(st.fractions())
def test_the_text_of_a_fraction_is_exact(value):
    assert Fraction(number_text(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb\x1b[31m\x00", "a\\nb\\x1b[31m\\x00"), ("\udc80", "\\udc80"), ("a" * 120, "a" * 120),
        ("a" * 5000, "a" * 60 + "... (5,000 characters)"), ("\x07" * 90, "\\x07" * 15 + "... (90 characters)"),
        (10**400, "1.000000e+400"), (int("f" * 4000, 16), "3.019469e+4816"), (-(10**90), "-1.000000e+90"),
        ([1, None, "x"], "[1, null, x]"), ({"a\n": {"b": True}}, "{a\\n: {b: true}}"), (["x"] * 2000,
         "[x" + ", x" * 19 + ",... (6,000 characters)"),
    ],
    ids=range(11),
)  # fmt: skip
def test_a_value_is_shown_on_one_line_of_bounded_length_without_control_characters(value, text):
    assert value_text(value) == text
    assert len(text) < 160


def test_the_clause_of_values_that_work():
    assert nearest_clause([]) == ""
    assert nearest_clause([2]) == " Nearest that works: 2."
    assert nearest_clause([2, 4]) == " Nearest that work: 2 or 4."
    assert nearest_clause([2, 2]) == " Nearest that works: 2."
    assert nearest_clause([True, "x=1"]) == " Nearest that work: true or x=1."
    assert str(Refusal("a", "a=3 is odd.", (2, 4))) == "a=3 is odd. Nearest that work: 2 or 4."


def test_only_near_names_are_proposed():
    assert did_you_mean("stps", ["steps", "seed"]) == " Did you mean 'steps'?"
    assert did_you_mean("zzz", ["steps", "seed"]) == ""


def test_a_user_error_holds_all_problems_and_pickles():
    error = UserError(["one.", "two."])
    assert error.problems == ("one.", "two.")
    assert str(error) == "one.\ntwo."
    assert pickle.loads(pickle.dumps(error)).problems == error.problems
    assert UserError("one.").problems == ("one.",)


def test_a_wrong_kind_says_what_would_be_right():
    assert WrongType("must be at least 1.", [1]).nearest == (1,)


def test_a_message_is_one_line_without_control_characters_and_without_endless_words():
    assert echoed("a\nb") == "a b"
    assert echoed("steps\x1b[31m=\r5\u202e\x00\udc80") == r"steps\x1b[31m=\r5\u202e\x00\udc80"
    assert echoed(f"steps={'a' * 5000} is text") == f"steps={'a' * 54}[4,916 characters]{'a' * 30} is text"
    assert len(echoed("word " * 10_000)) < 4100
    sentence = (
        "per_device_batch_size=0.3 x 8 devices = 2.4 examples, not a whole number. Nearest that work: 0.25 or 0.375."
    )
    assert echoed(sentence) == sentence


def test_what_cannot_be_written_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"file/inside cannot be written: Not a directory\.$"), writing(tmp_path):
        (tmp_path / "file" / "inside").write_text("x")
    with pytest.raises(UserError, match=r"^run cannot be written: No space left on device\.$"), writing("run"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as for a file that is open already
    with pytest.raises(UserError, match=r"^to cannot be written: Input/output error\.$"), writing("run"):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "from", None, "to")


@pytest.mark.parametrize(("text", "shown"), [
    ("http://me:pass@host:8000/v1", "http://***@host:8000/v1"),
    ("s3://AKIA:pa/ss@bucket/data", "s3://AKIA:pa/ss@bucket/data"),  # no name and password: a bucket has no slash
    ("s3://AKIA:pass@bucket/a@b", "s3://***@bucket/a@b"),
    ("https://h/x?X-Amz-Credential=C/1&X-Amz-Signature=abc&part=2",
     "https://h/x?X-Amz-Credential=***&X-Amz-Signature=***&part=2"),
    ("https://token@host/x", "https://***@host/x"),
    ("abfs://container@account/x", "abfs://container@account/x"),
    ("gs://bucket/run@2024", "gs://bucket/run@2024"),
    ("me@host and key=value", "me@host and key=value"),
])  # fmt: skip
def test_what_an_address_holds_of_secrets_is_not_written(text, shown):
    assert without_secrets(text) == full_text(text) == value_text(text) == shown
    assert full_text([text, {"where": text}]) == f"[{shown}, {{where: {shown}}}]"
