"""The command: exit codes, one clear line for each mistake, and a run killed at any moment."""

import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.processes import RunFiles, environment
from tests.rl.conftest import RUN, lines, timeless

# A module of the working directory, as a user's own rewards are. Its file `deadly` is a number of calls, in the last of
# which the run is killed: amid a rollout, as the next chunk is sampled while one is judged.
JUDGE = """
import os, pathlib, signal
def low_bytes(completions):
    deadly = pathlib.Path("deadly")
    if deadly.exists():
        calls = int(deadly.read_text()) - 1
        deadly.write_text(str(calls))
        if not calls:
            os.kill(os.getppid(), signal.SIGKILL)
    return [sum(character < "@" for character in text) / max(len(text), 1) for text in completions]
"""
# Two updates on each batch, and a reference: all that a batch can need to go on after a restart.
WHOLE = ["steps=8", "num_iterations=2", "grpo_beta=0.05", "micro_batch_size=4", "eval_interval=4", "max_num_checkpoints_to_keep=20",
         "reward_functions=judge:low_bytes"]  # fmt: skip


def _command(directory, *overrides, config="post_train/rl.yml"):
    words = [config, *RUN, f"base_output_directory={directory}", *overrides]
    return [sys.executable, "-m", "maxtext_lite.train_rl", *words]


def _run(command, directory):
    (directory / "judge.py").write_text(JUDGE)
    how = {"env": environment(2), "cwd": directory, "capture_output": True, "text": True}
    return subprocess.run(command, timeout=300, check=False, **how)


def _train_rl(directory, *overrides):
    return _run(_command(directory, *overrides), directory)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    result = _train_rl(directory, *WHOLE)
    assert result.returncode == 0, result.stderr
    return directory / "rl", result


def test_a_run_shows_its_config_plan_and_progress(uninterrupted):
    run, result = uninterrupted
    for part in (
        "pairs_per_batch              16 = 4 prompts x 4 generations",
        "90 training prompts, 10 prompts held out",
        "step 0/8  held-out accuracy",
        "step 8/8  loss",
        f"8 steps done; run directory: {run}",
    ):
        assert part in result.stdout
    assert result.stderr == ""


def _killed(directory, is_time):
    """The command, killed as soon as `is_time`, unless something else kills it before."""
    with subprocess.Popen(
        _command(directory, *WHOLE),
        env=environment(2),
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        deadline = time.monotonic() + 200
        while process.poll() is None and not is_time():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors


def test_killed_at_any_moment_the_same_command_ends_in_the_same_bits(uninterrupted, tmp_path):
    """Killed with a reference and without a step, amid a rollout, and while the first of two updates is being saved."""
    run, checkpoints = tmp_path / "rl", tmp_path / "rl" / "checkpoints"
    (tmp_path / "judge.py").write_text(JUDGE)
    _killed(tmp_path, (run / "reference" / "checkpoints" / "0").exists)
    assert not list(checkpoints.iterdir())

    (tmp_path / "deadly").write_text("7")  # one evaluation, the 4 chunks of steps 1 and 2, and 2 of steps 3 and 4
    _killed(tmp_path, lambda: False)
    assert RunFiles(run).last_step == 2

    def is_saving_a_first_update():
        return any(path.name.startswith(("3.", "5.")) for path in checkpoints.iterdir())

    _killed(tmp_path, is_saving_a_first_update)
    whole = [int(path.name) for path in checkpoints.iterdir() if path.name.isdigit()]
    assert 0 < max(whole, default=0) < 8

    result = _train_rl(tmp_path, *WHOLE)
    assert result.returncode == 0, result.stderr
    before = uninterrupted[0]
    assert timeless(lines(run)) == timeless(lines(before))
    assert lines(run, "rollouts.jsonl") == lines(before, "rollouts.jsonl")
    jax.tree.map(np.testing.assert_array_equal, RunFiles(run).parameters(8), RunFiles(before).parameters(8))


