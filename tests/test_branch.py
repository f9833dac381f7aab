"""The command `branch`: the same examples from one checkpoint, a table, a page; and a restart after a kill."""

import json

import pytest

from maxtext_lite.branch import main
from maxtext_lite.train import main as train
from tests.processes import RunFiles
from tests.training.conftest import TINY

KEYS = """
base_num_decoder_layers=1 per_device_batch_size=8 warmup_steps=1 eval_interval=-1 checkpoint_period=2
learning_rate_schedule=constant run_name=run steps=4
"""


def records(directory):
    return {line["step"]: line for line in RunFiles(directory).steps}


def test_branches_see_the_examples_that_the_run_saw_and_continue_after_a_kill(
    tmp_path, capsys, one_device
):
    assert train([*TINY, *KEYS.split(), f"base_output_directory={tmp_path}"]) == 0
    options = "--step 2 --steps 2 --scaling none"
    arguments = [str(tmp_path / "run"), *options.split()]
    assert main([*arguments, "--factors", "1"]) == 0
    output = tmp_path / "run-branches-2"
    (
        output / ".batch-16"
    ).mkdir()  # as if killed while the second one's run directory is made
    capsys.readouterr()
    assert main([*arguments, "--factors", "1,2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    run, same, twice = (
        records(each)
        for each in (tmp_path / "run", output / "batch-8", output / "batch-16")
    )
    assert [same[step]["examples_hash"] for step in (3, 4)] == [
        run[step]["examples_hash"] for step in (3, 4)
    ]
    assert (
        same[4]["loss"] == run[4]["loss"]
    )  # with its optimizer state: the rate is constant in both
    assert (twice[3]["examples"], twice[3]["examples_seen"]) == (
        16,
        same[4]["examples_seen"],
    )
    weights = [same[step]["target_tokens"] for step in (3, 4)]
    assert twice[3]["target_tokens"] == sum(weights)
    mean = sum(
        weight * same[step]["loss"]
        for step, weight in zip((3, 4), weights, strict=True)
    ) / sum(weights)
    assert [each["loss"] for each in told["branches"]] == [
        pytest.approx(mean),
        twice[3]["loss"],
    ]
    assert (told["rule"], told["by"]) == ("none", "training loss")
    assert (output / "report.html").stat().st_size > 10_000
    written = json.loads((output / "branches.json").read_text())
    assert written == told | {"step": 2, "examples_seen": 16}
    assert (tmp_path / "run" / "tensorboard").exists()
    assert not list(output.rglob("tensorboard"))  # they are sent to no tracker
