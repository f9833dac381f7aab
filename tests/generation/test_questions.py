"""Continuations are tokenized with their contexts; a wrong question is refused by its line."""

import math

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.generation.questions import (
    Cloze,
    Scored,
    accuracy,
    continued,
    perplexity,
    read_questions,
    with_blank,
)


def test_a_continuation_is_read_with_its_context():
    letters = lambda text: [ord(letter) for letter in text]  # noqa: E731
    assert continued(letters, "ab", " c") == (letters("ab c"), 2)
    assert continued(letters, "ab \n", "c") == (letters("ab \nc"), 2)
    assert continued(letters, "", "c") == (letters("c"), 0)
    merged = lambda text: [1] if text == "ab c" else letters(text)  # noqa: E731
    assert continued(merged, "ab", " c") == ([1], 0)  # a tokenizer that joins them


def test_a_perplexity_beyond_every_float_is_infinite():
    scored = [Scored(-1600.0, is_greedy=False, num_tokens=2)]
    found = perplexity(scored, "ab")
    assert (found["loss"], found["perplexity"], found["tokens"]) == (800.0, math.inf, 2)
    assert accuracy([Cloze(context="a", target="b")], scored)["answer_perplexity"] == math.inf


@pytest.mark.parametrize(("context", "continuation", "want"), [
    ("ab", "c", " c"), ("ab ", "c", "c"), ("ab", " c", " c"), ("ab", "\nc", "\nc"), ("", "c", "c"),
])  # fmt: skip
def test_words_are_parted_by_one_blank(context, continuation, want):
    assert with_blank(context, continuation) == want


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_line_separator_within_a_text_ends_no_line(separator, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(f'{{"context": "a{separator}b", "target": "c"}}\n\n{{"target": ""}}\n', encoding="utf-8")
    with pytest.raises(UserError, match="line 3: context: Field required"):
        read_questions(str(path), "cloze")
    path.write_text(f'{{"context": "a{separator}b", "target": "c"}}\n', encoding="utf-8")
    (cloze,) = read_questions(str(path), "cloze")
    assert cloze.context == f"a{separator}b"


@pytest.mark.parametrize(("kind", "line", "message"), [
    ("choices", "{", "line 2: Invalid JSON"),
    ("choices", '{"context": "a", "choices": ["b"], "answer": 0}', "line 2: choices: List should have at least 2"),
    ("choices", '{"context": "a", "choices": ["b", "c"], "answer": 2}', "line 2: Value error, answer must be in 0..1"),
    ("choices", '{"context": "a", "choices": ["b", " "], "answer": 1}', "choices must not be empty"),
    ("cloze", '{"context": "a"}', "line 2: target: Field required"),
])  # fmt: skip
def test_wrong_questions_are_refused_by_line(kind, line, message, tmp_path):
    (tmp_path / "q.jsonl").write_text("\n" + line)
    with pytest.raises(UserError) as refusal:
        read_questions(str(tmp_path / "q.jsonl"), kind)
    assert message in str(refusal.value)
    with pytest.raises(UserError, match="No such file"):
        read_questions(str(tmp_path / "none.jsonl"), kind)
