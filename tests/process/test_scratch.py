"""A scratch directory is gone after its process, even one that is killed."""

import subprocess
import sys
import time

import pytest

from maxtext_lite.analysis.scratch import scratch_directory

KILLED = """
import os, signal, sys
from maxtext_lite.analysis.scratch import scratch_directory
with scratch_directory("scratch-") as directory:
    (directory / "file").touch()
    print(directory, flush=True)
    os.killpg(0, int(sys.argv[1]))
"""


@pytest.mark.parametrize("signal", ["9", "15"])
def test_it_is_removed_if_the_process_is_killed(tmp_path, monkeypatch, signal):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, signal],
        stdout=subprocess.PIPE,
        start_new_session=True,
        timeout=60,
    )
    assert done.returncode == -int(signal)
    assert done.stdout
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_is_removed_after_the_block():
    with scratch_directory("scratch-") as directory:
        (directory / "file").touch()
    assert not directory.exists()
