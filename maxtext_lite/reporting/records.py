"""Files with a JSON object in each line, such as metrics.jsonl: every line that can be read, and which cannot."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVALUATION_METRICS = ("eval_loss", "eval_target_tokens", "eval_accuracy", "eval_reward")
"""The numbers of an evaluation's line that a report shows; no other line has them."""

_MOST_NUMBERS = 5
_MOST_STEPS = 2**63


class Records:
    """The objects of a file, each with the step that it is of, in the order of the lines; read once, as it is iterated.

    Attributes:
      notes: sentences on what was wrong with the file; whole after the last object.
      is_missing: there is no file.
    """

    def __init__(self, path: Path):
        self._path = path
        self.notes: list[str] = []
        self.is_missing = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the objects.

        Raises:
          OSError: there is something that cannot be read.
        """
        bad: list[int] = []
        number = 0
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self.is_missing = True
            return
        with file:
            for number, line in enumerate(file, start=1):
                record = _record(line)
                if record is not None:
                    yield record
                elif line.strip():
                    if line.endswith(b"\n"):
                        bad.append(number)
                    else:
                        self.notes.append(
                            f"{self._path.name} ends in a line cut short: the run was writing it, or was killed."
                        )
        if bad:
            shown = ", ".join(map(str, bad[:_MOST_NUMBERS])) + (" ..." if len(bad) > _MOST_NUMBERS else "")
            self.notes.append(
                f"{self._path.name}: {len(bad)} of {number} lines are left out, as they hold no step: {shown}."
            )


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
        gaps, expected = [], 1
        for first, end in [*sorted(self._ranges), [last + 1, last + 1]]:
            first = min(first, last + 1)
            if first > expected:
                gaps.append(f"{expected}" if first == expected + 1 else f"{expected} to {first - 1}")
            expected = max(expected, end + 1)
        shown = ", ".join(gaps[:_MOST_NUMBERS]) + (" ..." if len(gaps) > _MOST_NUMBERS else "")
        return shown and f"step {shown}"


def is_evaluation(record: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is of an evaluation, not of a step of training."""
    return any(name in record for name in EVALUATION_METRICS)


def record_text(record: dict[str, Any]) -> str:
    """A record as a line of such a file; numbers that are not finite become null, as JSON has none."""
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or not 0 <= record["step"] < _MOST_STEPS:
        return None
    return record
