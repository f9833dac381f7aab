"""Files of data: found by path, glob or shipped name, and read as text, as lines of JSON or as documents."""

from __future__ import annotations

import contextlib
import glob
import gzip
import importlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from maxtext_lite.config import UserError, packaged_directory, packaged_file
from maxtext_lite.config.errors import counted, install_text
from maxtext_lite.config.json_file import (
    check_file,
    is_directory,
    is_there,
    parse_json,
    path_below,
    read_object,
    user_path,
)
from maxtext_lite.config.registry import load
from maxtext_lite.console import complain
from maxtext_lite.data.text_encoder import TextEncoder

_COMPRESSED = ("", ".gz", ".zst")
PLAIN_SUFFIXES = tuple(f".txt{end}" for end in _COMPRESSED)
"""Suffixes of files of plain text, each one document."""
_ARRAY_SUFFIXES = tuple(f".json{end}" for end in _COMPRESSED)
_LINES_SUFFIXES = tuple(f"{kind}{end}" for kind in (".jsonl", ".ndjson") for end in _COMPRESSED)
ROWS_SUFFIXES = (".parquet", ".arrow")
"""Suffixes of files of rows with columns."""
TEXT_SUFFIXES = (*PLAIN_SUFFIXES, *_LINES_SUFFIXES, *_ARRAY_SUFFIXES, *ROWS_SUFFIXES)
"""Suffixes of all files that are read, in small or capital letters."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""A possible prefix of UTF-8 files that is not part of their text."""
_ABOUT_DATA = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "manifest.json",
    "prepare.json",
)
"""Files that Hugging Face's datasets and `prepare` write beside data."""
DOCUMENTS_FILE = "documents.i64"
"""Where each document of a prepared dataset starts in its stream, then the length of the stream: little-endian int64
[documents + 1]."""
_MOST_NAMED = 5  # files
_PIECE = 2**20
_LARGEST_WINDOW = 2**31  # bytes, those of zstd --long=31; its library reads 2**27 by default
_ZSTANDARD_PIECE = 2**14  # may expand a thousandfold at once


def find_files(key: str, path: str) -> list[tuple[str, Path]]:
    """(name for messages, file) of each file of a path, a glob or a shipped text's name, sorted by name.

    A message names the files of a directory that are not read.

    Args:
      key: what messages call the path.
    Raises:
      UserError: there is no file, or one is of another kind.
    """
    suffixes = ", ".join(TEXT_SUFFIXES)
    place = user_path(path)
    if dataset := _dataset_files(key, path):
        files = dataset
    elif is_there(place / DOCUMENTS_FILE):
        raise UserError(f"{key}={path!r} is a prepared dataset, which is read with dataset_type=array_record.")
    elif is_directory(place):
        everything = _matches(f"{glob.escape(str(place))}/**")
        files = [(str(file), file) for file in everything if _is_data(file.name)]
        if not files:
            raise UserError(f"{key}={path!r} is a directory without a {suffixes} file.")
        unread = [str(file.relative_to(place)) for file in everything if not _is_data(file.name)]
        if unread:
            named = ", ".join(unread[:_MOST_NAMED]) + ", ..." * (len(unread) > _MOST_NAMED)
            complain(f"{key}={path!r}: {counted(len(unread), 'file')} not read: {named}")
    elif is_there(place):
        files = [(path, place)]
    elif glob.has_magic(path):
        files = [(str(file), file) for file in _matches(str(place))]
        if not files:
            raise UserError(f"{key}={path!r} matches no file in {str(Path.cwd())!r}.")
    else:
        files = [(path, _packaged_text(key, path))]
    for name, file in files:
        if not is_kind(name, TEXT_SUFFIXES):
            raise UserError(f"{key}={path!r}: cannot read {name!r}. The files are {suffixes}.")
        check_file(file)
    names: dict[str, str] = {}
    for name, file in files:
        if (first := names.setdefault(os.path.realpath(file), name)) != name:
            raise UserError(f"{key}={path!r}: {name!r} is a link to {first!r}, which would be read twice.")
    return files


def _is_data(name: str) -> bool:
    """Whether a file that a directory holds is one of texts, rather than one about them."""
    return is_kind(name, TEXT_SUFFIXES) and name not in _ABOUT_DATA


