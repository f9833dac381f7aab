"""Paths in buckets, such as gs://bucket/runs: which are known, what an installation needs for them, how they are read.

A bucket has objects, whose names only look like those of files in directories: each is written whole, at once; none is
appended to or renamed.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# etils and fsspec declare none of their functions.

import atexit
import contextlib
import errno
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

from maxtext_lite.config.errors import UserError, value_text

_NEEDS = {"gs": ("gcs", "gcsfs"), "s3": ("s3", "s3fs")}  # the extra, and the package of it that reads and writes
_LIBRARIES = ("gcsfs", "aiohttp", "botocore", "google", "requests", "fsspec")  # whose errors are the storage's
_WEIGHTS = (".safetensors", ".bin", ".npz")  # the names of files that hold weights end so
_copies: dict[str, Path] = {}


def bucket_scheme(path: object) -> str:
    """`gs` or `s3` of a path in a bucket; "" of any other."""
    scheme, mark, _ = str(path).partition("://")
    return scheme if mark and scheme in _NEEDS else ""


def is_bucket(path: object) -> bool:
    """Whether a path is one in a bucket, and not of this machine's file system."""
    return bucket_scheme(path) != ""


def any_path(path: str | Path, key: str) -> Path:
    """A path as an object: pathlib's, or, in a bucket, etils', which has the same methods but no rename and no append.

    Raises:
      UserError: the extra that a bucket needs is not installed; names `key`.
    """
    scheme = bucket_scheme(path)
    if not scheme:
        return Path(path)
    extra, package = _NEEDS[scheme]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{key}={value_text(str(path))} needs {package}: pip install 'maxtext-lite[{extra}]'.")
    import fsspec.config
    from etils import epath  # with gcsfs a second, for those alone who have a bucket

    # Lists are asked for, not remembered: other processes, and TensorStore in this one, write beside us.
    for name in ("gcs", "s3"):
        fsspec.config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    return cast("Path", epath.Path(path))


def absolute(path: Path) -> Path:
    """The path from the root; one in a bucket always is."""
    return path if is_bucket(path) else path.absolute()


def file_system(path: str | Path, key: str = "path") -> tuple[Any, str]:
    """What reads and writes the bucket of a path, of fsspec, and the path as it takes it; see `any_path`."""
    import fsspec

    return fsspec.core.url_to_fs(str(any_path(path, key)))


@contextlib.contextmanager
def storage_errors(path: object) -> Generator[None]:
    """What is done inside reads or writes a path: of a bucket, whatever its libraries raise becomes an OSError.

    Raises:
      OSError: with a number and a reason.
    """
    try:
        yield
    except Exception as error:
        numbered = isinstance(error, OSError) and error.errno
        # gcsfs makes a ValueError of an answer that calls the request invalid, as that of a name no bucket can have.
        known = isinstance(error, OSError | ValueError) and not numbered
        theirs = known or type(error).__module__.partition(".")[0] in _LIBRARIES
        if not is_bucket(path) or not theirs or isinstance(error, FileExistsError):
            raise
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, "there is no such bucket or object", str(path)) from None
        said = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise OSError(errno.EIO, said[:300], str(path)) from None


def names_below(directory: Path) -> list[str]:
    """The files of a directory and of those in it, by their names from there, in order."""
    if is_bucket(directory):
        system, root = file_system(directory)
        with storage_errors(directory):
            return sorted(name.removeprefix(f"{root}/") for name in system.find(root))
    return sorted(
        str((Path(parent) / name).relative_to(directory)) for parent, _, found in os.walk(directory) for name in found
    )


def remove_objects(directory: Path) -> None:
    """Removes whatever a directory of a bucket holds.

    Raises:
      OSError: it cannot be.
    """
    system, root = file_system(directory)
    with storage_errors(directory):
        if system.exists(root):
            system.rm(root, recursive=True)


def fetch(directory: str | Path, to: Path, parts: Sequence[str] = ("", "hf"), but: tuple[str, ...] = _WEIGHTS) -> None:
    """Copies the files that stand in `parts` of a directory of a bucket, and not in directories there.

    Args:
      but: endings of names that are left out.

    Raises:
      OSError: they cannot be read.
    """
    system, root = file_system(directory)
    for part in parts:
        where, into = f"{root}/{part}".rstrip("/"), to / part
        with storage_errors(directory):
            for about in system.ls(where, detail=True) if system.isdir(where) else ():
                name = about["name"].rpartition("/")[2]
                if about["type"] == "file" and name and not name.endswith(but):
                    into.mkdir(parents=True, exist_ok=True)
                    system.get_file(about["name"], str(into / name))
                    os.utime(into / name, (about["mtime"].timestamp(),) * 2)


def local_copy(path: str | Path, key: str) -> Path:
    """A path on this machine's file system: itself, or, of a run directory in a bucket, a copy until this process ends.

    The copy has all but checkpoints and what TensorBoard shows; `original` finds the former. It is made once.

    Raises:
      UserError: the bucket cannot be read; names `key`.
    """
    if not is_bucket(path):
        return Path(path)
    url = str(path).rstrip("/")
    if url not in _copies:
        any_path(url, key)
        copy = Path(tempfile.mkdtemp(prefix="maxtext_lite-"))
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        with reaching(url, key):
            fetch(url, copy)
        _copies[url] = copy
    return _copies[url]


def original(path: str | Path, key: str) -> Path:
    """The path whose `local_copy` this is; itself where it is none."""
    return any_path(next((url for url, copy in _copies.items() if copy == Path(path)), path), key)


@contextlib.contextmanager
def reaching(path: str | Path, key: str) -> Generator[None]:
    """What is done inside looks into a path for the first time.

    Raises:
      UserError: in the place of an error of a bucket; names `key`.
    """
    try:
        with storage_errors(path):
            yield
    except OSError as error:
        if not is_bucket(path):
            raise
        raise UserError(f"{key}={value_text(str(path))} cannot be reached: {error.strerror}.") from None
