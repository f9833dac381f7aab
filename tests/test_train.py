"""The command: exit codes, one clear line for each mistake, and a run killed at any moment."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.conftest import QUICK_COMPILATION
from tests.processes import commands_in_turn, quick_python
from tests.training.conftest import TINY

RUN = [
    *TINY,
    "steps=60",
    "eval_interval=10",
    "eval_steps=1",
    "checkpoint_period=10",
    "per_device_batch_size=1",
    "log_period=1",
]


def _command(directory, *overrides, python=None):
    python = quick_python() if python is None else python
    return [
        *python,
        "-m",
        "maxtext_lite.train",
        "base.yml",
        *RUN,
        f"base_output_directory={directory}",
        *overrides,
    ]


_SECRET = "planted-0451"


def _environment():
    """Two devices without conftest's settings, as on a user's machine; and secrets, which must not leak."""
    kept = {key: value for key, value in os.environ.items() if key not in ("NPROC", "OMP_NUM_THREADS")}
    kept |= dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY"), _SECRET)
    return kept | {"XLA_FLAGS": " ".join(["--xla_force_host_platform_device_count=2", *QUICK_COMPILATION])}


def _train(directory, *overrides, python=None):
    return subprocess.run(
        _command(directory, *overrides, python=python),
        env=_environment(),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def commands():
    with commands_in_turn(devices=2) as run:
        yield run


def _steps(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def _evaluations(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval_loss" in line]


def _parameters(run):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore((run / "checkpoints" / "60" / "params").absolute())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    result = _train(directory, python=[sys.executable])
    assert result.returncode == 0, result.stderr
    return directory / "default", result.stdout


def test_a_run_shows_its_config_plan_and_progress(uninterrupted):
    _, output = uninterrupted
    for part in (
        "global_batch_to_train",
        "attention kernel: dot_product",
        "step 60/60",
        "held-out loss",
        "60 steps done",
    ):
        assert part in output


def test_secrets_in_the_environment_are_in_no_file_and_no_line(uninterrupted):
    run, output = uninterrupted
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if _SECRET.encode() in path.read_bytes()] == []
    assert _SECRET not in output


def _killed(directory, step):
    """Starts the command and kills it after a step; after step 0: before its first."""
    run = directory / "default"
    process = subprocess.Popen(
        _command(directory),
        env=_environment(),
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists() and f'"step": {step},' in (run / "metrics.jsonl").read_text():
            break
        if step == 0 and (run / "config.yml").exists():
            break
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (run / "checkpoints" / "60").exists()


def test_killed_at_any_step_the_same_command_ends_in_the_same_bits(uninterrupted, tmp_path):
    """Killed before its first step, then before its first checkpoint, then well after one: it resumes each time."""
    run = tmp_path / "default"
    for step in (0, 5, 33):
        _killed(tmp_path, step)
    result = _train(tmp_path)
    assert result.returncode == 0, result.stderr
    want, got = _steps(uninterrupted[0]), _steps(run)
    assert [record["step"] for record in got] == list(range(1, 61))
    same = ("loss", "grad_norm", "examples_hash", "tokens_seen")
    assert [[record[key] for key in same] for record in got] == [[record[key] for key in same] for record in want]
    assert _evaluations(run) == _evaluations(uninterrupted[0])
    jax.tree.map(np.testing.assert_array_equal, _parameters(run), _parameters(uninterrupted[0]))


@pytest.mark.parametrize("is_command", [True, False])
def test_a_command_is_watched_from_before_jax_is_imported_and_a_call_is_not(is_command, monkeypatch):
    from maxtext_lite import train

    watched = []
    monkeypatch.setattr(train.command_signals, "installed", is_command)
    monkeypatch.setattr(train.watchdog, "start", watched.append)
    monkeypatch.setattr(train, "finish", lambda *_: 0)
    assert train.main(["hang_timeout_seconds=77"]) == 0
    assert watched == [77] * is_command


def test_a_signal_ends_with_75_after_saving(tmp_path):
    with subprocess.Popen(
        _command(tmp_path, "steps=100000", "checkpoint_period=100000", "eval_interval=-1"),
        env=_environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 2/"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 75
    assert "stopped by SIGINT after step" in rest
    assert "saved" in rest
    assert len(list((tmp_path / "default" / "checkpoints").iterdir())) == 1


# The command, in which the compilation for the second stage of a ramp takes forever.
SLOW = """
import sys, threading
from maxtext_lite.cli import run_command
from maxtext_lite.process.signals import command_signals
from maxtext_lite.train import main
from maxtext_lite.training.executables import Executables
command_signals.install()
of_first_stage = Executables._compile
def compiled(self, slots):
    if slots > 2:
        threading.Event().wait()
    return of_first_stage(self, slots)
