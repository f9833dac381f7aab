"""Callbacks see each step, evaluation and checkpoint, and end a run as if its last step had come."""

import jax
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import Callback, train
from tests.run_directories import lines_of
from tests.training.conftest import TINY

KEYS = """
dataset_type=synthetic eval_interval=2 eval_steps=1 checkpoint_period=2 warmup_steps=1
learning_rate_schedule=constant per_device_batch_size=1 steps=6 optimizer=sgd
"""
RUN = (*TINY, *KEYS.split())


class Seen(Callback):
    """Notes what it sees, and ends the run at its first evaluation, or after a step."""

    def __init__(self, *, ends_after=None, ends_evaluated=False, wants_state=False):
        self.ends_after, self.ends_evaluated, self.wants_state = (
            ends_after,
            ends_evaluated,
            wants_state,
        )
        self.events, self.values, self.states = [], [], {}

    def _saw(self, kind, step, value=None):
        self.events.append(f"{kind} {step}")
        self.values.append(value)

    def after_step(self, step, record, state):
        self._saw("step", step, record["loss"])
        if state is not None:
            self.states[int(state.step)] = jax.device_get(state.params)
        return step == self.ends_after

    def after_evaluation(self, step, record, state):
        self._saw("evaluation", step, record["eval_loss"])
        assert int(state.step) == step
        return self.ends_evaluated

    def after_checkpoint(self, step, state):
        self._saw("checkpoint", step)
        assert int(state.step) == step


def trained(directory, *callbacks):
    result = train(
        load_config(None, [*RUN, f"base_output_directory={directory}"]),
        callbacks=callbacks,
    )
    return result, lines_of(result.run_directory)


pytestmark = pytest.mark.usefixtures("one_device_for_all")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps that no callback ends, its lines, and what a callback saw."""
    seen = Seen(wants_state=True)
    return *trained(tmp_path_factory.mktemp("runs"), seen), seen


def test_a_callback_sees_what_the_run_records_in_its_order_and_the_state_of_each_step(
    whole,
):
    result, lines, seen = whole
    of_evaluation = lambda step: [f"evaluation {step}", f"checkpoint {step}"]  # noqa: E731
    assert seen.events == [
        "step 1",
        "step 2",
        *of_evaluation(2),
        "step 3",
        "step 4",
        *of_evaluation(4),
        "step 5",
        "step 6",
        *of_evaluation(6),
    ]
    assert [value for value in seen.values if value] == [
        line.get("loss", line.get("eval_loss")) for line in lines
    ]
    assert list(seen.states) == list(range(1, 7))
    jax.tree.map(
        np.testing.assert_array_equal,
        seen.states[6],
        jax.device_get(result.state.params),
    )


def test_a_run_ends_evaluated_and_saved_and_goes_on_as_if_it_had_not_ended(
    whole, tmp_path, capsys
):
    """At once where no step is under way; without the state a step later, as the next is already running."""
    legs = [
        (
            {"ends_evaluated": True},
            ["step 1", "step 2", "evaluation 2", "checkpoint 2"],
        ),
        ({"ends_after": 3}, ["step 3", "step 4", "evaluation 4", "checkpoint 4"]),
        (
            {"ends_after": 5, "wants_state": True},
            ["step 5", "evaluation 5", "checkpoint 5"],
        ),
        ({}, ["step 6", "evaluation 6", "checkpoint 6"]),
    ]
    for ends, want in legs:
        seen = Seen(**ends)
        result, lines = trained(tmp_path, seen)
        assert sorted(seen.events) == sorted(want)
        assert (f"step {result.step}", result.interrupted) == (
            f"step {want[-1].split()[1]}",
            False,
        )
        assert ("stopped by a callback after step" in capsys.readouterr().out) == bool(
            ends
        )
        assert bool(seen.states) == seen.wants_state
    losses = [
        [line["loss"] for line in each if "loss" in line] for each in (lines, whole[1])
    ]
    assert losses[0] == losses[1]
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.device_get(each.state) for each in (result, whole[0])),
    )
