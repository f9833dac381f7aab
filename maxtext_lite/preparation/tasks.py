"""Splits the inputs of `prepare` into a list of tasks that depends only on the files, not on the workers."""

import dataclasses
import itertools
from collections.abc import Iterator

from maxtext_lite.config import UserError
from maxtext_lite.data.text_files import find_files, is_kind
from maxtext_lite.preparation.reading import DIVIDED, Piece
from maxtext_lite.preparation.row_files import check_column, parquet_file


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file of the input, in the state it was found in.

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
    """The files of these paths, in their order; within a directory or a glob sorted by name.

    Raises:
      UserError: there is no file, one is of another kind, or one occurs twice.
    """
    found = [file for path in paths for file in find_files("input", path)]
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


def split_into_tasks(files: list[InputFile], *, task_bytes: int, field: str) -> list[Task]:
    """The tasks: ranges of `task_bytes` of large files, and small files combined up to that size.

    Args:
      field: the column that rows must have.
    """
    tasks: list[Task] = []
    pieces: list[Piece] = []
    total = 0
    for piece, num_bytes in itertools.chain.from_iterable(_pieces(file, task_bytes, field) for file in files):
        if pieces and total + num_bytes > task_bytes:
            tasks.append(Task(len(tasks), tuple(pieces), total))
            pieces = []
            total = 0
        pieces.append(piece)
        total += num_bytes
    if pieces:
        tasks.append(Task(len(tasks), tuple(pieces), total))
    return tasks


def _pieces(file: InputFile, task_bytes: int, field: str) -> Iterator[tuple[Piece, int]]:
    """Each part of a file, with its bytes."""
    if is_kind(file.name, (".parquet",)):
        yield from _row_groups(file, task_bytes, field)
    elif is_kind(file.name, DIVIDED):
        for start in range(0, file.num_bytes, task_bytes):
            stop = min(start + task_bytes, file.num_bytes)
            yield Piece(file.name, file.path, start, stop), stop - start
    else:
        yield Piece(file.name, file.path, 0, file.num_bytes), file.num_bytes


def _row_groups(file: InputFile, task_bytes: int, field: str) -> Iterator[tuple[Piece, int]]:
    with parquet_file(file.name, file.path) as opened:
        check_column(file.name, opened.schema_arrow, field)
        sizes = [opened.metadata.row_group(group).total_byte_size for group in range(opened.num_row_groups)]
    start = 0
    total = 0
    for group, size in enumerate(sizes):
        if group > start and total + size > task_bytes:
            yield Piece(file.name, file.path, start, group), total
            start = group
            total = 0
        total += size
    if sizes:
        yield Piece(file.name, file.path, start, len(sizes)), total
