"""Steps of pre-training, SFT and DPO on batches from the data feed, and the loss over held-out examples."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# jax, optax and orbax declare some of their functions in part.

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.stages import Compiled

from maxtext_lite.batching import BatchStage
from maxtext_lite.batching.table import split_text
from maxtext_lite.config.load import load_asked
from maxtext_lite.config.phases import phases
from maxtext_lite.config.registry import resolve
from maxtext_lite.data.feed import DeviceBatch, balance_of, training_batches
from maxtext_lite.parallel import Tree, devices_share_threads, sharding, value_of_host
from maxtext_lite.training.compile import Executables, ProgramMemory, raising_out_of_memory
from maxtext_lite.training.evaluation import HeldOutLoss
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState
from maxtext_lite.training.step import TRAIN_BATCH_AXES, make_train_step
from maxtext_lite.training.step_log import StepLog, StepResult

Result = TypeVar("Result")


class FeedSteps:
    """The steps after a log's, each on the next batch of the data; see `loop.StepSource`.

    Args:
      state: restored or new.
    Raises:
      UserError: the objective cannot start, as where a resumed DPO run's pairs have changed.
    """

    ahead = True

    def __init__(self, run: TrainingRun, state: TrainState, log: StepLog):
        counts = log.counts
        if starts := run.config.objective_kind.starts:
            resolve(starts)(run, state, counts, log.say)
        self._run = run
        self._plan = run.plan
        self._log = log
        step = make_train_step(run.parts, run.schedule(counts))
        self._executables = Executables(step, run.parts, run.plan, example=(run.source.num_tokens, run.source.fields))
        self._stage: BatchStage | None = None
        self._step: Compiled | None = None
        self._is_new = True  # this executable has not run yet
        self._begun: set[int] = set()  # slots of the executables of the stages so far
        self._first: list[DeviceBatch] = []
        self.compiled_anew = False  # an executable, rather than found where an earlier process kept it
        if run.parts.local:
            from maxtext_lite.training.synchronise import make_summarise, make_synchronise

            self._synchronise = make_synchronise(run.parts)
            self._summarise = make_summarise(run.parts)
        self._examples_seen = counts.examples_seen
        self._batches = training_batches(
            run.source,
            run.plan,
            sharding=sharding(run.mesh, TRAIN_BATCH_AXES),
            examples_seen=counts.examples_seen,
            num_steps=run.steps_left(counts),
            seed=run.config.data_shuffle_seed,
            worker_count=run.config.grain_worker_count,
            balance=balance_of(run.config, run.plan),
            excluded=run.excluded,
        )

    def prepare(self, state: TrainState, step: int) -> None:
        """Waits for the executable if a stage of the batch begins with this step."""
        stage = self._plan.stage_at(self._examples_seen)
        if stage != self._stage:
            with self._log.paused(state):
                self._begin_stage(stage, step)

    def _begin_stage(self, stage: BatchStage, step: int) -> None:
        plan = self._plan
        previous = self._stage
        log = self._log
        if previous is None:  # data that cannot be read end the run before it compiles
            phases.enter("reading", step)
            self._first = [next(self._batches)]
        phases.enter("compile", step)
        built = self._executables.of(stage)
        self._step = built.step
        self._stage = stage
        self.compiled_anew |= not built.kept
        slots = self._executables.slots(stage)
        self._is_new = slots not in self._begun
        self._begun.add(slots)
        needs = ""
        if stage == plan.stages[-1]:
            num_bytes = ProgramMemory.of(built.step).total
            needs = "".join(hook.after_compile(num_bytes) for hook in log.hooks)
        if previous is None:
            phases.mark("compile")
            log.say(f"compiled the train step {built.how}{needs}")
            for hook in log.hooks:
                hook.before_first_step(self._first[0].arrays)
        elif self._is_new:
            log.say(f"compiled the train step of the next stage {built.how}, in the background")
        if len(plan.stages) > 1:
            rate = f"; learning_rate x {plan.stage_multiplier(stage):.4g}" if plan.scales_by_stage else ""
            split = split_text(stage.per_device_batch_size, plan.num_devices, stage.gradient_accumulation_steps)
            log.say(f"from step {step}: global_batch_to_train={stage.global_batch_to_train} = {split}{rate}")

    def take(self, state: TrainState, step: int) -> tuple[TrainState, StepResult]:
        """With local updates, also summarises the replicas, and synchronises them periodically."""
        assert self._step is not None, "prepare() comes first"
        assert self._stage is not None
        if devices_share_threads():
            jax.block_until_ready(state)
        phases.enter("reading", step)
        batch = self._first.pop() if self._first else next(self._batches)
        self._examples_seen += batch.num_examples
        phases.enter("step", step)
        number = np.int32(batch.num_micro_batches) if self._plan.ramps_accumulation else None
        with raising_out_of_memory() if self._is_new else contextlib.nullcontext():
            state, metrics = self._step(state, batch.arrays, number)
            phases.advance()
            if self._is_new:  # only its first run shows whether it fits
                jax.block_until_ready(metrics)
        self._is_new = False
        if local := self._run.parts.local:
            metrics = _call_when_idle(self._summarise, metrics)
            state = dataclasses.replace(state, skipped_in_a_row=metrics.pop("skipped_in_a_row"))
            if step % local.sync_period == 0:
                state = _call_when_idle(self._synchronise, state)
        self._executables.request_after(self._stage)  # after the dispatch, as tracing blocks Python
        more = {} if batch.attention_imbalance is None else {"attention_imbalance": batch.attention_imbalance}
        find_cause = functools.partial(self._find_cause, batch)
        return state, StepResult(metrics, batch.example_ids, batch.num_examples, batch.data_seconds, find_cause, more)

    def unfinished(self, step: int) -> None:
        """Nothing: a batch is one step."""

    def close(self) -> None:
        """Stops reading and compiling ahead."""
        self._batches.close()
        self._executables.close()

    def _find_cause(self, batch: DeviceBatch, state: TrainState) -> str:
        find = load_asked(self._run.config, "diagnosis", "nonfinite")
        if find is None:
            return ""
        # A loading host has the ids in the order in which it laid out the rows.
        ids = np.asarray(value_of_host(self._plan.loading_hosts[0], batch.example_ids.tolist()))
        return find(self._run.parts, state, batch.arrays, ids, micro_batches=batch.num_micro_batches)


def _call_when_idle(function: Callable[[Tree], Result], argument: Tree) -> Result:
    """Calls a function on the devices, on simulated ones only once they are idle."""
    return function(jax.block_until_ready(argument) if devices_share_threads() else argument)


def make_feed_steps(run: TrainingRun, state: TrainState, log: StepLog) -> tuple[FeedSteps, HeldOutLoss]:
    """The steps and the evaluation of a run that reads its batches."""
    return FeedSteps(run, state, log), HeldOutLoss(run)
