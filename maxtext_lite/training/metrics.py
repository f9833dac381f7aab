"""What a run shows: metrics.jsonl, TensorBoard, lines or a progress bar on the terminal, and the FLOPs behind MFU."""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import rich.console
import rich.progress

PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "NVIDIA B200": {"bfloat16": 2250.0, "float32": 1125.0},
    "NVIDIA H200": {"bfloat16": 989.4, "float32": 494.7},
    "NVIDIA H100 PCIe": {"bfloat16": 756.0, "float32": 378.0},
    "NVIDIA H100": {"bfloat16": 989.4, "float32": 494.7},
    "NVIDIA A100": {"bfloat16": 312.0, "float32": 156.0},
    "NVIDIA L4": {"bfloat16": 121.0},
    "TPU v4": {"bfloat16": 275.0},
    "TPU v5 lite": {"bfloat16": 197.0},
    "TPU v5": {"bfloat16": 459.0},
    "TPU v6 lite": {"bfloat16": 918.0},
}
"""Dense peak of a device in 1e12 FLOP/s, by the start of its `device_kind`; float32 is TF32 on NVIDIA.
Source: the vendors' data sheets."""


def peak_tflops(device_kind: str, dtype: str) -> float | None:
    """Peak TFLOP/s of a device for matmuls in `dtype`; None where it is not known.

    On NVIDIA's devices float16 is as fast as bfloat16; TPUs have no float16 matmul.
    """
    if dtype == "float16" and device_kind.startswith("NVIDIA"):
        dtype = "bfloat16"
    for prefix, peaks in PEAK_TFLOPS.items():
        if device_kind.startswith(prefix):
            return peaks.get(dtype)
    return None


class JsonLines:
    """A file of JSON objects, each with the step that it is of.

    Args:
      after_step: the step the run goes on from; lines of later steps, and a line cut short by a kill, are removed.
    """

    def __init__(self, path: Path, after_step: int):
        kept = _lines_up_to(path, after_step)
        scratch = path.with_suffix(".jsonl.tmp")
        scratch.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        scratch.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._file.close()


class MetricsLog:
    """metrics.jsonl, in which each step stands once, and TensorBoard's copy of it.

    Args:
      after_step: see `JsonLines`.
    """

    def __init__(self, run_directory: Path, after_step: int):
        import tensorboardX  # here, because it imports torch, for seconds, wherever that is installed

        self._lines = JsonLines(run_directory / "metrics.jsonl", after_step)
        self._board = tensorboardX.SummaryWriter(str(run_directory / "tensorboard"), purge_step=max(after_step + 1, 0))

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record; non-finite numbers become null, as JSON has none."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self._lines.write(finite)
        for key, value in finite.items():
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                self._board.add_scalar(key, value, record["step"])

    def close(self) -> None:
        """Flushes and closes both."""
        self._lines.close()
        self._board.close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break  # the last line of a killed process
        if record["step"] <= step:
            kept.append(line)
    return kept


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
    """Plain lines, on a terminal above a progress bar; silent on all processes but the first."""

    def __init__(self, *, log_period: int, quiet: bool):
        self._log_period, self._quiet = log_period, quiet
        self._first_step, self.last_step = 0, 0
        self._started: float | None = None
        self._bar: rich.progress.Progress | None = None

    def start(self, first_step: int, last_step: int) -> None:
        """Shows the bar, on a terminal: of `last_step` steps, `first_step` are done already."""
        self._first_step, self.last_step = first_step, last_step
        if sys.stdout.isatty() and not self._quiet:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("step {task.completed}/{task.total}"),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TextColumn("loss {task.fields[loss]}"),
                rich.progress.TimeRemainingColumn(),
                console=rich.console.Console(),
            )
            self._task = self._bar.add_task("train", total=self.last_step, completed=first_step, loss="-")
            self._bar.start()

    def say(self, text: str) -> None:
        """Prints a line, above the bar where there is one."""
        if self._quiet:
            return
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def step(self, record: dict[str, Any]) -> None:
        """Shows a step: on the bar, and as a line every `log_period` steps and at the last."""
        step = record["step"]
        now = time.perf_counter()
        started = self._started = self._started or now - record["step_seconds"]  # compiling does not count
        if self._bar:
            self._bar.update(self._task, completed=step, loss=f"{record['loss']:.4f}")
        if step % self._log_period == 0 or step == self.last_step:
            left = (now - started) / (step - self._first_step) * (self.last_step - step)
            self.say(f"step {step}/{self.last_step}  {_step_line(record)}  ETA {_duration(left)}")

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar:
            self._bar.stop()


def evaluation_text(record: dict[str, Any]) -> str:
    """An evaluation's record as a line of the terminal."""
    tokens = f"{record['eval_target_tokens']:,} tokens"
    if "eval_pairs" not in record:
        return f"held-out loss {record['eval_loss']:.4f} nats per token over {tokens}"
    return (
        f"held-out loss {record['eval_loss']:.4f} per pair over {record['eval_pairs']:,} pairs, reward accuracy "
        f"{record['eval_reward_accuracy']:.1%}, margin {record['eval_reward_margin']:.3g}"
    )


def _step_line(record: dict[str, Any]) -> str:
    mfu = "" if record["mfu"] is None else f"  MFU {record['mfu']:.1%}"
    reward = ""
    if "reward" in record:
        reward = f"reward {record['reward']:.3f}  "
    elif "pairs" in record:
        reward = f"accuracy {record['reward_accuracy']:.1%}  margin {record['reward_margin']:.3g}  "
    loss = round(record["loss"], 4) + 0.0  # a policy's is about 0, which is not to be shown as minus 0
    return (
        f"loss {loss:.4f}  {reward}{record['tokens_per_second']:,.0f} tokens/s  "
        f"{record['tflops_per_device']:.3g} TFLOP/s/device{mfu}  lr {record['learning_rate']:.3g}  "
        f"grad {record['grad_norm']:.3g}  batch {record['global_batch_to_train']}"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
