"""Callbacks see each step, evaluation and checkpoint, and end a run as if its last step had come."""

import json

import jax
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import Callback, train
from tests.training.conftest import TINY

RUN = (*TINY, "dataset_type=synthetic", "eval_interval=2", "eval_steps=1", "checkpoint_period=2", "warmup_steps=1",
       "learning_rate_schedule=constant", "per_device_batch_size=1")  # fmt: skip


class Seen(Callback):
    def __init__(self, *, ends_after=None, ends_at=None, wants_state=False):
        self.ends_after, self.wants_state, self.events, self.states = ends_after, wants_state, [], {}
        self.ends_at = ends_at  # the kind of an event at step 2 or 3

    def after_step(self, step, record, state):
        self.events.append(("step", step, record["loss"]))
        if state is not None:
            self.states[step] = int(state.step), jax.device_get(state.params)
        return step == self.ends_after

    def after_evaluation(self, step, record, state):
        self.events.append(("evaluation", step, record["eval_loss"]))
        assert int(state.step) == step
        return self.ends_at == "evaluation"

    def after_checkpoint(self, step, state):
        self.events.append(("checkpoint", step, None))
        assert int(state.step) == step
        return self.ends_at == "checkpoint"


def _train(tmp_path, name, *callbacks, steps=5, words=()):
    words = [*RUN, *words, f"steps={steps}", f"base_output_directory={tmp_path}", f"run_name={name}"]
    result = train(load_config(None, words), callbacks=callbacks)
    lines = [json.loads(line) for line in (result.run_directory / "metrics.jsonl").read_text().splitlines()]
    return result, lines


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of five steps that no callback ends, and the events that a callback saw."""
    seen = Seen(wants_state=True)
    return *_train(tmp_path_factory.mktemp("runs"), "whole", seen), seen


def test_a_callback_sees_what_the_run_records_in_its_order(whole):
    _, lines, seen = whole
    steps = {line["step"]: line["loss"] for line in lines if "loss" in line}
    evaluations = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    want = []
    for step, loss in steps.items():
        want.append(("step", step, loss))
        if step in evaluations:
            want += [("evaluation", step, evaluations[step]), ("checkpoint", step, None)]
    assert seen.events == want
    assert list(evaluations) == [2, 4, 5]


def test_one_that_wants_the_state_is_passed_that_of_the_step(whole):
    result, _, seen = whole
    assert [number for number, _ in seen.states.values()] == list(seen.states) == [1, 2, 3, 4, 5]
    jax.tree.map(np.testing.assert_array_equal, seen.states[5][1], jax.device_get(result.state.params))


@pytest.mark.parametrize(("wants_state", "last"), [(False, 4), (True, 3)])
def test_the_run_ends_evaluated_and_saved_and_goes_on_as_if_it_had_not_ended(
    wants_state, last, whole, tmp_path, capsys
):
    """Without the state, one step later: the next step is already running when one is recorded."""
    seen = Seen(ends_after=3, wants_state=wants_state)
    result, lines = _train(tmp_path, "ended", seen)
    assert (result.step, result.interrupted) == (last, False)
    assert f"stopped by a callback after step {last}, saved" in capsys.readouterr().out
    assert [step for kind, step, _ in seen.events if kind == "checkpoint"] == [2, last]
    assert [step for kind, step, _ in seen.events if kind == "evaluation"] == [2, last]
    assert bool(seen.states) == wants_state
    again, lines = _train(tmp_path, "ended")
    assert again.step == 5
    losses = [[line["loss"] for line in each if "loss" in line] for each in (lines, whole[1])]
    assert losses[0] == losses[1]
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(each.state) for each in (again, whole[0])))


@pytest.mark.parametrize(("ends", "words", "want"), [
    ({"ends_at": "evaluation"}, ["checkpoint_period=100"], ["step 1", "step 2", "evaluation 2", "checkpoint 2"]),
    ({"ends_at": "checkpoint"}, ["eval_interval=100"], ["step 1", "step 2", "checkpoint 2", "evaluation 2"]),
])  # fmt: skip
def test_the_run_ends_at_once_where_no_step_is_under_way(ends, words, want, tmp_path):
    """Evaluated and saved once, whichever of the two was due."""
    seen = Seen(**ends)
    result, lines = _train(tmp_path, "ended", seen, words=words)
    assert (result.step, result.interrupted) == (2, False)
    assert [f"{kind} {step}" for kind, step, _ in seen.events] == want
    assert [line["step"] for line in lines] == [1, 2, 2]


def test_the_run_ends_at_once_at_an_evaluation_that_a_start_makes_up_for(tmp_path):
    """As it would have at the evaluation itself; the checkpoint is that from which the run goes on."""
    result, lines = _train(tmp_path, "ended", Seen(ends_at="evaluation"))
    assert [line["step"] for line in lines] == [1, 2, 2]
    (result.run_directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    seen = Seen(ends_at="evaluation")
    again, made_up = _train(tmp_path, "ended", seen)
    assert (again.step, again.interrupted, again.eval_loss) == (2, False, result.eval_loss)
    assert [f"{kind} {step}" for kind, step, _ in seen.events] == ["evaluation 2"]
    assert [line["step"] for line in made_up] == [1, 2, 2]
