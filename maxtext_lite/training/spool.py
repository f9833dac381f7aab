"""The files of a run directory in a bucket, on this machine while they are written.

What is appended to or renamed cannot be in a bucket. So everything but checkpoints is written here and uploaded, each
file whole: before a checkpoint counts, so that metrics.jsonl in the bucket always has the steps of the newest one, and
at the end of the run. A run that goes on begins with what the bucket has.
"""

import hashlib
import os
import shutil
import tempfile
import threading
from pathlib import Path

from maxtext_lite.config.bucket import fetch, file_system, storage_errors


class Spool:
    """The local side of a run directory in a bucket.

    Attributes:
      directory: where files are written; it follows from the bucket's path, and is emptied by `fetch`.
    """

    def __init__(self, url: Path):
        self._url = url
        name = hashlib.sha256(str(url).encode()).hexdigest()[:16]
        self.directory = Path(tempfile.gettempdir()) / f"maxtext_lite-{os.getuid()}" / name
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def fetch(self) -> None:
        """Starts with the files that the bucket has.

        Raises:
          OSError: they cannot be read, or not be written here.
        """
        self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.directory.parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.directory.parent} is another user's")
        if self.directory.exists():  # of a process that was killed; what it had not uploaded is made again
            shutil.rmtree(self.directory)
        self.directory.mkdir()
        fetch(self._url, self.directory, parts=("",), but=())
        self._uploaded = dict(self._files())

    def upload(self) -> None:
        """Writes the files that have changed into the bucket.

        Raises:
          OSError: one cannot be written.
        """
        with self._lock:
            system, root = file_system(self._url)
            for path, state in self._files():
                if self._uploaded.get(path) == state:
                    continue
                with tempfile.NamedTemporaryFile(dir=self.directory.parent) as whole:
                    shutil.copyfile(path, whole.name)  # it may grow while it is uploaded
                    with storage_errors(self._url):
                        system.put_file(whole.name, f"{root}/{path.relative_to(self.directory).as_posix()}")
                self._uploaded[path] = state

    def close(self) -> None:
        """Uploads what is left, and removes the directory.

        Raises:
          OSError: something cannot be written.
        """
        self.upload()
        shutil.rmtree(self.directory)

    def _files(self) -> list[tuple[Path, tuple[int, int]]]:
        """Each file, with its size and when it was written to."""
        paths = sorted(path for path in self.directory.rglob("*") if path.is_file() and path.suffix != ".tmp")
        return [(path, (about.st_size, about.st_mtime_ns)) for path in paths for about in [path.stat()]]
