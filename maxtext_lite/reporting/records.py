"""Files with a JSON object in each line, such as metrics.jsonl: every line that can be read, and which cannot."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
