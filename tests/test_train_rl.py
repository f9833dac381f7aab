"""The command: exit codes, one clear line for each mistake, and a run killed at any moment."""

import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.processes import RunFiles, commands_in_turn, environment, quick_python
from tests.rl.conftest import RUN, lines, timeless

# A module of the working directory, as a user's own rewards are. Its file `deadly` is a number of calls, in the last of
# which the run is killed: during a rollout, as the next chunk is sampled while one is judged.
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
# Two updates on each batch, and a reference: all that a batch can need after a restart.
WHOLE = ["steps=8", "num_iterations=2", "grpo_beta=0.05", "micro_batch_size=4", "eval_interval=4",
         "max_num_checkpoints_to_keep=20", "reward_functions=judge:low_bytes"]  # fmt: skip


def _command(directory, *overrides, config="post_train/rl.yml", python=None):
    words = [config, *RUN, f"base_output_directory={directory}", *overrides]
    return [*(python or quick_python()), "-m", "maxtext_lite.train_rl", *words]


def _run(command, directory):
    (directory / "judge.py").write_text(JUDGE)
    how = {"env": environment(2), "cwd": directory, "capture_output": True, "text": True}
    return subprocess.run(command, timeout=300, check=False, **how)


def _train_rl(directory, *overrides):
    return _run(_command(directory, *overrides), directory)


@pytest.fixture(scope="module")
def commands():
    with commands_in_turn(devices=2) as run:
        yield run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    result = _run(_command(directory, *WHOLE, python=[sys.executable]), directory)
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
    """Killed with a reference before the first step, during a rollout, and while the first of two updates is saved."""
    run, checkpoints = tmp_path / "rl", tmp_path / "rl" / "checkpoints"
    (tmp_path / "judge.py").write_text(JUDGE)
    _killed(tmp_path, (run / "reference" / "checkpoints" / "0").exists)
    assert not list(checkpoints.iterdir())

    (tmp_path / "deadly").write_text(
        "9"
    )  # the 3 chunks of an evaluation, the 4 of steps 1 and 2, and 2 of steps 3 and 4
    _killed(tmp_path, lambda: False)
    assert RunFiles(run).last_step == 2

    def is_saving_a_first_update():
        return any(path.name.startswith(("unfinished-3", "unfinished-5")) for path in checkpoints.iterdir())

    _killed(tmp_path, is_saving_a_first_update)
    whole = [int(path.name) for path in checkpoints.iterdir() if path.name.isdigit()]
    assert 0 < max(whole, default=0) < 8

    result = _train_rl(tmp_path, *WHOLE)
    assert result.returncode == 0, result.stderr
    before = uninterrupted[0]
    assert timeless(lines(run)) == timeless(lines(before))
    assert lines(run, "rollouts.jsonl") == lines(before, "rollouts.jsonl")
    jax.tree.map(np.testing.assert_array_equal, RunFiles(run).parameters(8), RunFiles(before).parameters(8))


def test_a_signal_ends_with_75_after_saving(tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    words = ("num_iterations=2", "steps=100000", "checkpoint_period=100000", "eval_interval=-1")
    command = _command(tmp_path, *words, "reward_functions=judge:low_bytes")
    with subprocess.Popen(command, env=environment(2), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 2/"):
                process.send_signal(signal.SIGTERM)
                break
        rest = process.stdout.read()
    assert process.returncode == 75
    assert "stopped by SIGTERM after step" in rest
    assert "saved" in rest
    run = RunFiles(tmp_path / "rl")
    assert run.checkpoints == [run.last_step]


FILES = ["dataset_type=prompts", "arithmetic_largest=99", "arithmetic_operations=+-"]


@pytest.mark.parametrize(("overrides", "message"), [
    (["reward_functions=judge:nothing"], "judge:nothing"),
    ([*FILES, "dataset_path=empty.jsonl"], "dataset_path='empty.jsonl'"),
    ([*FILES, "dataset_path=long.jsonl", "long_examples=refuse"], "long.jsonl"),
    (["micro_batch_size=6"], "micro_batch_size=6 is not a multiple of num_generations=4: a group of responses is "
                             "judged together. Nearest that work: 4 or 8."),
    (["eval_fraction=1"], "eval_fraction=1"),
    (["rollout_slots=3"], "rollout_slots=3 is not a multiple of the 2 parts into which the generating devices split "
                          "them. Nearest that work: 2 or 4."),
])  # fmt: skip
def test_mistakes_end_with_2_and_name_key_and_value(overrides, message, tmp_path, commands):
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "long.jsonl").write_text('{"prompt": "2+3+2+3=", "answer": "10"}\n' * 30)
    result = commands(tmp_path, "train_rl", *_command(tmp_path, *overrides, python=[sys.executable])[3:])
    assert result.returncode == 2
    (error,) = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "rl").exists()


@pytest.mark.fast
def test_each_command_names_the_other_for_its_configs(tmp_path):
    result = _run(_command(tmp_path, config="base.yml", python=[sys.executable])[:4], tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        "error: base.yml is not a config of reinforcement learning, which needs the line `base: post_train/rl.yml`. "
        "`train` takes it as it is.\n"
    )
    result = _run([*quick_python(), "-m", "maxtext_lite.train", "post_train/rl.yml"], tmp_path)
    assert result.returncode == 2
    assert result.stderr == "error: a config of reinforcement learning is not for train, but for train_rl.\n"
    assert not [path for path in tmp_path.iterdir() if path.name != "judge.py"]


def test_a_non_finite_loss_ends_with_3(tmp_path):
    words = ("optimizer=sgd", "learning_rate=1e30", "gradient_clipping_threshold=0", "eval_interval=-1")
    result = _train_rl(tmp_path, *words, "reward_functions=judge:low_bytes")
    assert result.returncode == 3
    assert result.stderr.splitlines()[-1].startswith("error: step ")
    assert "Traceback" not in result.stderr
