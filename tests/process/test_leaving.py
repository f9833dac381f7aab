"""A process whose abandoned work goes on ends at once, with its exit code, its output and what it had to do at exit."""

import os
import subprocess
import sys

import pytest

from tests.source_tree import REPOSITORY

PROGRAM = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from maxtext_lite.console import abandon, leave

pool, begun, may_end = ThreadPoolExecutor(1), threading.Event(), threading.Event()
pool.submit(int).result()

def compile():
    begun.set()
    may_end.wait({seconds})

work = [pool.submit(compile), pool.submit(compile)]
assert begun.wait(60)
pool.shutdown(wait=False, cancel_futures=True)
abandon(work)
atexit.register(lambda: print("at exit"))
print("said", end=" ")
if {seconds} == 0:
    work[0].result()
leave(75)
print("went on", end=" ")
"""


@pytest.mark.parametrize(
    ("seconds", "code", "said"),
    [(1000, 75, "said at exit\n"), (0, 0, "said went on at exit\n")],
)
def test_only_work_that_is_still_running_makes_it_leave_early(seconds, code, said):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", PROGRAM.format(seconds=seconds)]
    ended = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, said, "")
