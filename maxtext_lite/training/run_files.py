"""The run directory, and the files that the first host writes there, other than checkpoints.

In a bucket nothing can be appended or renamed. Its files are written into a temporary directory and uploaded whole at
the end of the run and before each checkpoint counts: metrics.jsonl in the bucket always has the steps of the newest.
A resumed run starts from the files in the bucket.
"""

import contextlib
import errno
import importlib.metadata
import json
import platform
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

LEASE = "lease"
"""A subdirectory of the run directory, present while a run writes there."""


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
      directory: where they are written; for a bucket, a temporary directory once `make` has made it.
    """

    def __init__(self, run_directory: Path):
        self.directory = run_directory
        self._bucket = run_directory if is_bucket(run_directory) else None
        self._uploaded: dict[Path, int] = {}
        self._lock = threading.Lock()

    def make(self) -> None:
        """Makes the directory."""
        if self._bucket:
            self.directory = Path(tempfile.mkdtemp(prefix="maxtext_lite-"))
        self.directory.mkdir(parents=True, exist_ok=True)

    def fetch(self) -> None:
        """Downloads the bucket's files, or removes what a killed process has left half written."""
        if self._bucket:
            fetch(self._bucket, self.directory, but=())
            self._uploaded = self._modified()
        for folder in (self.directory, self.directory / "hf"):
            for path in folder.glob(f"*{TEMPORARY}"):
                path.unlink(missing_ok=True)

    def upload(self) -> None:
        """Uploads the files that have changed, and removes from the bucket those that are gone."""
        if self._bucket is None:
            return
        system, root = file_system(self._bucket)
        with self._lock, storage_errors(self._bucket):
            modified = self._modified()
            for path in self._uploaded.keys() - modified.keys():
                with contextlib.suppress(FileNotFoundError):
                    system.rm_file(f"{root}/{path.relative_to(self.directory).as_posix()}")
            for path, seconds in modified.items():
                if self._uploaded.get(path) == seconds:
                    continue
                with tempfile.NamedTemporaryFile() as whole:
                    shutil.copyfile(path, whole.name)  # the file may grow during the upload
                    system.put_file(whole.name, f"{root}/{path.relative_to(self.directory).as_posix()}")
            self._uploaded = modified

    def close(self) -> None:
        """Uploads changed files and removes the temporary directory of a bucket."""
        if self._bucket:
            self.upload()
            shutil.rmtree(self.directory)

    def _modified(self) -> dict[Path, int]:
        """Each file, with its modification time in nanoseconds."""
        paths = [path for path in self.directory.rglob("*") if path.is_file() and path.suffix != TEMPORARY]
        return {path: path.stat().st_mtime_ns for path in sorted(paths)}


def package_versions() -> dict[str, str]:
    """The versions of installed packages that a run's numbers depend on."""
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
    """The commit of the checkout that contains this file; None without git.

    None also for an installed package, whose environment may be an ignored directory of another checkout.
    """
    if _git("check-ignore", Path(__file__).name):
        return None
    return _git("rev-parse", "HEAD") or None


def _git(*words: str) -> str:
    """The output of git beside this file; "" if it is not installed, fails or does not answer."""
    try:
        return subprocess.check_output(
            ["git", *words],
            cwd=Path(__file__).parent,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=10,
            text=True,
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return ""
