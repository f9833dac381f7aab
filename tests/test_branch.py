"""The command `branch`: the same examples from one checkpoint, a table, a page; and a restart after a kill."""

import json

import pytest

from maxtext_lite.branch import _table, main
from maxtext_lite.cli import run_command
from maxtext_lite.train import main as train
from maxtext_lite.training.branches import BranchResult
from tests.test_verify_resume import SIZES


def records(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


def test_branches_see_the_examples_that_the_run_saw_and_continue_after_a_kill(tmp_path, capsys):
    words = [*SIZES, f"base_output_directory={tmp_path}", "run_name=run", "steps=4"]
    assert train(words) == 0
    arguments = [str(tmp_path / "run"), "--step", "2", "--steps", "2", "--scaling", "none"]
    assert main([*arguments, "--factors", "1"]) == 0
    output = tmp_path / "run-branches-2"
    (output / ".batch-16").mkdir()  # as if killed while the second one's run directory is made
    shown = capsys.readouterr().out
    assert shown.splitlines()[-2].startswith("critical batch (training loss at equal tokens 1% above the best; ")
    assert main([*arguments, "--factors", "1,2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    run, same, twice = (records(each) for each in (tmp_path / "run", output / "batch-8", output / "batch-16"))
    assert [same[step]["examples_hash"] for step in (3, 4)] == [run[step]["examples_hash"] for step in (3, 4)]
    assert same[4]["loss"] == run[4]["loss"]  # with its optimizer state: the rate is constant in both
    assert (twice[3]["examples"], twice[3]["examples_seen"]) == (16, same[4]["examples_seen"])
    assert twice[3]["target_tokens"] == same[3]["target_tokens"] + same[4]["target_tokens"]
    assert (output / "report.html").stat().st_size > 10_000
    assert [each["loss"] for each in told["branches"]] == [run_loss(same[3], same[4]), twice[3]["loss"]]
    assert (told["rule"], told["by"]) == ("none", "training loss")


def run_loss(*lines):
    """The mean over the target tokens of several steps."""
    tokens = [line["target_tokens"] for line in lines]
    return pytest.approx(sum(n * line["loss"] for n, line in zip(tokens, lines, strict=True)) / sum(tokens))


def test_the_table_says_where_steps_are_left_out():
    measured = BranchResult(
        factor=1.0,
        batch=8,
        learning_rate=0.1,
        steps=4,
        tokens=32,
        loss=2.0,
        left_out=2,
        eval_loss=None,
        run_directory="",
    )
    assert list(_table([measured], {8: 2.0}))[2:] == ["batch 8: the loss leaves out 2 steps whose loss is not finite"]


@pytest.mark.parametrize(("words", "error"), [
    (["--steps", "0"], "error: --steps=0 must be at least 1"),
    (["--steps", "2", "--factors", "1,x"], "error: argument --factors: x is not a number"),
    (["--steps", "2", "--factors", "1e999999999"], "error: argument --factors: 1e999999999 is not a number"),
    (["--steps", "2", "--factors", "1_0"], "error: argument --factors: 1_0 is not a number"),
    (["--steps", "2", "--factors=-1"], "error: argument --factors: -1 must be from 1/1024 to 1024"),
    (["--steps", "2", "--factors", "1., .5,1e-1,1/3,1e2"], "error: --step=2 is no checkpoint of RUN_DIR="),
    (["--steps", "2", "--factors", "1,1/9999"], "error: argument --factors: 1/9999 must be from 1/1024 to 1024"),
    (["--steps", "2"], "error: --step=2 is no checkpoint of RUN_DIR="),
])  # fmt: skip
def test_what_is_wrong_is_refused(words, error, tmp_path, capsys):
    assert run_command(main, [str(tmp_path), "--step", "2", *words]) == 2
    assert capsys.readouterr().err.startswith(error)
