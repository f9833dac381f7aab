"""The checksums of a checkpoint's files, in one file of the checkpoint per process that wrote it.

SHA-256 is in hashlib (Orbax brings no faster checksum), and processors have instructions for it: at least 1 GB/s per
core, with files hashed in parallel, which is more than most file systems read. `sha256sum --check` reads these files,
so a copy can be checked without this program. CRC-32 would be twice as fast per core, but would accept one damaged file
in 4 billion.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Collection, Generator, Mapping
from pathlib import Path

from maxtext_lite.config.bucket import is_bucket, names_below, storage_errors
from maxtext_lite.config.errors import UserError
from maxtext_lite.config.json_file import path_below
from maxtext_lite.config.whole_file import to_disk, write_whole

_PART = re.compile(r"sha256\.(\d{1,6})-of-([1-9]\d{0,5})")
_LAST_LINE = "# sha256 of the lines above: "
_OWNER = re.compile(r"(?:ocdbt\.)?process_(\d{1,6})")
_LOST = (errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # on a disk; in a bucket EIO is any refusal
_THREADS = min(8, os.cpu_count() or 1)


class Damaged(Exception):
    """A checkpoint file that differs from what was written; says which one and how."""


@contextlib.contextmanager
def finding_damage(path: Path, name: str) -> Generator[None]:
    """A block that reads a file of a checkpoint, which messages call `name`.

    Raises:
      Damaged: it is gone, or the disk cannot read it.
      OSError: it cannot be read now, by this process or over this network, and may be whole.
    """
    try:
        with storage_errors(path):
            yield
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        if is_bucket(path) or error.errno not in _LOST:
            raise
        raise Damaged(f"{name} cannot be read: {error.strerror or error}") from None


def part_name(process: int, num_processes: int) -> str:
    """The name of the file with the checksums of one process, which also states the number of such files."""
    return f"sha256.{process}-of-{num_processes}"


def write_part(directory: Path, process: int, num_processes: int) -> int:
    """Writes the checksums of a process's share: the files that Orbax named after it; the first process adds the rest.

    The share follows from names alone, so no process need see what another has just written. On a file system, all of
    it is on the disk afterwards: a power cut then takes no part of a checkpoint that counts.

    Returns:
      The number of bytes hashed.
    """
    own = [name for name in _files(directory) if _owner(name, num_processes) == process]
    digests = _digests(directory, own, syncs=not is_bucket(directory))
    hashed = sum(size for _, size in digests.values())
    lines = [f"{digest}  {name}\n" for name, (digest, _) in digests.items()]
    text = "".join(lines)
    text += _LAST_LINE + hashlib.sha256(text.encode()).hexdigest() + "\n"
    part = directory / part_name(process, num_processes)
    if is_bucket(directory):
        with storage_errors(part):
            part.write_text(text)
    else:
        write_whole(part, text)
        for folder in {parent for name in own for parent in (directory / name).relative_to(directory).parents}:
            to_disk(directory / folder)
    return hashed


def read_manifest(directory: Path) -> dict[str, str] | None:
    """The checksum of each file of a checkpoint by name; None if the checkpoint has no checksums.

    Raises:
      Damaged: the part of a process is missing, changed, or that of another process.
      OSError: see `finding_damage`.
    """
    with finding_damage(directory, directory.name):
        parts = {path.name: path for path in directory.iterdir() if _PART.fullmatch(path.name)}
    if not parts:
        return None
    num_processes = max(int(name.rpartition("-")[2]) for name in parts)
    digests: dict[str, str] = {}
    for process in range(num_processes):
        name = part_name(process, num_processes)
        if name not in parts:
            raise Damaged(f"{name} is missing")
        part = _read_part(parts[name])
        if any(_owner(file, num_processes) != process for file in part):
            raise Damaged(f"{name} is that of another process")
        digests |= part
    return digests


def damage(
    directory: Path, digests: Mapping[str, str], *, share: int = 0, num_shares: int = 1
) -> tuple[str | None, int]:
    """The first damaged file in a share of a checkpoint's files, None if all are whole; and the number of bytes hashed.

    Args:
      digests: of the files to check, by name.
    Raises:
      OSError: see `finding_damage`.
    """
    own = sorted(digests)[share::num_shares]
    try:
        found = _digests(directory, own)
    except Damaged as problem:
        return str(problem), 0
    changed = (f"{name} is not as it was written" for name in own if found[name][0] != digests[name])
    return next(changed, None), sum(size for _, size in found.values())


def in_items(digests: Mapping[str, str], items: Collection[str]) -> dict[str, str]:
    """The checksums of the files of these items of a checkpoint, and of files that belong to no item."""
    return {name: digest for name, digest in digests.items() if "/" not in name or name.partition("/")[0] in items}


def _read_part(path: Path) -> dict[str, str]:
    try:
        with finding_damage(path, path.name):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Damaged(f"{path.name} cannot be read: it is not UTF-8 text") from None
    lines, mark, digest = text.rpartition(_LAST_LINE)
    if not mark or digest != hashlib.sha256(lines.encode()).hexdigest() + "\n":
        raise Damaged(f"{path.name} is not as it was written")
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in lines.splitlines())}
    for name in digests:
        try:
            path_below(path.parent, name, path.name)
        except UserError as error:
            raise Damaged(str(error).rstrip(".")) from None
    return digests


def _files(directory: Path) -> list[str]:
    """The names of a checkpoint's files without those of its checksums, in order."""
    return [name for name in names_below(directory) if not _PART.match(name)]  # even while one is being written


def _owner(name: str, num_processes: int) -> int:
    named = [int(match[1]) for part in Path(name).parts if (match := _OWNER.fullmatch(part))]
    return named[0] if named and named[0] < num_processes else 0


def _digests(directory: Path, names: Collection[str], *, syncs: bool = False) -> dict[str, tuple[str, int]]:
    """The checksum and size of each file; threads hash several at once, as hashlib releases Python's lock."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: _digest(directory / name, name, syncs), names)
        return dict(zip(names, found, strict=True))


def _digest(path: Path, name: str, syncs: bool) -> tuple[str, int]:
    with finding_damage(path, name), path.open("rb") as file:
        if syncs:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
