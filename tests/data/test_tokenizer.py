import json
import pathlib

import numpy as np
import pytest
import sentencepiece
import tokenizers

from maxtext_lite.config import Config, UserError, load_config
from maxtext_lite.data.tokenizer import check_vocabulary, load_tokenizer

# ASCII, accents, CJK, an emoji of several code points, a combining mark, control characters.
UNICODE = "To be, or not to be—naïve Ærøskøbing 東京 👩‍🚀 é e\u0301\n\ttab\x00 end  two spaces"
CORPUS = ["the cat sat on the mat", "the dog sat on the log", "a naïve café — 東京", "\n\n  indented"] * 8


def config_for(tokenizer_type: str, path: pathlib.Path | str = "") -> Config:
    overrides = [f"tokenizer_type={tokenizer_type}", f"tokenizer_path={path}", "vocab_size=100000"]
    return load_config(None, overrides)


def train_bpe(directory: pathlib.Path, special_tokens: list[str]) -> pathlib.Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special_tokens,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def train_sentencepiece(directory: pathlib.Path, **options: int) -> pathlib.Path:
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


@pytest.fixture(scope="module", params=["byte", "huggingface", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "byte":
        return load_tokenizer(config_for("byte"))
    if request.param == "huggingface":
        return load_tokenizer(config_for("huggingface", train_bpe(directory, ["<|endoftext|>"])))
    return load_tokenizer(config_for("sentencepiece", train_sentencepiece(directory)))


@pytest.mark.parametrize("text", ["", "a", "the cat sat", UNICODE], ids=["empty", "one", "words", "unicode"])
def test_decode_undoes_encode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert not np.isin(ids, tokenizer.end_of_text_id).any()
    assert (len(ids) == 0) == (text == "")


def test_tokens_are_placed_where_their_text_stands(tokenizer):
    texts = [UNICODE, "", "  the cat  sat "]
    for text, placed in zip(texts, tokenizer.encode_placed(texts), strict=True):
        np.testing.assert_array_equal(placed.token_ids, tokenizer.encode(text))
        assert len(placed.starts) == len(placed.stops) == len(placed.token_ids)
        # Every character belongs to a token, in order; the tokens of one character share it.
        covered = 0
        for start, stop in zip(placed.starts, placed.stops, strict=True):
            assert start <= covered <= stop
            covered = stop
        assert covered == len(text)
        for number in range(len(placed.token_ids)):  # each token decodes to its own characters
            said = tokenizer.decode(placed.token_ids[number : number + 1]).strip()
            if said and "\N{REPLACEMENT CHARACTER}" not in said:
                assert said in text[placed.starts[number] : placed.stops[number]]


def test_special_tokens_are_not_text(tokenizer):
    assert tokenizer.end_of_text_id in tokenizer.special_ids
    assert not tokenizer.special_ids & set(tokenizer.encode(UNICODE).tolist())


def test_trimmed_spaces_belong_to_the_token_after_them(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "bb": 1, "</s>": 2}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["</s>"])
    words.save(str(tmp_path / "tokenizer.json"))
    (placed,) = load_tokenizer(config_for("huggingface", tmp_path)).encode_placed(["a  bb </s>"])
    assert [placed.token_ids.tolist(), placed.starts.tolist(), placed.stops.tolist()] == [
        [0, 1, 2], [0, 1, 5], [1, 5, 10],
    ]  # fmt: skip


def test_documents_are_encoded_as_single_texts_are(tokenizer):
    together = tokenizer.encode_documents([*CORPUS[:4], "", UNICODE])
    assert len(together) == 6
    for ids, text in zip(together, [*CORPUS[:4], "", UNICODE], strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_streaming_gives_the_same_text_and_never_half_a_character(tokenizer):
    ids = tokenizer.encode(UNICODE * 2).tolist()
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(i) for i in ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + decoder.flush() == UNICODE * 2
    # Text comes as it is made, not at the end.
    assert sum(map(bool, pieces)) > len(ids) / 4
    assert decoder.flush() == ""
    again = [decoder.push(i) for i in ids] + [decoder.flush()]
    assert "".join(again) == UNICODE * 2


def test_a_stream_that_stops_within_a_character_shows_a_replacement(tokenizer):
    ids = tokenizer.encode("ab東").tolist()[:-1]
    decoder = tokenizer.stream_decoder()
    text = "".join(decoder.push(i) for i in ids) + decoder.flush()
    assert text == tokenizer.decode(ids)
    assert text.startswith("ab")


def test_end_of_text_has_an_id_and_no_text(tokenizer):
    assert 0 <= tokenizer.end_of_text_id < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.end_of_text_id]) == ""
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(int(i)) for i in (*tokenizer.encode("ab"), tokenizer.end_of_text_id, *tokenizer.encode("c"))]
    assert ("".join(pieces) + decoder.flush()).replace(" ", "") == "abc"


