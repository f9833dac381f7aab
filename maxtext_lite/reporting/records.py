"""Files with a JSON object in each line, such as metrics.jsonl: every line that can be read, and which cannot."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

EVALUATION_METRICS = ("eval_loss", "eval_target_tokens", "eval_accuracy", "eval_reward")
"""The numbers of an evaluation's line that a report shows; no other line has them."""
EVALUATION_BY_SOURCE = ("eval_losses", "source_token_shares")
"""Its objects of numbers by the name of a source."""

_MOST_NAMED = 5
_MOST_STEPS = 2**63

Record = dict[str, Any]
"""A JSON object with the `step` that it is of."""


def read_records(path: Path, notes: list[str]) -> Iterator[Record]:
    """Yields the records of a file in the order of its lines; none where there is no file.

    Args:
      notes: gains, after the last record, sentences on what was wrong with the file.
    Raises:
      OSError: there is something that cannot be read.
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
                notes.append(f"{path.name} ends in a line cut short: the run was writing it, or was killed.")
    if bad:
        left_out = f"{len(bad)} of {number} lines are left out, as they hold no step"
        notes.append(f"{path.name}: {left_out}: {_first([str(line) for line in bad])}.")


def _record(line: bytes) -> Record | None:
    try:
        record: object = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    step = as_object(record).get("step")
    return as_object(record) if type(step) is int and 0 <= step < _MOST_STEPS else None


def _first(texts: list[str]) -> str:
    return ", ".join(texts[:_MOST_NAMED]) + (" ..." if len(texts) > _MOST_NAMED else "")


class Steps:
    """Numbers of steps, kept as ranges: of a run that lost none, one."""

    def __init__(self) -> None:
        self._ranges: list[list[int]] = []

    def add(self, step: int) -> None:
        """Takes a step in; one that is there already changes nothing."""
        if self._ranges and self._ranges[-1][0] <= step <= self._ranges[-1][1] + 1:
            self._ranges[-1][1] = max(self._ranges[-1][1], step)
        else:
            self._ranges.append([step, step])

    def missing(self, last: int) -> str:
        """Which of the steps 1 to `last` are not there, in words: "step 3, 7 to 9"; "" if none is missing."""
        gaps: list[str] = []
        expected = 1
        for first, end in [*sorted(self._ranges), [last + 1, last + 1]]:
            first = min(first, last + 1)
            if first > expected:
                gaps.append(f"{expected}" if first == expected + 1 else f"{expected} to {first - 1}")
            expected = max(expected, end + 1)
        return f"step {_first(gaps)}" if gaps else ""


def is_evaluation(record: Record) -> bool:
    """Whether a line of metrics.jsonl is of an evaluation, not of a step of training."""
    return any(name in record for name in EVALUATION_METRICS)


def is_of_evaluations(metric: str) -> bool:
    """Whether a report's metric is read from evaluations; one that is by source is named `eval_losses/web`."""
    return metric.partition("/")[0] in (*EVALUATION_METRICS, *EVALUATION_BY_SOURCE)


def record_text(record: Record) -> str:
    """A record as a line of such a file; numbers that are not finite become null, as JSON has none."""
    return json.dumps(with_numbers(record, math.inf), allow_nan=False) + "\n"


def with_numbers(value: Any, below: float) -> Any:
    """JSON whose numbers lie between -below and below; the others, and those that are not finite, become null."""
    if isinstance(value, dict):
        return {name: with_numbers(each, below) for name, each in cast("Record", value).items()}
    if isinstance(value, list | tuple):
        return [with_numbers(each, below) for each in cast("list[Any]", value)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if -below < value < below else None
    return value


def as_object(value: object) -> dict[str, Any]:
    """A JSON object; {} in place of anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """A JSON array; [] in place of anything else."""
    return cast("list[Any]", value) if isinstance(value, list) else []
