"""Steps from the data feed: compiled once per number of row slots, in the background; a failure is not lost."""

import contextlib
import json
import statistics
import threading

import jax
import numpy as np
import pytest
from jax.sharding import get_abstract_mesh

from maxtext_lite.batching import make_plan
from maxtext_lite.batching.tuning import Candidate, Timing
from maxtext_lite.config import load_config
from maxtext_lite.data import example_ids, example_shape
from maxtext_lite.parallel import make_mesh, sharding
from maxtext_lite.training import executables
from maxtext_lite.training.checkpoint import Counts
from maxtext_lite.training.executables import Executables
from maxtext_lite.training.feed_steps import FeedSteps
from maxtext_lite.training.metrics import Terminal
from maxtext_lite.training.opening import open_run
from maxtext_lite.training.state import StepParts
from maxtext_lite.training.step import TRAIN_BATCH_AXES
from maxtext_lite.training.timing import measured
from tests.training.conftest import TINY

WAIT = 60  # seconds at most, for what takes milliseconds
RUN = (*TINY, "dataset_type=synthetic", "eval_interval=-1", "enable_checkpointing=false", "optimizer=sgd")

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
    """A function of a stand-in that makes executables for a ramp on the 8 devices, and their plan."""
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
def test_a_request_returns_while_compiling_goes_on_elsewhere_and_each_stage_is_compiled_once(make):
    step = Step(waits=True)
    made, plan = make(step)
    for stage in (*plan.stages, *plan.stages):
        made.request(stage)  # would wait for ever here
    step.may_end.set()
    assert [made.of(stage).step for stage in plan.stages] == ["executable 1", "executable 2", "executable 3"]
    assert step.examples() == [8, 16, 24]
    built = made.of(plan.stages[0])
    assert 0 <= built.compiling <= built.tracing + built.compiling < WAIT
    assert threading.current_thread() not in [thread for *_, thread, _ in step.lowered]


def test_stages_with_the_same_row_slots_share_their_executable(make):
    step = Step()
    made, plan = make(step, *FRACTIONS)
    assert [stage.micro_batch_to_train for stage in plan.stages] == [4, 6, 8]
    assert [made.slots(stage) for stage in plan.stages] == [8, 8, 8]
    assert {made.of(stage).step for stage in plan.stages} == {"executable 1"}
    assert step.examples() == [8]


@pytest.mark.parametrize("overrides", [(), ACCUMULATED], ids=["per device", "accumulated"])
def test_it_is_compiled_for_the_state_and_batches_of_the_run(overrides, make):
    step = Step()
    made, plan = make(step, *overrides)
    made.of(plan.stages[0])
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
    made, plan = make(step)
    made.request(plan.stages[1])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            made.of(plan.stages[1])
    assert len(step.lowered) == 1
    step.error = None
    assert made.of(plan.stages[2]).step == "executable 2"  # the others are not touched


def test_closing_drops_what_has_not_begun(make):
    step = Step(waits=True)
    made, plan = make(step)
    for stage in plan.stages:
        made.request(stage)
    assert step.begun.wait(WAIT)
    made.close()  # does not wait
    step.may_end.set()
    assert made.of(plan.stages[0]).step == "executable 1"
    assert step.examples() == [8]


@contextlib.contextmanager
def begun(tmp_path, counts):
    """The steps of a run after `counts`, and the state before its first."""
    run = open_run(load_config(None, [*RUN, *RAMP, f"base_output_directory={tmp_path}"]))
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
        assert taken.find_cause(state) is None
    assert (found, prepared) == ([8, 8, 16, 24], [1, 3, 4])
    said = capsys.readouterr().out
    assert said.count("compiled the train step in") == 1
    assert said.count("compiled the train step of the next stage") == 2
    assert "from step 3: global_batch_to_train=16 = 2 per device x 8 devices x 1 accumulation" in said
    with begun(tmp_path, Counts(step=3, examples_seen=32)) as (_, steps, state):
        steps.prepare(4)
        _, resumed = steps.take(state, 4)
    np.testing.assert_array_equal(resumed.example_ids, ids)


def test_a_short_run_gives_the_median_time_of_its_steps_and_one_that_does_not_fit_none(tmp_path, capsys):
    config = load_config(None, [*RUN, "base_output_directory=/nowhere"])
    candidate = Candidate({}, config, make_plan(config, num_devices=8, platform="cpu"))
    found = measured(candidate, tmp_path / "way", warm_up=1, steps=3, device_memory_gb=None)
    lines = [json.loads(line) for line in (tmp_path / "way" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    memory = json.loads((tmp_path / "way" / "memory.json").read_text())
    assert found == Timing(statistics.median(line["step_seconds"] for line in lines[1:]), memory["compiled_bytes"])
    assert capsys.readouterr().out == ""
    assert measured(candidate, tmp_path / "way", warm_up=1, steps=3, device_memory_gb=1e-6) == Timing(None, None)