def test_ids_that_only_the_embedding_table_has_give_no_text(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("ab").tolist(), 5000]) == "ab"


def test_bytes_are_their_own_tokens():
    tokenizer = load_tokenizer(config_for("byte"))
    assert tokenizer.encode("Aé").tolist() == [0x41, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.end_of_text_id, tokenizer.fingerprint) == (257, 256, "byte")
    assert tokenizer.decode([0x41, 0xC3, 0x42]) == "A\N{REPLACEMENT CHARACTER}B"


def test_random_bytes_stream_to_what_they_decode_to():
    tokenizer = load_tokenizer(config_for("byte"))
    ids = np.random.default_rng(0).integers(257, size=5000).tolist()
    decoder = tokenizer.stream_decoder()
    text = "".join(decoder.push(i) for i in ids) + decoder.flush()
    assert text == bytes(i for i in ids if i < 256).decode(errors="replace") == tokenizer.decode(ids)


def test_a_directory_stands_for_the_tokenizer_in_it(tmp_path):
    for kind, path in (
        ("huggingface", train_bpe(tmp_path, ["</s>"])),
        ("sentencepiece", train_sentencepiece(tmp_path)),
    ):
        by_directory, by_file = (load_tokenizer(config_for(kind, p)) for p in (tmp_path, path))
        assert by_directory.fingerprint == by_file.fingerprint


