"""`generate`: text to the terminal, tokens as JSON, conversations, and where a text begins and ends."""

import io
import json
import math
import types

import jax
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.tokenizer import ByteTokenizer
from maxtext_lite.generate import main, parse_generate_config
from maxtext_lite.inference import answering
from maxtext_lite.inference.requests import GenerateConfig
from maxtext_lite.inference.sampler import load_on_mesh
from maxtext_lite.inference.stream_text import StreamDecoder, TextTokens, WrittenText

LOAD = load_on_mesh


@pytest.fixture
def config(directory):
    return load_config(directory / "config.yml")


def ask(directory, capsys, config, *, as_json=False, **asked):
    answering.generate(
        directory, config, GenerateConfig(temperature=0, **asked), as_json=as_json
    )
    return capsys.readouterr().out


@pytest.mark.fast
def test_text_goes_on_from_the_prompt_and_an_empty_one_starts_a_document(
    directory, capsys
):
    words = [str(directory), "prompt=To be: or", "max_new_tokens=12", "seed=1"]
    texts = []
    for _ in range(2):
        assert main(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("To be: or")
    assert texts[0].endswith("\n")
    assert main([str(directory), "max_new_tokens=3"]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_a_request_is_what_the_words_say():
    words = "prompt=1e3 temperature=1e-1 stop_token_ids=[1,2] top_k=3 top_k=4"
    assert parse_generate_config(words.split()) == GenerateConfig(
        prompt="1e3", temperature=0.1, stop_token_ids=[1, 2], top_k=4
    )
    asked = GenerateConfig(ici_tensor_parallelism=2, ici_data_parallelism=3)
    assert asked.mesh == {"tensor": 2, "fsdp": 1, "data": 3}


def test_json_of_prompt_ids_needs_no_tokenizer_and_has_no_text(
    directory, config, capsys, monkeypatch
):
    asked = {"prompts": ["AB", "C"], "max_new_tokens": 4}
    of_text = json.loads(ask(directory, capsys, config, as_json=True, **asked))
    printed = ask(directory, capsys, config, **asked)
    assert printed == "".join(
        f"---- {number}\n{prompt}{text['text']}\n"
        for number, (prompt, text) in enumerate(zip(["AB", "C"], of_text, strict=True))
    )
    monkeypatch.setattr("maxtext_lite.inference.stream_text.load_tokenizer", None)
    words = ["prompt_ids=[[65,66],[67]]", "temperature=0", "max_new_tokens=4", "--json"]
    assert main([str(directory), *words]) == 0
    answers = json.loads(capsys.readouterr().out)
    for answer, with_text in zip(answers, of_text, strict=True):
        assert with_text.keys() - answer.keys() == {"text"}
        assert len(answer["log_probabilities"]) == 4
        assert max(answer["log_probabilities"]) < 0
    stop = answers[0]["tokens"][0]
    main([str(directory), *words, f"stop_token_ids=[{stop}]"])
    assert json.loads(capsys.readouterr().out)[0]["tokens"] == [stop]


def test_each_line_of_a_conversation_is_answered_after_all_before_it(
    directory, config, capsys, monkeypatch, tmp_path
):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    chatting = config.model_copy(update={"chat_template": "~/t.jinja"})
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    how = {"max_new_tokens": 4, "stop_token_ids": []}
    said = ask(directory, capsys, chatting, chat=True, system="S", **how)
    first = ask(directory, capsys, config, prompt="s:S;u:one;", **how)
    answer = first.removeprefix("s:S;u:one;").removesuffix("\n")
    prompt = f"s:S;u:one;a:{answer};u:two;"
    assert said == f"{answer}\n" + ask(
        directory, capsys, config, prompt=prompt, **how
    ).removeprefix(prompt)
    with pytest.raises(UserError, match="chat template"):
        main([str(directory), "prompt=x", "--chat"])


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_conversation_whose_input_is_not_utf_8_is_refused(
    errors, directory, config, capsys, monkeypatch, tmp_path
):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    )
    chatting = config.model_copy(update={"chat_template": f"{tmp_path}/t.jinja"})
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors)
    monkeypatch.setattr("sys.stdin", typed)
    with pytest.raises(UserError, match=r"^the input is not UTF-8"):
        ask(directory, capsys, chatting, chat=True, max_new_tokens=4)


