"""The keys of prepare, and the field that it reads."""

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.prepare import parse_prepare_config


def test_the_field_is_text_or_the_turns_of_a_conversation():
    words = ["input=a.jsonl", "output=out"]
    assert parse_prepare_config(words).field == "text"
    assert parse_prepare_config([*words, "chat=true"]).field == "messages"
    assert parse_prepare_config([*words, "chat=true", "text_field=turns"]).field == "turns"
    assert parse_prepare_config(["input=[a.jsonl, b.txt]", "output=out"]).input == ["a.jsonl", "b.txt"]


@pytest.mark.parametrize(("word", "message"), [
    ("task_megabyte=3", "unknown key 'task_megabyte' (command line). Did you mean 'task_megabytes'?"),
    ("num_workers=0", "num_workers=0 must be at least 1, or -1."),
    ("max_bad_fraction=2", "max_bad_fraction=2 must be at least 0 and at most 1."),
    ("output=az://b/x",
     "output=az://b/x is a URL (az:), and only local paths and gs:// and s3:// are read and written."),
    ("tokenizer_path=t.json", "tokenizer_path has no effect with tokenizer_type=byte."),
    ("tokenizer_type=huggingface", "tokenizer_path is empty with tokenizer_type=huggingface."),
    ("chat_template=t.jinja", "chat_template has no effect without chat=true."),
    ("out", "'out' is not of the form key=value."),
    ("input=", "input=null is not a path, or a list of paths."),
    ("input=[a.jsonl, 3]", "input.1=3 is not text."),
])  # fmt: skip
def test_a_wrong_key_is_named(word, message):
    with pytest.raises(UserError) as refused:
        parse_prepare_config(["input=a.jsonl", "output=out", word])
    assert any(problem.startswith(message) for problem in refused.value.problems), refused.value.problems


def test_input_and_output_are_required():
    with pytest.raises(UserError) as refused:
        parse_prepare_config([])
    assert [problem.partition(".")[0] for problem in refused.value.problems] == [
        "input is missing",
        "output is missing",
    ]
