"""The loop: from a config to a trained state, through interruptions."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_lite.batching import BatchStage
from maxtext_lite.config import Config
from maxtext_lite.data import (
    Batch,
    ExampleSource,
    evaluation_batches,
    training_batches,
)
from maxtext_lite.parallel import sharding
from maxtext_lite.training.checkpoint import Counts
from maxtext_lite.training.evaluate import evaluate
from maxtext_lite.training.executables import Executables
from maxtext_lite.training.gradients import accumulate_gradients
from maxtext_lite.training.ledger import Consumed, Ledger
from maxtext_lite.training.metrics import MetricsLog, Terminal, evaluation_text
from maxtext_lite.training.nonfinite import find_nonfinite
from maxtext_lite.training.objective import objective_of
from maxtext_lite.training.profile import Profile
from maxtext_lite.training.reference import add_reference
from maxtext_lite.training.run import Run, open_run
from maxtext_lite.training.state import TrainState
from maxtext_lite.training.step import (
    EVAL_BATCH_AXES,
    TRAIN_BATCH_AXES,
    make_eval_step,
    make_summarise,
    make_synchronise,
    make_train_step,
)
from maxtext_lite.training.stopping import Signals, Stop, watch_signals


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
      step: steps done in the whole run.
      loss: training loss of the last step; None if this process did none.
      eval_loss: the last evaluation's, a mean over target tokens (dpo: pairs); None without one.
      interrupted: a signal ended the run, after saving where checkpoints are on.
      is_first_host: this process is the one that writes the run directory.
      state: the final TrainState, on the devices.
    """

    run_directory: Path
    step: int
    loss: float | None
    eval_loss: float | None
    interrupted: bool
    is_first_host: bool
    state: TrainState


@dataclasses.dataclass
class _InFlight:
    """A step that has been dispatched and not yet looked at."""

    step: int
    metrics: dict[str, jax.Array]
    batch: Batch


def train(config: Config) -> RunResult:
    """Trains to `config.steps`, from the newest checkpoint of the run directory where there is one.

    Raises:
      UserError: the config cannot be trained on these devices or this data, or contradicts the checkpoint.
      NonFiniteLoss: the loss stopped being a number.
    """
    with jax.default_matmul_precision(config.matmul_precision):
        run = open_run(config)
        with jax.set_mesh(run.mesh), watch_signals() as signals:
            return _train(run, signals)


def _train(run: Run, signals: Signals) -> RunResult:
    terminal = Terminal(log_period=run.config.log_period, quiet=not run.is_first)
    with contextlib.ExitStack() as open_things:
        open_things.callback(terminal.close)
        open_things.enter_context(run.opened(terminal.say))
        state, counts = run.restore_or_init()
        left = run.plan.steps_left(counts.step, counts.examples_seen)
        if not left:
            terminal.say(f"nothing to do: {run.directory} has {counts.step} steps already, which is all")
            return RunResult(run.directory, counts.step, None, None, False, run.is_first, state)
        run.introduce(terminal, counts)
        add_reference(run, state, counts, terminal)
        log = run.open_log(lambda: MetricsLog(run.directory, counts.step, run.failures), terminal.say)
        if log:
            open_things.enter_context(contextlib.closing(log))
        terminal.start(counts.step, counts.step + left)
        return _Loop(run, terminal, log, counts, signals).train_from(state)


