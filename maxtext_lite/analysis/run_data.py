"""A run directory as numbers and text: from whichever files exist, with notes on what is missing or damaged."""

import contextlib
import datetime
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from maxtext_lite.analysis.charts import STEP_METRICS, STEPS_BY_SOURCE
from maxtext_lite.batching import count_parameters
from maxtext_lite.config import ConfigError, UserError, load_config
from maxtext_lite.config.bucket import original
from maxtext_lite.config.errors import counted, full_text, nearest_clause
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.load import packaged_directory
from maxtext_lite.config.records import (
    EVALUATION_BY_SOURCE,
    EVALUATION_METRICS,
    Record,
    Steps,
    as_object,
    is_evaluation,
    is_of_evaluations,
    read_records,
)
from maxtext_lite.config.yaml import parse_mapping
from maxtext_lite.operations.goodput_records import goodput_text, starts_of

_FILES = ("config.yml", "plan.json", "metrics.jsonl")
_TIMELINE_STEPS = 3
_SAMPLES = 8
_MOST_STEPS = 8  # that a note names

Column = Sequence[float | None]
"""A metric over the steps; None where it has no value."""
Phase = tuple[str, int, float, float]
"""An activity (rollout, reward or train), its chunk, and its start and stop in seconds since the step began."""


class Setting(NamedTuple):
    """One key of config.yml: its value, base.yml's value (None if it lacks the key), and its origin."""

    value: str
    base: str | None
    origin: str


@dataclass(frozen=True)
class Run:
    """What a report knows of one run.

    Attributes:
      directory: for a run in a bucket, its path there.
      label: the run's name, unique on the page.
      steps: `step` and each of STEP_METRICS that some line has, a row for each step, in order; a metric by source is
        named as in `source_epochs/web`.
      skipped: for each row, whether the update was skipped.
      evaluations: `step`, each of EVALUATION_METRICS that some line has, and the counts of that step where it has a
        line.
      plan, environment, memory: the JSON files of these names; empty where they cannot be read.
      settings: config.yml, likewise.
      goodput: how the run spent its time, as a sentence; "" where unknown.
      timeline: the last steps in timeline.jsonl, with their phases.
      samples: the first lines of the last batch in rollouts.jsonl, each a prompt, a response and its reward.
      num_parameters: of the whole model, where there is a valid config.
      last_written: the time of the last write to metrics.jsonl, UTC; "" without that file.
      notes: sentences on what is missing or damaged.
    """

    directory: Path
    label: str
    steps: Mapping[str, Column]
    skipped: Sequence[bool]
    evaluations: Mapping[str, Column]
    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    memory: Mapping[str, Any]
    goodput: str
    settings: Mapping[str, Setting]
    timeline: Mapping[int, Sequence[Phase]]
    samples: Sequence[Record]
    num_parameters: int | None
    last_written: str
    notes: Sequence[str]

    def column(self, metric: str) -> Column:
        """The values of a metric in its table; empty where no line has it."""
        table = self.evaluations if is_of_evaluations(metric) else self.steps
        return table.get(metric, ())

    def rows(self, metric: str) -> list[tuple[int, float]]:
        """The steps where a metric has a value, and the values."""
        steps = self.evaluations["step"] if is_of_evaluations(metric) else self.steps["step"]
        pairs = zip(steps, self.column(metric), strict=False)
        return [(int(step or 0), value) for step, value in pairs if value is not None]

    def last(self, metric: str) -> float | None:
        """The last value of a metric, or None."""
        rows = self.rows(metric)
        return rows[-1][1] if rows else None

    @property
    def num_steps(self) -> int:
        """The last step done; 0 before the first."""
        return int(self.steps["step"][-1] or 0) if self.steps["step"] else 0


def read_runs(directories: Iterable[str | Path]) -> list[Run]:
    """The runs in these directories, in order; a repeated directory counts once.

    Args:
      directories: for a run in a bucket, its `local_copy`.
    Raises:
      UserError: with every path that is not a run directory.
    """
    paths: dict[Path, Path] = {}
    for directory in directories:
        paths.setdefault(Path(directory).resolve(), Path(directory))
    problems = [problem for problem in map(_not_a_run, paths.values()) if problem]
    if problems:
        raise UserError(problems)
    labels = _labels([original(path, "RUN_DIR") for path in paths])
    return [_read_run(path, label) for path, label in zip(paths.values(), labels, strict=True)]


def _not_a_run(path: Path) -> str:
    """Why a path is no run directory; "" if it is one."""
    if not path.is_dir():
        return f"RUN_DIR={path} is {'a file' if path.exists() else 'missing'}; it must be a run directory."
    if any((path / name).is_file() for name in _FILES):
        return ""
    inside = sorted({str(file.parent) for name in _FILES for file in path.glob(f"*/{name}")})
    none = f"is not a run directory: it has none of {', '.join(_FILES)}."
    return f"RUN_DIR={original(path, 'RUN_DIR')} {none}{nearest_clause(inside[:2])}"


def _labels(paths: Sequence[Path]) -> list[str]:
    """The names of the directories, with as many parent directories as make them unique."""
    labels = [str(path) for path in paths]
    for length in range(max((len(path.parts) for path in paths), default=0), 0, -1):
        shorter = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(shorter)) == len(shorter):
            labels = shorter
    return labels


