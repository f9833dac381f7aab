"""jax's private client, in the installed version: its store, and its abort when process 0 is gone."""

import signal
import socket
import time
from types import SimpleNamespace

import pytest

from maxtext_lite.parallel import coordination
from maxtext_lite.parallel.coordination import coordinator_answers
from tests.processes import quick_python, run_launched

# One process fails or is killed while the other waits for it in a collective.
PROGRAM = """
import os, pathlib, signal, sys
from maxtext_lite.config import UserError
from maxtext_lite.cli import run_command
from maxtext_lite.parallel import exchange, start_devices
from maxtext_lite.config.phases import observers
from maxtext_lite.operations.watchdog import watchdog
def main(argv):
    watchdog.start(300, pathlib.Path(sys.argv[1]))
    observers.append(watchdog)
    start_devices()
    watchdog.enter("step", 7)
    exchange(0)
    if os.environ["JAX_PROCESS_ID"] == sys.argv[2]:
        if sys.argv[3] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[3] == "bug":
            raise AssertionError("a bug")
        raise UserError("the disk is full.")
    exchange(1)
sys.exit(run_command(main))
"""


def launch(directory, process, how):
    """The result of two processes, of which one fails."""
    words = [*quick_python(), "-c", PROGRAM, str(directory), str(process), how]
    return run_launched(words, "--grace", "60", processes=2, devices=1)


@pytest.mark.parametrize(
    ("process", "how", "code", "reason"),
    [
        (0, "failed", 2, "the disk is full."),
        (1, "failed", 2, "the disk is full."),
        (1, "bug", 1, "AssertionError: a bug"),
    ],
)
def test_if_one_fails_the_others_say_who_and_why_and_exit_with_its_code(
    process, how, code, reason, tmp_path
):
    began = time.monotonic()
    ended = launch(tmp_path, process, how)
    assert time.monotonic() - began < 60  # the grace of the launcher, and no signal
    assert ended.returncode == code
    (other,) = [
        line
        for line in ended.stderr.splitlines()
        if line.startswith(f"[{1 - process}] error: ")
    ]
    assert other.startswith(f"[{1 - process}] error: process {process} ")
    assert other.endswith(f"has failed with exit code {code}: {reason}")
    assert not [*tmp_path.iterdir()]  # stacks are of a run that hangs


def test_if_process_0_is_killed_the_others_name_it_and_exit_with_76(tmp_path):
    ended = launch(tmp_path, 0, "killed")
    assert ended.returncode == 128 + signal.SIGKILL  # the first that failed
    (said,) = [
        line for line in ended.stderr.splitlines() if line.startswith("[1] error:")
    ]
    assert "process 0 (coordinator)" in said
    assert "does not answer" in said
    assert "Exit code 76. Stacks of process 1 on" in said
    assert "in step 7" in said
    assert (tmp_path / "stacks-1.txt").read_text().startswith(said.removeprefix("[1] "))


def test_process_0_answers_if_its_port_does(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(
            coordination.distributed,
            "global_state",
            SimpleNamespace(coordinator_address=address),
        )
        assert coordinator_answers()
    assert not coordinator_answers()
