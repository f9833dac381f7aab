"""The command `verify_resume`."""

import json
import math
import re
import shutil

import pytest

from maxtext_lite.cli import run_command
from maxtext_lite.config.json_file import parse_json
from maxtext_lite.train import main as train
from maxtext_lite.training.run_difference import SavedDifference
from maxtext_lite.verify_resume import main

SIZES = ["base_emb_dim=16", "base_mlp_dim=32", "base_num_decoder_layers=1", "base_num_query_heads=2",
         "base_num_kv_heads=1", "head_dim=8", "max_target_length=32", "per_device_batch_size=1", "warmup_steps=1",
         "eval_interval=-1", "checkpoint_period=2", "learning_rate_schedule=constant"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of four steps, the same run resumed after two, and one with its rows in another order."""
    directory = tmp_path_factory.mktemp("runs")

    def ran(name, *words):
        assert train([*SIZES, f"base_output_directory={directory}", f"run_name={name}", *words]) == 0
        return str(directory / name)

    straight = ran("straight", "steps=4")
    shutil.copytree(straight, directory / "resumed")  # as killed before the checkpoint of step 4
    shutil.rmtree(directory / "resumed" / "checkpoints" / "4")
    resumed = ran("resumed", "steps=4")
    assert (directory / "resumed" / "checkpoints" / "4").is_dir()
    return straight, resumed, ran("shuffled", "steps=1", "data_shuffle_seed=9")


def test_a_resumed_run_is_the_same(runs, capsys):
    straight, resumed, _ = runs
    capsys.readouterr()
    assert main([straight, resumed]) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 steps and 0 evaluations in both runs (which end at 4 and 4): equal\n")
    assert re.search(r"^checkpoints of step 4, \d+ arrays: equal$", said, re.MULTILINE)


def test_other_rows_are_named_first(runs, capsys):
    straight, _, shuffled = runs
    capsys.readouterr()
    assert main([straight, shuffled, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    first = found["first_difference"]
    assert (found["same"], first["step"], next(iter(first["fields"]))) == (False, 1, "examples_hash")
    assert "loss" in first["fields"]
    assert len(first["rows"][0]) == len(first["rows"][1]) == 8
    assert first["rows"][0] != first["rows"][1]
    assert main([straight, shuffled]) == 1
    said = capsys.readouterr().out
    assert "the first difference is at step 1" in said
    assert f"rows of step 1 in run 1: {', '.join(map(str, first['rows'][0]))}\n" in said


def test_an_infinite_difference_is_null_in_json(runs, capsys, monkeypatch):
    saved = [SavedDifference(step=4, compared=2, arrays={"params/a": math.inf}, largest=math.inf)]
    monkeypatch.setattr("maxtext_lite.training.run_difference.compare_checkpoints", lambda *_: saved)
    capsys.readouterr()
    assert main([runs[0], runs[1], "--json"]) == 1
    (checkpoint,) = parse_json(capsys.readouterr().out)["checkpoints"]
    assert checkpoint["differing"] == {"params/a": None}


@pytest.mark.parametrize(("argv", "error"), [
    (["nowhere", "nowhere"], "error: RUN_DIR=nowhere has no metrics.jsonl"),
    (["a", "b", "--tolerance", "2"], "error: --tolerance=2 must be from 0 to 1. Nearest that works: 1."),
    (["a"], "error: the following arguments are required: RUN_DIR."),
])  # fmt: skip
def test_what_is_wrong_is_refused(argv, error, capsys):
    assert run_command(main, argv) == 2
    assert capsys.readouterr().err.startswith(error)
