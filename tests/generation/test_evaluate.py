"""`evaluate` and `harness`: log-likelihoods of a Hugging Face directory are those of transformers; windows that score
each token once; questions, and what is refused."""

import functools
import itertools
import json
import math
import shutil
import string
import sys
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest
import tokenizers

from maxtext_lite.cli import main as command
from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.tokenizer import ByteTokenizer
from maxtext_lite.evaluate import main
from maxtext_lite.generate import main as generate
from maxtext_lite.inference import scoring
from maxtext_lite.inference.harness_model import HarnessModel
from maxtext_lite.inference.questions import (
    continued,
    read_questions,
    with_blank,
)
from maxtext_lite.inference.requests import EvaluateConfig
from maxtext_lite.inference.scoring import TextScorer, evaluate
from tests import hf_models

torch = pytest.importorskip("torch")

TEXT = "To be, or not to be, that is the question.\n" * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model whose tokenizer has a token for each letter, and the tokens of a text."""
    path = hf_models.save("llama", tmp_path_factory.mktemp("model"))
    letters = sorted({*TEXT, *string.ascii_lowercase, "?"})
    vocabulary = {"<eos>": 2, "<bos>": 1, "<pad>": 0} | {
        letter: 3 + number for number, letter in enumerate(letters)
    }
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path, lambda text: [vocabulary[letter] for letter in text]


def _log_probabilities(tokens):
    """The log-probability of each token but the first, by transformers."""
    with torch.no_grad():
        logits = (
            hf_models.model("llama")(torch.tensor([tokens])).logits[0, :-1].double()
        )
    return torch.log_softmax(logits, -1)[
        torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])
    ].numpy()


@pytest.fixture
def found(model, tmp_path, capsys):
    """A function from a key, the content of its file and more words to the scores."""

    def run(key, content, *words, directory=model[0]):
        text = (
            content
            if isinstance(content, str)
            else "\n".join(map(json.dumps, content)) + "\n\n"
        )
        path = tmp_path / (f"{key}.txt" if isinstance(content, str) else f"{key}.jsonl")
        path.write_text(text)
        main(
            [
                str(directory),
                f"{key}={path}",
                "dtype=float32",
                "max_length=32",
                "--json",
                *words,
            ]
        )
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.fast
def test_perplexity_is_that_of_transformers_window_by_window(model, found):
    tokens = model[1](TEXT)
    scores = found("text", TEXT, "stride=16", "ici_fsdp_parallelism=2")
    nll = -_log_probabilities(tokens[:32]).sum()
    for scored in range(32, len(tokens), 16):
        nll -= _log_probabilities(tokens[scored - 16 : scored + 16])[15:].sum()
    assert scores["tokens"] == len(tokens) - 1
    assert scores["perplexity"] == pytest.approx(
        math.exp(nll / (len(tokens) - 1)), rel=1e-4
    )
    # The first letter, which nothing precedes, is not scored and does not count.
    assert scores["skipped_first_tokens"] == 1
    assert scores["bits_per_byte"] == pytest.approx(
        nll / math.log(2) / (len(TEXT) - 1), rel=1e-4
    )


def test_the_loss_of_a_file_is_that_of_its_answers_or_of_its_texts(model, found):
    """Of a Hugging Face directory, whichever the file holds; rows at once and its lines' order change nothing."""
    lines = [
        {"prompt": "to be ", "completion": "or not"},
        {"prompt": "the", "completion": " question is that"},
        {"prompt": "be or", "completion": " be"},
    ]
    nll = []
    for line in lines:
        tokens = [*model[1](line["prompt"] + line["completion"]), 2]
        nll += (-_log_probabilities(tokens))[len(line["prompt"]) - 1 :].tolist()
    for words in ((), ("rows_at_once=1", "ici_fsdp_parallelism=2")):
        scores = found("data", lines, *words)
        assert scores["loss"] == pytest.approx(np.mean(nll), rel=1e-5)
        assert (scores["target_tokens"], scores["examples"]) == (len(nll), 3)
    text = "to be or not to be"
    scores = found("data", [{"text": text}])
    nll = -_log_probabilities([*model[1](text), 2])
    assert scores["loss"] == pytest.approx(nll.mean(), rel=1e-5)
    assert (scores["target_tokens"], scores["examples"]) == (len(text), 1)


