"""The run directory, and the files that the first host writes there, but for checkpoints.

In a bucket nothing can be appended to or renamed. There they are written into a directory of this machine and uploaded,
each file whole: before a checkpoint counts, so that metrics.jsonl in the bucket always has the steps of the newest one,
and at the end of the run. A run that goes on begins with what the bucket has.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path

from maxtext_lite.config import RunConfig
from maxtext_lite.config.bucket import any_path, fetch, file_system, is_bucket, reaching, storage_errors
from maxtext_lite.config.errors import writing


def run_directory(config: RunConfig) -> Path:
    """Where all that a run writes goes.

    Raises:
      UserError: it is in a bucket, for which an extra is not installed.
    """
    return any_path(config.base_output_directory, "base_output_directory") / config.run_name


def write_json(path: Path, value: object) -> None:
    """Writes a file of JSON.

    Raises:
      UserError: it cannot be written.
    """
    with writing(path):
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def has_checkpoints(directory: Path) -> bool:
    """Whether a run directory holds any, or what is left of one.

    Raises:
      UserError: its bucket cannot be read.
    """
    with reaching(directory, "base_output_directory"):
        return any((directory / "checkpoints").glob("*"))


class RunFiles:
    """The files of a run directory. What it does raises OSError.

    Attributes:
      directory: where they are written; of a bucket, follows from its path.
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
        """Makes the directory, for this user alone where it is not the run directory."""
        if self._bucket:
            self.directory.parent.mkdir(mode=0o700, exist_ok=True)
            if self.directory.parent.stat().st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it belongs to another user", str(self.directory.parent))
        self.directory.mkdir(parents=True, exist_ok=True)

    def fetch(self) -> None:
        """Begins with the files that the bucket has; those that a killed process had not uploaded are made again."""
        if self._bucket:
            shutil.rmtree(self.directory)
            self.directory.mkdir()
            fetch(self._bucket, self.directory, parts=("",), but=())
            self._uploaded = dict(self._states())

    def upload(self) -> None:
        """Writes the files that have changed into the bucket."""
        with self._lock:
            for path, state in self._states() if self._bucket else ():
                if self._uploaded.get(path) == state:
                    continue
                system, root = file_system(str(self._bucket))
                with tempfile.NamedTemporaryFile(dir=self.directory.parent) as whole:
                    shutil.copyfile(path, whole.name)  # it may grow while it is uploaded
                    with storage_errors(self._bucket):
                        system.put_file(whole.name, f"{root}/{path.relative_to(self.directory).as_posix()}")
                self._uploaded[path] = state

    def close(self) -> None:
        """Uploads what is left, and removes what is not in the run directory."""
        if self._bucket:
            self.upload()
            shutil.rmtree(self.directory)

    def _states(self) -> list[tuple[Path, tuple[int, int]]]:
        """Each file, with its size and when it was written to."""
        paths = sorted(path for path in self.directory.rglob("*") if path.is_file() and path.suffix != ".tmp")
        return [(path, (about.st_size, about.st_mtime_ns)) for path in paths for about in [path.stat()]]
