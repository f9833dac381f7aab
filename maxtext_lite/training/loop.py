"""The training loop of every run, be it pre-training, SFT, DPO or reinforcement learning."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import jax
import optax

from maxtext_lite.batching import batch_settings, wants_solving
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import counted
from maxtext_lite.config.load import load_asked
from maxtext_lite.config.phases import observers, phases, status_line
from maxtext_lite.data import Examples
from maxtext_lite.data.feed import UnreadError
from maxtext_lite.data.history import nothing_left
from maxtext_lite.models import Decoder
from maxtext_lite.training.arrays import Record
from maxtext_lite.training.compile import OutOfMemory
from maxtext_lite.training.feed_steps import make_feed_steps
from maxtext_lite.training.hooks import Callback, LossSpike, Prepare, Restart, check_callbacks, hooks_of
from maxtext_lite.training.metrics import METRICS, Terminal
from maxtext_lite.training.objective import Loss
from maxtext_lite.training.opening import (
    chosen_split,
    keep_batch,
    open_run,
    own_objective,
    own_sources,
    plan_on_devices,
    start_run,
)
from maxtext_lite.training.optimizer import OptimizerFactory
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.startup import log_startup
from maxtext_lite.training.state import DecoderFactory, Overrides, TrainState
from maxtext_lite.training.step_log import StepLog, StepResult, is_evaluation_missing, open_lines
from maxtext_lite.training.stopping import Reason, Signals, Stop, watch_signals


class StepSource(Protocol):
    """The steps of a run: the origin of their batches, and the update of the state with each."""

    @property
    def ahead(self) -> bool:
        """Whether step N+1 is dispatched before the metrics of step N are read; the devices then never wait."""
        ...

    @property
    def compiled_anew(self) -> bool:
        """Whether a program may have been compiled here, rather than found where an earlier process kept it."""
        ...

    def prepare(self, state: TrainState, step: int) -> None:
        """Does what must precede this step and may take long, such as compiling; `state` is that before the step."""
        ...

    def take(self, state: TrainState, step: int) -> tuple[TrainState, StepResult]:
        """Takes a step on the next batch; `state`, that after the previous step, is donated.

        Raises:
          UnreadError: the batch cannot be read; the state is as it was.
        """
        ...

    def unfinished(self, step: int) -> dict[str, jax.Array] | None:
        """A batch already sampled that later steps still train on, for the checkpoint after this step; or None."""
        ...

    def close(self) -> None:
        """Stops reading and compiling ahead."""
        ...


class Evaluation(Protocol):
    """The evaluation of a run's model on held-out data."""

    @property
    def before_first_step(self) -> bool:
        """Whether the untrained model is evaluated too, at step 0."""
        ...

    def evaluate(self, state: TrainState, step: int, stops: Callable[[], bool]) -> tuple[Record, str] | None:
        """The entries of an evaluation's record, and its line on the terminal. All hosts call it.

        Args:
          stops: called on all hosts between batches; once it returns True, the evaluation ends and is None.
        Raises:
          UnreadError: the held-out data cannot be read.
        """
        ...


MakeSteps = Callable[[TrainingRun, TrainState, StepLog], tuple[StepSource, Evaluation]]
"""(run, state, log) -> the steps after the log's, and the evaluation of their model."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
      step: steps done in the whole run.
      loss: training loss of the last step; None if this process took none, or the step had no targets.
      eval_loss: the last evaluation's mean over target tokens (dpo: pairs); None without one, and in reinforcement
        learning, or if it was broken off.
      interrupted: a signal ended the run, or its last evaluation, after a checkpoint if enable_checkpointing is true.
      is_first_host: this process writes the run directory.
      state: the final TrainState, on the devices.
      was_complete: there was nothing to do.
    """

    run_directory: Path
    step: int
    loss: float | None
    eval_loss: float | None
    interrupted: bool
    is_first_host: bool
    state: TrainState
    was_complete: bool = False

    def __str__(self) -> str:
        """Where the run is, how it ended and its losses, on three lines."""
        losses = {"loss": self.loss, "eval_loss": self.eval_loss}
        known = [f"{name} {value:.6g}" for name, value in losses.items() if value is not None]
        ended = "interrupted after" if self.interrupted else "done:"
        return "\n".join(
            [f"run directory {self.run_directory}", f"{ended} step {self.step:,}", "  ".join(known) or "no loss"]
        )

    __repr__ = __str__  # as a notebook shows it: the state's arrays would fill pages


