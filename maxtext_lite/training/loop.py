"""The training loop of every run, be it pre-training, SFT, DPO or reinforcement learning."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import optax

from maxtext_lite.batching import wants_solving
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.optional import load_asked
from maxtext_lite.config.phases import observers, phases
from maxtext_lite.config.status_line import status_line
from maxtext_lite.data import Examples
from maxtext_lite.data.feed import UnreadError
from maxtext_lite.data.mixture import nothing_left
from maxtext_lite.models import Decoder, DecoderShape
from maxtext_lite.parallel import Pipeline
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.compile import OutOfMemory
from maxtext_lite.training.feed_steps import steps_of_feed
from maxtext_lite.training.hooks import Callback, Hook, LossSpike, Prepare, Restart, check_callbacks, hooks_of
from maxtext_lite.training.metrics import MetricsLog, Terminal
from maxtext_lite.training.objective import Loss
from maxtext_lite.training.opening import chosen_split, open_run, own_objective, own_sources, plan_on_devices, start_run
from maxtext_lite.training.optimizer import OptimizerFactory
from maxtext_lite.training.run import Data, TrainingRun
from maxtext_lite.training.state import Overrides, TrainState
from maxtext_lite.training.step_log import StepLog, StepResult, is_evaluation_missing
from maxtext_lite.training.stopping import Signals, Stop, watch_signals


class StepSource(Protocol):
    """The steps of a run: the origin of their batches, and the update of the state with each."""

    @property
    def ahead(self) -> bool:
        """Whether each step is dispatched before the last one is recorded, so that the devices never wait."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the next step needs no `prepare`, which may take long."""
        ...

    def prepare(self, step: int) -> None:
        """Prepares this step and those like it."""
        ...

    def take(self, state: TrainState, step: int) -> tuple[TrainState, StepResult]:
        """Takes a step on the next batch; `state`, that after the previous step, is donated.

        Raises:
          UnreadError: the batch cannot be read; the state is as it was.
        """
        ...

    def unfinished(self, step: int) -> dict[str, jax.Array] | None:
        """The batch that further steps will train on, for the checkpoint after this step; None: no such batch."""
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

    def of(self, state: TrainState, step: int, stops: Callable[[], bool]) -> tuple[Mapping[str, Any], str] | None:
        """The entries of an evaluation's record, and its line on the terminal. All hosts call it.

        Args:
          stops: asked on all hosts between batches; once it returns True, the evaluation ends and is None.
        Raises:
          UnreadError: the held-out data cannot be read.
        """
        ...


