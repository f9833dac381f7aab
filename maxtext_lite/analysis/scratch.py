"""A temporary directory that is removed however the process ends."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

# Its input ends with the process that started it. Processes which that one started may write for a moment longer.
_REMOVE = """
import shutil, sys, time
sys.stdin.read()
for _ in range(30):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.1)
"""


@contextlib.contextmanager
def scratch_directory(prefix: str) -> Generator[Path]:
    """A block with a directory that is removed after it, or by another process if this one is killed.

    Args:
      prefix: of its name, in the directory of temporary files.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as directory:
        remover = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REMOVE, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to this process's group must not reach it
        )
        try:
            yield Path(directory)
        finally:
            remover.kill()
            remover.communicate()
