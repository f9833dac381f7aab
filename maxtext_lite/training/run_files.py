"""The run directory, and the files that the first host writes there, other than checkpoints.

In a bucket nothing can be appended or renamed. Its files are written into a directory of this machine and uploaded as
a whole: before each checkpoint counts, so that metrics.jsonl in the bucket always has the steps of the newest one, and
at the end of the run. A resumed run starts from the files in the bucket.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax

from maxtext_lite.config import RunConfig
from maxtext_lite.config.bucket import (
    absolute,
    any_path,
    fetch,
    file_system,
    is_bucket,
    reaching,
    refuse_patterns,
    storage_errors,
)
from maxtext_lite.config.errors import writing
from maxtext_lite.config.load import WORKING_DIRECTORY
from maxtext_lite.config.whole_file import TEMPORARY, write_whole

_COMMIT = re.compile(rb"[0-9a-f]{40}|[0-9a-f]{64}")
_SECONDS_FOR_GIT = 10.0


def run_directory(config: RunConfig) -> Path:
    """The directory of everything that a run writes.

    Raises:
      UserError: it is in a bucket, and the extra for buckets is not installed, or its path has a pattern.
    """
    base = any_path(config.base_output_directory, "base_output_directory")
    place = "a bucket" if is_bucket(base) else "checkpoints"
    refuse_patterns(str(absolute(base)), "base_output_directory", place)
    refuse_patterns(config.run_name, "run_name", place)
    return base / config.run_name


def write_json(path: Path, value: object) -> None:
    """Writes a file of JSON.

    Raises:
      UserError: it cannot be written.
    """
    with writing(path):
        write_whole(path, json.dumps(value, indent=2) + "\n")


def has_checkpoints(directory: Path) -> bool:
    """Whether a run directory contains checkpoints, or the remains of one.

    Raises:
      UserError: its bucket cannot be read.
    """
    with reaching(directory, "base_output_directory"):
        return any((directory / "checkpoints").glob("*"))


def try_to_write(run_directory: Path, process: int) -> None:
    """Writes and removes an object in a bucket as checkpoints are written, by TensorStore.

    It has credentials of its own, which may lack a right that those of the lease have.

    Raises:
      OSError: it is refused.
    """
    import tensorstore

    try:
        store = tensorstore.KvStore.open(f"{run_directory}/lease/").result()
        store.write(f".write-{process}", b"-").result()
        store.write(f".write-{process}", None).result()  # which removes it
    except ValueError as error:  # which TensorStore raises of everything, with its own details in brackets
        raise OSError(errno.EIO, str(error).splitlines()[0].partition(" [")[0][:300], str(run_directory)) from None


class RunFiles:
    """The files of a run directory. All methods may raise OSError.

    Attributes:
      directory: where they are written; for a bucket, a local directory that depends on its path.
    """

    def __init__(self, run_directory: Path):
        self._bucket = run_directory if is_bucket(run_directory) else None
        self.directory = run_directory
        if self._bucket:
            name = hashlib.sha256(str(run_directory).encode()).hexdigest()[:16]
            self.directory = Path(tempfile.gettempdir()) / f"maxtext_lite-{os.getuid()}" / name
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def make(self) -> None:
        """Makes the directory; a local one for a bucket is this user's alone."""
        if self._bucket:
            self.directory.parent.mkdir(mode=0o700, exist_ok=True)
            if self.directory.parent.stat().st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it belongs to another user", str(self.directory.parent))
        self.directory.mkdir(parents=True, exist_ok=True)

    def fetch(self) -> None:
        """Downloads the bucket's files; whatever a killed process did not write or upload is written again."""
        for folder in (self.directory, self.directory / "hf"):
            for path in folder.glob("*"):
                if path.suffix == TEMPORARY and path.is_file():
                    path.unlink(missing_ok=True)
        if self._bucket:
            shutil.rmtree(self.directory)
            self.directory.mkdir()
            fetch(self._bucket, self.directory, but=())
            self._uploaded = dict(self._states())

    def upload(self) -> None:
        """Uploads the files that have changed."""
        with self._lock:
            for path, state in self._states() if self._bucket else ():
                if self._uploaded.get(path) == state:
                    continue
                system, root = file_system(str(self._bucket))
                with tempfile.NamedTemporaryFile(dir=self.directory.parent) as whole:
                    shutil.copyfile(path, whole.name)  # the file may grow during the upload
                    with storage_errors(self._bucket):
                        system.put_file(whole.name, f"{root}/{path.relative_to(self.directory).as_posix()}")
                self._uploaded[path] = state

    def remove_gone(self) -> None:
        """Removes from the bucket the fetched files that are no longer here."""
        with self._lock:
            for path in [each for each in self._uploaded if not each.exists()]:
                system, root = file_system(str(self._bucket))
                with contextlib.suppress(FileNotFoundError), storage_errors(self._bucket):
                    system.rm_file(f"{root}/{path.relative_to(self.directory).as_posix()}")
                del self._uploaded[path]

    def close(self) -> None:
        """Uploads changed files and removes the local directory of a bucket."""
        if self._bucket:
            self.upload()
            shutil.rmtree(self.directory)

    def _states(self) -> list[tuple[Path, tuple[int, int]]]:
        """Each file, with its size and modification time."""
        paths = sorted(path for path in self.directory.rglob("*") if path.is_file() and path.suffix != TEMPORARY)
        return [(path, (about.st_size, about.st_mtime_ns)) for path in paths for about in [path.stat()]]


def package_versions() -> dict[str, str]:
    """The versions of the packages on which the numbers of a run depend, of those that are installed."""
    packages = ("maxtext-lite", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions: dict[str, str] = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def environment() -> dict[str, Any]:
    """The content of environment.json: versions, devices, the git commit and the working directory."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": package_versions(),
        "devices": [device.device_kind for device in jax.devices()],
        "num_processes": jax.process_count(),
        "git_commit": _git_commit(),
        WORKING_DIRECTORY: str(Path.cwd()),
    }


def _git_commit() -> str | None:
    """The commit of the checkout that contains this file.

    None if git does not answer, and for an installed package, whose environment may be an ignored directory of another
    checkout.
    """
    own = Path(__file__)
    commit = _git("rev-parse", "HEAD", directory=own.parent)
    if not _COMMIT.fullmatch(commit) or _git("check-ignore", own.name, directory=own.parent):
        return None
    return commit.decode()


def _git(*words: str, directory: Path) -> bytes:
    """The output of git; empty if it is not installed, fails or does not answer."""
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_SECONDS_FOR_GIT,
        )
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout.strip()
