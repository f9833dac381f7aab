"""Where a text ends, piece by piece; and the speed of tokens."""

import itertools
from types import SimpleNamespace

import pytest

from maxtext_lite.data.tokenizer import ByteTokenizer
from maxtext_lite.generation import stream_text
from maxtext_lite.generation.stream_text import StopText, TimedTokens, WrittenText

TEXT = "one, two.\nUser: three"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(("stops", "expected"), [
    ([], TEXT), (["two"], "one, "), (["\nUser:"], "one, two."), (["four"], TEXT), (["o.", "two."], "one, "),
    (["three!"], TEXT), (["one"], ""), ([".\nUsed", "\nUser"], "one, two."),
])  # fmt: skip
def test_a_text_ends_before_the_first_stop_string(stops, expected, size):
    until, text = StopText(stops), ""
    for start in range(0, len(TEXT), size):
        text += until.push(TEXT[start : start + size])
        assert expected.startswith(text), "nothing is let through that belongs to a stop string"
    assert text + until.flush() == expected
    assert until.found == (expected != TEXT)


def test_text_is_let_through_as_soon_as_it_is_certain():
    until = StopText(["##"])
    assert [until.push(character) for character in "a#b##c"] == ["a", "", "#b", "", "", ""]


def write(tokens, **how):
    tokenizer = ByteTokenizer()
    text = WrittenText(tokenizer.stream_decoder(), how.get("stop_ids", []), how.get("stop_strings", []))
    pieces = [text.push(token) for token in tokens]
    assert "".join([*pieces, text.end()]) == text.text
    return text.text


def test_a_text_is_what_its_tokens_are():
    assert write("é!".encode()) == "é!"
    assert write("é".encode()[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_neither_stop_tokens_nor_stop_strings_are_part_of_it():
    assert write([*b"ab", 256, *b"cd"], stop_ids=[256]) == "ab"
    assert write(b"abcd", stop_strings=["c"]) == "ab"
    assert write([*b"ab#", 256], stop_ids=[256], stop_strings=["##"]) == "ab#"


def test_tokens_are_timed_after_two_rounds(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(stream_text, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    tokens = [(row, 7, -1.0) for _ in range(4) for row in range(2)]
    timed = TimedTokens(iter(tokens))
    assert list(timed) == tokens
    assert str(timed) == "8 tokens in 8.00 s, the first after 1.00 s with compilation; then 1.0 tokens/s"
    assert str(TimedTokens(iter([]))) == "no tokens"
