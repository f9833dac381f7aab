"""Rows that a run leaves out: a list of them in JSON lines, and which of its examples they are. Imports no jax."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import storage_errors
from maxtext_lite.data.mixture_source import named_sources
from maxtext_lite.data.sources import ExampleSource


class ExcludedRow(BaseModel):
    """A row that is left out from some place of a run on, in every epoch: its slot of the step is empty.

    Attributes:
      row: its number in its source.
      source: the source's name in a mixture; "" without one.
      data: the source's fingerprint; "": it is found by its name.
      from_example: the place of the run; 0: its beginning.
      spike: which of the times that the run went back found it, from 1 on; 0: somebody wrote it down.
      step: whose loss left its band.
      loss, grad_norm: its own, as of `training.row_losses`; None: no number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    row: NonNegativeInt
    source: str = ""
    data: str = ""
    from_example: NonNegativeInt = 0
    spike: NonNegativeInt = 0
    step: NonNegativeInt = 0
    loss: float | None = None
    grad_norm: float | None = None


def read_excluded(path: Path, where: str = "") -> list[ExcludedRow]:
    """The rows of a file.

    Args:
      where: what a message begins with; "": the file may be missing, which says as much as an empty one.
    Raises:
      UserError: it cannot be read, or a line is no row.
    """
    try:
        with storage_errors(path):
            lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError) and not where:
            return []
        raise UserError(f"{where or path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    rows: list[ExcludedRow] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(ExcludedRow.model_validate_json(line))
        except ValidationError as error:
            wrong = error.errors()[0]
            what = ".".join(map(str, wrong["loc"])) or "what stands there"
            raise UserError(f'{where or path} line {number}: {what}: {wrong["msg"]}. A row is {{"row": 28}}.') from None
    return rows


def excluded_text(rows: Iterable[ExcludedRow]) -> str:
    """The text of such a file."""
    return "".join(f"{row.model_dump_json()}\n" for row in rows)


def excluded_ids(source: ExampleSource, rows: Sequence[ExcludedRow], key: str = "") -> Mapping[int, int]:
    """The ids of rows in a source, each with the place of the run from which on it is left out.

    Args:
      key: names the file that they are from, all of which must be there; "": those of other sources say nothing.
    Raises:
      UserError: one is not.
    """
    first, ids, found = 0, dict[int, int](), set[ExcludedRow]()
    for name, each in named_sources(source).items():
        for row in rows:
            if (row.data == each.fingerprint if row.data else row.source == name) and row.row < len(each):
                ids[first + row.row] = min(row.from_example, ids.get(first + row.row, row.from_example))
                found.add(row)
        first += len(each)
    if key and (strange := [row for row in rows if row not in found]):
        of_source = f" of the source {strange[0].source}" if strange[0].source else ""
        fingerprint = " with that fingerprint" if strange[0].data else ""
        raise UserError(f"{key}: this run's data have no row {strange[0].row:,}{of_source}{fingerprint}.")
    return ids


def left_out(ids: np.ndarray, first: int, excluded: Mapping[int, int]) -> list[int]:
    """Those of the ids at the positions from `first` on that are left out there, by `excluded_ids`."""
    if not excluded:
        return []
    return [row for place, row in enumerate(ids.tolist(), first) if place >= excluded.get(row, place + 1)]
