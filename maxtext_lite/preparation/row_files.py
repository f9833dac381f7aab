"""Files of rows with columns: Parquet and Arrow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from maxtext_lite.config import UserError
from maxtext_lite.data.text_files import extra_module

_ROWS_AT_ONCE = 1024
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # optional in Arrow's format, but every writer's close() adds it


def parquet_file(name: str, path: str) -> Any:
    """The opened Parquet file.

    Raises:
      UserError: it cannot be read.
    """
    parquet = extra_module(name, "pyarrow.parquet")
    try:
        return parquet.ParquetFile(path)
    except (OSError, extra_module(name, "pyarrow").ArrowException) as error:
        raise UserError(f"{name}: cannot be read ({error}).") from error


def check_column(name: str, schema: Any, field: str) -> None:
    """Refuses rows without exactly one column of this name.

    Args:
      field: a column, or the path of a field of structs, such as meta.text.
    Raises:
      UserError: the column is missing, or there are several.
    """
    names = [path for column in schema for path in _paths(column)]
    if field not in names:
        offered = [path for path in names if not any(other.startswith(f"{path}.") for other in names)]  # no structs
        raise UserError(f"{name} has no column {field!r}; set text_field to one of {', '.join(offered)}.")
    if names.count(field) > 1:
        raise UserError(f"{name} has {names.count(field)} columns {field!r}.")


def _paths(column: Any) -> list[str]:
    """The names of a column and of the fields of its structs, as paths."""
    inner = [path for each in getattr(column.type, "fields", ()) for path in _paths(each)]
    return [column.name, *(f"{column.name}.{path}" for path in inner)]


def read_rows(
    name: str,
    path: str,
    *,
    required: str = "",
    optional: Sequence[str] | None = None,
    groups: range | None = None,
) -> Iterator[Callable[[], dict[str, Any]]]:
    """For each row, a function that returns its values by column.

    Args:
      required: a column that must be there, as in `check_column`; "": none.
      optional: further columns to read; None: all.
      groups: row groups of Parquet; None: all.
    Raises:
      UserError: the file cannot be read, or lacks the required column.
    """
    arrow = extra_module(name, "pyarrow")

    def columns_of(schema: Any) -> list[str]:
        if required:
            check_column(name, schema, required)
        if optional is None:
            return list(schema.names)
        wanted = (required if required in schema.names else required.partition(".")[0], *optional)
        found = list(dict.fromkeys(column for column in wanted if column in schema.names))
        for column in found:
            check_column(name, schema, column)
        return found

    try:
        with contextlib.ExitStack() as stack:
            if name.lower().endswith(".parquet"):
                opened = stack.enter_context(parquet_file(name, path))
                columns = columns_of(opened.schema_arrow)
                every = range(opened.num_row_groups) if groups is None else groups
                batches = opened.iter_batches(_ROWS_AT_ONCE, every, columns, use_threads=False)
            else:
                batches = _arrow_batches(stack.enter_context(arrow.memory_map(path)), arrow)
            for batch in batches:
                columns = columns_of(batch.schema)
                for values in zip(*(batch.column(column) for column in columns), strict=True):
                    yield functools.partial(_row, columns, values)
    except (OSError, EOFError, KeyError, arrow.ArrowException) as error:
        raise UserError(f"{name}: cannot be read ({error}).") from error


def _row(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    return {name: value.as_py() for name, value in zip(names, values, strict=True)}


def _arrow_batches(opened: Any, arrow: Any) -> Iterator[Any]:
    """The batches of a file in Arrow's stream format, which Hugging Face writes, or in its file format."""
    if opened.read(6) == b"ARROW1":
        opened.seek(0)
        reader = arrow.ipc.open_file(opened)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        return
    opened.seek(max(opened.size() - len(_END_OF_STREAM), 0))
    if opened.read() != _END_OF_STREAM:  # pyarrow would take a cut between two batches for the end
        raise EOFError("it is cut short")
    opened.seek(0)
    yield from arrow.ipc.open_stream(opened)
