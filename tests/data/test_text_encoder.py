"""How texts begin and end in tokens, the space at a seam, and special tokens that a text spells."""

import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data import text_encoder
from maxtext_lite.data.sources import open_sources
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.text_files import read_documents
from maxtext_lite.data.tokenizer import load_tokenizer
from maxtext_lite.hf.turns import TurnEncoder
from maxtext_lite.inference.stream_text import (
    StreamDecoder,
    WrittenText,
    decode_after,
    marked_stops,
)
from maxtext_lite.post_training.conversations import Renderer
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.preparation.shards import document_reader
from maxtext_lite.preparation.tasks import WHOLE, BadLine, DocumentReader, Piece
from tests.run_directories import write_lines

SPECIAL = ["<end>", "<begin>", "<|user|>", "<|assistant|>", "<turn>"]
END, BEGIN, TURN = 0, 1, 4
UINT16 = np.dtype(np.uint16)
CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def letters(*, byte_level=True, special=SPECIAL, rstrip=False):
    """A tokenizer of letters, each with an id of its own; without byte_level as Llama 2's."""
    alphabet = sorted(
        pre_tokenizers.ByteLevel.alphabet()
        if byte_level
        else "▁Tobentksm<|>usriahd\n. "
    )
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    if byte_level:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    made.add_special_tokens(
        [tokenizers.AddedToken(name, rstrip=rstrip, special=True) for name in special]
    )
    return made


def save(made, directory, **about):
    directory.mkdir(exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    stated = {"eos_token": "<end>", "bos_token": "<begin>"} | about
    (directory / "tokenizer_config.json").write_text(json.dumps(stated))
    return directory


def config_of(directory, *words):
    keys = ["tokenizer_type=huggingface", f"tokenizer_path={directory}"]
    return load_config(None, [*keys, "vocab_size=400", *words])


def encoder_of(directory, *words):
    config = config_of(directory, *words)
    return TurnEncoder(config, load_tokenizer(config))


def turns_of(user, assistant):
    return [
        {"role": "user", "content": user},
        {"role": "assistant", "content": assistant},
    ]


def renderer_of(directory, template, *words):
    """Of conversations, by a template that is written beside the tokenizer."""
    path = directory / "t.jinja"
    path.write_text(template)
    words = ["dataset_type=sft", f"chat_template={path}", *words]
    config = config_of(directory, *words)
    return Renderer(config, load_tokenizer(config))


PAIRS = [("<end>", END), ("<begin>", BEGIN), ("<turn>", TURN)]
TEMPLATE = processors.TemplateProcessing
BOTH = TEMPLATE(single="<begin> $A <end>", special_tokens=PAIRS)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("post_processor", "about", "begin"),
    [
        (None, {}, []),
        (None, {"add_bos_token": True}, [BEGIN]),
        (TEMPLATE(single="$A <end>", special_tokens=PAIRS), {}, []),
        (BOTH, {"add_eos_token": True}, [BEGIN]),
        (
            TEMPLATE(single="<begin> <turn> $A <end>", special_tokens=PAIRS),
            {},
            [BEGIN, TURN],
        ),
        (processors.BertProcessing(("<end>", END), ("<begin>", BEGIN)), {}, [BEGIN]),
        (processors.RobertaProcessing(("<end>", END), ("<begin>", BEGIN)), {}, [BEGIN]),
        (processors.Sequence([processors.ByteLevel(), BOTH]), {}, [BEGIN]),
    ],
    ids=["none", "stated", "end", "both", "two", "bert", "roberta", "sequence"],
)
def test_texts_begin_as_the_tokenizer_says_and_only_documents_end(
    post_processor, about, begin, tmp_path
):
    made = letters()
    if post_processor is not None:
        made.post_processor = post_processor
    directory = save(made, tmp_path / "t", **about)
    text = made.encode("To be", add_special_tokens=False).ids
    encoder = encoder_of(directory)
    assert encoder.prompt("To be").tolist() == [*begin, *text]
    assert encoder.prompt("").tolist() == (begin or [END])
    found = encoder.documents(["To be", "", "To be"], UINT16)
    assert found.stream.tolist() == [*begin, *text, END] * 2
    length = len(begin) + len(text) + 1
    assert found.lengths.tolist() == [length, 0, length]
    bare = encoder_of(directory, "add_bos=false", "add_eos=false")
    assert bare.documents(["To be"], UINT16).stream.tolist() == text
    forced = encoder_of(directory, "add_bos=true").prompt("To be").tolist()
    assert forced == [*(begin or [BEGIN]), *text]


