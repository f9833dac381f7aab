"""The output of a run: files of JSON lines, and lines or a progress bar on the terminal."""

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import rich.console
import rich.progress

from maxtext_lite.config.errors import rounded_text, writing
from maxtext_lite.config.phases import status_line
from maxtext_lite.config.records import INCOMPLETE, Steps, is_evaluation, read_records, record_text
from maxtext_lite.config.whole_file import replacing
from maxtext_lite.console import command_signals
from maxtext_lite.training.arrays import Record

METRICS = "metrics.jsonl"
_SHOW_CURSOR = b"\x1b[?25h\n"  # rich hides it while it shows a bar
_BESIDE_THE_BAR = 60  # columns
_SPEEDS = ("tokens_per_second", "tflops_per_device", "mfu")
_DISPENSABLE = ("TFLOP/s/device", "ETA ", "batch ", "grad ", "margin ", "lr ", "MFU ", "tokens/s")
"""Parts of a step's line to drop first, by a text in them, least important first. ETA is also beside the bar."""


class JsonLines:
    """A file of JSON objects, each with its step.

    Args:
      after_step: the step from which the run continues; lines of later steps and unreadable lines are removed.
    Attributes:
      notes: sentences on problems with the existing lines.
      steps: those of the kept lines, evaluations not included.
    Raises:
      OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, after_step: int):
        self._path = path
        self.steps = Steps()
        notes: list[str] = []
        with replacing(path) as partial, partial.open("w", encoding="utf-8") as kept:
            for record in read_records(path, notes):
                if record["step"] <= after_step:
                    kept.write(record_text(record))
                    if not is_evaluation(record):
                        self.steps.add(record["step"])
        self.notes = [note for note in notes if INCOMPLETE not in note]  # any kill leaves one
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Appends a record."""
        with writing(self._path):
            self._file.write(record_text(record))
            self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        with writing(self._path):
            self._file.close()


class Terminal:
    """Plain lines; on a terminal they fit its width, above a progress bar.

    Args:
      quiet: show nothing, as on all processes but the first.
    """

    def __init__(self, *, log_period: int = 1, quiet: bool = False):
        self._log_period = log_period
        self._quiet = quiet
        self._first_step = 0
        self._last_step = 0
        self._unshown: list[Record] = []  # since the last line
        self._has_line = False
        self._started: float | None = None
        self._bar: rich.progress.Progress | None = None
        if not quiet:
            status_line.say = self.say

    def start(self, first_step: int, last_step: int) -> None:
        """Shows the bar if stdout is a terminal; `first_step` of `last_step` steps are already done."""
        self._first_step = first_step
        self._last_step = last_step
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
        """Prints a line, above the bar if there is one."""
        if self._quiet:
            return
        status_line.printed()
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def say_step(self, step: int, text: str) -> None:
        """Prints a line about a step."""
        self.say(f"step {step}/{self._last_step}  {text}")

    def show(self, record: Record) -> None:
        """Shows a step on the bar, and at the last and every `log_period` steps a line with the speed since.

        Steps are dispatched ahead, so the time between the ends of two short ones is not what one takes.
        """
        step = record["step"]
        now = time.perf_counter()
        started = self._started = self._started or now - record["step_seconds"]  # without compilation
        seconds_per_step = (now - started) / (step - self._first_step)
        left = _duration(seconds_per_step * (self._last_step - step))
        if self._bar:
            status_line.printed()
            self._bar.update(self._task, completed=step, loss=_shown_loss(record), left=left)
        self._unshown.append(record)
        if step % self._log_period and step != self._last_step:
            return
        timed = self._unshown
        if not self._has_line and len(timed) > 1:
            timed = timed[1:]  # the first step of a process is slower
        parts = [f"step {step}/{self._last_step}", *_step_parts(record | _mean_speed(timed)), f"ETA {left}"]
        self._unshown = []
        self._has_line = True
        self.say(_fit(parts, self._bar.console.width) if self._bar else "  ".join(parts))

    def exclude(self, seconds: float) -> None:
        """Excludes a wait for the compiler from what the time left is judged by."""
        if self._started is not None:
            self._started += seconds

    def close(self) -> None:
        """Removes the bar and restores the terminal."""
        if self._bar:
            self._bar.stop()
            command_signals.say_at_the_end(b"")


def evaluation_text(record: Record) -> str:
    """An evaluation's record as a line of the terminal."""
    if "eval_pairs" not in record:
        tokens = f"{record['eval_target_tokens']:,} tokens"
        return f"held-out loss {record['eval_loss']:.4f} nats per token over {tokens}"
    return (
        f"held-out loss {record['eval_loss']:.4f} per pair over {record['eval_pairs']:,} pairs, reward accuracy "
        f"{record['eval_reward_accuracy']:.1%}, margin {record['eval_reward_margin']:.3g}"
    )


def _shown_loss(record: Record) -> str:
    """The rounded loss; adding 0.0 turns the -0 of a policy's loss, which is near 0, into 0."""
    return "-" if record["loss"] is None else f"{round(record['loss'], 4) + 0.0:.4f}"


def _mean_speed(records: Sequence[Record]) -> Record:
    """The speeds over all these steps."""
    seconds = sum(record["step_seconds"] for record in records)
    means: Record = {}
    for name in _SPEEDS:
        means[name] = None
        if records[0][name] is not None:
            means[name] = sum(record[name] * record["step_seconds"] for record in records) / seconds
    return means


def _step_parts(record: Record) -> list[str]:
    parts = [f"loss {_shown_loss(record)}"]
    if "reward" in record:
        parts.append("reward -" if math.isnan(record["reward"]) else f"reward {record['reward']:.3f}")
        if record["unscored_fraction"]:
            parts.append(f"unscored {record['unscored_fraction']:.1%}")
    elif record.get("pairs"):
        parts += [f"accuracy {record['reward_accuracy']:.1%}", f"margin {record['reward_margin']:.3g}"]
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    parts.append(f"{rounded_text(record['tflops_per_device'], 3)} TFLOP/s/device")
    if record["mfu"] is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if not math.isnan(record["learning_rate"]):
        parts.append(f"lr {record['learning_rate']:.3g}")
    return [*parts, f"grad {record['grad_norm']:.3g}", f"batch {record['global_batch_to_train']}"]


def _fit(parts: Sequence[str], width: int) -> str:
    """The parts as one line of at most `width` characters; the least important ones are dropped first."""
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
