"""The step log of a run: it counts, records and shows every step, and skips or ends on non-finite gradients."""

import dataclasses
import math
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from maxtext_lite.batching import BatchStage
from maxtext_lite.config import registry
from maxtext_lite.config.phases import phases
from maxtext_lite.data import MixtureSource, examples_hash
from maxtext_lite.parallel import on_first_host
from maxtext_lite.training.arrays import Record
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.hooks import Hook, LossSpike, NonFiniteLoss
from maxtext_lite.training.metrics import Terminal, lacks_evaluation
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState
from maxtext_lite.training.step import means_of

NOTHING_SAVED = "nothing was saved at or after it"

WINDOW = 32
"""The number of last losses with which a step's loss is compared."""
LEAST_LOSSES = 16
"""With fewer losses there is no band."""
_TO_DEVIATION = 1.4826  # standard deviation over median absolute deviation, for a normal distribution
_LEAST_DEVIATION = 0.01  # relative to the median, so that a loss that hardly moves has a band too


class StepResult(NamedTuple):
    """A dispatched step.

    Attributes:
      metrics: replicated scalars on the devices, from `step.make_train_step`.
      example_ids: int64; in reinforcement learning, the numbers of the prompts.
      num_examples: in reinforcement learning, pairs.
      data_seconds: time that the host waited for the examples.
      find_cause: finds the origin of a non-finite gradient, a clause or "", from the state after this step or a later
        one, which still has the step's parameters.
      more: further entries of the step's record.
    """

    metrics: dict[str, jax.Array]
    example_ids: np.ndarray
    num_examples: int
    data_seconds: float
    find_cause: Callable[[TrainState], str]
    more: Mapping[str, Any] = types.MappingProxyType({})


def is_evaluation_missing(run: TrainingRun[Any], step: int, *, is_last: bool) -> bool:
    """Whether the evaluation of a step that an earlier start took is due and missing. All hosts call it."""
    every = run.plan.period_steps(run.config.eval_interval)
    if run.eval_source is None or every <= 0 or not (is_last or step % every == 0):
        return False
    path = run.files.directory / "metrics.jsonl"
    return on_first_host(path, lambda: lacks_evaluation(path, step))


class Log(Protocol):
    """A receiver of the lines of metrics.jsonl."""

    def write(self, record: Record) -> None:
        """Appends a record."""
        ...


