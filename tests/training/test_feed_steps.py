"""Steps from the data feed: their examples, where a resumed run continues, and when an executable is needed."""

import contextlib

import jax
import numpy as np

from maxtext_lite.config import load_config
from maxtext_lite.data import example_ids
from maxtext_lite.training.checkpoint import Counts
from maxtext_lite.training.feed_steps import FeedSteps
from maxtext_lite.training.metrics import Terminal
from maxtext_lite.training.opening import open_run
from tests.training.test_run import TINY

# On 8 devices: two steps of 8 examples, one of 16, then 24.
RAMP = ("enable_rampup_batch_size=true", "per_device_batch_size_start=1", "per_device_batch_size_increment=1",
        "per_device_batch_size=3", "global_rampup_samples=32")  # fmt: skip


@contextlib.contextmanager
def begun(tmp_path, counts):
    """The steps of a run after `counts`, and the state before its first."""
    words = [*TINY, *RAMP, f"base_output_directory={tmp_path}", "enable_checkpointing=false", "optimizer=sgd"]
    run = open_run(load_config(None, words))
    with jax.set_mesh(run.mesh):
        state, _ = run.restore_or_init()
        with contextlib.closing(FeedSteps(run, Terminal(log_period=1, quiet=False), state, counts)) as steps:
            yield run, steps, state


def test_each_stage_is_prepared_for_once_and_takes_the_examples_that_follow(tmp_path, capsys):
    seen, prepared, found = 0, [], []
    with begun(tmp_path, Counts()) as (run, steps, state):
        for step in range(1, 5):
            if not steps.ready:
                steps.prepare(step)
                prepared.append(step)
            state, taken = steps.take(state, step)
            ids = example_ids(seen, taken.num_examples, num_examples=len(run.source), seed=run.config.data_shuffle_seed)
            np.testing.assert_array_equal(taken.example_ids, ids)
            seen += taken.num_examples
            found.append(taken.num_examples)
            assert steps.unfinished(step) is None
            assert int(jax.block_until_ready(state.step)) == step
            assert not taken.metrics["skipped"]
            assert not taken.more
    assert (found, prepared) == ([8, 8, 16, 24], [1, 3, 4])
    said = capsys.readouterr().out
    assert said.count("compiled the train step in") == 1
    assert said.count("compiled the train step of the next stage") == 2
    assert "from step 3: global_batch_to_train=16 = 2 per device x 8 devices x 1 accumulation" in said
    with begun(tmp_path, Counts(step=3, examples_seen=32)) as (_, steps, state):
        steps.prepare(4)
        _, resumed = steps.take(state, 4)
    np.testing.assert_array_equal(resumed.example_ids, ids)


def test_nothing_is_wrong_with_a_step_that_is_finite(tmp_path):
    with begun(tmp_path, Counts()) as (_, steps, state):
        steps.prepare(1)
        state, taken = steps.take(state, 1)
        assert taken.find_cause(state) is None