@status_line.shown()
def train(
    config: Config,
    *,
    model: DecoderFactory = Decoder,
    objective: Loss | None = None,
    source: Examples | None = None,
    eval_source: Examples | None = None,
    optimizer: optax.GradientTransformation | OptimizerFactory | None = None,
    callbacks: Sequence[Callback] = (),
    device_memory_gb: float | None = None,
) -> RunResult:
    """Trains to `config.steps`, from the newest checkpoint of the run directory if there is one.

    Arguments that are not passed are as configured. See docs/library.md.

    Args:
      model: makes the decoder, such as `functools.partial(Decoder, block=...)`.
      objective: the loss to minimise; it is tried on a few random rows first.
      source: the training examples; the held-out ones are then `eval_source`, or none.
      optimizer: replaces the whole update. It has its own learning rate, or is made with the config's schedule; it
        receives the sum over a step's micro-batches, and never a gradient that is not finite.
      callbacks: observe steps, evaluations and checkpoints, and may end the run.
      device_memory_gb: memory of a device that a step may use, in units of 1e9 bytes; None: all of it. A step that does
        not fit is refused with the nearest one that does and makes the same updates.
    Raises:
      UserError: the config cannot be trained on these devices or this data, or contradicts the checkpoint; an object
        breaks its protocol.
      LossSpike: the loss became non-finite or left its band, and the run did not go back.
    """
    start_run(config)
    sources = own_sources(config, source, eval_source)
    tried = None if objective is None else own_objective(config, objective, sources)
    own = Overrides(model, tried, optimizer)
    stated = batch_settings(config)
    if wants_solving(config):
        config = config.model_copy(update=chosen_split(config, device_memory_gb))
    config = keep_batch(config, stated)
    prepare: Prepare | None = None
    signals = Signals()
    while True:
        phases.begin()
        run = open_run(config, sources, own, stated=stated, device_memory_gb=device_memory_gb)
        phases.mark("data")
        try:
            return train_run(run, make_feed_steps, callbacks, prepare, signals)
        except OutOfMemory as error:
            refusal_of = load_asked(run.config, "diagnosis", "out_of_memory")
            if refusal_of is None:
                raise
            plan_of = plan_on_devices(run.plan)
            raise UserError(refusal_of(str(error), error.share, run.config, run.plan, plan_of)) from None
        except Restart as restart:
            prepare = restart.prepare
            if run.is_first:
                print(restart, flush=True)
        config = config.model_copy(update={"overwrite": False})  # what it removed is gone


