"""The command `train`: its exit codes, and a run that is killed at any moment."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from maxtext_lite import train
from maxtext_lite.cli import run_command
from tests.processes import RunFiles, environment, quick_python
from tests.training.conftest import TINY

SECONDS = 300  # for any of these processes: one that hangs is killed
STEPS = 40
KEYS = "eval_interval=10 eval_steps=1 checkpoint_period=10 log_period=1 per_device_batch_size=1"
RUN = [*TINY, f"steps={STEPS}", *KEYS.split()]
ENDLESS = ["steps=1000000", "checkpoint_period=1000000", "eval_interval=-1"]
SECRET = "planted-0451"


def command(directory, *overrides, python=None):
    words = ["-m", "maxtext_lite.train", "base.yml", *RUN]
    words += [f"base_output_directory={directory}", *overrides]
    return [*(python or quick_python()), *words]


SECRETS = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY")


@contextlib.contextmanager
def under_way(words, directory):
    """A process in a directory, killed with all that it started where it is left running or takes too long."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words,
        env=environment(2) | dict.fromkeys(SECRETS, SECRET),
        cwd=directory,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as process:
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def finished(words, directory):
    """What a command printed that ended with 0."""
    with under_way(words, directory) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    output = finished(command(directory), directory)
    return RunFiles(directory / "default"), output


METRICS = """
step loss grad_norm param_norm learning_rate examples target_tokens examples_seen tokens_seen epoch
per_device_batch_size gradient_accumulation_steps global_batch_to_train step_seconds data_seconds tokens_per_second
tflops_per_device mfu skipped examples_hash
"""


def test_a_run_shows_its_plan_and_progress_and_records_every_step(uninterrupted):
    run, output = uninterrupted
    for part in (f"{STEPS} steps of", f"step {STEPS}/{STEPS}", "held-out loss"):
        assert part in output
    assert [record["step"] for record in run.steps] == list(range(1, STEPS + 1))
    assert all(record.keys() >= set(METRICS.split()) for record in run.steps)
    evaluated = [record["step"] for record in run.evaluations]
    assert evaluated == list(range(10, STEPS + 1, 10))


def test_killed_the_same_command_ends_in_the_same_bits(uninterrupted, tmp_path):
    """Killed well after its second checkpoint."""
    run = RunFiles(tmp_path / "default")
    with under_way(command(tmp_path), tmp_path) as process:
        while process.poll() is None and run.last_step < 23:
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert STEPS not in run.checkpoints
    finished(command(tmp_path), tmp_path)
    want = uninterrupted[0]
    same = ("step", "loss", "grad_norm", "examples_hash", "tokens_seen")
    assert run.sequence(*same) == want.sequence(*same)
    assert run.evaluations == want.evaluations
    jax.tree.map(
        np.testing.assert_array_equal, run.parameters(STEPS), want.parameters(STEPS)
    )


def test_secrets_in_the_environment_are_in_no_file_and_no_line(uninterrupted):
    run, output = uninterrupted
    files = [path for path in run.directory.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in output


def signalled(words, directory, *, after, number):
    """The command's exit code, what it printed after a signal at the line that begins so, and its errors."""
    with under_way(words, directory) as process:
        for line in process.stdout:
            if line.startswith(after):
                process.send_signal(number)
                break
        output, errors = process.communicate()
        return process.returncode, output, errors


# The command, in which the compilation for the second stage of a ramp takes forever.
SLOW = """
import sys, threading
from maxtext_lite.cli import run_command
from maxtext_lite.console import command_signals
from maxtext_lite.train import main
from maxtext_lite.training.compile import Executables
command_signals.install()
of_first_stage = Executables._compile
def compiled(self, slots):
    if slots > 2:
        threading.Event().wait()
    return of_first_stage(self, slots)
Executables._compile = compiled
sys.exit(run_command(main))
"""
RAMP = """
enable_rampup_batch_size=true per_device_batch_size_start=1 per_device_batch_size_increment=1 per_device_batch_size=2
global_rampup_samples=1000000
"""


def test_a_signal_ends_with_75_after_saving_although_the_next_stage_is_being_compiled(
    tmp_path,
):
    words = command(tmp_path, *ENDLESS, *RAMP.split(), python=["python"])[3:]
    code, output, errors = signalled(
        [*quick_python(), "-c", SLOW, *words],
        tmp_path,
        after="step 2/",
        number=signal.SIGTERM,
    )
    assert code == 75, errors
    assert "stopped by SIGTERM after step" in output
    assert output.endswith("the same command resumes the run\n")
    assert len(RunFiles(tmp_path / "default").checkpoints) == 1


def test_a_signal_before_the_first_step_ends_at_once_with_130_and_one_line(tmp_path):
    """With a step that no other test has compiled, so that compilation takes long enough."""
    words = command(tmp_path, "base_mlp_dim=40", python=[sys.executable])
    code, _, errors = signalled(
        words, tmp_path, after="run directory", number=signal.SIGINT
    )
    assert code == 130
    assert errors == "stopped before the first step: there was nothing to save\n"
    assert RunFiles(tmp_path / "default").checkpoints == []


@pytest.mark.fast
def test_a_non_finite_loss_ends_with_3(tmp_path, capsys, one_device):
    keys = (
        "optimizer=sgd learning_rate=1e30 gradient_clipping_threshold=0 warmup_steps=0"
    )
    words = [*RUN, *keys.split(), f"base_output_directory={tmp_path}"]
    assert run_command(train.main, words) == 3
    assert "error: step " in capsys.readouterr().err