def test_as_many_tokens_are_added_as_the_learned_positions_allow(
    directory, config, capsys, monkeypatch, tmp_path
):
    """The last one is not fed back and needs no position. A conversation ends at the turn that goes past them."""
    monkeypatch.setattr(
        answering, "load_on_mesh", lambda *_: LOAD(directory, config, {})
    )
    short = config.model_copy(update={"trainable_position_size": 20})

    def after(length, added):
        asked = {"prompt_ids": [[5] * length], "max_new_tokens": added}
        text = ask(directory, capsys, short, as_json=True, **asked)
        return len(json.loads(text)[0]["tokens"])

    for length, most in ((17, 4), (20, 1)):
        assert after(length, most) == most
        with pytest.raises(
            UserError,
            match=rf"^max_new_tokens={most + 1} .*Nearest that works: {most}\.",
        ):
            after(length, most + 1)
    with pytest.raises(UserError, match=r"^max_new_tokens=1 after a prompt of 21 "):
        after(21, 1)
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    )
    chatting = short.model_copy(update={"chat_template": f"{tmp_path}/t.jinja"})
    monkeypatch.setattr("sys.stdin", io.StringIO("one\nand two is too long\nthree\n"))
    with pytest.raises(UserError, match=r"^max_new_tokens=4 "):
        ask(directory, capsys, chatting, chat=True, max_new_tokens=4)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_token_without_a_probability_ends_the_answers(
    directory, config, capsys, monkeypatch
):
    def damaged(*arguments):
        decoder, params, mesh = LOAD(*arguments)
        return decoder, jax.tree.map(lambda x: x * math.nan, params), mesh

    monkeypatch.setattr(answering, "load_on_mesh", damaged)
    asked = {"prompts": ["To", "be"], "max_new_tokens": 3}
    for as_json in (True, False):
        with pytest.raises(UserError, match=r"prompt 0 .* nan in dtype=float32"):
            ask(directory, capsys, config, as_json=as_json, **asked)


def test_what_is_wrong_with_prompts_and_mesh_is_said_at_once(directory, config, capsys):
    sizes = {
        "ici_tensor_parallelism": 3,
        "ici_fsdp_parallelism": 3,
        "ici_data_parallelism": 9,
    }
    with pytest.raises(UserError) as refusal:
        ask(
            directory,
            capsys,
            config,
            prompt_ids=[[1, 264]],
            stop_token_ids=[-1],
            **sizes,
        )
    assert [problem.split(" ")[0] for problem in refusal.value.problems] == [
        "prompt_ids:",
        "stop_token_ids:",
        *(f"{key}={value}" for key, value in sizes.items()),
    ]


TEXT = "one, two.\nUser: three"


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ([], TEXT),
        (["two"], "one, "),
        (["o.", "two."], "one, "),
        (["three!"], TEXT),
        ([".\nUsed", "\nUser"], "one, two."),
    ],
)
def test_a_text_ends_before_the_first_stop_string(stops, expected):
    for size in (1, 2, 3, 5, 100):
        decoder = types.SimpleNamespace(push=str, flush=str)
        written, text = WrittenText(decoder, (), stops), ""
        for start in range(0, len(TEXT), size):
            text += written.push(TEXT[start : start + size])
            assert expected.startswith(text), (
                "nothing is let through that belongs to a stop string"
            )
        assert written.ended == (expected != TEXT)
        assert text + written.end() == expected == written.text


def test_neither_stop_tokens_nor_stop_strings_are_part_of_a_text():
    def write(tokens, stop_ids=(), stop_strings=()):
        text = WrittenText(StreamDecoder(ByteTokenizer()), stop_ids, stop_strings)
        pieces = [text.push(token) for token in tokens]
        assert "".join([*pieces, text.end()]) == text.text
        return text.text

    assert write("é!".encode()) == "é!"
    assert write("é".encode()[:1]) == "\N{REPLACEMENT CHARACTER}"
    assert write([*b"ab", 256, *b"cd"], [256]) == "ab"
    assert write(b"abcd", (), ["c"]) == "ab"
    assert write([*b"ab#", 256], [256], ["##"]) == "ab#"


def test_a_text_begins_as_in_its_models_training_and_ends_where_its_files_or_the_request_say(
    tmp_path,
):
    config = load_config(None, ["vocab_size=264"])
    tokens = TextTokens.of(tmp_path, config)
    assert tokens.stop_token_ids == (256,)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"eos_token_id": [2, 256]}))
    assert TextTokens.of(tmp_path, config).stop_token_ids == (2, 256)
    for stop, text in (([], "ab"), ([[ord("b")]], "a")):
        written = tokens.begin([], *stop)
        for token in [*b"ab", 256, *b"c"]:
            written.push(token)
        written.end()
        assert written.text == text

    class Framed(ByteTokenizer):
        begin_ids = (1,)

    for words, begin in (([], [1]), (["add_bos=false"], [])):
        encoder = TextEncoder(load_config(None, words), Framed())
        assert encoder.prompt("ab").tolist() == [*begin, 97, 98]
        assert encoder.prompt("").tolist() == (begin or [256])
        assert encoder.prompt("\x01b").tolist() == [1, 98], "once"
