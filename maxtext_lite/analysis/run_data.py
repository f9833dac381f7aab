"""A run directory as numbers and text: from whichever files exist, with notes on what is missing or damaged."""

import datetime
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from maxtext_lite.analysis.charts import STEP_METRICS, STEPS_BY_SOURCE
from maxtext_lite.batching import count_parameters
from maxtext_lite.config import ConfigError, UserError, load_config
from maxtext_lite.config.bucket import original
from maxtext_lite.config.errors import counted, full_text, nearest_clause
from maxtext_lite.config.load import packaged_directory
from maxtext_lite.config.records import (
    EVALUATION_BY_SOURCE,
    EVALUATION_METRICS,
    Record,
    Steps,
    as_list,
    as_object,
    is_evaluation,
    is_of_evaluations,
    read_records,
    with_numbers,
)
from maxtext_lite.config.yaml import YamlValue, parse_mapping
from maxtext_lite.operations.goodput_records import goodput_text, starts_of

_FILES = ("config.yml", "plan.json", "metrics.jsonl")
_TIMELINE_STEPS = 3
_MOST_STEPS = 8  # that a note names
_LARGEST = 1e300  # sums of larger values overflow, and no metric of a live run is as large

Content = TypeVar("Content")
Column = Sequence[float | None]
"""A metric over the steps; None where it has no value."""
Phase = tuple[str, int, float, float]
"""An activity (rollout, reward or train), its chunk, and its start and stop in seconds since the step began."""


class Setting(NamedTuple):
    """One key of config.yml: its value, that of configs/base.yml (None where that lacks the key), and its origin."""

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
      plan: plan.json; empty where it cannot be read. The same goes for environment (environment.json), memory
        (memory.json) and settings (config.yml).
      goodput: how the run spent its time, as a sentence; "" where unknown.
      timeline: the last steps in timeline.jsonl, with their phases.
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
    num_parameters: int | None
    last_written: str
    notes: Sequence[str]

    def rows(self, metric: str) -> list[tuple[int, float]]:
        """The steps at which a metric has a value, and the values."""
        table = self.evaluations if is_of_evaluations(metric) else self.steps
        pairs = zip(table["step"], table.get(metric, ()), strict=False)
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
    problems = [problem for path in paths.values() if (problem := _not_a_run(path))]
    if problems:
        raise UserError(problems)
    labels = _labels([original(path, "RUN_DIR") for path in paths])
    return [_read_run(path, label) for path, label in zip(paths.values(), labels, strict=True)]


def _not_a_run(path: Path) -> str | None:
    if not path.is_dir():
        return f"RUN_DIR={path} is {'a file' if path.exists() else 'missing'}; it must be a run directory."
    if any((path / name).is_file() for name in _FILES):
        return None
    inside = sorted({str(file.parent) for name in _FILES for file in path.glob(f"*/{name}")})
    none = f"is not a run directory: it has none of {', '.join(_FILES)}."
    return f"RUN_DIR={original(path, 'RUN_DIR')} {none}{nearest_clause(inside[:2])}"


def _labels(paths: Sequence[Path]) -> list[str]:
    """The names of the directories, with as many parent directories as make them unique."""
    for length in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        labels = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def _read_run(directory: Path, label: str) -> Run:
    notes: list[str] = []
    metrics = directory / "metrics.jsonl"
    excluded = [line["step"] for line in _records(directory / "excluded_rows.jsonl", notes)]
    if excluded:
        at = ", ".join(f"{step:,}" for step in [*dict.fromkeys(excluded)][:_MOST_STEPS])
        notes.append(
            f"the run went back before step {at} and excluded {counted(len(excluded), 'row')}: excluded_rows.jsonl."
        )
    steps, skipped, evaluations = _read_metrics(metrics, notes)
    settings = _read_settings(directory / "config.yml", notes)
    found = _read_object(directory / "goodput.json", notes, optional=True)
    starts = starts_of(found)
    if found and not starts:
        notes.append("goodput.json is damaged.")
    try:
        num_parameters = count_parameters(load_config((directory / "config.yml").resolve())).total if settings else None
    except ConfigError:  # from another version of maxtext_lite: its keys are shown, but cannot be interpreted
        num_parameters = None
    written = datetime.datetime.fromtimestamp(metrics.stat().st_mtime, datetime.UTC) if metrics.is_file() else None
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
        timeline=_read_timeline(directory / "timeline.jsonl", notes),
        num_parameters=num_parameters,
        last_written="" if written is None else f"{written:%Y-%m-%d %H:%M UTC}",
        notes=notes,
    )


