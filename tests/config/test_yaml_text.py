import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtext_lite.config.yaml_text import is_one_scalar, parse_mapping, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("-2", -2), ("+3", 3), ("010", 10), ("0o17", 15),
        ("0x1F", 31), ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("y", "y"), ("1_000", "1_000"),
        ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("true", True), ("False", False), ("~", None), ("null", None),
        ("", None), ("none", "none"), ('"5"', "5"), ("'true'", "true"), ("[[1, 2], [3]]", [[1, 2], [3]]),
        ("{a: 1}", {"a": 1}),
        ("!!seq [!!map {a: 1}]", [{"a": 1}]), ("-.inf", -math.inf), ("a # comment", "a"), ("1e", "1e"), ("0b1", "0b1"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    parsed = parse_value(text).value
    assert parsed == value
    assert type(parsed) is type(value)


def test_nan_is_read():
    assert math.isnan(parse_value(".nan").value)


@given(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
def test_python_numbers_are_read_back(integer, number):
    assert parse_value(str(integer)).value == integer
    assert parse_value(repr(number)).value == number


def test_the_text_of_a_scalar_is_kept():
    assert parse_value("007").text == "007"
    assert parse_value("'007'").text == "007"
    assert parse_value("[1]").text is None


def test_a_scalar_is_alone_where_yaml_drops_nothing():
    alone, beside = ["a", " a ", "'a # b'", '"a"\n', "~"], ["a # b", "'a' # b", "!!str a", "&a b", "", "# a", "[a]"]
    assert [is_one_scalar(text) for text in (*alone, *beside)] == [True] * len(alone) + [False] * len(beside)


def test_entries_come_in_order_with_duplicates():
    entries = parse_mapping("b: 1\na: x\nb: 2\n")
    assert [(key, value.value) for key, value in entries] == [("b", 1), ("a", "x"), ("b", 2)]
    assert parse_mapping("") == []
    assert parse_mapping("# nothing\n") == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1", "is not YAML"), ("&a [*a]", "contains itself"), ("*a", "is not YAML"),
        ("!!python/name:os 1", "has the tag"), ("!foo {a: 1}", "has the tag !foo"), ("[!foo [a]]", "has the tag !foo"),
        ("{a: 1, b: 2, a: 3}", r"has the key 'a' twice \(line 1\)"), ("- a: 1\n  'a': 1\n", r"'a' twice \(line 2\)"),
        ("\0", "is not YAML"), ("a: b: c", "is not YAML"), ("--- 1\n--- 2\n", "is not YAML"), ("[" * 2000, "is n"),
    ],
)  # fmt: skip
def test_what_is_not_yaml_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        parse_value(text)


@pytest.mark.parametrize("text", ["- a\n", "text", "? [a]\n: 1\n", "!foo\na: 1\n"])
def test_a_file_that_is_no_mapping_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a list|is not a word|has the tag"):
        parse_mapping(text)