def train_run(
    run: TrainingRun,
    make_steps: MakeSteps,
    callbacks: Sequence[Callback] = (),
    prepare: Prepare | None = None,
    signals: Signals | None = None,
) -> RunResult:
    """Takes the remaining steps of a run; raises as `train` does, and `Restart`.

    Args:
      prepare: of the `Restart` that began this start; None: there was none.
      signals: of the run that this one starts again; None: it is the first.
    """
    check_callbacks(callbacks)
    hooks = [*hooks_of(run.config), *callbacks]
    terminal = Terminal(log_period=run.plan.period_steps(run.config.log_period), quiet=not run.is_first)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision(run.config.matmul_precision))
        stack.enter_context(jax.set_mesh(run.mesh))
        signals = stack.enter_context(watch_signals(signals or Signals()))
        stack.callback(terminal.close)
        stack.enter_context(run.opened(terminal.say))
        for hook in hooks:
            hook.opened(run)
        if prepare:
            prepare(run, terminal.say)
            phases.fold()
        state, counts = run.restore_or_init()
        phases.mark("restore" if counts.step else "init")
        last_step = counts.step + run.steps_left(counts)
        if counts.step == last_step and not is_evaluation_missing(run, counts.step, is_last=True):
            why = nothing_left(run.plan, step=counts.step, examples_seen=counts.examples_seen)
            terminal.say(f"nothing to do: {run.directory} already has {counted(counts.step, 'step')}; {why}")
            return RunResult(run.directory, counts.step, None, None, False, run.is_first, state, was_complete=True)
        log_startup(run, counts, terminal.say)
        for hook in hooks:
            stack.callback(hook.close)
            hook.start(run, state, counts, terminal.say)
        log = StepLog(run, counts, terminal, open_lines(run, METRICS, counts.step, terminal.say), hooks)
        stack.callback(log.close)
        steps, evaluation = make_steps(run, state, log)
        stack.callback(steps.close)
        terminal.start(counts.step, last_step)
        try:
            return _Loop(run, log, steps, evaluation, signals, last_step).train_from(state)
        except (UserError, LossSpike, Restart):
            raise
        except Exception as error:
            for observer in observers:
                observer.failed(error)
            raise


