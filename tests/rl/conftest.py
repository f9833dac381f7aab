"""A tiny run of reinforcement learning: sums of single digits, by an untrained model."""

import pytest

from maxtext_lite.config import load_config
from tests.run_directories import lines_of
from tests.training.conftest import TINY

KEYS = """
warmup_steps=0 steps=6 learning_rate=3e-3 learning_rate_schedule=constant dataset_type=arithmetic arithmetic_largest=9
arithmetic_operations=+ eval_fraction=0.1 max_target_length=16 max_prefill_predict_length=6 batch_size=4
num_generations=4 micro_batch_size=8 eval_interval=3 checkpoint_period=1 log_period=1
reward_functions=tests.rl.low_bytes:low_bytes
"""
RUN = (*TINY, *KEYS.split())
# Two updates on each batch, a reference and importance weights: all that a batch can need after a restart.
BATCH = "num_iterations=2 grpo_beta=0.05 rollout_correction=truncated"
MESH = "ici_data_parallelism=2 ici_fsdp_parallelism=2 ici_tensor_parallelism=2 rollout_fsdp_parallelism=2"
EVALUATION = "eval_num_generations=2 eval_sampling_temperature=1"
WHOLE = (*BATCH.split(), *MESH.split(), *EVALUATION.split())


@pytest.fixture(scope="session")
def config_of():
    """A function from a directory and overrides to the config of a tiny run in it."""

    def make(directory, *overrides):
        words = [*RUN, f"base_output_directory={directory}", *overrides]
        return load_config("configs/post_train/rl.yml", words)

    return make


@pytest.fixture(scope="session")
def server():
    from tests.rl.served import serving

    with serving() as served:
        yield served


def steps(run_directory):
    return [line for line in lines_of(run_directory) if "loss" in line]


def evaluations(run_directory):
    return [line for line in lines_of(run_directory) if "eval_reward" in line]


def timeless(records):
    """The records without their times."""
    words = ("seconds", "per_second", "tflops", "overlap")
    return [
        {key: x for key, x in each.items() if not any(word in key for word in words)}
        for each in records
    ]
