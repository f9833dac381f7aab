"""The results for lm-evaluation-harness equal those of `evaluate` and `generate`."""

import json
import math
from types import SimpleNamespace

import pytest

from maxtext_lite.config import load_config
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


def _request(*args):
    return SimpleNamespace(args=args)


def test_requests_are_answered_as_the_commands_answer(run, tmp_path, capsys):
    model = HarnessModel(str(run), max_length="24", batch_size="2", device="cuda:0")
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
