"""Rows that a run excludes: their list in JSON lines, and the ids of their examples. Imports no jax."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import storage_errors
from maxtext_lite.data.source import ExampleSource
from maxtext_lite.data.text_files import json_lines, json_object


class ExcludedRow(BaseModel):
    """A row excluded from a run from some position on, in every epoch: its slot in the step is empty.

    Attributes:
      row: its number in its source.
      source: name of the source in a mixture; "" without one.
      data: fingerprint of the source; "": the name identifies it.
      from_example: the position in the run; 0: its beginning.
      spike: number, from 1, of the loss spike that found it; 0: a person listed it.
      step: the step whose loss left its band.
      loss, grad_norm: of the row, see `training.row_losses`; None: not finite.
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


def read_excluded(path: Path, key: str = "") -> list[ExcludedRow]:
    """The rows of a file.

    Args:
      key: the key that names the file; "": it is the run's own, and may be missing, which counts as empty.
    Raises:
      UserError: it cannot be read, or a line is not a row.
    """
    rows: list[ExcludedRow] = []
    try:
        for where, value in json_lines(str(path), path, wanted='"row"') if key else _own_rows(path):
            try:
                rows.append(ExcludedRow.model_validate(value))
            except ValidationError as error:
                wrong = error.errors()[0]
                what = ".".join(map(str, wrong["loc"])) or "its value"
                raise UserError(f'{where}: {what}: {wrong["msg"]}. A row is {{"row": 28}}.') from None
    except UserError as error:
        raise UserError(f"{key}: {error}" if key else str(error)) from None
    return rows


def _own_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a run's own file, which may be in a bucket; none if there is no such file."""
    try:
        with storage_errors(path):
            content = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    for number, line in enumerate(content.splitlines(), start=1):
        where = f"{path}:{number}"
        yield where, json_object(where, line, wanted='"row"')


def excluded_text(rows: Iterable[ExcludedRow]) -> str:
    """The text of such a file."""
    return "".join(f"{row.model_dump_json()}\n" for row in rows)


def excluded_ids(
    source: ExampleSource,
    rows: Sequence[ExcludedRow],
    key: str = "",
) -> Mapping[int, int]:
    """The ids of rows in a source, each with the position of the run from which it is excluded.

    Args:
      key: the key that names their file, if all of them must be found; "": rows of other sources are ignored.
    Raises:
      UserError: a row that must be found is not.
    """
    ids: dict[int, int] = {}
    found: set[ExcludedRow] = set()
    first = 0
    for name, each in source.named().items():
        for row in rows:
            is_of_source = row.data == each.fingerprint if row.data else row.source == name
            if is_of_source and row.row < len(each):
                example_id = first + row.row
                ids[example_id] = min(row.from_example, ids.get(example_id, row.from_example))
                found.add(row)
        first += len(each)
    for row in rows:
        if key and row not in found:
            of_source = f" of the source {row.source}" if row.source else ""
            raise UserError(f"{key}: this run's data have no row {row.row:,}{of_source}.")
    return ids


def left_out(
    ids: np.ndarray,
    first: int,
    excluded: Mapping[int, int],
) -> np.ndarray:
    """For each of the ids, at positions `first` and on, whether `excluded_ids` excludes it there; bool."""
    if not excluded:
        return np.zeros(len(ids), bool)
    return np.array([place >= excluded.get(row, place + 1) for place, row in enumerate(ids.tolist(), first)], bool)