def _read_object(path: Path, notes: list[str], *, optional: bool = False) -> dict[str, Any]:
    """The JSON object of a file; an optional one is missing in older runs."""
    if optional and not path.is_file():
        return {}

    def parse(text: str) -> tuple[object, object]:
        value: object = json.loads(text)
        return value, with_numbers(value, _LARGEST)

    value, shown = _parsed(path, notes, parse, ({}, {}))
    if not isinstance(value, dict):
        notes.append(f"{path.name} is not a JSON object.")
    elif shown != value:
        notes.append(f"{path.name} has numbers beyond any that a run writes; they are left out.")
    return as_object(shown)


def _parsed(path: Path, notes: list[str], parse: Callable[[str], Content], empty: Content) -> Content:
    """The content of a file; where it cannot be read, `empty` and a note."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}.")
    return empty


def _number(value: object) -> float | None:
    """The value if it is a number that can be drawn, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None
    return value


def _read_metrics(path: Path, notes: list[str]) -> tuple[dict[str, Column], list[bool], dict[str, Column]]:
    """The columns of the steps, whether each was skipped, and the columns of the evaluations."""
    rows: dict[int, tuple[float | None, ...]] = {}
    skipped: dict[int, bool] = {}
    evaluations: dict[int, tuple[float | None, ...]] = {}
    by_source: dict[str, dict[int, float | None]] = {}
    for record in _records(path, notes):
        step: int = record["step"]  # of two lines for a step, the later one counts
        if is_evaluation(record):
            evaluations[step] = tuple(_number(record.get(name)) for name in EVALUATION_METRICS)
        else:
            rows[step] = tuple(_number(record.get(name)) for name in STEP_METRICS)
            skipped[step] = record.get("skipped") is True
        for metric in EVALUATION_BY_SOURCE if is_evaluation(record) else STEPS_BY_SOURCE:
            for source, value in as_object(record.get(metric)).items():
                by_source.setdefault(f"{metric}/{source}", {})[step] = _number(value)
    present = Steps()
    for step in sorted(rows):
        present.add(step)
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
    elif not rows:
        notes.append(f"{path.name} has no step yet.")
    elif missing := present.missing(max(rows)):
        notes.append(f"{path.name} lacks {missing}.")
    of_steps, of_evaluations = _columns(rows, STEP_METRICS), _columns(evaluations, EVALUATION_METRICS)
    for name, found in by_source.items():
        columns, steps = (of_evaluations, evaluations) if is_of_evaluations(name) else (of_steps, rows)
        columns[name] = [found.get(step) for step in sorted(steps)]
    for name in ("examples_seen", "tokens_seen"):
        counted = {step: row[STEP_METRICS.index(name)] for step, row in rows.items()} | {0: 0.0}
        of_evaluations[name] = [counted.get(step) for step in sorted(evaluations)]
    return of_steps, [skipped[step] for step in sorted(rows)], of_evaluations


def _columns(rows: Mapping[int, Sequence[float | None]], names: Sequence[str]) -> dict[str, Column]:
    """`step` and the columns with any value, over the steps in order."""
    order = sorted(rows)
    columns: dict[str, Column] = {"step": order}
    for index, name in enumerate(names):
        column = [rows[step][index] for step in order]
        if column.count(None) < len(order):
            columns[name] = column
    return columns


def _read_timeline(path: Path, notes: list[str]) -> dict[int, list[Phase]]:
    """The last steps in timeline.jsonl; most runs have no such file."""
    found: deque[tuple[int, list[Phase]]] = deque(maxlen=_TIMELINE_STEPS)
    for record in _records(path, notes):
        phases = [as_list(phase) for phase in as_list(record.get("phases"))]
        if isinstance(record.get("phases"), list) and all(_is_phase(phase) for phase in phases):
            found.append((record["step"], [(name, chunk, start, stop) for name, chunk, start, stop in phases]))
    return dict(found)


def _is_phase(values: Sequence[object]) -> bool:
    if len(values) != 4 or not isinstance(values[0], str) or type(values[1]) is not int:
        return False
    start, stop = _number(values[2]), _number(values[3])
    return start is not None and stop is not None and 0 <= start <= stop


def _records(path: Path, notes: list[str]) -> Iterator[Record]:
    """The records of a file, with notes on what is wrong with it."""
    try:
        yield from read_records(path, notes)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")


def _read_settings(path: Path, notes: list[str]) -> dict[str, Setting]:
    """Every key of config.yml, in its order, compared with configs/base.yml."""

    def parse(text: str) -> tuple[str, list[tuple[str, YamlValue]]]:
        if entries := parse_mapping(text):
            return text, entries
        raise ValueError("it has no keys")

    text, entries = _parsed(path, notes, parse, ("", []))
    base_text = (packaged_directory("configs") / "base.yml").read_text(encoding="utf-8")
    base = {key: full_text(entry.value) for key, entry in parse_mapping(base_text)}
    # The origin of a value is the comment that ends its line.
    origins = {line.partition(":")[0]: line.rpartition(" # ")[2] for line in text.splitlines() if " # " in line}
    return {key: Setting(full_text(entry.value), base.get(key), origins.get(key, "")) for key, entry in entries}
