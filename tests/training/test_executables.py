"""Steps from the data feed: compiled once per number of row slots, and in the order of the data."""

import contextlib
import re
import time

import jax
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.data import example_ids
from maxtext_lite.training import train
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.feed_steps import FeedSteps
from maxtext_lite.training.metrics import Terminal
from maxtext_lite.training.opening import open_run
from maxtext_lite.training.step_log import StepLog
from tests.conftest import use_one_device
from tests.run_directories import lines_of
from tests.training.conftest import TINY

KEYS = (
    "dataset_type=synthetic eval_interval=-1 enable_checkpointing=false optimizer=sgd"
)
RUN = (*TINY, *KEYS.split())

RAMP = """
enable_rampup_batch_size=true per_device_batch_size_start=8 per_device_batch_size_increment=8 per_device_batch_size=16
global_rampup_samples=16
"""
# Stages of 4, 6 and 8 examples, all laid out in 8 slots.
FRACTIONS = f"{RAMP} per_device_batch_size_start=0.5 per_device_batch_size_increment=0.25 per_device_batch_size=1"

DOWN = "batch_schedule=[[0,8],[9,16],[20,8]] per_device_batch_size=16"


@contextlib.contextmanager
def begun(tmp_path, words):
    """The steps of a run, and the state before its first."""
    run = open_run(
        load_config(None, [*RUN, *words.split(), f"base_output_directory={tmp_path}"])
    )
    with jax.set_mesh(run.mesh):
        state, _ = run.restore_or_init()
        with contextlib.closing(
            FeedSteps(run, state, StepLog(run, TrainProgress(), Terminal()))
        ) as steps:
            yield run, steps, state


@pytest.mark.parametrize(
    ("words", "devices", "sizes", "stages", "compiled"),
    [
        (RAMP, 1, [8, 8, 16], 2, 2),
        (DOWN, 1, [8, 8, 16, 8], 3, 2),
        (FRACTIONS, 8, [4, 4, 6, 6, 8], 3, 1),
    ],
)
def test_each_stage_is_prepared_for_once_and_takes_the_examples_that_follow(
    words, devices, sizes, stages, compiled, tmp_path, capsys, monkeypatch
):
    if devices == 1:
        use_one_device(monkeypatch)
    seen = [0]
    with begun(tmp_path, words) as (run, steps, state):
        for step in range(1, len(sizes) + 1):
            steps.prepare(state, step)
            state, taken = steps.take(state, step)
            ids = example_ids(
                seen[-1],
                taken.num_examples,
                num_examples=len(run.source),
                seed=run.config.data_shuffle_seed,
            )
            np.testing.assert_array_equal(taken.example_ids, ids)
            seen.append(seen[-1] + taken.num_examples)
            assert steps.unfinished(step) is None
            assert int(jax.block_until_ready(state.step)) == step
            assert not taken.metrics["skipped"]
        assert "finite by itself" in taken.find_cause(state)
    assert np.diff(seen).tolist() == sizes
    said = capsys.readouterr().out
    assert said.count("global_batch_to_train=") == stages
    assert said.count("compiled the train step in") == 1
    assert said.count("compiled the train step of the next stage") == compiled - 1


def test_a_wait_for_the_compiler_is_no_part_of_a_step_s_time(
    tmp_path, capsys, monkeypatch
):
    """By a clock on which each compilation takes a thousand seconds more."""
    use_one_device(monkeypatch)
    clock, begin_stage, waited = time.perf_counter, FeedSteps._begin_stage, [0.0]

    def begin_for_long(self, *arguments):
        begin_stage(self, *arguments)
        waited[0] += 1000

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + waited[0])
    monkeypatch.setattr(FeedSteps, "_begin_stage", begin_for_long)
    words = (*RUN, *RAMP.split(), "steps=5", "warmup_steps=0", "log_period=1")
    result = train(load_config(None, [*words, f"base_output_directory={tmp_path}"]))
    assert waited == [2000]
    lines = lines_of(result.run_directory)
    assert [line["global_batch_to_train"] for line in lines] == [8, 8, 16, 16, 16]
    assert max(line["step_seconds"] for line in lines) < 500
    left = re.findall(r"ETA (\d+):(\d+)", capsys.readouterr().out)
    assert len(left) == 5
    assert all(hours == "0" and int(minutes) < 8 for hours, minutes in left)