def test_the_fingerprint_is_of_the_contents_not_the_place(tmp_path):
    fingerprints = []
    for name, tokens in (("a", ["<eos>"]), ("b", ["<eos>"]), ("c", ["<eos>", "<pad>"])):
        (tmp_path / name).mkdir()
        fingerprints.append(load_tokenizer(config_for("huggingface", train_bpe(tmp_path / name, tokens))).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_the_library_gives_the_same_ids(tmp_path):
    path = train_bpe(tmp_path, ["<|endoftext|>"])
    direct = tokenizers.Tokenizer.from_file(str(path)).encode(UNICODE).ids
    assert load_tokenizer(config_for("huggingface", path)).encode(UNICODE).tolist() == direct
    path = train_sentencepiece(tmp_path)
    direct = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode(UNICODE)
    assert load_tokenizer(config_for("sentencepiece", path)).encode(UNICODE).tolist() == direct


def test_a_file_that_asks_for_dropout_gets_none(tmp_path):
    path = train_bpe(tmp_path, ["<|endoftext|>"])
    expected = load_tokenizer(config_for("huggingface", path)).encode(UNICODE).tolist()
    content = json.loads(path.read_text())
    content["model"]["dropout"] = 1.0
    path.write_text(json.dumps(content))
    assert len(tokenizers.Tokenizer.from_file(str(path)).encode(UNICODE).ids) > len(expected)
    tokenizer = load_tokenizer(config_for("huggingface", path))
    assert tokenizer.encode(UNICODE).tolist() == expected
    assert [ids.tolist() for ids in tokenizer.encode_documents([UNICODE] * 3)] == [expected] * 3


def test_a_file_that_asks_for_truncation_and_padding_gets_neither(tmp_path):
    path = train_bpe(tmp_path, ["<|endoftext|>"])
    whole = load_tokenizer(config_for("huggingface", path))
    library = tokenizers.Tokenizer.from_file(str(path))
    library.enable_truncation(3)
    library.enable_padding(length=50)
    library.save(str(path))
    assert len(tokenizers.Tokenizer.from_file(str(path)).encode(UNICODE).ids) == 50
    tokenizer, texts = load_tokenizer(config_for("huggingface", path)), ["a", UNICODE]
    expected = [whole.encode(text).tolist() for text in texts]
    assert [tokenizer.encode(text).tolist() for text in texts] == expected
    assert [ids.tolist() for ids in tokenizer.encode_documents(texts)] == expected


@pytest.mark.parametrize(
    ("special_tokens", "stated", "expected"),
    [
        (["<pad>", "<|endoftext|>"], None, 1),
        (["<s>", "</s>"], None, 1),
        (["</s>", "<|endoftext|>"], None, 1),  # the more specific name first
        (["<|endoftext|>", "<stop>"], "<stop>", 1),
        (["<|endoftext|>", "<stop>"], {"content": "<stop>", "special": True}, 1),
        (["<eos>"], ..., 0),  # a tokenizer_config.json that states none
    ],
)
def test_end_of_text_is_stated_or_found_by_name(tmp_path, special_tokens, stated, expected):
    path = train_bpe(tmp_path, special_tokens)
    if stated is not None:
        content = {} if stated is ... else {"eos_token": stated}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert load_tokenizer(config_for("huggingface", path)).end_of_text_id == expected


def refusal(tokenizer_type: str, path: pathlib.Path) -> str:
    with pytest.raises(UserError) as caught:
        load_tokenizer(config_for(tokenizer_type, path))
    return str(caught.value)


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    path = train_bpe(tmp_path, ["<pad>", "<cls>"])
    assert refusal("huggingface", path) == (
        f"tokenizer_path='{path}' has no end-of-text token: none of its special tokens (<cls>, <pad>) is one of "
        "<|endoftext|>, <|end_of_text|>, <|end▁of▁sentence|>, </s>, <eos>, <|im_end|>. "
        f"Name it as eos_token in '{tmp_path}/tokenizer_config.json'."
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    assert refusal("huggingface", path) == (
        f"'{tmp_path}/tokenizer_config.json': the tokenizer has no token eos_token='<gone>'."
    )
    model = train_sentencepiece(tmp_path, eos_id=-1)
    assert refusal("sentencepiece", model) == (
        f"tokenizer_path='{model}' has no end-of-text token: the model was trained without an eos piece."
    )


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_a_missing_or_wrong_file_is_refused(tmp_path, kind):
    name = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}[kind]
    assert refusal(kind, tmp_path / "none") == (
        f"tokenizer_path='{tmp_path}/none': there is no file '{tmp_path}/none'."
    )
    assert refusal(kind, tmp_path) == f"tokenizer_path='{tmp_path}': there is no file '{tmp_path}/{name}'."
    for content in (b"", b"{}", b"\xff\xfe", b"\x0a\x05wrong"):
        (tmp_path / name).write_bytes(content)
        assert refusal(kind, tmp_path).startswith(f"tokenizer_path='{tmp_path}/{name}' is not a ")


def test_the_copy_that_a_run_stored_is_named_where_its_tokenizer_is_gone(tmp_path):
    keys = [f"base_output_directory={tmp_path}", "run_name=my run", "tokenizer_type=huggingface", "dataset_type=sft"]
    config = load_config(None, [*keys, f"tokenizer_path={tmp_path}/gone"])
    gone = f"tokenizer_path='{tmp_path}/gone': there is no file '{tmp_path}/gone'."
    with pytest.raises(UserError) as alone:
        load_tokenizer(config)
    assert str(alone.value) == gone
    (stored := tmp_path / "my run" / "hf").mkdir(parents=True)
    copy = train_bpe(stored, ["<|endoftext|>"])
    with pytest.raises(UserError) as refused:
        load_tokenizer(config)
    assert str(refused.value) == f"{gone} Nearest that works: tokenizer_path={copy}, the copy in the run directory."
    assert load_tokenizer(load_config(None, [*keys, f"tokenizer_path={copy}"])).vocab_size == 300


def test_the_vocabulary_must_hold_every_token(tokenizer):
    for vocab_size in (tokenizer.vocab_size, tokenizer.vocab_size + 63):
        check_vocabulary(tokenizer, vocab_size)
    needed = tokenizer.vocab_size
    with pytest.raises(UserError) as caught:
        check_vocabulary(tokenizer, needed - 1)
    assert str(caught.value) == (
        f"vocab_size={needed - 1} is smaller than the tokenizer's {needed} tokens. Nearest that works: {needed}."
    )


def test_the_vocabulary_size_covers_ids_with_gaps(tmp_path):
    path = train_bpe(tmp_path, ["<|endoftext|>"])
    content = json.loads(path.read_text())
    content["model"]["vocab"]["Z"] = 900  # the library moves such an id for added tokens, but keeps it here
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(config_for("huggingface", path))
    assert tokenizer.vocab_size == 901
    assert tokenizer.encode("Z").tolist() == [900]