class _Loop:
    """The steps: one is always on its way while the one before is logged, so that devices never wait for the host."""

    def __init__(self, run: Run, terminal: Terminal, log: MetricsLog | None, counts: Counts, signals: Signals):
        self.run, self.config, self.plan = run, run.config, run.plan
        self.terminal = terminal
        self.ledger = Ledger(run, terminal, log, counts)
        self.eval_loss: float | None = None
        num_traced = run.config.profiler_steps if run.is_first else 0
        self.profile = Profile(run.directory / "tensorboard", num_traced, run.failures)
        # The simulated devices of a CPU share a few threads: with two steps under way, a collective of one can wait
        # for ever for a device whose thread the other holds. There, a step is finished before the next begins.
        self.one_at_a_time = jax.default_backend() == "cpu" and jax.device_count() > 1
        train_step = make_train_step(
            run.decoder,
            run.optimizer,
            run.mesh,
            config=run.config,
            schedule=run.schedule,
            local=run.local,
            objective=run.objective,
        )
        self.executables = Executables(train_step, run.abstract_state, run.plan, run.mesh, config=run.config)
        self.stage: BatchStage | None = None
        self.signals = signals
        if run.local:
            self.synchronise = make_synchronise(run.decoder, run.optimizer, run.mesh, run.local)
            self.summarise = make_summarise(run.mesh)

    def train_from(self, state: TrainState) -> RunResult:
        """The steps after those of the ledger, until the last or a signal."""
        run, config, plan, counts = self.run, self.config, self.plan, self.ledger.counts
        steps_left = plan.steps_left(counts.step, counts.examples_seen)
        last_step = counts.step + steps_left
        stopping = Stop(run.mesh, self.signals, run.failures)
        with (
            contextlib.closing(self.executables),
            training_batches(
                run.source,
                plan,
                sharding=sharding(run.mesh, TRAIN_BATCH_AXES),
                examples_seen=counts.examples_seen,
                num_steps=steps_left,
                seed=config.data_shuffle_seed,
                worker_count=config.grain_worker_count,
            ) as batches,
        ):
            eval_step = make_eval_step(run.decoder, run.mesh, config, objective_of(config))
            train_step = self._step_of(plan.stage_at(counts.examples_seen), counts.step + 1)
            self.ledger.restart_clock()
            in_flight: _InFlight | None = None
            examples_seen = counts.examples_seen
            for step in range(counts.step + 1, last_step + 1):
                self.profile.before_step(step - counts.step)
                if self.one_at_a_time:
                    jax.block_until_ready(state)
                stage = plan.stage_at(examples_seen)
                if stage != self.stage:  # recorded first: should the next executable not be ready, its step waits
                    self._finish(in_flight, state)
                    in_flight = None
                    train_step = self._step_of(stage, step)
                batch = next(batches)
                examples_seen += batch.num_examples
                state, metrics = self._take(train_step, state, batch, step)
                self.executables.request_after(stage)  # once the first step is on its way: tracing holds Python up
                self._finish(in_flight, state)
                in_flight = _InFlight(step, metrics, batch)
                stops = stopping.after_this_step()
                last = step == last_step or stops
                saves = run.checkpointer is not None and (step % config.checkpoint_period == 0 or last)
                evaluates = (
                    run.eval_source is not None
                    and config.eval_interval > 0
                    and (step % config.eval_interval == 0 or step == last_step)
                )
                if saves or evaluates or last:
                    # Everything up to this step is on record before its checkpoint is: a restart adds what follows.
                    self._finish(in_flight, state)
                    in_flight = None
                    if stops:
                        run.failures.raise_together()
                    # A checkpoint after its evaluation: a kill between them repeats both. Asked to stop, save first.
                    if stops:
                        run.save(state, self.ledger.counts)
                    if evaluates:
                        self._evaluate(eval_step, state, run.eval_source)
                    if saves:
                        run.save(state, self.ledger.counts)
                    self.ledger.restart_clock()
                if last:
                    break
            self.profile.close()
            self.ledger.flush()
            run.wait()
        interrupted = self.ledger.counts.step < last_step
        if interrupted:
            saved = "saved" if run.checkpointer else "not saved (enable_checkpointing=false)"
            by = self.signals.received.name if self.signals.received else "another host"
            self.terminal.say(f"stopped by {by} after step {self.ledger.counts.step}, {saved}")
        self.ledger.advise()
        done = self.ledger
        return RunResult(run.directory, done.counts.step, done.loss, self.eval_loss, interrupted, run.is_first, state)

    def _step_of(self, stage: BatchStage, step: int) -> Any:
        """The compiled step of a stage that begins; says so."""
        compiled, seconds = self.executables.of(stage)
        if self.stage is None:
            self.terminal.say(f"compiled the train step in {seconds:.1f} s")
        elif self.executables.slots(stage) != self.executables.slots(self.stage):
            self.terminal.say(f"compiled the train step of the next stage in {seconds:.1f} s, in the background")
        if len(self.plan.stages) > 1:
            self.terminal.say(
                f"from step {step}: global_batch_to_train={stage.global_batch_to_train} = "
                f"{float(stage.per_device_batch_size):g} per device x {self.plan.num_devices} devices x "
                f"{stage.gradient_accumulation_steps} accumulation"
            )
        self.stage = stage
        return compiled

    def _take(self, train_step: Any, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, Any]:
        """One step; with local updates, also what follows it: scalars for the log, and the replicas' meeting."""
        number = np.int32(batch.num_micro_batches) if self.plan.ramps_accumulation else None
        state, metrics = train_step(state, batch.arrays, number)
        if self.run.local:
            metrics = self._alone(self.summarise, metrics)
            state = dataclasses.replace(state, skipped_in_a_row=metrics.pop("skipped_in_a_row"))
            if step % self.run.local.sync_period == 0:
                state = self._alone(self.synchronise, state)
        return state, metrics

    def _alone(self, function: Any, argument: Any) -> Any:
        """A function on the devices; where they can do only one thing at a time, once they have done what they do."""
        return function(jax.block_until_ready(argument) if self.one_at_a_time else argument)

    def _finish(self, done: _InFlight | None, state: TrainState) -> None:
        """Waits for a step and takes it down; `state` is that of the newest step."""
        if done is None:
            return
        batch = done.batch
        consumed = Consumed(batch.example_ids, batch.num_examples, batch.data_seconds)
        self.ledger.add(done.step, done.metrics, consumed, find_cause=lambda: self._find_cause(done, state))
        self.signals.take_requests()

    def _find_cause(self, done: _InFlight, state: TrainState) -> Any:
        """Where a step's gradient stops being finite: the state, of a later step, still has that one's parameters."""
        run = self.run
        if self.one_at_a_time:
            jax.block_until_ready(state)
        step_gradients = accumulate_gradients(
            run.decoder, run.optimizer, run.mesh, self.config, run.local, run.objective
        )
        return find_nonfinite(
            lambda params, *rest: step_gradients(params[0], *rest, frozen=params[1]),
            (state.params, state.frozen),
            done.batch.arrays,
            done.batch.example_ids,
            micro_batches=done.batch.num_micro_batches,
            loss_scale=run.optimizer.loss_scale(state.opt_state),
        )

    def _evaluate(self, eval_step: Any, state: TrainState, source: ExampleSource | None) -> None:
        assert source is not None
        with evaluation_batches(
            source, self.plan, sharding=sharding(self.run.mesh, EVAL_BATCH_AXES), eval_steps=self.config.eval_steps
        ) as batches:
            params = self.run.decoder.joined(state.model_params, state.frozen)
            found = evaluate(eval_step, params, batches, objective_of(self.config))
        self.eval_loss = found["eval_loss"]
        self.ledger.write({"step": self.ledger.counts.step, **found})
        self.terminal.say(f"step {self.ledger.counts.step}/{self.terminal.last_step}  {evaluation_text(found)}")
