"""Paths in buckets, such as gs://bucket/runs: which schemes are known, what they need installed, how they are read.

A bucket has objects, whose names only look like paths of files: each is written whole, and none is appended to or
renamed.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# etils and fsspec have no type declarations.

import atexit
import contextlib
import errno
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from maxtext_lite.config.errors import Refusal, UserError, install_text, value_text
from maxtext_lite.config.json_file import path_below, user_path

_NEEDS = {"gs": ("gcs", "gcsfs"), "s3": ("s3", "s3fs")}  # the extra, and its package that reads and writes
_LIBRARIES = ("gcsfs", "aiohttp", "botocore", "google", "requests", "fsspec")  # their errors are the storage's
_WEIGHTS = (".safetensors", ".bin", ".npz")  # endings of the names of files with weights
_PATTERNS = {"a bucket": "* ? [ ] #", "checkpoints": "* ? [ ] \\"}
_copies: dict[str, Path] = {}


def bucket_scheme(path: object) -> str:
    """`gs` or `s3` for a path in a bucket; "" for any other path."""
    scheme, mark, _ = str(path).partition("://")
    return scheme if mark and scheme in _NEEDS else ""


def is_bucket(path: object) -> bool:
    """Whether a path is in a bucket, not in this machine's file system."""
    return bucket_scheme(path) != ""


def refuse_patterns(text: str, key: str, place: str = "a bucket") -> None:
    r"""Refuses wildcards and the like: `* ? [ ] #` in a path in a bucket, `* ? [ ] \\` in one of checkpoints.

    fsspec and etils take them for patterns and generations of objects; Orbax, which looks for what its processes have
    written, for patterns too, and TensorStore a backslash for a slash.

    Args:
      text: the path, or a part of it.
      place: "a bucket" or "checkpoints".
    Raises:
      UserError: the text has one of them; names `key`.
    """
    marks = _PATTERNS[place]
    if found := [letter for letter in text if letter in marks.split()]:
        problem = f"{key}={value_text(text)} has {found[0]} in a path of {place}, where {marks} name other files."
        without = text.translate(dict.fromkeys(map(ord, found), "_"))
        raise UserError(str(Refusal(key, problem, (without,))))


def any_path(path: str | Path, key: str) -> Path:
    """A path as a pathlib object, or an etils one for a bucket: the same methods without rename and append.

    Raises:
      UserError: the extra for the bucket is not installed, or see `refuse_patterns`; names `key`.
    """
    scheme = bucket_scheme(path)
    if not scheme:
        return user_path(str(path))
    refuse_patterns(str(path), key)
    extra, package = _NEEDS[scheme]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{key}={value_text(str(path))} needs {package}: {install_text(extra)}.")
    import fsspec.config
    from etils import epath  # takes a second with gcsfs, which only users of buckets should wait

    # Listings are never cached, since other processes, and TensorStore in this one, write to the same bucket.
    for name in ("gcs", "s3"):
        fsspec.config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    return cast("Path", epath.Path(path))


def absolute(path: Path) -> Path:
    """The absolute path; a path in a bucket always is."""
    return path if is_bucket(path) else path.absolute()


def file_system(path: str | Path, key: str = "path") -> tuple[Any, str]:
    """The fsspec file system of a path's bucket, and the path in its form; see `any_path`."""
    import fsspec

    return fsspec.core.url_to_fs(str(any_path(path, key)))


@contextlib.contextmanager
def storage_errors(path: object) -> Generator[None]:
    """A context to read or write a path in. A bucket's library errors become OSErrors.

    Raises:
      OSError: with a number and a reason.
    """
    try:
        yield
    except Exception as error:
        numbered = isinstance(error, OSError) and error.errno
        # gcsfs raises a ValueError where the server calls the request invalid, as for a name that no bucket can have.
        known = isinstance(error, OSError | ValueError) and not numbered
        theirs = known or type(error).__module__.partition(".")[0] in _LIBRARIES
        if not is_bucket(path) or not theirs or isinstance(error, FileExistsError):
            raise
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, "there is no such bucket or object", str(path)) from None
        said = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise OSError(errno.EIO, said[:300], str(path)) from None


def names_below(directory: Path) -> list[str]:
    """All files below a directory, by their paths from there, in order."""
    system, root = file_system(directory)
    with storage_errors(directory):
        return sorted(name.removeprefix(f"{root}/") for name in system.find(root))


def remove_objects(directory: Path) -> None:
    """Removes a directory of a bucket with everything in it.

    Raises:
      OSError: it cannot be removed.
    """
    system, root = file_system(directory)  # which refuses patterns: `rm` would remove what they match
    with storage_errors(directory):
        if system.exists(root):
            system.rm(root, recursive=True)


def fetch(directory: str | Path, to: Path, but: tuple[str, ...] = _WEIGHTS) -> None:
    """Copies the files directly in a bucket's directory and in its hf/, not those further below.

    Args:
      but: endings of the names of files to skip.

    Raises:
      OSError: they cannot be read.
      UserError: a name leads out of the directory.
    """
    system, root = file_system(directory)
    for part in ("", "hf"):
        where, into = f"{root}/{part}".rstrip("/"), to / part
        with storage_errors(directory):
            for about in system.ls(where, detail=True) if system.isdir(where) else ():
                name = about["name"].rpartition("/")[2]
                if about["type"] == "file" and name and not name.endswith(but):
                    file = path_below(into, name, directory)
                    into.mkdir(parents=True, exist_ok=True)
                    system.get_file(about["name"], str(file))
                    os.utime(file, (about["mtime"].timestamp(),) * 2)


def local_copy(path: str | Path, key: str) -> Path:
    """A path in the local file system: itself, or for a run directory in a bucket a temporary copy.

    The copy is made once, without checkpoints and TensorBoard files, and is deleted when the process ends; `original`
    gives the path in the bucket.

    Raises:
      UserError: the bucket cannot be read; names `key`.
    """
    if not is_bucket(path):
        return user_path(str(path))
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
    """The path that this is the `local_copy` of; any other path unchanged."""
    return any_path(next((url for url, copy in _copies.items() if copy == Path(path)), path), key)


@contextlib.contextmanager
def reaching(path: str | Path, key: str) -> Generator[None]:
    """A context for the first access to a path.

    Raises:
      UserError: in place of an error of a bucket; names `key`.
    """
    try:
        with storage_errors(path):
            yield
    except OSError as error:
        if not is_bucket(path):
            raise
        raise UserError(f"{key}={value_text(str(path))} cannot be reached: {error.strerror}.") from None
