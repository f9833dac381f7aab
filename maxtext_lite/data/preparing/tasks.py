"""The inputs of `prepare`, split into a list of tasks that depends only on the files, not on who does the work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxtext_lite.config import UserError
from maxtext_lite.config.json_file import is_directory, is_there, path_below, read_object, user_path
from maxtext_lite.data.text_files import TEXT_SUFFIXES, extra_module, find_files

ROWS_SUFFIXES = (".parquet", ".arrow")
"""Suffixes of files of rows, which have columns."""
SUFFIXES = (*TEXT_SUFFIXES, ".txt.zst", ".jsonl.zst", *ROWS_SUFFIXES)
"""Suffixes of all files that are read; other files of a directory are ignored."""

WHOLE = -1
"""`Piece.stop` of a .jsonl that is read as a whole, so that its lines are known by number."""


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file of the input, as it was found.

    Attributes:
      name: for messages.
      path: absolute.
      num_bytes, changed_ns: size and time of the last change.
    """

    name: str
    path: str
    num_bytes: int
    changed_ns: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a file.

    Attributes:
      start, stop: for a .jsonl file, its lines that begin at these bytes; for Parquet, its row groups; else all of it.
    """

    name: str
    path: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Task:
    """The input of one shard.

    Attributes:
      number: counted from 0, in the order of the stream.
      num_bytes: bytes as stored.
    """

    number: int
    pieces: tuple[Piece, ...]
    num_bytes: int


def find_inputs(paths: list[str]) -> list[InputFile]:
    """The files of these paths, in their order; those of a directory or a glob are sorted by name.

    Raises:
      UserError: there is no file, one is of another kind, or one occurs twice.
    """
    found = [file for path in paths for file in (_dataset_files(path) or find_files("input", path, SUFFIXES))]
    files = []
    for name, file in found:
        path = file.resolve()
        status = path.stat()
        files.append(InputFile(name, str(path), status.st_size, status.st_mtime_ns))
    seen: set[str] = set()
    for file in files:
        if file.path in seen:
            raise UserError(f"input: {file.name!r} is read twice.")
        seen.add(file.path)
    return files


def _dataset_files(path: str) -> list[tuple[str, Path]] | None:
    """The files of a dataset written by Hugging Face's save_to_disk; None for any other path."""
    directory = user_path(path)
    if is_directory(directory) and is_there(directory / "dataset_dict.json"):
        splits = read_object(directory / "dataset_dict.json").get("splits", [])
        raise UserError(f"input={path!r} has several datasets; name one: {', '.join(f'{path}/{s}' for s in splits)}.")
    if not (is_directory(directory) and is_there(directory / "state.json")):
        return None
    try:
        names = [each["filename"] for each in read_object(directory / "state.json")["_data_files"]]
    except (KeyError, TypeError):
        raise UserError(f"{directory / 'state.json'} lists no data files, unlike that of a dataset.") from None
    files = [path_below(directory, name, directory / "state.json") for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"input={path!r}: {missing[0]!r}, which its state.json lists, is missing.")
    return [(f"{path.rstrip('/')}/{name}", file) for name, file in zip(names, files, strict=True)]


def split_into_tasks(files: list[InputFile], *, task_bytes: int, field: str) -> list[Task]:
    """The tasks: stretches of `task_bytes` of large files, and small files combined up to that size.

    Args:
      field: the column that rows must have.
    """
    tasks: list[Task] = []
    pieces: list[Piece] = []
    total = 0
    for piece, num_bytes in (each for file in files for each in _pieces(file, task_bytes, field)):
        if pieces and total + num_bytes > task_bytes:
            tasks.append(Task(len(tasks), tuple(pieces), total))
            pieces, total = [], 0
        pieces.append(piece)
        total += num_bytes
    if pieces:
        tasks.append(Task(len(tasks), tuple(pieces), total))
    return tasks


def _pieces(file: InputFile, task_bytes: int, field: str) -> Iterator[tuple[Piece, int]]:
    """Each part of a file, with its bytes."""
    if file.name.endswith(".parquet"):
        yield from _row_groups(file, task_bytes, field)
    elif file.name.endswith(".jsonl"):
        for start in range(0, file.num_bytes, task_bytes):
            stop = min(start + task_bytes, file.num_bytes)
            yield Piece(file.name, file.path, start, stop), stop - start
    else:
        yield Piece(file.name, file.path, 0, file.num_bytes), file.num_bytes


def _row_groups(file: InputFile, task_bytes: int, field: str) -> Iterator[tuple[Piece, int]]:
    with parquet_file(file.name, file.path) as opened:
        check_column(file.name, opened.schema_arrow, field)
        sizes = [opened.metadata.row_group(group).total_byte_size for group in range(opened.num_row_groups)]
    start, total = 0, 0
    for group, size in enumerate(sizes):
        if group > start and total + size > task_bytes:
            yield Piece(file.name, file.path, start, group), total
            start, total = group, 0
        total += size
    if sizes:
        yield Piece(file.name, file.path, start, len(sizes)), total


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

    Raises:
      UserError: the column is missing, or there are several.
    """
    if field not in schema.names:
        raise UserError(f"{name} has no column {field!r}; set text_field to one of {', '.join(schema.names)}.")
    if schema.names.count(field) > 1:
        raise UserError(f"{name} has {schema.names.count(field)} columns {field!r}.")
