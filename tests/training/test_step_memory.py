"""A step that does not fit is refused with the nearest one that does."""

import json

import jax
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.training import train
from maxtext_lite.training.compile import Executables
from tests.training.conftest import TINY

KEYS = """
dataset_type=synthetic eval_interval=-1 steps=2 checkpoint_period=1 optimizer=sgd learning_rate_schedule=constant
warmup_steps=0
"""
RUN = [*TINY, *KEYS.split()]
ASKED = ["per_device_batch_size=2", "gradient_accumulation_steps=1"]
FITS = ["per_device_batch_size=1", "gradient_accumulation_steps=2"]


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


def test_under_a_limit_the_step_named_fits(tmp_path):
    """What stays under its own bytes as a limit is what a step of twice the rows is told to be."""
    _, memory = run(tmp_path, "fits", *FITS)
    compiled = memory["compiled_bytes"]
    assert memory["error_of_plan_to_compiled"] == memory["planned_bytes"] / compiled - 1
    assert memory["limit_bytes"] is None
    with pytest.raises(UserError, match=f"works: {' '.join(FITS)}."):
        run(tmp_path, "too large", *ASKED, device_memory_gb=compiled / 1e9)
    with pytest.raises(UserError, match="more devices"):
        run(tmp_path, "no room", *ASKED, device_memory_gb=1e-6)


def test_a_first_step_that_finds_no_room_is_refused_in_the_same_way(
    tmp_path, monkeypatch
):
    """Its argument is lost, as when an allocation fails after the donation."""

    def no_room(state, *rest):
        jax.tree.map(lambda x: x.delete(), state)
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes."
        )

    compiled_of = Executables.of

    def without_room(self, stage):
        built = compiled_of(self, stage)
        no_room.memory_analysis = built.step.memory_analysis
        return built._replace(step=no_room)

    monkeypatch.setattr(Executables, "of", without_room)
    with pytest.raises(UserError, match=f"works: {' '.join(FITS)}."):
        run(tmp_path, "full", *ASKED)