Begin = Callable[[Terminal, TrainState, TrainProgress, Sequence[Hook]], tuple[StepSource, Evaluation]]
"""(terminal, state, counts, hooks), restored or new -> the steps from there, and the evaluation of their model."""


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
    """

    run_directory: Path
    step: int
    loss: float | None
    eval_loss: float | None
    interrupted: bool
    is_first_host: bool
    state: TrainState

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
    model: Callable[[DecoderShape, Pipeline | None], Decoder] = Decoder,
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
    if wants_solving(config):
        config = config.model_copy(update=chosen_split(config, device_memory_gb))
    prepare: Prepare | None = None
    signals = Signals()
    while True:
        phases.begin()
        run = open_run(config, sources, own, device_memory_gb=device_memory_gb)
        phases.mark("data")
        try:
            return train_run(run, functools.partial(steps_of_feed, run), callbacks, prepare, signals)
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
    run: TrainingRun[Data],
    begin: Begin,
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
    with contextlib.ExitStack() as open_things:
        open_things.enter_context(jax.default_matmul_precision(run.config.matmul_precision))
        open_things.enter_context(jax.set_mesh(run.mesh))
        signals = open_things.enter_context(watch_signals(signals or Signals()))
        open_things.callback(terminal.close)
        open_things.enter_context(run.opened(terminal.say))
        for hook in hooks:
            hook.opened(run)
        if prepare:
            prepare(run, terminal.say)
            phases.fold()
        state, counts = run.restore_or_init()
        phases.mark("restore" if counts.step else "init")
        if not (left := run.steps_left(counts)) and not is_evaluation_missing(run, counts.step, is_last=True):
            why = nothing_left(run.plan, step=counts.step, examples_seen=counts.examples_seen)
            terminal.say(f"nothing to do: {run.directory} has {counts.step} steps already, and {why}")
            return RunResult(run.directory, counts.step, None, None, False, run.is_first, state)
        run.log_startup(terminal, counts)
        for hook in hooks:
            open_things.callback(hook.close)
            hook.start(run, state, counts, terminal.say)
        # An evaluation before the first step has step 0.
        log = run.open_log(lambda: MetricsLog(run.files.directory, counts.step or -1), terminal.say)
        if log:
            open_things.enter_context(contextlib.closing(log))
        steps, evaluation = begin(terminal, state, counts, hooks)
        open_things.enter_context(contextlib.closing(steps))
        terminal.start(counts.step, counts.step + left)
        step_log = StepLog(run, terminal, log, counts, hooks)
        loop = _Loop(run, terminal, step_log, signals, steps, evaluation, hooks, may_end=bool(callbacks))
        try:
            return loop.train_from(state)
        except (UserError, LossSpike, Restart):
            raise
        except Exception as error:
            for observer in observers:
                observer.failed(error)
            raise


@dataclasses.dataclass
class _Loop:
    """The steps that are left, one at a time, or each dispatched before the one before it is recorded.

    Attributes:
      may_end: whether a hook may end the run.
      asked_to_end: a hook of this host has asked for the end.
      stops: all hosts stop after this step, for a signal.
      ends: all hosts end the run after this step, as a hook has asked.
      in_flight: the newest step, until it is recorded.
      lost_evaluation: the newest evaluation was broken off, or left out, as the run was to stop.
    """

    run: TrainingRun[Any]
    terminal: Terminal
    log: StepLog
    signals: Signals
    steps: StepSource
    evaluation: Evaluation
    hooks: Sequence[Hook]
    may_end: bool
    asked_to_end: bool = False
    stops: bool = False
    ends: bool = False
    in_flight: tuple[int, StepResult] | None = None
    eval_loss: float | None = None
    lost_evaluation: bool = False

    def __post_init__(self) -> None:
        self.shows_state = any(hook.wants_state for hook in self.hooks)
        self.evaluates = self.run.eval_source is not None and self.run.config.eval_interval > 0
        self.ending = Stop(self.run.mesh if self.may_end else None, lambda: self.asked_to_end)
        self.saved = "saved" if self.run.checkpointer else "not saved (enable_checkpointing=false)"
        self.stopping = Stop(self.run.mesh, lambda: self.signals.received is not None)

    def train_from(self, state: TrainState) -> RunResult:
        """Takes the steps after those of the log, up to the last, or until a signal or a callback ends the run."""
        before, last_step = self.log.counts.step, self.terminal.last_step
        try:
            if self.evaluates and self._owes_evaluation(before):
                self._evaluate(state, lambda: False)
                phases.mark("evaluation")
                self.ends = before > 0 and self.ending.between_steps()
            if before < last_step and not self.ends:
                self.steps.prepare(before + 1)
            self.log.restart_clock()
            for step in range(before + 1, last_step + 1):
                if self.stops or self.ends:
                    break
                for hook in self.hooks:
                    hook.before_step(step)
                state = self._take(state, step)
                self.run.check()
                self.stops = self.stopping.after_this_step()
                self.ends = self.ending.after_this_step() and not self.stops
                self._evaluate_and_save(state, step)
        except UnreadError as error:
            self._record(state)
            if jax.process_count() > 1 or self.log.counts.step == before:
                raise
            self._save(state)
            self._wait()
            raise UserError(f"{error} The run ended after step {self.log.counts.step}, {self.saved}.") from None
        self._end()
        return self._result(state)

    def _take(self, state: TrainState, step: int) -> TrainState:
        """Dispatches a step, and records the one before it while this one runs; returns the state after it."""
        steps = self.steps
        if not steps.ready:
            self._record(state)  # before a wait that may be long
            began = time.perf_counter()
            steps.prepare(step)
            self.terminal.leave_out(time.perf_counter() - began)
            self.log.restart_clock()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, taken = steps.take(state, step)
        self._record(state)
        self.in_flight = step, taken
        if self.shows_state or not steps.ahead:
            self._record(state)
        return state

    def _end(self) -> None:
        """Waits until everything is written."""
        phases.enter("save", self.log.counts.step)
        for hook in self.hooks:
            hook.after_last_step()
        self._wait()
        for hook in self.hooks:
            if said := hook.saved():
                self.terminal.say(said)

    def _wait(self) -> None:
        """Waits until the newest checkpoint counts."""
        if self.run.checkpointer:
            self.run.checkpointer.wait()
        self.run.check()

    def _owes_evaluation(self, step: int) -> bool:
        """Whether the state from which this start begins is to be evaluated first. All hosts call it."""
        is_last = step == self.terminal.last_step
        return is_evaluation_missing(self.run, step, is_last=is_last) if step else self.evaluation.before_first_step

    def _evaluate_and_save(self, state: TrainState, step: int) -> None:
        """Evaluates and saves what is due after this step."""
        run, config = self.run, self.run.config
        period = run.plan.period_steps
        is_last = self.ends or step == self.terminal.last_step
        saves = run.checkpointer is not None and (step % period(config.checkpoint_period) == 0 or is_last)
        evaluates = self.evaluates and (step % period(config.eval_interval) == 0 or is_last)
        if not (saves or evaluates or self.stops or is_last):
            return
        # All steps are on record before the checkpoint: a restart only appends.
        self._record(state)
        # The checkpoint follows its evaluation, so that a kill between them repeats both.
        if evaluates:
            self._evaluate_unless_stopped(state)
        if saves or self.stops:
            self._save(state)
        if self.ending.between_steps() and not self.stops:
            self.ends = True
            if self.evaluates and not evaluates:
                self._evaluate_unless_stopped(state)
            self._save(state)
        self.ends = self.ends and not self.stops
        self.log.restart_clock()

    def _record(self, state: TrainState) -> None:
        """Waits for the step in flight, if there is one, and records it; `state` is that after the newest step."""
        if self.in_flight is not None:
            (step, taken), self.in_flight = self.in_flight, None
            try:
                record = self.log.add(step, taken, state)
            except LossSpike as error:
                restarts: list[Restart] = []
                for hook in self.hooks:
                    try:
                        hook.on_spike(error)
                    except Restart as restart:
                        restarts.append(restart)
                if restarts:
                    raise restarts[0] from error
                raise
            self.signals.take_requests()
            shown = state if self.shows_state else None
            for hook in self.hooks:
                self.asked_to_end |= bool(hook.after_step(step, record, shown))

    def _save(self, state: TrainState) -> None:
        counts, checkpointer = self.log.counts, self.run.checkpointer
        phases.enter("save", counts.step)
        is_new = checkpointer is not None and checkpointer.latest_step() != counts.step
        self.run.save(state, counts, self.steps.unfinished(counts.step))
        if is_new:
            for hook in self.hooks:
                self.asked_to_end |= bool(hook.after_checkpoint(counts.step, state))

    def _evaluate_unless_stopped(self, state: TrainState) -> None:
        """Evaluates unless the run stops, which leaves the evaluation to the next start."""
        self.lost_evaluation = self.stops or not self._evaluate(state, self.stopping.after_this_step)
        if self.lost_evaluation:
            self.stops = True
            self.eval_loss = None
            self.terminal.say(f"step {self.log.counts.step}/{self.terminal.last_step}  no evaluation, as the run stops")

    def _evaluate(self, state: TrainState, stops: Callable[[], bool]) -> bool:
        """Evaluates and records it; returns whether it reached its end, which `stops` may prevent."""
        step = self.log.counts.step
        phases.enter("evaluation", step)
        evaluated = self.evaluation.of(state, step, stops)
        if evaluated is None:
            return False
        found, text = evaluated
        self.eval_loss = found.get("eval_loss")
        record = {"step": step, **found, **self.run.token_shares(self.log.counts)}
        self.log.write(record)
        self.terminal.say(f"step {step}/{self.terminal.last_step}  {text}")
        for hook in self.hooks:
            self.asked_to_end |= bool(hook.after_evaluation(step, record, state))
        return True

    def _result(self, state: TrainState) -> RunResult:
        """The result of the run; if something is left, reports that a signal or a callback stopped it."""
        run, log = self.run, self.log
        has_left = log.counts.step < self.terminal.last_step
        is_interrupted = (has_left or self.lost_evaluation) and not self.ends
        if is_interrupted or has_left:
            by = self.signals.received.name if self.signals.received else "another host"
            by = "a callback" if self.ends else by
            self.terminal.say(f"stopped by {by} after step {log.counts.step}, {self.saved}")
        for shares in run.token_shares(log.counts).values():
            said = ", ".join(f"{source} {share:.4%}" for source, share in shares.items())
            self.terminal.say(f"target tokens by source since the mixture last changed: {said}")
        log.advise()
        return RunResult(run.directory, log.counts.step, log.loss, self.eval_loss, is_interrupted, run.is_first, state)
