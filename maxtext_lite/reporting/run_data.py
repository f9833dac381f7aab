"""A run directory as numbers and texts: whatever of its files is there, and notes on what is not as it should be."""

import datetime
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext_lite.batching import count_parameters
from maxtext_lite.config import ConfigError, UserError, load_config
from maxtext_lite.config.errors import full_text, nearest_clause
from maxtext_lite.config.files import packaged_directory
from maxtext_lite.config.yaml_text import parse_mapping
from maxtext_lite.reporting.records import EVALUATION_METRICS, Records, Steps, is_evaluation

STEP_METRICS = (
    "loss", "grad_norm", "param_norm", "learning_rate", "examples_seen", "tokens_seen", "epoch",
    "global_batch_to_train", "step_seconds", "data_seconds", "tokens_per_second", "tflops_per_device", "mfu",
    "moe_balance_loss", "z_loss", "gradient_noise_scale", "gradient_noise_scale_ratio", "gradient_noise_scale_error",
    "gradient_noise_scale_low", "gradient_noise_scale_high",
    "loss_scale", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy",
    "reward", "reward_std", "equal_reward_groups", "response_tokens", "truncated_responses", "kl", "token_nll",
    "clip_fraction_low", "clip_fraction_high", "rollout_seconds", "reward_seconds", "train_seconds", "overlap_fraction",
)  # fmt: skip
"""The numbers of a step's line in metrics.jsonl that a report shows."""

_FILES = ("config.yml", "plan.json", "metrics.jsonl")
_TIMELINE_STEPS = 3
_LARGEST = 1e300  # beyond it sums overflow; no metric of a run that goes on is there

Column = Sequence[float | None]
"""A metric over the steps; None where it has no value."""


@dataclass(frozen=True)
class Setting:
    """One key of config.yml.

    Attributes:
      value: as config.yml has it.
      base: as configs/base.yml has it; None where that lacks the key.
      origin: where the value came from.
    """

    value: str
    base: str | None
    origin: str

    @property
    def differs(self) -> bool:
        """Whether the value is not that of configs/base.yml."""
        return self.value != self.base


@dataclass(frozen=True)
class TimelineStep:
    """Who was busy when in a step of reinforcement learning.

    Attributes:
      phases: name (rollout, reward or train), chunk, start and stop, in seconds since the step began.
    """

    step: int
    phases: tuple[tuple[str, int, float, float], ...]


@dataclass(frozen=True)
class Run:
    """What a report knows of one run.

    Attributes:
      label: the run's name, made unlike those of the other runs of the page.
      steps: `step` and each of STEP_METRICS that some line has, a row for each step, in their order.
      skipped: for each row, whether the update was skipped.
      evaluations: `step`, each of EVALUATION_METRICS that some line has, and the counts of that step where its line is
        there.
      timeline: of the last steps that timeline.jsonl has, the step and its phases; see `TimelineStep`.
      plan: plan.json; None where it cannot be read. So are environment (environment.json) and settings (config.yml).
      num_parameters: of the whole model, where the config is there and valid.
      last_written: when metrics.jsonl was last written to, UTC.
      notes: sentences on what is missing or damaged.
    """

    directory: Path
    label: str
    steps: Mapping[str, Column]
    skipped: Sequence[bool]
    evaluations: Mapping[str, Column]
    plan: Mapping[str, Any] | None
    environment: Mapping[str, Any] | None
    settings: Mapping[str, Setting] | None
    timeline: tuple[TimelineStep, ...]
    num_parameters: int | None
    last_written: str | None
    notes: tuple[str, ...]

    def last(self, metric: str) -> float | None:
        """The last value of a metric of the steps, or None."""
        return last_value(self.steps.get(metric, ()))

    @property
    def num_steps(self) -> int:
        """The last step done; 0 before the first."""
        return int(self.steps["step"][-1] or 0) if self.steps["step"] else 0

    @property
    def planned_steps(self) -> int | None:
        """The steps of the plan, where it is known."""
        steps = (self.plan or {}).get("steps")
        return steps if isinstance(steps, int) else None


def last_value(column: Column) -> float | None:
    """The last value that is one."""
    return next((value for value in reversed(column) if value is not None), None)


def read_runs(directories: Iterable[str | Path]) -> list[Run]:
    """The runs in these directories, in their order; a directory that is given twice counts once.

    Raises:
      UserError: with every path that is no run directory.
    """
    paths: dict[Path, Path] = {}
    for directory in directories:
        paths.setdefault(Path(directory).resolve(), Path(directory))
    problems = [problem for path in paths.values() if (problem := _not_a_run(path))]
    if problems:
        raise UserError(problems)
    labels = _labels([*paths.values()])
    return [_read_run(path, label) for path, label in zip(paths.values(), labels, strict=True)]


def _not_a_run(path: Path) -> str | None:
    if not path.is_dir():
        return f"RUN_DIR={path} is {'a file' if path.exists() else 'not there'}; it must be a run directory."
    if any((path / name).is_file() for name in _FILES):
        return None
    inside = sorted({file.parent for name in _FILES for file in path.glob(f"*/{name}")})
    return f"RUN_DIR={path} is not a run directory: it has none of {', '.join(_FILES)}." + nearest_clause(
        [str(directory) for directory in inside[:2]]
    )


