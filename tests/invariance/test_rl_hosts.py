"""Reinforcement learning by several processes: the responses, rewards and updates are those of one."""

import shutil

import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.post_training.keys import RLRunConfig
from maxtext_lite.post_training.rollout_steps import train_rl
from tests.processes import RunFiles, in_turn
from tests.rl.conftest import RUN, evaluations
from tests.run_directories import lines_of

FILE = "configs/post_train/rl.yml"
WORDS = [
    *RUN,
    "num_iterations=2",
    "grpo_beta=0.05",
    "rollout_correction=truncated",
    "max_num_checkpoints_to_keep=20",
    "steps=4",
]
AMID = 1  # steps, after which a batch has had one of its two updates


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run by one process with 8 devices; from between its first two updates on by two with 2 each.

    The two go on to a run whose reward fails.
    """
    directory = tmp_path_factory.mktemp("runs")

    def named(name, *overrides):
        return [
            *WORDS,
            f"base_output_directory={directory}",
            f"run_name={name}",
            *overrides,
        ]

    config = load_config(
        FILE, named("one", "ici_fsdp_parallelism=4", "ici_data_parallelism=2")
    )
    assert isinstance(config, RLRunConfig)
    train_rl(config)

    shutil.copytree(directory / "one", directory / "two")
    for checkpoint in (directory / "two" / "checkpoints").iterdir():
        if int(checkpoint.name) > AMID:
            shutil.rmtree(checkpoint)
    mesh = (
        "ici_fsdp_parallelism=2",
        "ici_data_parallelism=2",
        "rollout_fsdp_parallelism=4",
    )
    fails = (
        "reward_functions=tests.rl.test_rollout_steps:failing",
        "reward_error=stop",
    )
    runs = [named("two", *mesh), named("fails", *mesh, *fails)]
    failed, _ = in_turn([[FILE, *words] for words in runs], processes=2, devices=2)
    return lambda name: RunFiles(directory / name), failed


def test_prompts_responses_and_rewards_are_those_of_one_process(runs):
    got, want = (runs[0](name) for name in ("two", "one"))
    exact = ("step", "examples_hash", "examples_seen", "target_tokens")
    assert got.sequence(*exact) == want.sequence(*exact)
    sampled = [
        [step["responses_hash"] for step in run.steps if "reward" in step]
        for run in (got, want)
    ]
    assert sampled[0] == sampled[1]
    assert len(set(sampled[0])) == 2
    pairs = [
        [
            (pair["prompt"], pair["response"], pair["rewards"])
            for pair in lines_of(run.directory, "rollouts.jsonl")
        ]
        for run in (got, want)
    ]
    assert pairs[0] == pairs[1]
    assert evaluations(got.directory) == evaluations(want.directory)


def test_losses_agree(runs):
    for key in ("loss", "kl", "grad_norm", "param_norm", "token_nll"):
        got, want = (
            [step[key] for step in runs[0](name).steps] for name in ("two", "one")
        )
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6, err_msg=key)


def test_a_reward_that_fails_on_the_first_host_ends_all_with_2_and_its_message(runs):
    _, result = runs
    assert result.returncode == 2
    own, other = [
        line.partition("] error: ")[2]
        for line in sorted(result.stderr.splitlines())
        if "] error: " in line
    ]
    assert own.startswith(
        "Reward function tests.rl.test_rollout_steps:failing raised RuntimeError: no opinion"
    )
    assert other.startswith("process 0 (coordinator) on ")
    assert own[:100] in other