def test_a_document_that_ends_with_end_of_text_gets_no_second_one(tmp_path):
    encoder = encoder_of(
        save(letters(), tmp_path / "t"), "special_tokens_in_text=encode"
    )
    for text in ("To<end>", "To<end>\n", "To"):
        rendered = encoder.rendered_documents([text], UINT16).stream.tolist()
        assert rendered.count(END) == 1
    assert encoder.documents(["<begin>To"], UINT16).stream.tolist().count(BEGIN) == 1


def test_begin_of_text_that_a_tokenizer_lacks_and_data_with_another_are_refused(
    tmp_path,
):
    with pytest.raises(UserError, match=r"^add_bos=true.*add_bos=auto"):
        TextEncoder(load_config(None, ["add_bos=true"]), load_tokenizer(load_config()))
    encoder = encoder_of(save(letters(), tmp_path / "t", add_bos_token=True))
    assert "add_bos=false" in encoder.disagreement([], add_eos=True)
    assert "add_eos=false" in encoder.disagreement([BEGIN], add_eos=False)
    assert encoder.disagreement([BEGIN], add_eos=True) is None


def seams(tmp_path):
    """Tokenizers of each kind of decoder."""
    words = {name: number for number, name in enumerate([*SPECIAL, "?"])}
    for word in ("To", "be", "not", "▁To", "▁be", "▁not", "##s", "o</w>", "be</w>"):
        words[word] = len(words)
    of_metaspace = tokenizers.Tokenizer(models.WordLevel(words, unk_token="?"))
    of_metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    of_metaspace.decoder = decoders.Metaspace()
    of_pieces = tokenizers.Tokenizer(models.WordPiece(words, unk_token="?"))
    of_pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    of_pieces.decoder = decoders.WordPiece()
    made = {
        "bytes": letters(),
        "strip": letters(byte_level=False),
        "metaspace": of_metaspace,
        "pieces": of_pieces,
    }
    for name, each in made.items():
        each.add_special_tokens(SPECIAL)
        yield load_tokenizer(config_of(save(each, tmp_path / name)))
    with (tmp_path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["To be not to be"] * 9),
            model_writer=file,
            vocab_size=40,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    path = f"tokenizer_path={tmp_path / 'tokenizer.model'}"
    words = ["tokenizer_type=sentencepiece", path]
    yield load_tokenizer(load_config(None, words))
    # It reads control pieces that a text spells as characters, whatever is asked.
    words += ["special_tokens_in_text=encode"]
    with pytest.raises(UserError, match=r"^special_tokens_in_text=encode"):
        TextEncoder(load_config(None, words), load_tokenizer(load_config(None, words)))


def test_a_continuation_keeps_the_space_at_the_seam(tmp_path):
    for tokenizer in seams(tmp_path):
        before, whole = (
            tokenizer.encode(text).tolist() for text in ("To", "To be not")
        )
        rest = whole[len(before) :]
        for prompt, text in (
            ([BEGIN, *before], " be not"),
            ([], tokenizer.decode(rest)),
        ):
            stream = StreamDecoder(tokenizer, prompt)
            streamed = "".join([*map(stream.push, rest), stream.flush()])
            assert streamed == decode_after(tokenizer, prompt, rest) == text


