"""Pieces of a text have the tokens of the text, for every tokenizer that allows cuts; others do not cut."""

import json
import random

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from maxtext_lite.data import tokenizer_files as splitting
from maxtext_lite.data.text_files import find_files, json_lines

ALPHABET = [
    *"abZ  \t\n\r 129.,'-é中\u0301\u00a0\u3000",
    "'s",
    "'LL",
    " the",
    "  ",
    " \n",
    "<|end|>",
    "  a b",
]


def words_of(kind):
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=kind == "gpt2"
    )
    if kind == "gpt2":
        return byte_level
    pattern = Regex(splitting._PATTERNS[kind])
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, behavior="isolated"), byte_level]
    )


@pytest.fixture(scope="module")
def prose():
    ((name, file),) = find_files("dataset_path", "shakespeare.jsonl.gz")
    return next(value for _, value in json_lines(name, file, wanted="text"))["text"][
        :20_000
    ]


def trained(kind, prose):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words_of(kind)
    tokenizer.normalizer = normalizers.NFC() if kind == 1 else None
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    keys = {
        "vocab_size": 600,
        "special_tokens": ["<|end|>"],
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    tokenizer.train_from_iterator([prose], trainers.BpeTrainer(**keys))
    return tokenizer


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["gpt2", 0, 1])
def test_the_tokens_of_the_pieces_are_those_of_the_whole(kind, prose):
    tokenizer = trained(kind, prose)
    assert splitting.may_split(json.loads(tokenizer.to_str()))
    draw = random.Random(3)
    texts = [
        prose,
        *("".join(draw.choices(ALPHABET, k=draw.randrange(80))) for _ in range(150)),
    ]
    cuts = 0
    for text in texts:
        for most in (1, 7) if text is not prose else (50, 9999):
            pieces = splitting.pieces(text, most)
            cuts += len(pieces) - 1
            assert "".join(pieces) == text
            joined = [
                token
                for piece in pieces
                for token in tokenizer.encode(piece, add_special_tokens=False).ids
            ]
            assert joined == tokenizer.encode(text, add_special_tokens=False).ids, (
                pieces,
            )
    assert cuts > 150


@pytest.mark.parametrize(
    "change",
    [
        '{"normalizer": {"type": "Lowercase"}}',
        '{"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true, "use_regex": true}}',
        '{"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}}',
        '{"pre_tokenizer": {"type": "Sequence", "pretokenizers": ['
        '{"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": false},'
        '{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]}}',
        '{"model": {"type": "Unigram"}}',
        '{"model": {"type": "BPE", "dropout": 0.1}}',
        '{"added_tokens": [{"content": "<a b>", "lstrip": false, "rstrip": false}]}',
    ],
)
def test_other_tokenizers_do_not_cut(change, prose):
    stated = json.loads(trained("gpt2", prose[:2000]).to_str())
    assert not splitting.may_split(stated | json.loads(change))
