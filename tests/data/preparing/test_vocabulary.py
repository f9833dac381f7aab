"""Tokenizers trained on text: of the requested size, for any text, or refused if the text is too small."""

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data import load_tokenizer
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.prepare import main
from tests.run_directories import write_lines

TEXTS = [
    "the cat sat on the mat, and the hat lay flat\n",
    "a rat ran past the mat at 12:45\n" * 3,
    "",
]


@pytest.fixture
def words(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    return [f"input={path}", f"output={tmp_path}/out"]


@pytest.mark.parametrize(
    ("kind", "size"), [("huggingface", 270), ("sentencepiece", 290)]
)
def test_a_trained_tokenizer_has_its_size_and_decodes_any_text(
    words, kind, size, tmp_path, capsys
):
    assert (
        main(["tokenizer", *words, f"tokenizer_type={kind}", f"vocab_size={size}"]) == 0
    )
    keys = capsys.readouterr().out.partition(":")[0].split()
    assert keys[0] == f"tokenizer_type={kind}"
    chosen = dict(word.split("=", 1) for word in keys)
    tokenizer = load_tokenizer(PrepareConfig(**chosen))
    assert tokenizer.vocab_size == size
    for text in [*TEXTS, "Grüße, 猫!  two  spaces"]:
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text_id not in ids
    assert len(tokenizer.encode("the mat")) < len("the mat")  # it has learned something
    with pytest.raises(UserError, match="tokenizer"):  # there already
        main(["tokenizer", *words, f"tokenizer_type={kind}", f"vocab_size={size}"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("vocab_size=100", "vocab_size=100 .*: 257"),
        ("vocab_size=9999", "vocab_size=9999: "),
    ],
)
def test_an_impossible_vocabulary_is_refused(words, more, message, tmp_path):
    with pytest.raises(UserError, match=message):
        main(["tokenizer", *words, *more.split()])
    assert not (tmp_path / "out").exists()