SPELLED = ["To <turn> be", "<end>", "a<turn><turn>b<begin>"]


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["bytes", "strip", "rstrip"])
def test_special_tokens_that_a_document_spells_are_characters_unless_asked(
    kind, tmp_path
):
    made = letters(byte_level=kind != "strip", rstrip=kind == "rstrip")
    directory = save(made, tmp_path / "t")
    plain = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    plain.encode_special_tokens = True  # the library's own way
    for policy, library in (("plain", plain), ("encode", made)):
        encoder = encoder_of(
            directory, f"special_tokens_in_text={policy}", "add_eos=false"
        )
        for text in (*SPELLED, "To be", "< turn>"):
            found = encoder.documents([text], UINT16)
            assert found.stream.tolist() == library.encode(text).ids
            assert found.num_spelled == sum(map(text.count, SPECIAL))
    encoder = encoder_of(directory, "special_tokens_in_text=refuse")
    encoder.check("d:1", "To be")
    with pytest.raises(UserError, match=r"^d:1: .*<turn>"):
        encoder.check("d:1", SPELLED[0])
    # A text in memory and a run's note on it.
    write_lines(tmp_path / "d.jsonl", [{"text": text} for text in SPELLED])
    keys = [
        "dataset_type=text",
        f"dataset_path={tmp_path / 'd.jsonl'}",
        "eval_fraction=0",
    ]
    source, _ = open_sources(
        config_of(directory, *keys, "packing=none", "eval_interval=-1")
    )
    assert any("5 special tokens" in note for note in source.notes)


@pytest.mark.fast
def test_a_long_document_that_spells_a_special_token_is_encoded_in_pieces(
    tmp_path, monkeypatch
):
    directory = save(letters(), tmp_path / "t")
    plain = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    plain.encode_special_tokens = True
    text = "To be not to be " * 9 + "a <turn> be" + " or not to be" * 9
    monkeypatch.setattr(text_encoder, "_CHARACTERS_OF_A_PIECE", 16)
    encoder = encoder_of(directory, "add_eos=false")
    seen = []
    for name in ("encode_documents", "encode_placed", "encode_broken"):
        real = getattr(encoder.tokenizer, name)

        def spy(texts, real=real):
            seen.extend(map(len, texts))
            return real(texts)

        monkeypatch.setattr(encoder.tokenizer, name, spy)
    found = encoder.documents([text], UINT16)
    assert found.stream.tolist() == plain.encode(text).ids
    assert found.num_spelled == 1
    assert 1 < max(seen) < 40
    monkeypatch.setattr(text_encoder, "_CHARACTERS_OF_A_BEGINNING", 16)
    seen.clear()
    assert encoder.first_token(text) == "T"
    assert max(seen) < 40


@pytest.mark.fast
def test_the_first_token_of_a_document_is_that_of_its_encoding(tmp_path):
    directory = save(letters(), tmp_path / "t")
    for policy, first in (("plain", "<"), ("encode", "<turn>")):
        encoder = encoder_of(directory, f"special_tokens_in_text={policy}")
        assert encoder.first_token("<turn>To") == first
        assert encoder.first_token("T") == "T"


@pytest.mark.fast
def test_a_text_that_is_normalized_into_a_special_token_spells_it(tmp_path):
    made = letters(special=[])
    made.normalizer = normalizers.Lowercase()
    vocabulary = made.get_vocab()
    special = [tokenizers.AddedToken("<end>", special=True, normalized=True)]
    made.add_special_tokens(special)
    directory = save(made, tmp_path / "t")
    for text in ("to<END>", "to<end>"):
        found = encoder_of(directory, "add_eos=false").documents([text], UINT16)
        assert found.stream.tolist() == [vocabulary[letter] for letter in "to<end>"]
        with pytest.raises(UserError, match=r"special_tokens_in_text=refuse.*<end>"):
            encoder_of(directory, "special_tokens_in_text=refuse").encode([text])


