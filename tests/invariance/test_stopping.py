"""Two processes of one run: one of them killed, or told to stop, or asked for the end by its callback."""

import os
import signal
import time

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from tests.invariance.conftest import MODEL
from tests.own_run import own_run
from tests.processes import RunFiles, quick_python, run_launched, train_under_way

EXACT = ("step", "examples_hash", "learning_rate", "examples_seen", "tokens_seen")


@pytest.fixture(scope="module")
def story(tmp_path_factory, documents):
    """One run through all of it, and the same run without it."""
    directory = tmp_path_factory.mktemp("runs")
    overrides = [
        *MODEL,
        "steps=100000",
        "learning_rate_schedule=constant",
        "per_device_batch_size=-1",
        "global_batch_size=4",
        "checkpoint_period=5",
        "eval_interval=-1",
        f"dataset_path={documents}/0/documents.jsonl",
        f"base_output_directory={directory}",
        "run_name=interrupted",
    ]
    run, found = RunFiles(directory / "interrupted"), {}

    def until_after(step, act):
        with train_under_way(overrides, processes=2, devices=1) as under_way:
            under_way.wait_until(lambda: run.last_step > step and run.checkpoints)
            began = time.monotonic()
            act(under_way)
            return (
                *under_way.end(),
                time.monotonic() - began,
                run.last_step,
                run.checkpoints,
            )

    found["killed"] = until_after(
        6, lambda both: os.kill(both.process_id(1), signal.SIGKILL)
    )
    found["told"] = until_after(
        found["killed"][4], lambda both: os.kill(both.process_id(1), signal.SIGTERM)
    )
    last = found["told"][4] + 2
    train(
        load_config(None, [*overrides, f"steps={last}"])
    )  # on 8 devices: half an example each
    train(load_config(None, [*overrides, f"steps={last}", "run_name=straight"]))
    return found, run, RunFiles(directory / "straight")


def test_where_one_process_is_killed_the_others_are_ended_within_seconds(story):
    code, _, _, seconds, last_step, checkpoints = story[0]["killed"]
    assert code == 128 + signal.SIGKILL
    assert seconds < 60
    # Saving goes on beside the steps: one that was begun may not have ended, but the one before it has.
    assert checkpoints[-1] in range(last_step - 9, last_step + 1)
    assert checkpoints[-1] % 5 == 0


def test_where_one_is_told_to_stop_all_stop_after_the_same_step_saved_and_with_75(
    story,
):
    code, output, errors, _, last_step, checkpoints = story[0]["told"]
    assert code == 75, errors
    assert checkpoints[-1] == last_step
    said = [line for line in output.splitlines() if "stopped by" in line]
    assert said in [
        [f"[0] stopped by {reason} after step {last_step}, saved"]
        for reason in ("SIGTERM", "another host")
    ]


def test_after_all_that_the_run_is_the_one_that_nobody_stopped(story):
    found, run, straight = story
    assert found["killed"][4] < found["told"][4] < run.last_step
    assert run.sequence(*EXACT) == straight.sequence(*EXACT)
    for interrupted, whole in zip(run.steps[:5], straight.steps[:5], strict=True):
        assert interrupted["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_what_one_process_asks_for_ends_all_after_the_same_step(tmp_path, capsys):
    """With several hosts the answer is a step later; what was trained on the way is what one process trains."""
    words = [
        *MODEL,
        "steps=9",
        "learning_rate_schedule=constant",
        "per_device_batch_size=-1",
        "global_batch_size=4",
        "eval_interval=-1",
        f"base_output_directory={tmp_path}",
    ]
    own_run([*words, "run_name=1"])
    assert "ended after 4" in capsys.readouterr().out
    result = run_launched(
        [*quick_python(), "-m", "tests.own_run", *words, "run_name=2"],
        processes=2,
        devices=1,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    for process in range(2):
        assert f"[{process}] ended after 5" in result.stdout
    two, one = (RunFiles(tmp_path / str(processes)) for processes in (2, 1))
    assert (two.checkpoints, one.checkpoints) == ([5], [4])
    assert two.sequence(*EXACT)[:4] == one.sequence(*EXACT)
    losses = [[record["loss"] for record in run.steps[:4]] for run in (two, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
