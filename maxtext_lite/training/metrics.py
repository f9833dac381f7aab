"""What a run shows: metrics.jsonl, TensorBoard and its traces, lines or a bar on the terminal, the FLOPs behind MFU."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# jax, optax and orbax declare some of their functions in part.

import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.progress

from maxtext_lite.process.signals import command_signals
from maxtext_lite.reporting.records import Steps, is_evaluation, read_records, record_text
from maxtext_lite.training.arrays import Record, Tree
from maxtext_lite.training.failures import Failures

_FLUSH_SECONDS = 30.0
_SHOW_CURSOR = b"\x1b[?25h\n"  # rich hides it while it shows a bar
_BESIDE_THE_BAR = 60  # columns
_DISPENSABLE = ("TFLOP/s/device", "ETA ", "batch ", "grad ", "margin ", "lr ", "MFU ", "tokens/s")
"""The parts of a step's line, by what they hold, from the one that is least missed; ETA stands beside the bar."""


class JsonLines:
    """A file of JSON objects, each with the step that it is of.

    Args:
      after_step: the step the run goes on from; lines of later steps, and those that cannot be read, are removed.
      failures: collects what cannot be written.
    Attributes:
      notes: sentences on what was wrong with the lines that were there.
      steps: of the lines that were kept; lines of evaluations are none of them.
    Raises:
      OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, after_step: int, failures: Failures):
        self._path, self._failures = path, failures
        notes: list[str] = []
        scratch = path.with_suffix(".jsonl.tmp")
        with scratch.open("w", encoding="utf-8") as kept:
            self.steps = Steps()
            for record in read_records(path, notes):
                if record["step"] <= after_step:
                    kept.write(record_text(record))
                    if not is_evaluation(record):
                        self.steps.add(record["step"])
        scratch.replace(path)
        self.notes = tuple(note for note in notes if "cut short" not in note)  # as any kill leaves it
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Appends a record."""
        with self._failures.of_writing(self._path):
            self._file.write(record_text(record))
            self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        with self._failures.of_writing(self._path):
            self._file.close()


class MetricsLog:
    """metrics.jsonl, in which each step stands once, and TensorBoard's copy of it.

    Args:
      after_step, failures: see `JsonLines`.
    Attributes:
      notes: see `JsonLines`.
    """

    def __init__(self, run_directory: Path, after_step: int, failures: Failures):
        self._lines = JsonLines(run_directory / "metrics.jsonl", after_step, failures)
        self._board = _Board(run_directory / "tensorboard", max(after_step + 1, 0), failures)
        self.notes = self._lines.notes
        if missing := self._lines.steps.missing(after_step):
            self.notes += (f"metrics.jsonl holds no {missing} any more.",)

    def write(self, record: Record) -> None:
        """Appends a record; non-finite numbers become null."""
        self._lines.write(record)
        self._board.write(record)

    def flush(self) -> None:
        """Writes what is only in memory yet."""
        self._board.flush()

    def close(self) -> None:
        """Flushes and closes both."""
        self._lines.close()
        self._board.close()