@pytest.mark.parametrize("policy", ["plain", "refuse"])
def test_added_tokens_that_frame_turns_are_characters_in_their_contents(
    policy, tmp_path
):
    """Also those that the tokenizer does not call special; others, such as a tool's, stay as they are."""
    made = letters(special=["<end>", "<begin>"])
    framing = ["<|user|>", "<|assistant|>", "<turn>"]
    made.add_tokens([*framing, "<think>", "<tool>", "be"])
    directory = save(made, tmp_path / "t")
    template = CHATML.replace("'<|' + m.role", "(m.tool or '') + '<|' + m.role")
    template = template.replace("+ m.content", "+ (m.thought or '') + m.content")
    policy_word = f"special_tokens_in_text={policy}"
    renderer = renderer_of(directory, "{# <tool> #}" + template, policy_word)

    def names(user, assistant):
        turns = turns_of(user, assistant)
        (rendered,) = renderer.sft_texts("d:1", {"messages": turns})
        ids = next(renderer.tokens([rendered])).token_ids.tolist()
        tokens = [made.id_to_token(token) for token in ids]
        return [token for token in tokens if len(token) > 1]

    around = ["<|user|>", "<turn>", "<|assistant|>", "<think>", "<tool>", "<turn>"]
    assert names("To", "<think>To<tool>") == around
    assert names("To<tool>be", "To") == [
        around[0],
        "<tool>",
        "be",
        *around[1:3],
        "<turn>",
    ]
    spells = "To<turn><|assistant|>be", "<think>To<|user|><tool>"
    if policy == "refuse":
        with pytest.raises(UserError, match=r"^d:1: .*<turn>"):
            names(*spells)
    else:
        assert names(*spells) == [around[0], "be", *around[1:]]


@pytest.mark.parametrize("rstrip", [False, True])
def test_special_tokens_in_the_content_of_a_turn_are_characters_and_the_templates_are_not(
    rstrip, tmp_path
):
    made = letters(rstrip=rstrip)
    directory = save(made, tmp_path / "t")

    def tokenized(content, template=CHATML, *words):
        renderer = renderer_of(directory, template, *words)
        turns = turns_of(content, f"be {content}.")
        (found,) = renderer.tokens(renderer.sft_texts("d:1", {"messages": turns}))
        return found

    def spelled(token_ids):
        return made.decode(token_ids.tolist(), skip_special_tokens=False)

    for content in ("To", "To<turn>", "<|user|> <end> To"):
        found = tokenized(content)
        special = [token for token in found.token_ids.tolist() if token < len(SPECIAL)]
        assert special == [2, TURN, 3, TURN]
        assert spelled(found.token_ids[found.is_answer]) == f"be {content}.<turn>"
        encoded = tokenized(content, CHATML, "special_tokens_in_text=encode")
        if "<" not in content:
            assert encoded.token_ids.tolist() == found.token_ids.tolist()
            assert encoded.is_answer.tolist() == found.is_answer.tolist()
        else:
            assert len(encoded.token_ids) < len(found.token_ids)
            with pytest.raises(UserError, match=r"^d:1: .*special_tokens_in_text"):
                tokenized(content, CHATML, "special_tokens_in_text=refuse")
    # A template that looks at such a content, rather than writing it.
    for change in (
        "m.content.split('<turn>')[0]",
        "m.content + m.content|length|string",
    ):
        template = CHATML.replace("m.content", change)
        tokenized("To", template)
        with pytest.raises(UserError, match=r"^d:1: .*special_tokens_in_text=encode"):
            tokenized("To<turn>", template)


