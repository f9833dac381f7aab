"""Files with a JSON object on each line, such as metrics.jsonl, read despite damaged lines."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

EVALUATION_METRICS = ("eval_loss", "eval_target_tokens", "eval_accuracy", "eval_reward")
"""The numbers on an evaluation's line that a report shows; no other line has them."""
EVALUATION_BY_SOURCE = ("eval_losses", "source_token_shares")
"""The objects of numbers by source on an evaluation's line."""

INCOMPLETE = "ends with an incomplete line"
"""In the note on a file with an incomplete last line, as after any kill."""

_MOST_NAMED = 5

Record = dict[str, Any]
"""A JSON object with its `step`."""


def read_records(path: Path, notes: list[str]) -> Iterator[Record]:
    """Yields the records of a file in the order of its lines; none where there is no file.

    Args:
      notes: gains sentences on what is wrong with the file, after the last record.
    Raises:
      OSError: the file exists but cannot be read.
    """
    bad: list[int] = []
    number = 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, start=1):
            record = _record(line)
            if record is not None:
                yield record
            elif line.endswith(b"\n") and line.strip():
                bad.append(number)
            elif line.strip():
                notes.append(f"{path.name} {INCOMPLETE}: the run was writing it, or was killed.")
    if bad:
        ignored = f"{len(bad)} of {number} lines have no step and are ignored"
        notes.append(f"{path.name}: {ignored}: {_first([str(line) for line in bad])}.")


def _record(line: bytes) -> Record | None:
    try:
        record = as_object(json.loads(line))
    except (ValueError, RecursionError):
        return None
    step = record.get("step")
    return record if type(step) is int and step >= 0 else None


def _first(texts: list[str]) -> str:
    return ", ".join(texts[:_MOST_NAMED]) + (" ..." if len(texts) > _MOST_NAMED else "")


class Steps:
    """A set of step numbers, stored as ranges: a single one for a run without gaps."""

    def __init__(self) -> None:
        self._ranges: list[list[int]] = []

    def add(self, step: int) -> None:
        """Adds a step; adding it again changes nothing."""
        if self._ranges and self._ranges[-1][0] <= step <= self._ranges[-1][1] + 1:
            self._ranges[-1][1] = max(self._ranges[-1][1], step)
        else:
            self._ranges.append([step, step])

    def missing(self, last: int) -> str:
        """The steps missing from 1 to `last`, in words: "step 3, 7 to 9"; "" if none is missing."""
        gaps: list[str] = []
        expected = 1
        for first, end in [*sorted(self._ranges), [last + 1, last + 1]]:
            first = min(first, last + 1)
            if first > expected:
                gaps.append(f"{expected}" if first == expected + 1 else f"{expected} to {first - 1}")
            expected = max(expected, end + 1)
        return f"step {_first(gaps)}" if gaps else ""


def is_evaluation(record: Record) -> bool:
    """Whether a line of metrics.jsonl is for an evaluation, not for a training step."""
    return any(name in record for name in EVALUATION_METRICS)


def is_of_evaluations(metric: str) -> bool:
    """Whether a report's metric comes from evaluations; a metric by source is named as in `eval_losses/web`."""
    return metric.partition("/")[0] in (*EVALUATION_METRICS, *EVALUATION_BY_SOURCE)


def record_text(record: Record) -> str:
    """A record as a line of such a file. Non-finite numbers become null, because JSON has none."""
    return json_text(record) + "\n"


def json_text(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """A value as JSON, with null for numbers that are not finite.

    Args:
      default: converts values of other types.
    """
    return json.dumps(without_infinities(value), allow_nan=False, indent=indent, default=default)


def without_infinities(value: Any) -> Any:
    """JSON with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: without_infinities(each) for name, each in cast("Record", value).items()}
    if isinstance(value, list | tuple):
        return [without_infinities(each) for each in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_object(value: object) -> dict[str, Any]:
    """The value if it is a JSON object, otherwise {}."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