Executables._compile = compiled
sys.exit(run_command(main))
"""


def test_a_signal_ends_with_75_although_the_next_stage_is_being_compiled(tmp_path):
    ramp = ["enable_rampup_batch_size=true", "per_device_batch_size_start=1", "per_device_batch_size_increment=1",
            "per_device_batch_size=2", "global_rampup_samples=1000000", "steps=1000000"]  # fmt: skip
    words = _command(tmp_path, *ramp, "eval_interval=-1", "checkpoint_period=1000000", python=())[2:]
    command = [*quick_python(), "-c", SLOW, *words]
    with subprocess.Popen(command, env=_environment(), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        next(line for line in process.stdout if line.startswith("step 2/"))
        process.send_signal(signal.SIGTERM)
        try:
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 75
    assert "stopped by SIGTERM after step" in rest
    assert len(list((tmp_path / "default" / "checkpoints").iterdir())) == 1


def test_a_signal_before_the_first_step_ends_at_once_with_130_and_no_output(tmp_path):
    """With a step that no other test has compiled, so that compilation takes long enough."""
    with subprocess.Popen(
        _command(tmp_path, "base_mlp_dim=40", python=[sys.executable]),
        env=_environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("attention kernel"):  # what follows is compiling
                process.send_signal(signal.SIGINT)
                break
        _, error = process.communicate()
    assert (process.returncode, error) == (130, "")
    assert not list((tmp_path / "default" / "checkpoints").glob("*"))


def test_a_non_finite_loss_ends_with_3(tmp_path):
    result = _train(tmp_path, "optimizer=sgd", "learning_rate=1e30", "gradient_clipping_threshold=0", "warmup_steps=0")
    assert result.returncode == 3
    assert result.stderr.splitlines()[-1].startswith("error: step ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("overrides", "message"), [
    (["per_device_batchsize=3"],
     "unknown key 'per_device_batchsize' (command line). Did you mean 'per_device_batch_size'?"),
    (["dataset_path=nowhere.txt"], "dataset_path='nowhere.txt': there is no such file"),
    (["vocab_size=100", "ici_tensor_parallelism=1"], "vocab_size=100"),
    (["per_device_batch_size=0.3"], "per_device_batch_size=0.3 x 2 devices = 0.6 examples, not a whole number."),
])  # fmt: skip
def test_mistakes_end_with_2_and_name_key_and_value(overrides, message, tmp_path, commands):
    result = commands(tmp_path, "train", *_command(tmp_path, *overrides, python=[sys.executable])[3:])
    assert result.returncode == 2
    assert any(line.startswith("error: ") and message in line for line in result.stderr.splitlines()), result.stderr
    assert "Traceback" not in result.stderr
    assert "compiled" not in result.stdout
    assert not (tmp_path / "default").exists()


def test_a_directory_that_cannot_be_made_ends_with_2(tmp_path):
    (tmp_path / "file").write_text("")
    result = _train(tmp_path, f"base_output_directory={tmp_path}/file")
    assert result.returncode == 2
    assert result.stderr.startswith(
        f"error: base_output_directory={tmp_path}/file with run_name=default cannot be made"
    )
