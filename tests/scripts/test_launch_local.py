"""Several processes on one machine: what each is told, what is printed, and how all end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.source_tree import REPOSITORY

LAUNCHER = REPOSITORY / "scripts" / "launch_local.py"
TOLD = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start(*options: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
    """The launcher with `--processes 2 --grace 0.3`, unless the options say otherwise."""
    return subprocess.Popen(
        [sys.executable, "-I", str(LAUNCHER), "--processes", "2", "--grace", "0.3", *options, "--", *command],
        env={"PATH": os.environ["PATH"], **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run(*options: str, command: list[str], **environment: str) -> tuple[int, bytes, bytes]:
    process = start(*options, command=command, **environment)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def shell(program: str) -> list[str]:
    return ["bash", "-c", program]


def by_process(zero: str, one: str) -> list[str]:
    return shell(f"if [ $JAX_PROCESS_ID = 0 ]; then {zero}; else {one}; fi")


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_process_is_told_who_it_is_and_all_one_coordinator_on_this_machine_only():
    code, output, errors = run("--processes", "3", command=shell(f"echo {' '.join(f'${name}' for name in TOLD)}"))
    assert (code, errors) == (0, b"")
    lines = sorted(output.decode().splitlines())
    assert len(lines) == 3
    ports = {re.fullmatch(rf"\[{i}\] (127\.0\.0\.1:\d+) \1 3 {i}", line)[1] for i, line in enumerate(lines)}
    assert len(ports) == 1


def test_a_proxy_is_not_asked_for_this_machine():
    code, output, _ = run("--processes", "1", command=shell("echo $no_proxy"), NO_PROXY="example.org")
    assert (code, output) == (0, b"[0] example.org,127.0.0.1\n")
    code, output, _ = run("--processes", "1", command=shell("echo $no_proxy"), https_proxy="http://example.org:3128")
    assert (code, output) == (0, b"[0] 127.0.0.1\n")
    code, output, _ = run("--processes", "1", command=shell("echo ${no_proxy-unset}"))
    assert (code, output) == (0, b"[0] unset\n")


SEEN = shell('echo "$XLA_FLAGS|$JAX_PLATFORMS|$JAX_CPU_COLLECTIVES_IMPLEMENTATION|$PYTHONUNBUFFERED"')


@pytest.mark.parametrize(("options", "environment", "seen"), [
    (["--devices-per-process", "4"], {}, "--xla_force_host_platform_device_count=4|cpu|gloo|1"),
    (
        ["--devices-per-process", "2"],
        {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2", "JAX_PLATFORMS": "cuda"},
        "--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=2|cuda|gloo|1",
    ),
    ([], {"XLA_FLAGS": "--xla_a=1"}, "--xla_a=1||gloo|1"),
    ([], {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi"}, "||mpi|1"),
])  # fmt: skip
def test_devices_are_simulated_where_asked_and_the_users_other_choices_stand(options, environment, seen):
    code, output, _ = run("--processes", "1", *options, command=SEEN, **environment)
    assert (code, output.decode()) == (0, f"[0] {seen}\n")


def test_every_line_has_its_process_whatever_its_bytes_and_streams_stay_apart():
    program = (
        "import sys; out = sys.stdout.buffer\n"
        "out.write(b'y' * 300_000 + b'\\n\\n\\xff\\xfe caf\\xc3\\xa9\\r\\nlast, without an end'); out.flush()\n"
        "print('to stderr', file=sys.stderr)"
    )
    code, output, errors = run("--processes", "1", command=[sys.executable, "-c", program])
    assert code == 0
    assert output == b"[0] " + b"y" * 300_000 + b"\n[0] \n[0] \xff\xfe caf\xc3\xa9\r\n[0] last, without an end\n"
    assert errors == b"[0] to stderr\n"


def test_lines_of_all_processes_come_whole_and_as_they_are_written():
    code, output, _ = run(command=shell("for i in $(seq 2000); do echo $JAX_PROCESS_ID-$i; done"))
    assert code == 0
    lines = output.decode().splitlines()
    for process in (0, 1):
        assert [line for line in lines if line[1] == str(process)] == [
            f"[{process}] {process}-{i}" for i in range(1, 2001)
        ]


def test_a_line_is_passed_on_before_the_process_ends():
    process = start("--processes", "1", command=[sys.executable, "-c", "print('early'); import time; time.sleep(60)"])
    assert process.stdout is not None
    assert process.stdout.readline() == b"[0] early\n"
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(("zero", "one", "code"), [
    ("exit 0", "exit 0", 0),
    ("exit 0", "sleep 0.2; exit 3", 3),
    ("sleep 60", "exit 2", 2),  # the other one is ended, which is not its failure
    ("exec sleep 60", "exit 2", 2),
    ("trap 'exit 1' TERM; while :; do sleep 0.1; done", "exit 75", 75),  # the first that fails
    ("trap '' TERM; while :; do sleep 0.1; done", "exit 7", 7),  # only SIGKILL ends it
    ("trap 'exit 0' TERM; while :; do sleep 0.1; done", "kill -SEGV $$", 128 + signal.SIGSEGV),
])  # fmt: skip
def test_one_that_fails_ends_all_and_its_exit_code_is_that_of_the_run(zero, one, code):
    started = time.monotonic()
    assert run(command=by_process(zero, one))[0] == code
    assert time.monotonic() - started < 20


def test_the_others_may_end_by_themselves_after_a_failure():
    code, output, _ = run("--grace", "20", command=by_process("sleep 0.5; echo saved", "exit 3"))
    assert (code, output) == (3, b"[0] saved\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_every_process_once_and_their_75_comes_back_however_long_saving_takes(number):
    # The process that saves for longer than --grace is not disturbed by the one that has ended with 75.
    save = (
        "import os, signal, time\n"
        "def save(*_):\n print('got it'); time.sleep(1.5 * int(os.environ['JAX_PROCESS_ID'])); os._exit(75)\n"
        f"signal.signal({int(number)}, save); print('ready')\n"
        "time.sleep(60)"
    )
    process = start(command=[sys.executable, "-c", save])
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == [b"[0] ready\n", b"[1] ready\n"]
    os.killpg(process.pid, number)  # as Ctrl-C does: to the whole group of the terminal
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert sorted(output.splitlines()) == [b"[0] got it", b"[1] got it"]


def test_130_in_answer_to_a_signal_is_that_of_the_run_and_no_failure_of_its_own():
    answer = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: os._exit(130)); print('ready')\n"
        "time.sleep(60)"
    )
    process = start(command=[sys.executable, "-c", answer])
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == [b"[0] ready\n", b"[1] ready\n"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    # One that fails, and another that we end: it had nothing to save, and the failure counts.
    assert run(command=by_process("trap 'exit 130' TERM; while :; do sleep 0.1; done", "sleep 0.3; exit 3"))[0] == 3


def test_a_second_signal_ends_what_does_not_answer():
    process = start(command=shell("trap '' TERM; echo ready; while :; do sleep 0.1; done"))
    assert process.stdout is not None
    assert process.stdout.readline().endswith(b"ready\n")
    assert process.stdout.readline().endswith(b"ready\n")
    process.terminate()
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL


def is_running(pid: int) -> bool:
    """Whether the process is there and not a zombie that nobody has asked about."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
