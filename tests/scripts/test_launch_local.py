"""Several processes on one machine: what each is told, what is printed, and how all end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.scripts.test_shell import WITH_SIGNALS
from tests.source_tree import REPOSITORY

LAUNCHER = [sys.executable, "-I", str(REPOSITORY / "scripts" / "launch_local.py")]
SECONDS = 60  # a launcher that takes longer is killed, and its processes with it
TOLD = "$JAX_COORDINATOR_ADDRESS $JAX_COORDINATOR_BIND_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID"


@pytest.fixture
def start():
    """Starts the launcher with `--processes 2 --grace 0.3`, unless the options say otherwise."""
    with contextlib.ExitStack() as stack:

        def run(*options, command, **environment):
            usual = "--processes 2 --grace 0.3"
            words = [*WITH_SIGNALS, *LAUNCHER, *usual.split(), *options, "--", *command]
            environment = {"PATH": os.environ["PATH"], **environment}
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                words, env=environment, stdout=pipe, stderr=pipe, start_new_session=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            timer = threading.Timer(SECONDS, process.kill)
            timer.start()
            stack.callback(timer.cancel)
            return process

        yield run


@pytest.fixture
def run(start):
    """Its exit code, output and errors."""

    def ended(*options, command, **environment):
        process = start(*options, command=command, **environment)
        output, errors = process.communicate()
        return process.returncode, output, errors

    return ended


def shell(program):
    return ["bash", "-c", program]


def by_process(zero, one):
    return shell(f"if [ $JAX_PROCESS_ID = 0 ]; then {zero}; else {one}; fi")


def test_each_process_is_told_who_it_is_and_all_one_coordinator_on_this_machine_only(
    run,
):
    code, output, errors = run("--processes", "3", command=shell(f"echo {TOLD}"))
    assert (code, errors) == (0, b"")
    lines = sorted(output.decode().splitlines())
    assert len(lines) == 3
    ports = {
        re.fullmatch(rf"\[{i}\] (127\.0\.0\.1:\d+) \1 3 {i}", line)[1]
        for i, line in enumerate(lines)
    }
    assert len(ports) == 1


@pytest.mark.fast
@pytest.mark.parametrize(
    ("zero", "one", "code"),
    [
        ("sleep 60", "exit 2", 2),  # the other one is ended, which is not its failure
        (
            "trap 'exit 1' TERM; while :; do sleep 0.1; done",
            "exit 75",
            75,
        ),  # the first that fails
        (
            "trap '' TERM; while :; do sleep 0.1; done",
            "exit 7",
            7,
        ),  # only SIGKILL ends it
        (
            "trap 'exit 0' TERM; while :; do sleep 0.1; done",
            "kill -SEGV $$",
            128 + signal.SIGSEGV,
        ),
    ],
)
def test_one_that_fails_ends_all_and_its_exit_code_is_that_of_the_run(
    zero, one, code, run
):
    assert run(command=by_process(zero, one))[0] == code


def test_the_end_names_the_process_that_a_signal_ended(run):
    killed = by_process("sleep 0.2; exit 76", "kill -9 $$")
    code, output, errors = run("--grace", "20", command=killed)
    assert (code, output, errors) == (137, b"", b"[1] ended by signal 9\n")


def test_the_others_may_end_by_themselves_after_a_failure(run):
    code, output, _ = run(
        "--grace", "20", command=by_process("sleep 0.5; echo saved", "exit 3")
    )
    assert (code, output) == (3, b"[0] saved\n")


# The process that saves for longer than --grace is not disturbed by the one that has ended.
ANSWER = """
import os, signal, sys, time
def answer(*_):
    print('got it', flush=True)
    time.sleep(1.5 * int(os.environ['JAX_PROCESS_ID']))
    os._exit(int(sys.argv[2]))
signal.signal(int(sys.argv[1]), answer)
print('ready', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGHUP, 75)],
)
def test_a_signal_reaches_every_process_once_and_their_answer_comes_back_however_long_saving_takes(
    number, code, start
):
    process = start(command=[sys.executable, "-c", ANSWER, str(int(number)), str(code)])
    assert sorted(process.stdout.readline() for _ in range(2)) == [
        b"[0] ready\n",
        b"[1] ready\n",
    ]
    os.killpg(process.pid, number)  # as Ctrl-C does: to the whole group of the terminal
    output, _ = process.communicate()
    assert process.returncode == code
    assert sorted(output.splitlines()) == [b"[0] got it", b"[1] got it"]


def test_a_second_signal_ends_what_does_not_answer(start):
    process = start(
        command=shell("trap '' TERM; echo ready; while :; do sleep 0.1; done")
    )
    for _ in range(2):
        assert process.stdout.readline().endswith(b"ready\n")
    process.terminate()
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()
    process.communicate()
    assert process.returncode == 128 + signal.SIGKILL


def is_running(pid):
    """Whether the process is there and not a zombie that nobody has asked about."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
@pytest.mark.parametrize("is_killed", [True, False])
def test_neither_a_killed_launcher_nor_one_that_ends_leaves_a_process_behind(
    is_killed, start
):
    wait = "wait" if is_killed else "exit 0"
    process = start(
        command=shell(f"trap '' TERM HUP PIPE; sleep 600 & echo $$ $!; {wait}")
    )
    pids = []
    for _ in range(2):
        pids += map(int, process.stdout.readline().split()[1:])
    assert len(pids) == 4
    if is_killed:
        assert all(map(is_running, pids))
        process.kill()
    process.communicate()  # until the last writer has closed
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "words",
    [
        "--processes 0 -- true",
        "--processes 2 --grace nan -- true",
        "--processes 2 --",
        "--processes 2 -- no-such-command",
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(words):
    command = [*LAUNCHER, *words.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
