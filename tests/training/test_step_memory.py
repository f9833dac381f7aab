"""A run that does not fit descends its ladder, ends like one that fits from the start, and resumes where it fits."""

import json

import jax
import numpy as np
import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.training import train
from maxtext_lite.training.executables import Executables
from maxtext_lite.training.step_memory import (
    Ladder,
    StepMemory,
)
from tests.training.conftest import TINY, lines_of

KEYS = """
dataset_type=synthetic eval_interval=-1 steps=2 checkpoint_period=1 optimizer=sgd learning_rate_schedule=constant
warmup_steps=0
"""
RUN = [*TINY, *KEYS.split()]
ASKED = ["per_device_batch_size=2", "gradient_accumulation_steps=1"]
RUNG = {"per_device_batch_size": "1", "gradient_accumulation_steps": "2"}


def run(tmp_path, name, *words, **limit):
    result = train(
        load_config(
            None,
            [*RUN, f"base_output_directory={tmp_path}", f"run_name={name}", *words],
        ),
        **limit,
    )
    return result, json.loads((result.run_directory / "memory.json").read_text())


pytestmark = pytest.mark.usefixtures("one_device_for_all")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A run that fits, and its memory.json."""
    return run(
        tmp_path_factory.mktemp("runs"),
        "fitted",
        *(f"{key}={value}" for key, value in RUNG.items()),
    )


def same(one, other):
    fields = "step loss grad_norm examples_hash global_batch_to_train learning_rate"
    metrics = []
    for result in (one, other):
        lines = lines_of(result.run_directory)
        metrics.append([[line[field] for field in fields.split()] for line in lines])
    assert metrics[0] == metrics[1]
    jax.tree.map(np.testing.assert_array_equal, one.state.params, other.state.params)


def test_under_a_limit_it_is_the_run_that_fitted(fitted, tmp_path, capsys):
    whole, memory = fitted
    assert (memory["rungs"], memory["limit_bytes"]) == ([], None)
    result, found = run(
        tmp_path, "limited", *ASKED, device_memory_gb=memory["compiled_bytes"] / 1e9
    )
    assert (
        capsys.readouterr().out.count(
            "the run starts again with per_device_batch_size=1"
        )
        == 1
    )
    assert found["rungs"] == [RUNG]
    assert found["compiled_bytes"] <= found["limit_bytes"] == memory["compiled_bytes"]
    assert (
        found["error_of_plan_to_compiled"]
        == found["planned_bytes"] / found["compiled_bytes"] - 1
    )
    same(whole, result)


def test_a_first_step_that_finds_no_room_is_taken_again_with_less(
    fitted, tmp_path, monkeypatch
):
    """Its argument is lost, as when an allocation fails after the donation."""
    compiled_of, taken = Executables.of, []

    def without_room(self, stage):
        built = compiled_of(self, stage)

        def step(state, *rest):
            jax.tree.map(lambda x: x.delete(), state)
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes."
            )

        taken.append(stage.per_device_batch_size)
        if len(taken) > 1:
            return built
        step.memory_analysis = built.step.memory_analysis
        return built._replace(step=step)

    monkeypatch.setattr(Executables, "of", without_room)
    result, found = run(tmp_path, "full", *ASKED)
    assert (taken, found["rungs"]) == ([2, 1], [RUNG])
    same(fitted[0], result)


@pytest.mark.fast
def test_a_ladder_is_for_what_was_asked_on_these_devices_and_ends_in_a_refusal(
    tmp_path,
):
    def config(*words):
        there = f"base_output_directory={tmp_path}", "run_name=there"
        return load_config(None, [*RUN, *ASKED, *there, *words])

    asked = config()
    plan = make_plan(asked, num_devices=8)
    ladder = Ladder.of(asked, None).lowered(
        asked, plan, lambda other: make_plan(other, num_devices=8)
    )
    lowered = ladder.applied(asked)
    assert (lowered.per_device_batch_size, lowered.gradient_accumulation_steps) == (
        1,
        2,
    )
    memory = StepMemory(plan.memory)
    memory.ladder = ladder
    (tmp_path / "there").mkdir()
    memory.write(tmp_path / "there")
    assert Ladder.of(asked, None) == ladder
    for other, limit in ((asked, 16.0), (config("remat_policy=full"), None)):
        assert not Ladder.of(other, limit).rungs
    path = tmp_path / "there" / "memory.json"
    for damaged in (path.read_text()[:-9], "[]"):  # as a kill leaves it, or anyone
        path.write_text(damaged)
        assert not Ladder.of(asked, None).rungs

    def refuse(_):
        raise UserError("no")

    with pytest.raises(UserError, match="more devices"):
        Ladder({}).lowered(asked, plan, refuse)