def test_choices_are_those_of_transformers(model, found):
    rng = np.random.default_rng(0)
    questions, right, right_by_byte = [], 0, 0
    for _ in range(5):
        words = rng.choice(["to", "be", "question", "that", "is"], 4, replace=False)
        context, *choices = words.tolist()
        likelihoods = np.array(
            [
                _log_probabilities(model[1](f"{context} {choice}"))[
                    len(context) - 1 :
                ].sum()
                for choice in choices
            ]
        )
        answer = int(rng.integers(3))
        right += likelihoods.argmax() == answer
        right_by_byte += (likelihoods / [*map(len, choices)]).argmax() == answer
        questions.append({"context": context, "choices": choices, "answer": answer})
    scores = found("choices", questions)
    assert scores["questions"] == 5
    assert scores["accuracy"] == right / 5
    assert scores["accuracy_per_byte"] == right_by_byte / 5


def test_a_cloze_is_right_where_it_is_what_the_model_would_write(model, found):
    """A blank and a letter, each of which must be the likeliest: after a context that the model continues this way."""
    encode = model[1]
    letters = {encode(letter)[0]: letter for letter in {*TEXT, *string.ascii_lowercase}}

    def next_letters(contexts):
        with torch.no_grad():
            likeliest = hf_models.model("llama")(
                torch.tensor([encode(text) for text in contexts])
            ).logits[:, -1]
        return [letters.get(token, "") for token in likeliest.argmax(-1).tolist()]

    contexts = [
        "".join(three) for three in itertools.product(string.ascii_lowercase, repeat=3)
    ]
    before_blanks = [
        c + blank
        for c, blank in zip(contexts, next_letters(contexts), strict=True)
        if blank.isspace()
    ]
    continued = zip(before_blanks, next_letters(before_blanks), strict=True)
    context, letter = next(
        (context, letter) for context, letter in continued if letter.strip()
    )
    targets = (letter, "a" if letter != "a" else "b")
    lines = [
        {"context": context[:3], "target": context[3:] + target} for target in targets
    ]
    assert found("cloze", lines)["accuracy"] == 0.5
    likelihood = sum(
        _log_probabilities(encode(context + target))[2:].sum() for target in targets
    )
    assert found("cloze", lines)["answer_perplexity"] == pytest.approx(
        math.exp(-likelihood / 4), rel=1e-4
    )


def test_each_line_of_a_text_is_a_document(found):
    texts = [TEXT[:9], TEXT[9:50]]
    each = [found("text", text) for text in texts]
    both = found("text", [{"text": text} for text in texts])
    assert both["tokens"] == sum(one["tokens"] for one in each)
    nll = sum(one["loss"] * one["tokens"] for one in each)
    assert both["loss"] * both["tokens"] == pytest.approx(nll, rel=1e-5)


def test_a_continuation_is_read_with_its_context():
    letters = lambda text: [ord(letter) for letter in text]  # noqa: E731
    assert continued(letters, "ab \n", "c") == (letters("ab \nc"), 2)
    assert continued(letters, "ab", " c") == (letters("ab c"), 2)
    assert continued(letters, "", "c") == (letters("c"), 0)
    merged = lambda text: [1] if text == "ab c" else letters(text)  # noqa: E731
    assert continued(merged, "ab", " c") == ([1], 0)  # a tokenizer that joins them
    blanks = [("ab", "c"), ("ab ", "c"), ("ab", " c"), ("ab", "\nc"), ("", "c")]
    assert [with_blank(*each) for each in blanks] == [" c", "c", " c", "\nc", "c"]


