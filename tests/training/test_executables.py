"""The train step is compiled once per number of row slots, in the background, and a failure is not lost."""

import contextlib
import json
import threading

import jax
import pytest
from jax.sharding import get_abstract_mesh

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
from maxtext_lite.data import example_shape
from maxtext_lite.parallel import make_mesh, sharding
from maxtext_lite.training import executables, train
from maxtext_lite.training.executables import Executables
from maxtext_lite.training.state import StepParts
from maxtext_lite.training.step import TRAIN_BATCH_AXES
from tests.training.conftest import TINY

WAIT = 60  # seconds at most, for what takes milliseconds

# On 8 devices: two steps of 8 examples, one of 16, then 24.
RAMP = ("enable_rampup_batch_size=true", "per_device_batch_size_start=1", "per_device_batch_size_increment=1",
        "per_device_batch_size=3", "global_rampup_samples=32")  # fmt: skip
# The same up to there, as 1, 2 and 3 micro-batches, then 4.
ACCUMULATED = ("rampup_mode=gradient_accumulation_steps", "per_device_batch_size_start=0.25",
               "per_device_batch_size_increment=0.25", "per_device_batch_size=1", "gradient_accumulation_steps=4",
               "global_rampup_samples=48")  # fmt: skip
# Stages of 4, 6 and 8 examples, all laid out in 8 slots.
FRACTIONS = ("per_device_batch_size_start=0.5", "per_device_batch_size_increment=0.25", "per_device_batch_size=1",
             "global_rampup_samples=16")  # fmt: skip


@contextlib.contextmanager
def compilations():
    """Lists the functions that are compiled meanwhile, or read from the persistent cache, by name."""
    found = []

    def listen(event, seconds, **facts):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(facts["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(("overrides", "examples", "compiled"), [
    ((), [8, 8, 16, 24, 24], 3),
    (ACCUMULATED, [8, 8, 16, 24, 32], 1),
    (FRACTIONS, [4, 4, 6, 6, 8], 1),
], ids=["per device", "accumulated", "fractions of one layout"])  # fmt: skip
def test_a_run_compiles_its_train_step_once_for_each_number_of_row_slots(overrides, examples, compiled, tmp_path):
    config = load_config(
        None,
        [*TINY, "dataset_type=synthetic", "enable_checkpointing=false", "eval_interval=-1", "steps=5",
         f"base_output_directory={tmp_path}", *RAMP, *overrides],
    )  # fmt: skip
    with compilations() as names:
        result = train(config)
    lines = (result.run_directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["examples"] for line in lines] == examples
    assert len([name for name in names if "train_step" in name]) == compiled


class Step:
    """A stand-in for a jitted train step that records its lowerings and their threads, and waits before it finishes."""

    def __init__(self, *, waits=False, error=None):
        self.lowered, self.error = [], error
        self.begun, self.may_end = threading.Event(), threading.Event()
        if not waits:
            self.may_end.set()

    def lower(self, state, batch, num_micro_batches):
        self.begun.set()
        settings = (get_abstract_mesh(), jax.config.jax_default_matmul_precision)
        self.lowered.append((state, batch, num_micro_batches, threading.current_thread(), settings))
        return self

    def compile(self):
        number = len(self.lowered)
        assert self.may_end.wait(WAIT)
        if self.error:
            raise self.error
        return f"executable {number}"

    def examples(self):
        return [batch["tokens"].shape[1] for _, batch, *_ in self.lowered]


@pytest.fixture
def make(monkeypatch):
    """Executables of a stand-in, for a ramp on the 8 devices, and their plan."""
    monkeypatch.setattr(executables, "abstract_state", lambda parts: "the state")
    with contextlib.ExitStack() as stack:

        def make(step, *overrides):
            config = load_config(None, [*TINY, *RAMP, *overrides])
            plan = make_plan(config, num_devices=8)
            parts = StepParts(None, None, make_mesh(plan.ici_mesh, plan.dcn_mesh), config)
            made = Executables(step, parts, plan, example=example_shape(config))
            stack.enter_context(contextlib.closing(made))
            stack.callback(step.may_end.set)
            return made, plan

        yield make


@pytest.mark.fast
def test_a_request_returns_while_compiling_goes_on_elsewhere(make):
    step = Step(waits=True)
    executables, plan = make(step)
    executables.request(plan.stages[0])  # would wait for ever here
    step.may_end.set()
    built = executables.of(plan.stages[0])
    assert built.step == "executable 1"
    assert 0 <= built.compiling <= built.tracing + built.compiling < WAIT
    ((*_, thread, _),) = step.lowered
    assert thread is not threading.current_thread()


def test_each_stage_is_compiled_once_however_often_it_is_asked_for(make):
    step = Step()
    executables, plan = make(step)
    for stage in (*plan.stages, *plan.stages):
        executables.request(stage)
    assert [executables.of(stage)[0] for stage in plan.stages] == ["executable 1", "executable 2", "executable 3"]
    assert step.examples() == [8, 16, 24]


def test_what_was_not_requested_is_compiled_when_it_is_needed(make):
    executables, plan = make(Step())
    assert executables.of(plan.stages[2])[0] == "executable 1"


def test_stages_with_the_same_row_slots_share_their_executable(make):
    step = Step()
    executables, plan = make(step, *FRACTIONS)
    assert [stage.micro_batch_to_train for stage in plan.stages] == [4, 6, 8]
    assert [executables.slots(stage) for stage in plan.stages] == [8, 8, 8]
    assert {executables.of(stage)[0] for stage in plan.stages} == {"executable 1"}
    assert step.examples() == [8]


@pytest.mark.parametrize("overrides", [(), ACCUMULATED], ids=["per device", "accumulated"])
def test_it_is_compiled_for_the_state_and_batches_of_the_run(overrides, make):
    step = Step()
    executables, plan = make(step, *overrides)
    executables.of(plan.stages[0])
    ((state, batch, number, _, (mesh, precision)),) = step.lowered
    assert state == "the state"
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int32", "targets": "int32", "segments": "int32", "positions": "int32", "weights": "float32",
    }  # fmt: skip
    # [A, B, T]: with a ramp of the accumulation the target's A, of which the step is told how many to take.
    assert {array.shape for array in batch.values()} == {(4 if overrides else 1, 8, 32)}
    where = make_mesh(plan.ici_mesh, plan.dcn_mesh)
    assert {array.sharding for array in batch.values()} == {sharding(where, TRAIN_BATCH_AXES)}
    assert mesh == where.abstract_mesh
    assert precision == "highest"  # TINY's, not the thread's own
    if overrides:
        assert (number.shape, number.dtype.name) == ((), "int32")
    else:
        assert number is None


def test_an_error_in_the_background_reaches_who_needs_the_executable(make):
    step = Step(error=RuntimeError("out of memory"))
    executables, plan = make(step)
    executables.request(plan.stages[1])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            executables.of(plan.stages[1])
    assert len(step.lowered) == 1
    step.error = None
    assert executables.of(plan.stages[2])[0] == "executable 2"  # the others are not touched


def test_closing_drops_what_has_not_begun(make):
    step = Step(waits=True)
    executables, plan = make(step)
    for stage in plan.stages:
        executables.request(stage)
    assert step.begun.wait(WAIT)
    executables.close()  # does not wait
    step.may_end.set()
    assert executables.of(plan.stages[0])[0] == "executable 1"
    assert step.examples() == [8]
    with pytest.raises(RuntimeError, match="shutdown"):
        executables._thread.submit(print)