class _Loop:
    """The steps that are left.

    Attributes:
      lost_evaluation: the newest evaluation was interrupted or skipped because the run is stopping.
    """

    def __init__(
        self,
        run: TrainingRun,
        log: StepLog,
        steps: StepSource,
        evaluation: Evaluation,
        signals: Signals,
        last_step: int,
    ):
        self.run = run
        self.log = log
        self.steps = steps
        self.evaluation = evaluation
        self.signals = signals
        self.last_step = last_step
        self.stop = Stop(run.mesh, signals)
        self.is_ahead = steps.ahead and not log.shows_state
        self.evaluates = run.eval_source is not None and run.config.eval_interval > 0
        self.eval_loss: float | None = None
        self.lost_evaluation = False
        self.saved = "saved" if run.checkpointer else "not saved (enable_checkpointing=false)"

    def train_from(self, state: TrainState) -> RunResult:
        """Takes the steps after the log's, up to the last, or until a signal or a callback stops the run."""
        done_before = self.log.counts.step
        try:
            self._evaluate_first(state)
            self.log.restart_clock()
            for step in range(done_before + 1, self.last_step + 1):
                if self.stop.reason:
                    break
                state = self._take(state, step)
                self.signals.take_requests()
                self.run.check()
                self.stop.poll(self.log.is_end_requested)
                self._evaluate_and_save(state, step)
        except UnreadError as error:
            self.log.flush(state)
            if jax.process_count() > 1 or self.log.counts.step == done_before:
                raise
            self._save(state)
            self._wait()
            raise UserError(f"{error} The run ended after step {self.log.counts.step}, {self.saved}.") from None
        self._finish()
        return self._result(state)

    def _evaluate_first(self, state: TrainState) -> None:
        """Evaluates the untrained model, or runs the evaluation that was due when the previous process stopped."""
        step = self.log.counts.step
        if not self.evaluates:
            return
        if step == 0 and self.evaluation.before_first_step:
            self._evaluate(state, lambda: False)
            phases.mark("evaluation")
        elif step and is_evaluation_missing(self.run, step, is_last=step == self.last_step):
            self._evaluate(state, lambda: False)
            phases.mark("evaluation")
            self.stop.poll_blocking(self.log.is_end_requested)

    def _take(self, state: TrainState, step: int) -> TrainState:
        """Dispatches a step, and records the one before it while this one runs; returns the state after it."""
        self.steps.prepare(state, step)
        for hook in self.log.hooks:
            hook.before_step(step)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, result = self.steps.take(state, step)
        self.log.add(step, result, state)
        if not self.is_ahead:
            self.log.flush(state)
        return state

    def _evaluate_and_save(self, state: TrainState, step: int) -> None:
        """Evaluates and saves what is due after this step, or because the run stops."""
        log = self.log
        stop = self.stop
        config = self.run.config
        period = self.run.plan.period_steps
        is_last = step == self.last_step or stop.reason is Reason.CALLBACK
        saves = self.run.checkpointer is not None and (is_last or step % period(config.checkpoint_period) == 0)
        evaluates = self.evaluates and (is_last or step % period(config.eval_interval) == 0)
        if not (is_last or saves or evaluates or stop.reason):
            return
        log.flush(state)  # all steps are on record before the checkpoint: a restart only appends
        if evaluates:  # before the checkpoint: a kill between them repeats both
            self._evaluate_unless_stopped(state)
        if saves or stop.reason:
            self._save(state)
        if not is_last and stop.poll_blocking(log.is_end_requested):
            if stop.reason is Reason.CALLBACK and self.evaluates and not evaluates:
                self._evaluate_unless_stopped(state)
            self._save(state)
        log.restart_clock()

    def _evaluate_unless_stopped(self, state: TrainState) -> None:
        """Evaluates unless a signal stops the run; the next start then evaluates."""

        def stops() -> bool:
            return self.stop.poll(self.log.is_end_requested) is Reason.SIGNAL

        self.lost_evaluation = self.stop.reason is Reason.SIGNAL or not self._evaluate(state, stops)
        if self.lost_evaluation:
            self.eval_loss = None
            self.log.terminal.say_step(self.log.counts.step, "evaluation skipped: the run is stopping")

    def _evaluate(self, state: TrainState, stops: Callable[[], bool]) -> bool:
        """Evaluates and records the result; returns whether it finished, which `stops` may prevent."""
        log = self.log
        step = self.log.counts.step
        phases.enter("evaluation", step)
        evaluated = self.evaluation.evaluate(state, step, stops)
        if evaluated is None:
            return False
        values, text = evaluated
        self.eval_loss = values.get("eval_loss")
        record = {"step": step, **values}
        if shares := log.token_shares():
            record["source_token_shares"] = shares
        log.write(record)
        log.terminal.say_step(step, text)
        for hook in log.hooks:
            log.is_end_requested |= bool(hook.after_evaluation(step, record, state))
        return True

    def _save(self, state: TrainState) -> None:
        counts = self.log.counts
        checkpointer = self.run.checkpointer
        phases.enter("save", counts.step)
        is_new = checkpointer is not None and checkpointer.latest_step() != counts.step
        self.run.save(state, counts, self.steps.unfinished(counts.step))
        if is_new:
            for hook in self.log.hooks:
                self.log.is_end_requested |= bool(hook.after_checkpoint(counts.step, state))

    def _finish(self) -> None:
        """Waits until everything is written."""
        phases.enter("save", self.log.counts.step)
        for hook in self.log.hooks:
            hook.after_last_step()
        self._wait()
        for hook in self.log.hooks:
            if text := hook.saved():
                self.log.say(text)

    def _wait(self) -> None:
        """Waits until the newest checkpoint counts."""
        if self.run.checkpointer:
            self.run.checkpointer.wait()
        self.run.check()

    def _result(self, state: TrainState) -> RunResult:
        """The result of the run; if steps or an evaluation are left, reports what stopped it."""
        run = self.run
        log = self.log
        step = self.log.counts.step
        has_left = step < self.last_step
        is_interrupted = (has_left or self.lost_evaluation) and self.stop.reason is Reason.SIGNAL
        if has_left or is_interrupted:
            by = "a callback"
            if is_interrupted:
                by = self.signals.received.name if self.signals.received else "another host"
            log.say(f"stopped by {by} after step {step}, {self.saved}")
        if shares := log.token_shares():
            text = ", ".join(f"{source} {share:.4%}" for source, share in shares.items())
            log.say(f"target tokens by source since the mixture last changed: {text}")
        return RunResult(run.directory, step, log.loss, self.eval_loss, is_interrupted, run.is_first, state)