def is_kind(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file's name has one of these suffixes, in small or capital letters."""
    return name.lower().endswith(suffixes)


def _dataset_files(key: str, path: str) -> list[tuple[str, Path]] | None:
    """The files of a dataset written by Hugging Face's save_to_disk; None for any other path."""
    directory = user_path(path)
    splits = _stated(directory / "dataset_dict.json", "splits")
    if splits:
        raise UserError(f"{key}={path!r} has several datasets; name one: {', '.join(f'{path}/{s}' for s in splits)}.")
    listed = _stated(directory / "state.json", "_data_files")
    names = [each["filename"] for each in listed if isinstance(each, dict) and isinstance(each.get("filename"), str)]
    if not names:
        return None
    files = [path_below(directory, name, directory / "state.json") for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{key}={path!r}: {missing[0]!r}, which its state.json lists, is missing.")
    return [(f"{path.rstrip('/')}/{name}", file) for name, file in zip(names, files, strict=True)]


def _stated(file: Path, field: str) -> list[Any]:
    """The list in a field of a file; empty without one, as in another program's file of that name."""
    value = read_object(file).get(field) if is_there(file) else None
    return value if isinstance(value, list) else []


def _matches(pattern: str) -> list[Path]:
    # Not pathlib's glob, which includes hidden files (.ipynb_checkpoints) and takes no absolute pattern.
    names = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    return [path for path in map(Path, names) if not is_directory(path)]


def _packaged_text(key: str, path: str) -> Path:
    packaged = packaged_file("assets", path)
    if packaged is not None:
        return packaged
    from maxtext_lite.config.hints import hub_hint

    names = (file.name for file in packaged_directory("assets").iterdir() if is_kind(file.name, TEXT_SUFFIXES))
    raise UserError(
        f"{key}={path!r}: there is no such file or directory in {str(Path.cwd())!r}, "
        f"nor among the texts that ship with the package ({', '.join(sorted(names))})."
        f"{hub_hint(path, '--repo-type dataset')}"
    )


def read_text(name: str, file: Path) -> str:
    """The UTF-8 text of a file, decompressed, without a byte-order mark; line ends are kept.

    Raises:
      UserError: it cannot be read, or is not text.
    """
    with _opened(name, file) as pieces:
        content = b"".join(pieces)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text (byte {error.start}: {error.reason}).") from error


def read_lines(name: str, file: Path) -> Iterator[bytes]:
    """The lines of a file, without line ends and byte-order mark; only one is in memory at a time.

    Those of a .json that is one array, which is in memory as a whole, are its entries.

    Raises:
      UserError: the file cannot be read.
    """
    if is_kind(name, _ARRAY_SUFFIXES):
        with _opened(name, file) as pieces:
            start = next(filter(None, pieces), b"").removeprefix(BYTE_ORDER_MARK).lstrip()
        if start.startswith(b"["):
            yield from _array_entries(name, file)
            return
    # Split at newlines only: str.splitlines would also split at U+2028, which JSON allows inside a string.
    prefix = BYTE_ORDER_MARK
    unfinished: list[bytes] = []  # parts of a line
    with _opened(name, file) as pieces:
        for piece in pieces:
            *ends, rest = piece.split(b"\n")
            for end in ends:
                yield b"".join([*unfinished, end]).removeprefix(prefix)
                unfinished = []
                prefix = b""
            unfinished.append(rest)
    yield b"".join(unfinished).removeprefix(prefix)


def _array_entries(name: str, file: Path) -> Iterator[bytes]:
    try:
        entries = parse_json(read_text(name, file))
    except ValueError as error:
        raise UserError(f"{name}: not JSON ({error}).") from error
    for entry in entries:
        yield json.dumps(entry).encode()


@contextlib.contextmanager
def _opened(name: str, file: Path) -> Iterator[Iterator[bytes]]:
    """Pieces of a file's content, decompressed."""
    try:
        with file.open("rb") as stored:
            if is_kind(name, (".zst",)):
                yield _zstandard_pieces(name, stored)
            elif is_kind(name, (".gz",)):
                with gzip.open(stored) as opened:
                    yield iter(lambda: opened.read(_PIECE), b"")
            else:
                yield iter(lambda: stored.read(_PIECE), b"")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name}: cannot be read ({error}).") from error


def extra_module(name: str, module: str) -> Any:
    """A module of the extra `prepare`, needed for the file `name`.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{name} needs {package} to be read: {install_text('prepare')}.") from None


def _zstandard_pieces(name: str, stored: BinaryIO) -> Iterator[bytes]:
    """The content of the frames of a .zst. zstandard's own reader would accept a truncated frame as complete."""
    zstandard = extra_module(name, "zstandard")
    frame: Any = None
    while data := stored.read(_ZSTANDARD_PIECE):
        while data:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise UserError(f"{name}: cannot be read ({error}).") from error
            data = frame.unused_data
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it is cut short")


Entry = bytes | Callable[[], dict[str, Any]]
"""A line of JSON, or a function that reads a row's values by column."""


def read_entries(
    name: str,
    file: Path,
    *,
    required: str = "",
    optional: Sequence[str] | None = None,
    groups: range | None = None,
) -> Iterator[tuple[str, Entry]]:
    """The lines of a file that are not blank, each after its place, "file:line"; or its rows.

    Args:
      required: a column that rows must have, "" for none; `optional`: further ones that are read, None for all.
      groups: row groups of Parquet; None: all.
    Raises:
      UserError: the file cannot be read.
    """
    if is_kind(name, ROWS_SUFFIXES):
        rows = load("rows", "columns")(name, str(file), required=required, optional=optional, groups=groups)
        for number, row in enumerate(rows, start=1):
            yield f"{name}: row {number}", row
        return
    for number, line in enumerate(read_lines(name, file), start=1):
        if line.strip():
            yield f"{name}:{number}", line


def object_of(
    where: str,
    entry: Entry,
    wanted: str,
) -> dict[str, Any]:
    """The values of a line or row by name.

    Args:
      wanted: what an object should contain, for messages.
    Raises:
      UserError: the line is not a JSON object in UTF-8, or a value of the row cannot be read.
    """
    if isinstance(entry, bytes):
        return json_object(where, entry, wanted=wanted)
    try:
        return entry()
    except (ValueError, OverflowError) as error:
        raise UserError(f"{where} has a value that cannot be read ({error}).") from error


def json_lines(
    name: str,
    file: Path,
    *,
    wanted: str,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The values of each line or row of a file by name, after its place; arguments and errors as for `object_of`."""
    for where, entry in read_entries(name, file):
        yield where, object_of(where, entry, wanted)


def json_object(
    where: str,
    line: bytes,
    *,
    wanted: str,
) -> dict[str, Any]:
    """The JSON object on a line.

    Args:
      where: what messages call the line.
      wanted: what an object should contain, for messages.
    Raises:
      UserError: the line is not a JSON object in UTF-8.
    """
    try:
        value = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text (byte {error.start} of the line: {error.reason}).") from error
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: not a JSON object with {wanted}.")
    return value


def json_objects(
    key: str,
    path: str,
    *,
    reads: str,
    wanted: str,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """`json_lines` of all files of a path (`find_files`); plain text is refused.

    Args:
      reads: what reads them, for messages, such as "x reads .jsonl files".
    """
    for name, file in find_files(key, path):
        if is_kind(name, PLAIN_SUFFIXES):
            raise UserError(f"{key}={path!r}: {reads}, not {name!r}.")
        yield from json_lines(name, file, wanted=wanted)


def check_unicode(where: str, key: str, text: str) -> None:
    """Refuses half a surrogate pair, which JSON can spell but no encoding can.

    Raises:
      UserError: the text contains one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f'{where}: "{key}" is not valid Unicode ({error.reason}).') from error


Document = TypeVar("Document", bound=Sized)


def read_documents(files: Iterable[tuple[str, Path]], encoder: TextEncoder) -> Iterator[str]:
    """The documents of files from `find_files` as training reads them, including empty ones.

    Raises:
      UserError: a file cannot be read, or a line has no document.
    """
    for name, file in files:
        if is_kind(name, PLAIN_SUFFIXES):
            yield read_document(name, file, encoder)
            continue
        for where, entry in read_entries(name, file, required="text", optional=()):
            yield text_of(where, entry, "text", encoder)


def read_document(name: str, file: Path, encoder: TextEncoder) -> str:
    """A file of plain text, which is one document."""
    text = read_text(name, file)
    encoder.check(name, text)
    return text


def text_of(
    where: str,
    entry: Entry,
    field: str,
    encoder: TextEncoder,
) -> str:
    """The text in a field of a line or row.

    Raises:
      UserError: there is none, or it cannot be encoded.
    """
    wanted = f'a string under "{field}"'
    text = _value(object_of(where, entry, wanted), field)
    if not isinstance(text, str):
        raise UserError(f"{where}: not {'a JSON object' if isinstance(entry, bytes) else 'a row'} with {wanted}.")
    check_unicode(where, field, text)
    encoder.check(where, text)
    return text


def _value(line: dict[str, Any], field: str) -> object:
    """The value of a field, or by its path of a field of objects: meta.text."""
    if field in line:
        return line[field]
    value: Any = line
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def batches(
    documents: Iterable[Document],
    most: int,
    most_characters: int,
) -> Iterator[list[Document]]:
    """Documents in order, in batches for a call of the tokenizer: of `most`, or of enough characters."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if len(batch) == most or characters >= most_characters:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch
