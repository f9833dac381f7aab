"""The time of a train step, measured in a short run."""

import contextlib
import io
import json
import statistics
from pathlib import Path

from maxtext_lite.analysis.tuning import Candidate, Timing
from maxtext_lite.config import Config
from maxtext_lite.config.records import read_records
from maxtext_lite.training.compile import OutOfMemory
from maxtext_lite.training.feed_steps import make_feed_steps
from maxtext_lite.training.loop import train_run
from maxtext_lite.training.opening import open_run


def measured(
    candidate: Candidate, directory: Path, *, warm_up: int, steps: int, device_memory_gb: float | None
) -> Timing:
    """The time of a candidate's step, from a short run without evaluations and checkpoints.

    Args:
      directory: of the run; replaced if it exists.
      warm_up: first steps, which do not count.
      device_memory_gb: see `loop.train`.
    """
    run = open_run(_short(candidate.config, directory, warm_up + steps), device_memory_gb=device_memory_gb)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train_run(run, make_feed_steps)
    except OutOfMemory:
        return Timing(None, _compiled_bytes(directory))
    lines = [line for line in read_records(directory / "metrics.jsonl", []) if line["step"] > warm_up]
    return Timing(statistics.median(line["step_seconds"] for line in lines), _compiled_bytes(directory))


def _compiled_bytes(directory: Path) -> int | None:
    """The bytes of a device that the compiled step needs; None if it was not compiled."""
    return json.loads((directory / "memory.json").read_text(encoding="utf-8"))["compiled_bytes"]


def _short(config: Config, directory: Path, steps: int) -> Config:
    changes = {
        "base_output_directory": str(directory.parent),
        "run_name": directory.name,
        "overwrite": False,
        "steps": steps,
        "num_epochs": 0,
        "warmup_steps": 0,
        "eval_interval": -1,
        "enable_checkpointing": False,
        "profiler_steps": 0,
        "log_to": "",
        "prometheus_port": 0,
    }
    return config.model_copy(update=changes)
