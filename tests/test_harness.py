"""The results for lm-evaluation-harness equal those of `evaluate` and `generate`."""

import functools
import json
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest

from maxtext_lite.cli import main
from maxtext_lite.config import UserError, load_config
from maxtext_lite.evaluate import main as evaluate
from maxtext_lite.generate import main as generate
from maxtext_lite.harness import HarnessModel
from maxtext_lite.training import train
from tests.training.conftest import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    keys = ["steps=2", "eval_interval=-1", "per_device_batch_size=1", f"base_output_directory={directory}"]
    return train(load_config(None, [*TINY, *keys])).run_directory


@pytest.fixture(scope="module")
def model(run):
    return HarnessModel(str(run), max_length="24", batch_size="2", device="cuda:0")


def _request(*args):
    return SimpleNamespace(args=args)


def test_requests_are_answered_as_the_commands_answer(run, model, tmp_path, capsys):
    text = "To be, or not to be, that is the question."
    (tmp_path / "text.txt").write_text(text)
    evaluate([str(run), f"text={tmp_path / 'text.txt'}", "max_length=24", "--json"])
    found = json.loads(capsys.readouterr().out)
    (whole,) = model.loglikelihood_rolling([_request(text)])
    assert whole == pytest.approx(-found["loss"] * found["tokens"], rel=1e-5)

    pairs = [("To be", " or"), ("To be", " not"), ("", "To")]
    lines = [{"context": context, "target": target} for context, target in pairs]
    scored = model.loglikelihood([_request(*pair) for pair in pairs])
    for line, (likelihood, is_greedy) in zip(lines, scored, strict=True):
        (tmp_path / "cloze.jsonl").write_text(json.dumps(line))
        evaluate([str(run), f"cloze={tmp_path / 'cloze.jsonl'}", "max_length=24", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert likelihood == pytest.approx(-len(line["target"]) * math.log(found["answer_perplexity"]), rel=1e-5)
        assert is_greedy == (found["accuracy"] == 1)

    generate([str(run), "prompt=To be", "temperature=0", "max_new_tokens=6", "--json"])
    alone = json.loads(capsys.readouterr().out)[0]["text"]
    (written,) = model.generate_until([_request("To be", {"until": [], "max_gen_toks": 6, "do_sample": False})])
    assert written == alone
    (cut,) = model.generate_until([_request("To be", {"until": alone[2:4], "max_gen_toks": 6})])
    assert cut == alone[: alone.index(alone[2:4])]


def test_a_text_is_scored_from_its_first_token_on(model, monkeypatch):
    """After end-of-text where, as GPT-2's and Qwen's, the tokenizer adds no first token."""
    monkeypatch.setattr(model._scorer, "encode", lambda text: list(text.encode()))
    for text in ("T", "To be"):
        (whole,) = model.loglikelihood_rolling([_request(text)])
        assert whole == pytest.approx(model.loglikelihood([_request("", text)])[0][0], rel=1e-5)
    assert model.loglikelihood_rolling([_request("")]) == [0]


def test_repeated_requests_have_answers_of_their_own_which_a_rerun_repeats(model):
    requests = [_request("To be", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8})] * 3
    answers = model.generate_until(requests)
    assert len(set(answers)) == 3
    assert model.generate_until(requests) == answers


def test_options_of_sampling_mean_what_they_mean_to_the_harness(model):
    def written(**options):
        return model.generate_until([_request("To be", {"max_gen_toks": 8, **options})])[0]

    likeliest = written()
    assert written(do_sample=False, temperature=1.0) == written(temperature=0.0) == likeliest
    sampled = written(do_sample=True, temperature=1.0)
    assert sampled != likeliest
    assert written(do_sample=True) == written(temperature=1) == sampled
    assert written(do_sample=True, top_k=1) == written(do_sample=True, top_p=1e-6) == likeliest
    assert written(max_gen_toks=None, max_new_tokens=8, until=None) == likeliest


@pytest.mark.parametrize(("options", "message"), [
    ({"num_beams": 4}, "generation option num_beams=4 has no meaning here. Those that have one: until, max_gen_toks, "),
    ({"temperature": 1e-40}, "generation option temperature=1e-40 must be at least 1e-06, or 0. Nearest that works:"),
    ({"max_tokens": 0}, "generation option max_tokens=0 must be at least 1. Nearest that works: 1."),
    ({"do_sample": True, "top_p": 2}, "generation option top_p=2 must be above 0 and at most 1. Nearest"),
    ({"max_gen_toks": 24}, "max_new_tokens=24 leaves no room for a prompt in max_length=24. Nearest that works: 23."),
])  # fmt: skip
def test_wrong_options_of_a_request_are_refused(options, message, model):
    with pytest.raises(UserError) as refusal:
        model.generate_until([_request("To be", options)])
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"max_lenght": 24}, "--model_args has the unknown key 'max_lenght'. Did you mean 'max_length'?"),
    ({"batch_size": "auto"}, "batch_size=auto is not a whole number. Nearest that works: 1."),
    ({"batch_size": 10**20}, "batch_size=100000000000000000000 must be at most 2147483647. Nearest that works: "),
    ({"batch_size": 1.5}, "batch_size=1.5 is not a whole number. Nearest that works: 1."),
    ({"fsdp": float("inf")}, "fsdp=inf is not a whole number. Nearest that works: 1."),
    ({"path": "a" * 256}, f"path={'a' * 60}... (256 characters) names a file of 256 bytes, more than the 255"),
    ({"max_length": 1}, "max_length=1 must be at least 2. Nearest that works: 2."),
    ({"path": "nowhere"}, "nowhere is not a run directory"),
])  # fmt: skip
def test_wrong_arguments_of_a_model_are_refused(arguments, message, run):
    with pytest.raises(UserError) as refusal:
        HarnessModel(**{"path": str(run), **arguments})
    assert str(refusal.value).startswith(message)


def test_without_the_harness_the_command_names_its_extra(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["harness", "run"]) == 2
    assert capsys.readouterr().err == "error: harness needs lm_eval: pip install 'maxtext-lite[harness]'.\n"
    assert main(["harness", "--help"]) == 0
    assert "--model maxtext_lite" in capsys.readouterr().out


def test_a_wrong_argument_of_a_model_is_an_error_line_of_the_command(monkeypatch, capsys):
    models = {}

    def register_model(name):
        return functools.partial(models.__setitem__, name)

    for name, content in {
        "lm_eval": {"__spec__": object()},
        "lm_eval.api": {},
        "lm_eval.__main__": {"cli_evaluate": lambda: models["maxtext_lite"](path=sys.argv[1])},
        "lm_eval.api.model": {"LM": object},
        "lm_eval.api.registry": {"register_model": register_model},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("sys.argv", ["x"])
    assert main(["harness", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: nowhere is not a run directory")