class StepLog:
    """The log of finished steps: in the counts, in metrics.jsonl and on the terminal.

    Attributes:
      counts: of all steps so far.
      loss: of the last step; None if this process has taken none, or the step had no targets.
    """

    def __init__(
        self,
        run: TrainingRun[Any],
        terminal: Terminal,
        log: Log | None,
        counts: TrainProgress,
        hooks: Sequence[Hook] = (),
    ):
        self._run, self._terminal, self._log, self._hooks = run, terminal, log, hooks
        self.counts = counts
        self.loss: float | None = None
        self._has_begun = False
        self._last_ready = time.perf_counter()

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._run.directory

    def restart_clock(self) -> None:
        """Excludes the time since the last step from the next step's."""
        self._last_ready = time.perf_counter()

    def add(self, step: int, taken: StepResult, state: TrainState) -> Record:
        """Waits for a step and records it; returns its record.

        Args:
          state: after this step or a later one.
        Raises:
          LossSpike: the run must not continue after this step.
        """
        run, counts = self._run, self.counts
        values = {name: value.item() for name, value in jax.device_get(taken.metrics).items()}
        ready = time.perf_counter()
        step_seconds, self._last_ready = ready - self._last_ready, ready
        noise = counts.noise.after(
            group_squares=values.pop("group_squares"),
            groups=values.pop("groups"),
            grad_norm=values["grad_norm"],
            examples=taken.num_examples,
        )
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        self.counts = TrainProgress(
            step,
            counts.examples_seen + taken.num_examples,
            counts.tokens_seen + values["target_tokens"],
            0 if finite else counts.skipped_in_a_row + (not self._may_be_the_scale(values)),
            noise,
            counts.losses,
        )
        if run.plan.rl:  # a prompt is of no known length, nor are its responses
            flops = taken.num_examples * run.plan.flops_per_example
        else:
            flops = run.flops_of(taken.example_ids, counts.examples_seen)
        record = {
            "step": step,
            **values,
            **(
                {}
                if values.get(run.parts.objective.divisor, values["target_tokens"])
                else dict.fromkeys(values.keys() & means_of(run.parts.objective))
            ),
            **self._batch_of(taken, run.plan.stage_at(counts.examples_seen)),
            "step_seconds": step_seconds,
            "data_seconds": taken.data_seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            **run.speed.of(flops, values["target_tokens"], step_seconds),
            **noise.record(taken.num_examples),
            **taken.more,
        }
        for hook in self._hooks:
            record |= hook.entries(step)
        if not self._has_begun:
            self._say_start_up()
        self._has_begun, self.loss = True, record["loss"]
        self.write(record)
        self._terminal.step(record)
        if not finite:
            self._skip_or_stop(step, counts.examples_seen, values, lambda: taken.find_cause(state))
        elif not math.isfinite(values["param_norm"]):
            left = f"step {step} left param_norm {values['param_norm']}; {NOTHING_SAVED}"
            raise NonFiniteLoss(left, step + 1, self.counts.examples_seen)
        elif run.config.max_loss_spike and values["target_tokens"]:
            self._compare(step, counts.examples_seen, values["loss"])
        return record

    def _batch_of(self, taken: StepResult, stage: BatchStage) -> Record:
        """The entries on the examples of a step and the sizes of its batch, once it is counted."""
        source, seen = self._run.source, self.counts.examples_seen
        mixture = {"source_epochs": source.epochs(seen)} if isinstance(source, MixtureSource) else {}
        return {
            "examples": taken.num_examples,
            "examples_seen": seen,
            "tokens_seen": self.counts.tokens_seen,
            "epoch": seen / self._run.examples_per_epoch,
            "per_device_batch_size": float(stage.per_device_batch_size),
            "gradient_accumulation_steps": stage.gradient_accumulation_steps,
            "global_batch_to_train": stage.global_batch_to_train,
            "examples_hash": examples_hash(source.hashed(taken.example_ids)),
            **mixture,
        }

    def write(self, record: Record) -> None:
        """Writes a line of metrics.jsonl."""
        if self._log:
            self._log.write(record)
        for hook in self._hooks:
            hook.written(record)

    def _say_start_up(self) -> None:
        """Reports, after the first step of this start, how the time up to it was spent."""
        phases.mark("first step")
        parts = {part: round(seconds, 3) for part, seconds in phases.start_up.items()}
        said = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items())
        self._terminal.say(f"first step done {sum(parts.values()):.1f} s after the start, in seconds: {said}")
        self._run.note_environment(start_up_seconds=parts)

    def _may_be_the_scale(self, metrics: Record) -> bool:
        scaling = self._run.parts.optimizer.loss_scaling
        return scaling is not None and scaling.may_shrink(metrics["loss_scale"])

    def _skip_or_stop(self, step: int, examples_seen: int, metrics: Record, find_cause: Callable[[], str]) -> None:
        """Reports a step that was skipped for its gradient, or ends the run and names the gradient's origin."""
        config, in_a_row = self._run.config, self.counts.skipped_in_a_row
        if self._may_be_the_scale(metrics):
            self._terminal.say(f"step {step} skipped: not finite at loss_scale {metrics['loss_scale']:g}")
            return
        if config.skip_nonfinite_updates and in_a_row < config.max_skipped_updates:
            self._terminal.say(
                f"step {step} skipped: its gradient is not finite ({in_a_row} in a row of "
                f"max_skipped_updates={config.max_skipped_updates})"
            )
            return
        skipped = f", after {in_a_row} skipped steps in a row" if config.skip_nonfinite_updates else ""
        cause = find_cause()
        where = f": {cause}" if cause else ""
        raise NonFiniteLoss(
            f"step {step} has loss {metrics['loss']} and grad_norm {metrics['grad_norm']}{skipped}{where}; "
            f"{NOTHING_SAVED}",
            step,
            examples_seen,
        )

    def _compare(self, step: int, examples_seen: int, loss: float) -> None:
        """Compares a loss with the band of the losses before it, then adds it to them."""
        losses, width = self.counts.losses, self._run.config.max_loss_spike
        if loss > (limit := band_limit(losses, width)):
            raise LossSpike(
                f"step {step} has loss {loss:.6g}, above {limit:.6g}: max_loss_spike={width:g} robust deviations "
                f"over the median of the {len(losses)} losses before it; {NOTHING_SAVED}",
                step,
                examples_seen,
                limit,
            )
        self.counts = dataclasses.replace(self.counts, losses=(*losses, loss)[-WINDOW:])

    def advise(self) -> None:
        """Reports the batch size that the noise scale suggests, where it is known; not in reinforcement learning."""
        noise, plan, config = self.counts.noise, self._run.plan, self._run.config
        if not noise.steps or plan.rl is not None or not registry.is_installed("estimate", "advice"):
            return
        batch = plan.stage_at(self.counts.examples_seen).global_batch_to_train
        _, examples = plan.length.end_after(self.counts.step, self.counts.examples_seen)
        advice = registry.load("estimate", "advice")
        tokens = examples * config.max_target_length
        for sentence in advice(config, noise.examples, noise.relative_error, batch, tokens):
            self._terminal.say(sentence)


def peak_memory_bytes() -> int | None:
    """The peak of this process's devices so far; None where they do not report it, such as CPUs."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)


def band_limit(values: Sequence[float], width: float, *, least: int = LEAST_LOSSES) -> float:
    """The upper end of the band of normal values: the median of the finite values plus `width` robust deviations.

    A robust deviation is 1.4826 times the median distance from the median, and at least 1 % of the median. With fewer
    than `least` finite values the limit is infinity.
    Source: Rousseeuw and Croux 1993, "Alternatives to the median absolute deviation", section 1.
    """
    finite = np.asarray([value for value in values if math.isfinite(value)], np.float64)
    if len(finite) < least:
        return math.inf
    median = np.median(finite)
    deviation = _TO_DEVIATION * np.median(np.abs(finite - median))
    return float(median + width * max(deviation, _LEAST_DEVIATION * abs(median)))
