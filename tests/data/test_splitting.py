"""Pieces of a text have the tokens of the text, for every tokenizer that allows cuts; others do not cut."""

import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from maxtext_lite.data import splitting
from maxtext_lite.data.text_files import find_files, json_lines
from maxtext_lite.data.tokenizer import ByteTokenizer

ALPHABET = [*"abZ  \t\n\r 129.,'-é中\u0301\u00a0\u3000", "'s", "'LL", " the", "  ", " \n", "<|end|>", "  a b"]


def words_of(kind):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt2", "digits"))
    if kind == "gpt2":
        return byte_level
    if kind == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pattern = Regex(splitting._PATTERNS[kind])
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), byte_level])


@pytest.fixture(scope="module")
def prose():
    ((name, file),) = find_files("dataset_path", "shakespeare.jsonl.gz")
    return next(value for _, value in json_lines(name, file, wanted="text"))["text"][:60_000]


def trained(kind, prose):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words_of(kind)
    if kind == 1:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([prose], trainer)
    return tokenizer


@pytest.mark.parametrize("kind", ["gpt2", "digits", 0, 1])
def test_the_tokens_of_the_pieces_are_those_of_the_whole(kind, prose):
    tokenizer = trained(kind, prose)
    assert splitting.may_split(json.loads(tokenizer.to_str()))
    draw = random.Random(3)
    texts = [prose, *("".join(draw.choices(ALPHABET, k=draw.randrange(80))) for _ in range(150))]
    cuts = 0
    for text in texts:
        for most in (1, 7) if text is not prose else (50, 9999):
            pieces = splitting.pieces(text, most)
            cuts += len(pieces) - 1
            assert "".join(pieces) == text
            joined = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]
            assert joined == tokenizer.encode(text, add_special_tokens=False).ids, (pieces,)
    assert cuts > 300


def test_places_are_single_spaces_between_letters():
    assert splitting.pieces("a b  c. d e\n f", 1) == ["a", " b  c. d", " e\n f"]
    assert splitting.pieces("a b c d", 3) == ["a b", " c d"]
    assert splitting.pieces("", 5) == [""]


@pytest.mark.parametrize(("change"), [
    {"normalizer": {"type": "Lowercase"}},
    {"pre_tokenizer": None},
    {"pre_tokenizer": {"type": "Metaspace"}},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}},
    {"model": {"type": "Unigram"}},
    {"truncation": {"max_length": 512}},
    {"model": {"type": "BPE", "dropout": 0.1}},
    {"added_tokens": [{"content": "<a b>", "lstrip": False, "rstrip": False}]},
    {"added_tokens": [{"content": "<a>", "lstrip": True, "rstrip": False}]},
])  # fmt: skip
def test_other_tokenizers_do_not_cut(change, prose):
    stated = json.loads(trained("gpt2", prose[:2000]).to_str())
    assert splitting.may_split(stated)
    assert not splitting.may_split(stated | change)


def test_texts_are_tokenized_into_one_stream():
    ids, counts = splitting.tokenized(ByteTokenizer(), ["ab", "", "c"], np.dtype("<u2"))
    assert ids.tolist() == [97, 98, 256, 99, 256]
    assert counts.tolist() == [3, 1, 2]
    assert [len(each) for each in splitting.tokenized(ByteTokenizer(), [], np.dtype("<u2"))] == [0, 0]
