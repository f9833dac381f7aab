"""The log of a run: counts, records and shows every step; ends the run on a wrong loss or gradient."""

import contextlib
import dataclasses
import math
import time
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from maxtext_lite.config.errors import writing
from maxtext_lite.config.phases import phases
from maxtext_lite.config.records import is_evaluation, read_records
from maxtext_lite.data import examples_hash
from maxtext_lite.data.sources_on_hosts import source_tokens_of_run
from maxtext_lite.parallel import on_first_host
from maxtext_lite.training.arrays import Record
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.hooks import Hook, LossSpike, NonFiniteLoss, Restart
from maxtext_lite.training.metrics import METRICS, JsonLines, Terminal
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState
from maxtext_lite.training.step import means_of

NOTHING_SAVED = "nothing was saved at or after it"

WINDOW = 32
"""How many recent losses a step's loss is compared with."""
LEAST_LOSSES = 16
"""With fewer losses there is no band."""

_TO_DEVIATION = 1.4826  # standard deviation over median absolute deviation, for a normal distribution
_LEAST_DEVIATION = 0.01  # relative to the median; gives a loss that hardly moves a band too


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
      entries: `TrainProgress.entries` after this step.
    """

    metrics: dict[str, jax.Array]
    example_ids: np.ndarray
    num_examples: int
    data_seconds: float
    find_cause: Callable[[TrainState], str]
    more: Mapping[str, Any] = types.MappingProxyType({})
    entries: tuple[int, int] | None = None


def is_evaluation_missing(run: TrainingRun, step: int, *, is_last: bool) -> bool:
    """Whether a previous process stopped before evaluating this step. All hosts call it."""
    period = run.plan.period_steps(run.config.eval_interval)
    if run.eval_source is None or period <= 0 or not (is_last or step % period == 0):
        return False
    path = run.files.directory / METRICS

    def has_no_evaluation() -> bool:
        records = [record for record in read_records(path, []) if record["step"] == step]
        return len(records) > 0 and not any(map(is_evaluation, records))

    return on_first_host(path, has_no_evaluation)


def open_lines(run: TrainingRun, name: str, step: int, say: Callable[[str], None]) -> JsonLines | None:
    """A file of lines in the run directory that continues after `step`; None on hosts that do not write.

    Raises:
      WriteError: it cannot be read or written.
    """
    if not run.is_first or run.is_read_only:
        return None
    path = run.files.directory / name
    with writing(path):
        lines = JsonLines(path, step or -1)  # an evaluation before the first step has step 0
    for note in lines.notes:
        say(note)
    if name == METRICS and (missing := lines.steps.missing(step)):
        say(f"{METRICS} holds no {missing} any more.")
    return lines


QUIET = Terminal(quiet=True)


class StepLog:
    """The log of a run's steps: its progress, the terminal, metrics.jsonl and the hooks.

    Attributes:
      counts: the progress after the newest recorded step.
      loss: of the last step; None if this process has taken none, or the step had no targets.
      is_end_requested: a hook of this host has asked for the end of the run.
    """

    def __init__(
        self,
        run: TrainingRun,
        counts: TrainProgress,
        terminal: Terminal = QUIET,
        lines: JsonLines | None = None,
        hooks: Sequence[Hook] = (),
    ):
        self.run = run
        self.counts = counts
        self.terminal = terminal
        self.hooks = hooks
        self.loss: float | None = None
        self.is_end_requested = False
        self.shows_state = any(hook.wants_state for hook in hooks)
        self._lines = lines
        self._in_flight: tuple[int, StepResult] | None = None
        self._has_begun = False
        self._last_ready = time.perf_counter()
        self._source_tokens: tuple[int, dict[str, int]] | None = None

    def say(self, text: str) -> None:
        """Prints a line on the first host."""
        self.terminal.say(text)

    def write(self, record: Record) -> None:
        """Writes a line of metrics.jsonl."""
        if self._lines:
            self._lines.write(record)
        for hook in self.hooks:
            hook.written(record)

    def close(self) -> None:
        """Closes metrics.jsonl."""
        if self._lines:
            self._lines.close()

    def restart_clock(self) -> None:
        """Excludes the time since the last step from the next step's."""
        self._last_ready = time.perf_counter()

    @contextlib.contextmanager
    def paused(self, state: TrainState) -> Generator[None]:
        """A block for work that may take long, before which the step in flight is recorded; its time counts nowhere."""
        self.flush(state)
        began = time.perf_counter()
        yield
        self.terminal.exclude(time.perf_counter() - began)
        self.restart_clock()

    def add(self, step: int, result: StepResult, state: TrainState) -> None:
        """Records the previous step while the devices take this one; `state` belongs to this one."""
        self.flush(state)
        self._in_flight = step, result

    def flush(self, state: TrainState) -> None:
        """Waits for the step in flight, if there is one, and records it; `state` is that after the newest step."""
        if self._in_flight is None:
            return
        step, result = self._in_flight
        self._in_flight = None
        try:
            record = self.record(step, result, state)
        except LossSpike as spike:
            restarts: list[Restart] = []
            for hook in self.hooks:
                try:
                    hook.on_spike(spike)
                except Restart as restart:
                    restarts.append(restart)
            if restarts:
                raise restarts[0] from spike
            raise
        for hook in self.hooks:
            self.is_end_requested |= bool(hook.after_step(step, record, state if self.shows_state else None))

    def record(self, step: int, result: StepResult, state: TrainState) -> Record:
        """Waits for a step and records it; returns its record.

        Args:
          state: after this step or a later one.
        Raises:
          LossSpike: the run must not continue after this step.
        """
        metrics: Record = {name: value.item() for name, value in jax.device_get(result.metrics).items()}
        ready = time.perf_counter()
        seconds = ready - self._last_ready
        self._last_ready = ready
        before = self.counts
        noise = before.noise.after(
            group_squares=metrics.pop("group_squares"),
            groups=metrics.pop("groups"),
            grad_norm=metrics["grad_norm"],
            examples=result.num_examples,
        )
        is_finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
        skipped = 0
        if not is_finite:
            skipped = before.skipped_in_a_row + (not self._is_of_loss_scale(metrics))
        self.counts = TrainProgress(
            step=step,
            examples_seen=before.examples_seen + result.num_examples,
            tokens_seen=before.tokens_seen + metrics["target_tokens"],
            skipped_in_a_row=skipped,
            noise=noise,
            losses=before.losses,
            entries=result.entries,
        )
        record = {"step": step, **metrics}
        if not metrics.get(self.run.parts.objective.divisor, metrics["target_tokens"]):  # means over nothing
            record |= dict.fromkeys(metrics.keys() & means_of(self.run.parts.objective))
        record |= self._batch_fields(result, before.examples_seen)
        record |= self._speed_fields(result, before.examples_seen, metrics["target_tokens"], seconds)
        record |= noise.record(result.num_examples)
        record |= result.more
        for hook in self.hooks:
            record |= hook.entries(step)
        if not self._has_begun:
            self._has_begun = True
            self._report_start_up()
        self.loss = record["loss"]
        self.write(record)
        self.terminal.show(record)
        if not is_finite:
            self._skip_or_stop(before.examples_seen, metrics, lambda: result.find_cause(state))
        elif not math.isfinite(metrics["param_norm"]):
            left = f"step {step} left param_norm {metrics['param_norm']}; {NOTHING_SAVED}"
            raise NonFiniteLoss(left, step + 1, self.counts.examples_seen)
        elif self.run.config.max_loss_spike and metrics["target_tokens"]:
            self._compare_with_band(before.examples_seen, metrics["loss"])
        return record

    def _batch_fields(self, result: StepResult, seen_before: int) -> Record:
        """The entries on the examples of a step and the sizes of its batch, once it is counted."""
        source = self.run.source
        seen = self.counts.examples_seen
        stage = self.run.plan.stage_at(seen_before)
        fields: Record = {
            "examples": result.num_examples,
            "examples_seen": seen,
            "tokens_seen": self.counts.tokens_seen,
            "epoch": seen / self.run.examples_per_epoch,
            "per_device_batch_size": float(stage.per_device_batch_size),
            "gradient_accumulation_steps": stage.gradient_accumulation_steps,
            "global_batch_to_train": stage.global_batch_to_train,
            "examples_hash": examples_hash(source.hashed(result.example_ids)),
        }
        if source.parts:
            fields["source_epochs"] = source.epochs(seen)
        return fields

    def _speed_fields(self, result: StepResult, seen_before: int, target_tokens: int, seconds: float) -> Record:
        """The entries on the time and the memory of a step."""
        run = self.run
        flops = run.flops_of(result.example_ids, result.num_examples, seen_before)
        tflops = flops / seconds / run.mesh.size / 1e12
        return {
            "step_seconds": seconds,
            "data_seconds": result.data_seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "tokens_per_second": target_tokens / seconds,
            "tflops_per_device": tflops,
            "mfu": None if run.peak_tflops is None else tflops / run.peak_tflops,
        }

    def _report_start_up(self) -> None:
        """Reports, after the first step of this start, how the time up to it was spent."""
        phases.mark("first step")
        parts = {part: round(seconds, 3) for part, seconds in phases.start_up.items()}
        text = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items())
        self.say(f"first step finished after {sum(parts.values()):.1f} s: {text}")
        self.run.note_environment(start_up_seconds=parts)

    def _is_of_loss_scale(self, metrics: Record) -> bool:
        """Whether a gradient that is not finite may come from a large loss scale, which shrinks."""
        scaling = self.run.parts.optimizer.loss_scaling
        return scaling is not None and scaling.may_shrink(metrics["loss_scale"])

    def _skip_or_stop(self, examples_seen: int, metrics: Record, find_cause: Callable[[], str]) -> None:
        """Reports a step that was skipped for its gradient, or ends the run and names the gradient's origin."""
        config = self.run.config
        step = self.counts.step
        in_a_row = self.counts.skipped_in_a_row
        if self._is_of_loss_scale(metrics):
            self.say(f"step {step} skipped: not finite at loss_scale {metrics['loss_scale']:g}")
            return
        if config.skip_nonfinite_updates and in_a_row < config.max_skipped_updates:
            limit = f"max_skipped_updates={config.max_skipped_updates}"
            self.say(f"step {step} skipped: its gradient is not finite ({in_a_row} in a row of {limit})")
            return
        where = f", after {in_a_row} skipped steps in a row" if config.skip_nonfinite_updates else ""
        if cause := find_cause():
            where += f": {cause}"
        raise NonFiniteLoss(
            f"step {step} has loss {metrics['loss']} and grad_norm {metrics['grad_norm']}{where}; {NOTHING_SAVED}",
            step,
            examples_seen,
        )

    def _compare_with_band(self, examples_seen: int, loss: float) -> None:
        """Compares a loss with the band of the losses before it, then adds it to them."""
        step = self.counts.step
        losses = self.counts.losses
        width = self.run.config.max_loss_spike
        limit = band_limit(losses, width)
        if loss > limit:
            raise LossSpike(
                f"step {step} has loss {loss:.6g}, above {limit:.6g}: max_loss_spike={width:g} robust deviations "
                f"over the median of the {len(losses)} losses before it; {NOTHING_SAVED}",
                step,
                examples_seen,
                limit,
            )
        self.counts = dataclasses.replace(self.counts, losses=(*losses, loss)[-WINDOW:])

    def token_shares(self) -> dict[str, float]:
        """Each source's share of the target tokens since the mixture last changed; {} without. All hosts call it."""
        source = self.run.source
        seen = self.counts.examples_seen
        if not source.parts:
            return {}
        first, tokens = self._source_tokens or (source.counted[0], {})
        seed = self.run.config.data_shuffle_seed
        hosts = self.run.plan.loading_hosts
        more = source_tokens_of_run(source, first, seen, seed=seed, loading_hosts=hosts)
        tokens = {name: tokens.get(name, 0) + count for name, count in more.items()}
        self._source_tokens = seen, tokens
        total = max(sum(tokens.values()), 1)
        return {name: count / total for name, count in tokens.items()}


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


def peak_memory_bytes() -> int | None:
    """The peak of this process's devices so far; None where they do not report it, such as CPUs."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)