def test_a_killed_launcher_leaves_no_process_behind():
    process = start(command=shell("trap '' TERM HUP PIPE; sleep 600 & echo $$ $!; wait"))
    assert process.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()[1:]]
    assert len(pids) == 4
    assert all(map(is_running, pids))
    process.kill()
    process.communicate(timeout=30)  # until the last writer has closed
    wait_for(lambda: not any(map(is_running, pids)))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
def test_what_a_process_leaves_behind_does_not_keep_the_run_open():
    code, output, _ = run("--processes", "1", command=shell("sleep 600 & echo $!"))
    assert code == 0
    wait_for(lambda: not is_running(int(output.split()[1])))


def test_a_reader_that_has_seen_enough_ends_the_run_as_it_ends_a_plain_command():
    process = start("--processes", "1", command=["yes"])
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"[0] y\n"
    process.stdout.close()
    assert process.wait(timeout=30) in (1, 128 + signal.SIGPIPE)
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize(("arguments", "message"), [
    (["--processes", "0", "--", "true"], "argument --processes: 0 is not a whole number of at least 1. Nearest"),
    (["--processes", "two", "--", "true"], "argument --processes: two is not a whole number of at least 1. Nearest"),
    (["--processes", "2", "--devices-per-process", "-1", "--", "true"], "argument --devices-per-process: "),
    (["--processes", "2", "--grace", "nan", "--", "true"], "argument --grace: nan is not a number of seconds."),
    (["--", "true"], "the following arguments are required: --processes"),
    (["--processes", "2"], "there is no command; it stands after ` -- `"),
    (["--processes", "2", "--"], "there is no command; it stands after ` -- `"),
    (["--processes", "2", "true"], "unrecognized arguments: true"),
    (["--processes", "2", "--", "no-such-command"], "no-such-command cannot be started: No such file or directory."),
])  # fmt: skip
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments: list[str], message: str):
    result = subprocess.run([sys.executable, "-I", LAUNCHER, *arguments], capture_output=True, text=True, timeout=30)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_help_says_what_it_does():
    result = subprocess.run([sys.executable, "-I", LAUNCHER, "--help"], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0
    assert "--devices-per-process" in result.stdout
