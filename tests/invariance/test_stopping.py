"""Two processes of one run: one of them killed, all of them told to stop, or one of them told to stop."""

import os
import re
import signal
import subprocess
import time

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from tests.invariance.conftest import MODEL
from tests.processes import SECONDS, RunFiles, launched, quick_python, train_under_way

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
    found["all told"] = until_after(
        found["killed"][4], lambda both: both.popen.send_signal(signal.SIGTERM)
    )
    found["one told"] = until_after(
        found["all told"][4], lambda both: os.kill(both.process_id(1), signal.SIGTERM)
    )
    last = found["one told"][4] + 2
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


@pytest.mark.parametrize(
    ("who", "reasons"),
    [
        ("all told", {"SIGTERM"}),
        ("one told", {"SIGTERM", "another host"}),
    ],
)
def test_told_to_stop_all_stop_after_the_same_step_saved_and_with_75(
    who, reasons, story
):
    code, output, errors, _, last_step, checkpoints = story[0][who]
    assert code == 75, errors
    assert checkpoints[-1] == last_step
    said = [line for line in output.splitlines() if "stopped by" in line]
    assert said in [
        [f"[0] stopped by {reason} after step {last_step}, saved"] for reason in reasons
    ]


def test_after_all_that_the_run_is_the_one_that_nobody_stopped(story):
    found, run, straight = story
    assert (
        found["killed"][4] < found["all told"][4] < found["one told"][4] < run.last_step
    )
    assert run.sequence(*EXACT) == straight.sequence(*EXACT)
    for interrupted, whole in zip(run.steps[:5], straight.steps[:5], strict=True):
        assert interrupted["loss"] == pytest.approx(whole["loss"], rel=1e-5)


# A loss, data and a callback of one's own, which asks for the end on one process only, after step 3. And then held-out
# data of which the last process cannot read an example, the last of the second batch.
OWN = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
from maxtext_lite.config import UserError, load_config
from maxtext_lite.training import Callback, train
class Counting:
    fingerprint = "counting"
    def __len__(self):
        return 50
    def __getitem__(self, example_id):
        numbers = np.arange(example_id, example_id + 33) % 264
        return {"tokens": numbers[:-1], "targets": numbers[1:]}
class Damaged(Counting):
    fingerprint = "damaged"
    def __getitem__(self, example_id):
        if example_id == 7 and jax.process_index() == 1:
            raise UserError("record 7 is damaged.")
        return super().__getitem__(example_id)
class Ends(Callback):
    def after_step(self, step, record, state):
        return step == 3 and jax.process_index() == jax.process_count() - 1
def loss(predictions, rows):
    return jnp.sum(rows["weights"] * jnp.square(predictions.nll())), jnp.sum(rows["weights"])
result = train(load_config(None, sys.argv[1:]), source=Counting(), objective=loss, callbacks=[Ends()])
assert not result.interrupted
print("ended after", result.step, flush=True)
if jax.process_count() > 1:
    keys = ["eval_interval=3", "eval_per_device_batch_size=2", "run_name=damaged"]
    try:
        train(load_config(None, [*sys.argv[1:], *keys]), source=Counting(), eval_source=Damaged(), objective=loss)
    except UserError as error:
        print("refused:", error, flush=True)
"""


def test_what_one_process_asks_for_or_cannot_read_ends_all_after_the_same_step(
    tmp_path,
):
    """With several hosts a callback's answer is a step later; what was trained on the way is what one process trains.
    An evaluation that one process cannot read ends all at its step, which is saved."""
    found = {}
    for processes in (2, 1):
        words = [
            *MODEL,
            "steps=9",
            "learning_rate_schedule=constant",
            "per_device_batch_size=2",
            "eval_interval=-1",
            f"base_output_directory={tmp_path}",
            f"run_name={processes}",
        ]
        command, variables = launched(
            [*quick_python(), "-c", OWN, *words],
            processes=processes,
            devices=2 // processes,
        )
        result = subprocess.run(
            command,
            env=variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
        said = [
            line.removeprefix("[0] ").removeprefix("[1] ")
            for line in result.stdout.splitlines()
        ]
        found[processes] = [
            line for line in said if line.startswith(("ended", "refused"))
        ]
    refused = "refused: record 7 is damaged. The run ended after step 3, saved."
    assert {number: sorted(said) for number, said in found.items()} == {
        2: ["ended after 5", "ended after 5", refused, refused],
        1: ["ended after 4"],
    }
    damaged = RunFiles(tmp_path / "damaged")
    assert (damaged.last_step, damaged.checkpoints, damaged.evaluations) == (3, [3], [])
    two, one = (RunFiles(tmp_path / str(processes)) for processes in (2, 1))
    assert (two.checkpoints, one.checkpoints) == ([5], [4])
    assert two.sequence(*EXACT)[:4] == one.sequence(*EXACT)
    losses = [[record["loss"] for record in run.steps[:4]] for run in (two, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# The command `train`; the last process finds its disk full as it begins to save step 4.
FULL = """
import resource, sys
import jax
from maxtext_lite.cli import run_command
from maxtext_lite.train import main
from maxtext_lite.training import saving
start = saving.Saver.start
def full(self, directory, *more, **named):
    if directory.name == "4":
        self.wait()  # step 2 has been saved
        if jax.process_index() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    start(self, directory, *more, **named)
saving.Saver.start = full
sys.exit(run_command(main))
"""


def test_a_disk_that_is_full_on_one_host_alone_ends_all_with_2_and_the_same_line(
    tmp_path,
):
    """Nobody waits for that host's part of the save, and what is safe is what the first host knows of."""
    words = [
        *MODEL,
        "steps=100000",
        "learning_rate_schedule=constant",
        "per_device_batch_size=1",
        "eval_interval=-1",
        "checkpoint_period=2",
        "log_to=",
        f"base_output_directory={tmp_path}",
        "run_name=full",
    ]
    command, variables = launched(
        [*quick_python(), "-c", FULL, *words], processes=2, devices=1
    )
    ended = subprocess.run(
        command,
        env=variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr[-4000:]
    line = r"error: \S+/unfinished-4\S* cannot be written: File too large\. What is safe: the checkpoint of step 2, .*"
    said = [
        re.findall(rf"^\[{process}\] (error: .*)", ended.stderr, re.MULTILINE)
        for process in range(2)
    ]
    assert said[0] == said[1]
    assert re.fullmatch(line, *said[0])
    assert "Traceback" not in ended.stderr
