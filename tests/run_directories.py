"""Run directories for tests of reports, written by hand: what training writes, and what goes wrong with it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config, write_resolved


def step_line(step: int, **changed: Any) -> dict[str, Any]:
    """A step's line of metrics.jsonl: 8 examples of 100 tokens each."""
    return {
        "step": step,
        "loss": 4 - step / 100,
        "grad_norm": 1 + step / 1000,
        "param_norm": 7.5,
        "learning_rate": 0.001 * step,
        "examples": 8,
        "target_tokens": 800,
        "examples_seen": 8 * step,
        "tokens_seen": 800 * step,
        "epoch": step / 50,
        "per_device_batch_size": 8.0,
        "gradient_accumulation_steps": 1,
        "global_batch_to_train": 8,
        "step_seconds": 0.5,
        "data_seconds": 0.25,
        "tokens_per_second": 1600.0,
        "tflops_per_device": 1.5,
        "mfu": None,
        "skipped": False,
        "examples_hash": "00000000000000ff",
    } | changed


def eval_line(step: int, loss: float) -> dict[str, Any]:
    """An evaluation's line of metrics.jsonl."""
    return {"step": step, "eval_loss": loss, "eval_target_tokens": 999}


def lines_of(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The records of a file of a run."""
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Writes a file of JSON lines, and returns its path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_metrics(directory: Path, lines: list[dict[str, Any]]) -> Path:
    """A run directory that holds metrics.jsonl only."""
    directory.mkdir(parents=True, exist_ok=True)
    write_lines(directory / "metrics.jsonl", lines)
    return directory


def write_run(
    directory: Path,
    lines: list[dict[str, Any]],
    overrides: list[str],
    *,
    num_devices: int = 1,
) -> Path:
    """A run directory with every file that training writes, but for checkpoints."""
    write_metrics(directory, lines)
    config = load_config(None, [f"run_name={directory.name}", *overrides])
    write_resolved(config, directory / "config.yml")
    plan = make_plan(
        config, num_devices=num_devices, num_examples=64 if config.num_epochs else None
    )
    (directory / "plan.json").write_text(json.dumps(plan.to_json()), encoding="utf-8")
    environment = {
        "python": "3.11.7",
        "packages": {"jax": "0.10.2"},
        "devices": ["cpu"] * num_devices,
        "git_commit": None,
    }
    (directory / "environment.json").write_text(
        json.dumps(environment), encoding="utf-8"
    )
    return directory