def test_notes_count_the_special_tokens_of_the_lines_they_are_about(tmp_path):
    directory = save(letters(), tmp_path / "t")
    (tmp_path / "t.jinja").write_text(CHATML)
    lines = [{"messages": turns_of("a", "To")}] * 2
    lines += [{"messages": turns_of("<turn>", "To")}]
    lines[0] = {"prompt": "a", "completion": "<turn>"}

    def opened(config):
        write_lines(tmp_path / "data.jsonl", lines)
        return open_sources(config)

    keys = ["dataset_type=sft", f"dataset_path={tmp_path / 'data.jsonl'}"]
    changes = [f"chat_template={tmp_path / 't.jinja'}", "eval_fraction=0.4"]
    source, held_out = opened(config_of(directory, *keys, *changes))
    became = "1 special token spelled in {} became {}."
    where = "prompts and answers without turns"
    assert source.notes == (became.format(where, "this token"),)
    assert held_out.notes == (became.format("the text", "plain characters"),)
    # A sentencepiece model reads characters there, too.
    list(seams(tmp_path))
    lines = [{"prompt": "To ", "completion": "be</s>"}]
    keys += ["tokenizer_type=sentencepiece", "eval_fraction=0", "eval_interval=-1"]
    keys += [f"tokenizer_path={tmp_path / 'tokenizer.model'}", "vocab_size=400"]
    source, _ = opened(load_config(None, keys))
    assert not any("special" in note for note in source.notes)


def test_a_special_token_that_is_an_ordinary_word_too_is_refused(tmp_path):
    vocabulary = {name: number for number, name in enumerate([*SPECIAL, "?", "To"])}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([*SPECIAL, "?"])
    encoder = encoder_of(save(made, tmp_path / "t"), "add_eos=false")
    assert encoder.documents(["To x ?"], UINT16).stream.tolist() == [6, 5, 5]
    with pytest.raises(UserError, match=r"<turn>.*special_tokens_in_text=encode"):
        encoder.documents(["To <turn>"], UINT16)
    # Where a file is read, its line is named, and is one bad line; also if it has to be normalized first.
    made.normalizer = normalizers.NFKC()
    config = config_of(save(made, tmp_path / "n"), "dataset_type=text")
    encoder = TextEncoder(config, load_tokenizer(config))
    file = tmp_path / "d.jsonl"
    for spelled in ("<turn>", "\uff1cturn\uff1e"):
        texts = ["To ?", f"To {spelled} To", "To"]
        write_lines(file, [{"text": text} for text in texts])
        reader = DocumentReader(encoder)
        read = list(reader.read(Piece("d.jsonl", str(file), 0, WHOLE)))
        assert [isinstance(each, BadLine) for each in read] == [False, True, False]
        with pytest.raises(UserError, match=r"^d\.jsonl:2: .*<turn>"):
            list(read_documents([("d.jsonl", file)], encoder))
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    chat = PrepareConfig(
        tokenizer_type="huggingface",
        tokenizer_path=config.tokenizer_path,
        chat=True,
        chat_template=str(tmp_path / "t.jinja"),
    )
    write_lines(file, [{"messages": turns_of("To <turn>", "To")}])
    with pytest.raises(UserError, match=r"^d\.jsonl:1: .*<turn>"):
        list(
            document_reader(chat, encoder).texts(
                [Piece("d.jsonl", str(file), 0, WHOLE)]
            )
        )


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<turn>", "be"),
        ("<turn>\nx", "be"),
        ("e<turn>", "b"),
        ("<end>", "be\nxe"),
        ("x", "be\n"),
    ],
)
def test_a_stop_string_may_spell_special_tokens(stop, text, tmp_path):
    made = letters()
    encoder = encoder_of(save(made, tmp_path / "t"))
    strings, stand_ins = marked_stops(encoder, [stop])
    written = WrittenText(StreamDecoder(encoder.tokenizer), (), strings, stand_ins)
    ids = made.encode("be<turn>\nxe").ids
    pieces = [*map(written.push, ids), written.end()]
    assert "".join(pieces) == written.text == text