def _read_run(directory: Path, label: str) -> Run:
    notes: list[str] = []
    excluded = [line["step"] for line in _records(directory / "excluded_rows.jsonl", notes)]
    if excluded:
        at = ", ".join(f"{step:,}" for step in [*dict.fromkeys(excluded)][:_MOST_STEPS])
        rows = counted(len(excluded), "row")
        notes.append(f"the run went back before step {at} and excluded {rows}: excluded_rows.jsonl.")
    metrics = directory / "metrics.jsonl"
    steps, skipped, evaluations = _read_metrics(metrics, notes)
    last_written = ""
    if metrics.is_file():
        written = datetime.datetime.fromtimestamp(metrics.stat().st_mtime, datetime.UTC)
        last_written = f"{written:%Y-%m-%d %H:%M UTC}"
    settings = _read_settings(directory / "config.yml", notes)
    num_parameters = None
    if settings:
        with contextlib.suppress(ConfigError):  # of another version, whose keys are shown but cannot be interpreted
            num_parameters = count_parameters(load_config((directory / "config.yml").resolve())).total
    goodput = _read_object(directory / "goodput.json", notes, optional=True)
    starts = starts_of(goodput)
    if goodput and not starts:
        notes.append("goodput.json is damaged.")
    timeline = deque(_records(directory / "timeline.jsonl", notes), maxlen=_TIMELINE_STEPS)
    return Run(
        original(directory, "RUN_DIR"),
        label,
        steps,
        skipped,
        evaluations,
        plan=_read_object(directory / "plan.json", notes),
        environment=_read_object(directory / "environment.json", notes),
        memory=_read_object(directory / "memory.json", notes, optional=True),
        goodput=goodput_text(starts),
        settings=settings,
        timeline={record["step"]: [tuple(phase) for phase in record["phases"]] for record in timeline},
        samples=_read_samples(directory / "rollouts.jsonl", notes),
        num_parameters=num_parameters,
        last_written=last_written,
        notes=notes,
    )


def _read_object(path: Path, notes: list[str], *, optional: bool = False) -> dict[str, Any]:
    """The JSON object of a file; {} and a note where it cannot be read."""
    if path.is_file():
        try:
            return read_object(path)
        except UserError as error:
            notes.append(f"{path.name} cannot be read: {error}")
    elif not optional:
        notes.append(f"{path.name} is missing.")
    return {}


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def _read_metrics(path: Path, notes: list[str]) -> tuple[dict[str, Column], list[bool], dict[str, Column]]:
    """The columns of the steps, whether each was skipped, and the columns of the evaluations."""
    steps: dict[int, Record] = {}
    evaluations: dict[int, Record] = {}
    for record in _records(path, notes):  # of two lines for a step, the later one counts
        table = evaluations if is_evaluation(record) else steps
        table[record["step"]] = record
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
    elif not steps:
        notes.append(f"{path.name} has no step yet.")
    else:
        present = Steps()
        for step in sorted(steps):
            present.add(step)
        missing = present.missing(max(steps))
        if missing:
            notes.append(f"{path.name} lacks {missing}.")
    skipped = [steps[step].get("skipped") is True for step in sorted(steps)]
    evaluation_columns = _columns(evaluations, EVALUATION_METRICS, EVALUATION_BY_SOURCE)
    for name in ("examples_seen", "tokens_seen"):
        seen = {step: _number(record.get(name)) for step, record in steps.items()}
        seen[0] = 0.0
        evaluation_columns[name] = [seen.get(step) for step in sorted(evaluations)]
    return _columns(steps, STEP_METRICS, STEPS_BY_SOURCE), skipped, evaluation_columns


def _columns(records: Mapping[int, Record], metrics: Sequence[str], by_source: Sequence[str]) -> dict[str, Column]:
    """`step` and the columns with any value, over the steps in order; a metric by source has several."""
    order = sorted(records)
    columns: dict[str, Column] = {"step": order}
    for metric in metrics:
        column = [_number(records[step].get(metric)) for step in order]
        if column.count(None) < len(order):
            columns[metric] = column
    for metric in by_source:
        objects = [as_object(records[step].get(metric)) for step in order]
        for source in dict.fromkeys(itertools.chain.from_iterable(objects)):
            columns[f"{metric}/{source}"] = [_number(each.get(source)) for each in objects]
    return columns


def _read_samples(path: Path, notes: list[str]) -> list[Record]:
    """The first lines of the last batch in rollouts.jsonl, which only reinforcement learning writes."""
    samples: list[Record] = []
    for record in _records(path, notes):
        if samples and samples[0]["step"] != record["step"]:
            samples = []
        if len(samples) < _SAMPLES:
            samples.append(record)
    return samples


def _records(path: Path, notes: list[str]) -> Iterator[Record]:
    """The records of a file, with notes on what is wrong with it."""
    try:
        yield from read_records(path, notes)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")


def _read_settings(path: Path, notes: list[str]) -> dict[str, Setting]:
    """Every key of config.yml, in its order, compared with configs/base.yml."""
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        entries = parse_mapping(text)
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return {}
    base_text = (packaged_directory("configs") / "base.yml").read_text(encoding="utf-8")
    base = {key: full_text(entry.value) for key, entry in parse_mapping(base_text)}
    # The origin of a value is the comment that ends its line.
    origins = {line.partition(":")[0]: line.rpartition(" # ")[2] for line in text.splitlines() if " # " in line}
    return {key: Setting(full_text(entry.value), base.get(key), origins.get(key, "")) for key, entry in entries}