class _Board:
    """TensorBoard's event file. It is written where it is called: a thread could not say that the disk is full.

    Args:
      purge_step: from which on TensorBoard hides what earlier event files hold.
    """

    def __init__(self, directory: Path, purge_step: int, failures: Failures):
        with _without_torch():
            from tensorboardX import event_file_writer
            from tensorboardX.proto import event_pb2, summary_pb2

        self._directory, self._failures = directory, failures
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        directory.mkdir(exist_ok=True)
        self._file = event_file_writer.EventsWriter(str(directory / "events"), f".{os.getpid()}")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(self._events.Event(step=purge_step, session_log=start))
        self._flushed = time.monotonic()

    def write(self, record: Record) -> None:
        """Appends the finite numbers of a record."""
        numbers = {
            key: float(value)
            for key, value in record.items()
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        summary = self._summaries.Summary
        values = [summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._add(self._events.Event(step=record["step"], summary=summary(value=values)))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what is only in memory yet."""
        self._flushed = time.monotonic()
        if not self._failures.found:
            with self._failures.of_writing(self._directory):
                self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        with self._failures.of_writing(self._directory):
            self._file.close()

    def _add(self, event: Tree) -> None:
        event.wall_time = time.time()
        if not self._failures.found:
            with self._failures.of_writing(self._directory):
                self._file.write_event(event)


FIRST_STEP = 3
"""The first that is traced, of those that this process makes: the two before it compile and fill caches."""


class Profile:
    """The trace of a few steps, which TensorBoard's profile plugin shows.

    Traces `num_steps` steps from the third of this process on; 0: none.

    Args:
      directory: of TensorBoard's files.
      failures: collects a trace that cannot be written.
    """

    def __init__(self, directory: Path, num_steps: int, failures: Failures):
        self._directory, self._num_steps, self._failures = directory, num_steps, failures
        self._is_tracing = False

    def before_step(self, steps_here: int) -> None:
        """Call it before each step, whose number of those of this process is `steps_here`, from 1 on."""
        if steps_here == FIRST_STEP and self._num_steps:
            jax.profiler.start_trace(str(self._directory))
            self._is_tracing = True
        elif steps_here == FIRST_STEP + self._num_steps:
            self.close()

    def close(self) -> None:
        """Ends a trace that is under way and writes it."""
        if self._is_tracing:
            self._is_tracing = False
            with self._failures.of_writing(self._directory):
                jax.profiler.stop_trace()


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a step's time is held against.

    Attributes:
      flops_per_example: model FLOPs.
      peak: TFLOP/s of one device, or None.
    """

    flops_per_example: float
    num_devices: int
    peak: float | None

    def of(self, num_examples: int, target_tokens: int, step_seconds: float) -> dict[str, float | None]:
        """tokens_per_second (target tokens), tflops_per_device and mfu of a step."""
        tflops = num_examples * self.flops_per_example / step_seconds / self.num_devices / 1e12
        return {
            "tokens_per_second": target_tokens / step_seconds,
            "tflops_per_device": tflops,
            "mfu": None if self.peak is None else tflops / self.peak,
        }


class Terminal:
    """Plain lines, on a terminal as wide as it and above a progress bar; silent on all processes but the first."""

    def __init__(self, *, log_period: int, quiet: bool):
        self._log_period, self._quiet = log_period, quiet
        self._first_step, self.last_step = 0, 0
        self._started: float | None = None
        self._bar: rich.progress.Progress | None = None

    def start(self, first_step: int, last_step: int) -> None:
        """Shows the bar, on a terminal: of `last_step` steps, `first_step` are done already."""
        self._first_step, self.last_step = first_step, last_step
        if sys.stdout.isatty() and not self._quiet:
            console = rich.console.Console()
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("step {task.completed}/{task.total}"),
                rich.progress.BarColumn(bar_width=max(4, min(20, console.width - _BESIDE_THE_BAR))),
                rich.progress.TextColumn("loss {task.fields[loss]}"),
                rich.progress.TextColumn("ETA {task.fields[left]}"),
                console=console,
            )
            self._task = self._bar.add_task("train", total=last_step, completed=first_step, loss="-", left="-")
            command_signals.say_at_the_end(_SHOW_CURSOR)
            self._bar.start()

    def say(self, text: str) -> None:
        """Prints a line, above the bar where there is one."""
        if self._quiet:
            return
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def step(self, record: Record) -> None:
        """Shows a step: on the bar, and as a line every `log_period` steps and at the last."""
        step = record["step"]
        now = time.perf_counter()
        started = self._started = self._started or now - record["step_seconds"]  # compiling does not count
        left = _duration((now - started) / (step - self._first_step) * (self.last_step - step))
        if self._bar:
            self._bar.update(self._task, completed=step, loss=f"{_shown_loss(record):.4f}", left=left)
        if step % self._log_period == 0 or step == self.last_step:
            parts = [f"step {step}/{self.last_step}", *_step_parts(record), f"ETA {left}"]
            self.say(_fitting(parts, self._bar.console.width) if self._bar else "  ".join(parts))

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar:
            self._bar.stop()
            command_signals.say_at_the_end(b"")


def evaluation_text(record: Record) -> str:
    """An evaluation's record as a line of the terminal."""
    tokens = f"{record['eval_target_tokens']:,} tokens"
    if "eval_pairs" not in record:
        return f"held-out loss {record['eval_loss']:.4f} nats per token over {tokens}"
    return (
        f"held-out loss {record['eval_loss']:.4f} per pair over {record['eval_pairs']:,} pairs, reward accuracy "
        f"{record['eval_reward_accuracy']:.1%}, margin {record['eval_reward_margin']:.3g}"
    )


def _shown_loss(record: Record) -> float:
    """A policy's is about 0, which is not to be shown as minus 0."""
    return round(record["loss"], 4) + 0.0


def _step_parts(record: Record) -> list[str]:
    mfu = [] if record["mfu"] is None else [f"MFU {record['mfu']:.1%}"]
    reward = []
    if "reward" in record:
        reward = [f"reward {record['reward']:.3f}"]
    elif "pairs" in record:
        reward = [f"accuracy {record['reward_accuracy']:.1%}", f"margin {record['reward_margin']:.3g}"]
    return [
        f"loss {_shown_loss(record):.4f}",
        *reward,
        f"{record['tokens_per_second']:,.0f} tokens/s",
        f"{record['tflops_per_device']:.3g} TFLOP/s/device",
        *mfu,
        f"lr {record['learning_rate']:.3g}",
        f"grad {record['grad_norm']:.3g}",
        f"batch {record['global_batch_to_train']}",
    ]


def _fitting(parts: Sequence[str], width: int) -> str:
    """The parts as one line of at most `width` characters; what a terminal can best do without is left out first."""
    left = list(parts)
    for dispensable in _DISPENSABLE:
        if len("  ".join(left)) <= width:
            break
        left = [part for part in left if dispensable not in part]
    return "  ".join(left)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


@contextlib.contextmanager
def _without_torch() -> Generator[None]:
    """What is imported here does not find torch, unless it is there already.

    tensorboardX imports it for an annotation wherever it is installed, which takes seconds and 200 MB of memory.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it raises ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]