@pytest.mark.parametrize(
    ("kind", "line", "named"),
    [
        (
            "choices",
            '{"context": "a", "choices": ["b", "c"], "answer": 2}',
            ":2: .*answer",
        ),
        (
            "choices",
            '{"context": "a", "choices": ["b", " "], "answer": 1}',
            ":2: .*choices",
        ),
        ("cloze", '{"context": "a"}', ":2: target"),
    ],
)
def test_wrong_questions_are_refused_by_line(kind, line, named, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("\n" + line)
    with pytest.raises(UserError, match=named):
        read_questions(str(path), kind)
    with pytest.raises(UserError, match=r"none\.jsonl"):
        read_questions(str(tmp_path / "none.jsonl"), kind)
    path.write_text('{"context": "a\u2028b\x85", "target": "c"}\n', encoding="utf-8")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    (cloze,) = read_questions(str(path), "cloze")
    assert cloze.context == "a\u2028b\x85"  # which end no line


def test_a_continuation_longer_than_max_length_is_refused_before_the_model_is_loaded(
    directory, tmp_path
):
    """Its first tokens would have no context, or positions that the model has not learned."""
    asked = EvaluateConfig(max_length=32, rows_at_once=1)
    for positions, works in (
        (0, "works: 42"),
        (41, "works: 42"),
        (32, "32 learned positions"),
    ):
        words = [f"trainable_position_size={positions}"]
        config = load_config(directory / "config.yml", words)
        named = rf"^continuation 2 .*max_length=32 .*{works}"
        pairs = [("Q:" * 40, "a" * 31), ("Q:", "b" * 40), ("", "c" * 41)]
        with pytest.raises(UserError, match=named):
            TextScorer(tmp_path, config, asked).continuations(pairs)
    path = tmp_path / "questions.jsonl"
    path.write_text(
        json.dumps({"context": "Q: ", "choices": ["yes", "b" * 40], "answer": 0})
    )
    with pytest.raises(UserError, match=rf"^choices={path}, question 1, choice 1 "):
        evaluate(tmp_path, config, EvaluateConfig(choices=str(path), max_length=32))


@pytest.mark.parametrize(
    ("key", "content"), [("text", "abc"), ("cloze", [{"context": "a", "target": "b"}])]
)
def test_a_score_that_is_not_a_number_or_a_mesh_that_does_not_fit_is_refused(
    key, content, found, monkeypatch
):
    for word in ("ici_tensor_parallelism=3", "ici_fsdp_parallelism=16"):
        with pytest.raises(UserError, match=f"^{word} "):
            found(key, content, word)
    load = scoring.load_on_mesh

    def damaged(*arguments):
        decoder, params, mesh = load(*arguments)
        return decoder, jax.tree.map(lambda x: x * math.nan, params), mesh

    monkeypatch.setattr(scoring, "load_on_mesh", damaged)
    with pytest.raises(UserError, match=rf"^{key}=.* nan in dtype=float32"):
        found(key, content)


@pytest.fixture(scope="module")
def harness(directory):
    return HarnessModel(
        str(directory), max_length="24", batch_size="2", device="cuda:0"
    )


def _request(*args):
    return SimpleNamespace(args=args)


def test_requests_of_the_harness_are_answered_as_the_commands_answer(
    directory, harness, found, capsys
):
    text = "To be, or not to be, that is the question."
    words = {"directory": directory}
    scores = found("text", text, "max_length=24", **words)
    (whole,) = harness.loglikelihood_rolling([_request(text)])
    assert whole == pytest.approx(-scores["loss"] * scores["tokens"], rel=1e-5)
    pairs = [("To be", " or"), ("", "To")]
    scored = harness.loglikelihood([_request(*pair) for pair in pairs])
    for (context, target), (likelihood, is_greedy) in zip(pairs, scored, strict=True):
        question = {"context": context, "target": target}
        scores = found("cloze", [question], "max_length=24", **words)
        expected = -len(target) * math.log(scores["answer_perplexity"])
        assert likelihood == pytest.approx(expected, rel=1e-5)
        assert is_greedy == (scores["accuracy"] == 1)
    # Of a model from scratch, a text begins after the end of another.
    after = [256, *b"To be"]
    words = [f"prompt_ids={[after]}", "temperature=0", "max_new_tokens=6", "--json"]
    generate([str(directory), *words])
    alone = ByteTokenizer().decode(json.loads(capsys.readouterr().out)[0]["tokens"])
    for until, expected in (
        ([], alone),
        (alone[2:4], alone[: alone.index(alone[2:4])]),
    ):
        options = {"until": until, "max_gen_toks": 6, "do_sample": False}
        (written,) = harness.generate_until([_request("To be", options)])
        assert written == expected
    drawn = harness.generate_until(
        [_request("To be", {"do_sample": True, "max_gen_toks": 6})] * 2
    )
    assert len({alone, *drawn}) == 3


def test_a_text_is_scored_from_its_first_token_on(harness, monkeypatch):
    """After end-of-text where, as GPT-2's and Qwen's, the tokenizer adds no first token."""
    monkeypatch.setattr(harness._scorer, "encode", lambda text: list(text.encode()))
    (whole,) = harness.loglikelihood_rolling([_request("To be")])
    assert whole == pytest.approx(
        harness.loglikelihood([_request("", "To be")])[0][0], rel=1e-5
    )
    assert harness.loglikelihood_rolling([_request("")]) == [0]


TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ m['role'][:1] + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'be' }}{% endif %}"
)


