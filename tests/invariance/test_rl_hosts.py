"""Reinforcement learning by several processes: the responses, rewards and updates are those of one."""

import shutil

import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.rl.loop import train_rl
from tests.processes import RunFiles, train_in_turn
from tests.rl.conftest import RUN, evaluations, lines

FILE = "configs/post_train/rl.yml"
WORDS = [*RUN, "num_iterations=2", "grpo_beta=0.05", "max_num_checkpoints_to_keep=20"]
BATCH, AMID = 4, 3  # steps after which a batch is done, and after which it has had one of its two updates


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run by one process with 8 devices; by two with 2 each, also from between two updates on; by four with 2."""
    directory = tmp_path_factory.mktemp("runs")

    def named(name, *overrides):
        return [*WORDS, f"base_output_directory={directory}", f"run_name={name}", *overrides]

    train_rl(load_config(FILE, named("one", "ici_fsdp_parallelism=4", "ici_data_parallelism=2")))

    def begun(name, step):
        """A run of which one process has made so many steps."""
        shutil.copytree(directory / "one", directory / name)
        for checkpoint in (directory / name / "checkpoints").iterdir():
            if int(checkpoint.name) > step:
                shutil.rmtree(checkpoint)

    begun("two-amid", AMID)
    begun("four", BATCH)
    two = named("two", "ici_fsdp_parallelism=2", "ici_data_parallelism=2", "rollout_fsdp_parallelism=4")
    train_in_turn([[FILE, *two], [FILE, *named("two-amid", "ici_fsdp_parallelism=4")]], processes=2, devices=2)
    train_in_turn([[FILE, *named("four", "ici_fsdp_parallelism=4", "ici_data_parallelism=2")]], processes=4, devices=2)
    return lambda name: RunFiles(directory / name)


SEVERAL = ["two", "two-amid", "four"]


@pytest.mark.parametrize("several", SEVERAL)
def test_prompts_responses_and_rewards_are_those_of_one_process(several, runs):
    got, want = (runs(name) for name in (several, "one"))
    exact = ("step", "examples_hash", "examples_seen", "target_tokens")
    assert got.sequence(*exact) == want.sequence(*exact)
    sampled = [[step["responses_hash"] for step in run.steps if "reward" in step] for run in (got, want)]
    assert sampled[0] == sampled[1]
    assert len(set(sampled[0])) == 3
    pairs = [
        [(pair["prompt"], pair["response"], pair["rewards"]) for pair in lines(run.directory, "rollouts.jsonl")]
        for run in (got, want)
    ]
    assert pairs[0] == pairs[1]
    assert evaluations(got.directory) == evaluations(want.directory)


@pytest.mark.parametrize("several", SEVERAL)
def test_losses_agree(several, runs):
    for key in ("loss", "kl", "grad_norm", "param_norm", "token_nll"):
        got, want = ([step[key] for step in runs(name).steps] for name in (several, "one"))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6, err_msg=key)
