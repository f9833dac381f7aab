import json

import numpy as np
import pytest
import sentencepiece
import tokenizers

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.tokenizer import load_tokenizer
from maxtext_lite.inference.stream_text import StreamDecoder

# ASCII, accents, CJK, an emoji of several code points, a combining mark, control characters.
UNICODE = "To be, or not to be—naïve Ærøskøbing 東京 👩‍🚀 é e\u0301\n\ttab\x00 end  two spaces"
CORPUS = [
    "the cat sat on the mat",
    "the dog sat on the log",
    "a naïve café — 東京",
    "\n\n  indented",
] * 8
KINDS = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}


def load(kind, path="", *more):
    return load_tokenizer(
        load_config(None, [f"tokenizer_type={kind}", f"tokenizer_path={path}", *more])
    )


def train_bpe(directory, special_tokens=("<|endoftext|>",)):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    keys = {
        "special_tokens": list(special_tokens),
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    tokenizer.train_from_iterator(
        CORPUS, tokenizers.trainers.BpeTrainer(vocab_size=300, **keys)
    )
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def train_sentencepiece(directory, **options):
    path = directory / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_writer=file,
            vocab_size=320,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
            **options,
        )
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A tokenizer file of each kind, and what its own library reads in it."""
    directory = tmp_path_factory.mktemp("tokenizers")
    bpe, model = train_bpe(directory), train_sentencepiece(directory)
    of_library = {
        "huggingface": lambda text: (
            tokenizers.Tokenizer.from_file(str(bpe)).encode(text).ids
        ),
        "sentencepiece": sentencepiece.SentencePieceProcessor(
            model_file=str(model)
        ).encode,
        "byte": lambda text: list(text.encode()),
    }
    return {"huggingface": bpe, "sentencepiece": model, "byte": ""}, of_library


@pytest.fixture(params=["byte", *KINDS])
def kind(request):
    return request.param


@pytest.fixture
def tokenizer(kind, paths):
    return load(kind, paths[0][kind])


@pytest.mark.fast
def test_texts_become_the_ids_of_the_library_and_texts_again(kind, tokenizer, paths):
    texts = ["", "a", *CORPUS[:4], UNICODE]
    for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
        assert tokenizer.encode(text).tolist() == ids.tolist() == paths[1][kind](text)
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert not tokenizer.special_ids & {*ids.tolist()}
    end = tokenizer.end_of_text_id
    assert 0 <= end < tokenizer.vocab_size
    assert end in tokenizer.special_ids
    # Ids that only the embedding table has give no text, and neither does the end.
    assert tokenizer.decode([end, *tokenizer.encode("ab").tolist(), 5000]) == "ab"
    if kind in KINDS:
        assert load(kind, paths[0][kind].parent).fingerprint == tokenizer.fingerprint


def test_tokens_are_placed_where_their_text_stands(tokenizer):
    texts = [UNICODE, "", "  the cat  sat "]
    for text, placed in zip(texts, tokenizer.encode_placed(texts), strict=True):
        np.testing.assert_array_equal(placed.token_ids, tokenizer.encode(text))
        # Every character belongs to a token, in order; the tokens of one character share it.
        covered = 0
        for token, start, stop in zip(
            placed.token_ids, placed.starts, placed.stops, strict=True
        ):
            assert start <= covered <= stop
            covered = stop
            said = tokenizer.decode([token]).strip()
            if said and "\N{REPLACEMENT CHARACTER}" not in said:
                assert said in text[start:stop]
        assert covered == len(text)


def test_a_stream_gives_the_same_text_as_it_is_made_and_never_half_a_character(
    tokenizer,
):
    ids = tokenizer.encode(UNICODE).tolist()
    decoder = StreamDecoder(tokenizer)
    for _ in range(2):
        pieces = [decoder.push(i) for i in ids]
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert "".join(pieces) + decoder.flush() == UNICODE
        assert sum(map(bool, pieces)) > len(ids) / 4
    cut = tokenizer.encode("ab東").tolist()[:-1]
    assert "".join([*map(decoder.push, cut), decoder.flush()]) == tokenizer.decode(cut)


def test_a_stream_without_text_decodes_a_few_tokens_at_a_time(tokenizer, monkeypatch):
    decoded = []
    decode = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids: decoded.extend(ids) or decode(ids)
    )
    half = tokenizer.encode("東").tolist()[:-1]
    ids = [*half, tokenizer.end_of_text_id] * 100 + tokenizer.encode("ab").tolist()
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) + decoder.flush() == decode(ids)
    assert len(decoded) < 20 * len(ids)


def test_a_file_that_asks_for_dropout_truncation_and_padding_gets_none(tmp_path):
    path = train_bpe(tmp_path)
    texts = ["a", UNICODE]
    expected = [load("huggingface", path).encode(text).tolist() for text in texts]
    library = tokenizers.Tokenizer.from_file(str(path))
    library.enable_truncation(3)
    library.enable_padding(length=50)
    content = json.loads(library.to_str())
    content["model"]["dropout"] = 1.0
    path.write_text(json.dumps(content))
    tokenizer = load("huggingface", path)
    assert [tokenizer.encode(text).tolist() for text in texts] == expected
    assert [ids.tolist() for ids in tokenizer.encode_documents(texts)] == expected


@pytest.mark.parametrize(
    ("special_tokens", "stated", "expected"),
    [
        ("</s> <|endoftext|>", None, 1),  # the more specific name first
        ("<|endoftext|> <stop>", {"eos_token": "<stop>"}, 1),
        ("<pad> <cls>", None, None),
        ("<eos>", {"eos_token": "<gone>"}, None),
    ],
)
def test_end_of_text_is_stated_or_found_by_name_or_refused(
    tmp_path, special_tokens, stated, expected
):
    path = train_bpe(tmp_path, special_tokens.split())
    if stated is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    if expected is not None:
        assert load("huggingface", path).end_of_text_id == expected
        return
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        load("huggingface", path)