def test_a_context_that_a_chat_template_has_rendered_begins_once(model, tmp_path):
    """The tokenizer begins other texts with the token that the template writes."""
    path, encode = shutil.copytree(model[0], tmp_path / "model"), model[1]
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    chat = HarnessModel(str(path), max_length=32)
    turns = [{"role": "user", "content": "To"}, {"role": "question", "content": "no"}]
    assert chat.apply_chat_template(turns[:1]) == "<bos>uTobe"
    assert chat.apply_chat_template(turns, add_generation_prompt=False) == (
        "<bos>uTobeno"
    )
    span = chat._scorer._span("<bos>uTobe", "no")
    assert (span.tokens, span.first) == ([1, *encode("uTobeno")], 6)
    assert chat._scorer.encode("To") == [1, *encode("To")]
    # Requests that the harness stored are rendered too.
    stored = HarnessModel(str(path), max_length=32)
    assert stored.tokenizer_name == chat.tokenizer_name
    assert stored._scorer._span("<bos>uTobe", "no").tokens == span.tokens
    with pytest.raises(UserError, match="tool_use"):
        chat.chat_template("tool_use")


def test_wrong_options_of_a_request_and_wrong_arguments_of_a_model_are_refused(
    harness, directory
):
    for options, named in (
        ({"num_beams": 4}, "num_beams=4"),
        ({"max_gen_toks": 24}, "max_new_tokens=24 .*Nearest that works: 23"),
    ):
        with pytest.raises(UserError, match=named):
            harness.generate_until([_request("To be", options)])
    for arguments, named in (
        ({"max_lenght": 24}, "'max_lenght'.*'max_length'"),
        ({"path": "nowhere"}, "nowhere"),
    ):
        with pytest.raises(UserError, match=named):
            HarnessModel(**{"path": str(directory), **arguments})


def test_the_command_of_the_harness_has_our_models(monkeypatch, capsys):
    models = {}
    for name, content in {
        "lm_eval": {"__spec__": object()},
        "lm_eval.api": {},
        "lm_eval.__main__": {
            "cli_evaluate": lambda: models["maxtext_lite"](path=sys.argv[1])
        },
        "lm_eval.api.model": {"LM": object},
        "lm_eval.api.registry": {
            "register_model": lambda name: functools.partial(models.__setitem__, name)
        },
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("sys.argv", ["x"])
    assert command(["harness", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: nowhere ")