def _labels(paths: Sequence[Path]) -> list[str]:
    """The directories' names, with as many of the directories above as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max((len(names) for names in parts), default=0) + 1):
        labels = ["/".join(names[-length:]) for names in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path.resolve()) for path in paths]


def _read_run(directory: Path, label: str) -> Run:
    notes: list[str] = []
    steps, skipped, evaluations = _read_metrics(directory / "metrics.jsonl", notes)
    metrics = directory / "metrics.jsonl"
    written = metrics.stat().st_mtime if metrics.is_file() else None
    settings = _read_settings(directory / "config.yml", notes)
    return Run(
        directory=directory,
        label=label,
        steps=steps,
        skipped=skipped,
        evaluations=evaluations,
        plan=_read_object(directory / "plan.json", notes),
        environment=_read_object(directory / "environment.json", notes),
        settings=settings,
        timeline=_read_timeline(directory / "timeline.jsonl", notes),
        num_parameters=None if settings is None else _num_parameters(directory / "config.yml"),
        last_written=None
        if written is None
        else datetime.datetime.fromtimestamp(written, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        notes=tuple(notes),
    )


def _read_object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        shown = _showable(value)
    except FileNotFoundError:
        notes.append(f"{path.name} is not there.")
        return None
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return None
    if not isinstance(value, dict):
        notes.append(f"{path.name} is not a JSON object.")
        return None
    if shown != value:
        notes.append(f"{path.name} holds numbers beyond any that a run writes; they are left out.")
    return shown


def _showable(value: Any) -> Any:
    """JSON without the numbers that cannot be computed with, which become null."""
    if isinstance(value, dict):
        return {name: _showable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_showable(each) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value)
    return value


def _number(value: object) -> float | None:
    """A number that can be drawn, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None
    return value


def _read_metrics(path: Path, notes: list[str]) -> tuple[dict[str, Column], list[bool], dict[str, Column]]:
    """The columns of the steps, which of them were skipped, and the columns of the evaluations."""
    steps: dict[int, tuple[float | None, ...]] = {}
    skipped: dict[int, bool] = {}
    evaluations: dict[int, tuple[float | None, ...]] = {}
    for record in _records(path, notes):
        step = record["step"]  # one that stands twice counts as the later line has it
        if is_evaluation(record):
            evaluations[step] = tuple(_number(record.get(name)) for name in EVALUATION_METRICS)
        else:
            steps[step] = tuple(_number(record.get(name)) for name in STEP_METRICS)
            skipped[step] = record.get("skipped") is True
    if path.is_file() and not steps:
        notes.append("metrics.jsonl has no step yet.")
    order, eval_order = sorted(steps), sorted(evaluations)
    present = Steps()
    for step in order:
        present.add(step)
    if order and (missing := present.missing(order[-1])):
        notes.append(f"metrics.jsonl holds no {missing}.")
    columns: dict[str, Column] = {"step": order}
    for index, name in enumerate(STEP_METRICS):
        values = [steps[step][index] for step in order]
        if any(value is not None for value in values):
            columns[name] = values
    of_evaluations: dict[str, Column] = {"step": eval_order}
    for index, name in enumerate(EVALUATION_METRICS):
        values = [evaluations[step][index] for step in eval_order]
        if any(value is not None for value in values):
            of_evaluations[name] = values
    for name in ("examples_seen", "tokens_seen"):
        index = STEP_METRICS.index(name)
        counted = {step: row[index] for step, row in steps.items()} | {0: 0.0}
        of_evaluations[name] = [counted.get(step) for step in eval_order]
    return columns, [skipped[step] for step in order], of_evaluations


def _read_timeline(path: Path, notes: list[str]) -> tuple[TimelineStep, ...]:
    """The last steps of timeline.jsonl; most runs have none."""
    if not path.is_file():
        return ()
    found: deque[TimelineStep] = deque(maxlen=_TIMELINE_STEPS)
    for record in _records(path, notes):
        phases = record.get("phases")
        if isinstance(phases, list) and all(_is_phase(phase) for phase in phases):
            found.append(TimelineStep(record["step"], tuple(tuple(phase) for phase in phases)))  # type: ignore[misc]
    return tuple(found)


def _is_phase(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    name, chunk, start, stop = value
    times = [time for time in (_number(start), _number(stop)) if time is not None]
    return isinstance(name, str) and type(chunk) is int and len(times) == 2 and 0 <= times[0] <= times[1]


def _records(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file; what is wrong with it is noted."""
    records = Records(path)
    try:
        yield from records
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
    if records.is_missing:
        notes.append(f"{path.name} is not there.")
    notes += records.notes


def _read_settings(path: Path, notes: list[str]) -> dict[str, Setting] | None:
    """Every key of config.yml, in its order, beside configs/base.yml."""
    try:
        text = path.read_text(encoding="utf-8")
        entries = parse_mapping(text)
    except FileNotFoundError:
        notes.append("config.yml is not there.")
        return None
    except (OSError, ValueError) as error:
        notes.append(f"config.yml cannot be read: {error}.")
        return None
    base_text = (packaged_directory("configs") / "base.yml").read_text(encoding="utf-8")
    base = {key: full_text(entry.value) for key, entry in parse_mapping(base_text)}
    # The origin of a value is the comment that ends its line.
    origins = {line.partition(":")[0]: line.rpartition(" # ")[2] for line in text.splitlines() if " # " in line}
    return {key: Setting(full_text(entry.value), base.get(key), origins.get(key, "")) for key, entry in entries}


def _num_parameters(path: Path) -> int | None:
    try:
        return count_parameters(load_config(path.resolve())).total
    except ConfigError:  # of another version of maxtext_lite: its keys are shown, but mean something else
        return None
