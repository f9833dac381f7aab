#!/usr/bin/env python3
"""Runs a command as N processes of one run on this machine. Needs Python 3.11 or newer and nothing else.

  scripts/launch_local.py --processes 2 --devices-per-process 4 -- .venv/bin/python -m maxtext_lite.train steps=20

Each line of output begins with the number of its process. SIGINT, SIGTERM and SIGHUP go to every process. When one
fails, the others are stopped. Exit code: that of the first process that failed of its own accord; 0 when none did; 75
or 130 when a signal stopped the run and the processes answered with it (saved, or nothing to save yet); 130 for a
signal before any start; 2 for wrong arguments, before any start.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, NoReturn

EXIT_WRONG_ARGUMENTS = 2
EXIT_STOPPED_BY_SIGNAL = 75
EXIT_INTERRUPTED = 130

_ANSWERS = (EXIT_STOPPED_BY_SIGNAL, EXIT_INTERRUPTED)
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIMULATED = "--xla_force_host_platform_device_count="
_POLL_SECONDS = 0.02


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _refuse(message)


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(EXIT_WRONG_ARGUMENTS)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1. Nearest that works: 1.")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds.")
    return seconds


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options before the first `--`, and the command after it; wrong ones end the process with exit code 2."""
    parser = _Parser(
        prog="launch_local.py",
        usage="%(prog)s --processes N [--devices-per-process M] [--grace SECONDS] -- COMMAND [ARGUMENT ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=_count, required=True, metavar="N", help="how often COMMAND is started")
    parser.add_argument(
        "--devices-per-process",
        type=_count,
        metavar="M",
        help="CPU devices that each process simulates; without it the platform and its devices are left alone",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="after a failure: how long the others may take to end by themselves, and again after SIGTERM (default: 5)",
    )
    split = argv.index("--") if "--" in argv else len(argv)
    options, command = parser.parse_args(argv[:split]), list(argv[split + 1 :])
    if not command:
        parser.error("there is no command; it stands after ` -- `, as in: --processes 2 -- python train.py")
    return options, command


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing was listening a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment_of(
    process: int, inherited: Mapping[str, str], *, num_processes: int, devices_per_process: int | None, port: int
) -> dict[str, str]:
    """The environment that makes a process number `process` of the run; maxtext_lite.parallel reads it.

    Args:
      devices_per_process: simulated CPU devices; None leaves XLA_FLAGS and JAX_PLATFORMS as they are.
      port: where process 0 waits for the others, on 127.0.0.1 and nowhere else.
    """
    address = f"127.0.0.1:{port}"
    environment = {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        **inherited,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(process),
        "PYTHONUNBUFFERED": "1",
    }
    if any(name.lower().endswith("_proxy") for name in inherited):  # gRPC would look for 127.0.0.1 behind the proxy
        unproxied = inherited.get("no_proxy", inherited.get("NO_PROXY", ""))
        environment["no_proxy"] = ",".join([*filter(None, [unproxied]), "127.0.0.1"])
    if devices_per_process is not None:
        kept = [flag for flag in inherited.get("XLA_FLAGS", "").split() if not flag.startswith(_SIMULATED)]
        environment["XLA_FLAGS"] = " ".join([*kept, f"{_SIMULATED}{devices_per_process}"])
        environment.setdefault("JAX_PLATFORMS", "cpu")
    return environment


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left; macOS answers so for zombies
        os.killpg(pid, signal.SIGKILL)


@dataclass
class _Process:
    """One of the run's processes, in a session of its own: Ctrl-C at the terminal reaches it once, through us."""

    number: int
    popen: subprocess.Popen[bytes]
    readers: list[threading.Thread] = field(default_factory=list)
    sent: set[int] = field(default_factory=set)  # the signals that it got from us

    @property
    def code(self) -> int | None:
        """None while it runs, its exit code, or minus the signal that ended it."""
        return self.popen.poll()

    @property
    def ended_by_us(self) -> bool:
        """Whether one of our signals ended it, or its command, which a shell reports as 128 + signal."""
        return self.code is not None and self.exit_code - 128 in self.sent

    @property
    def exit_code(self) -> int:
        """What a shell would report: 128 + signal where one ended it."""
        code = self.code
        assert code is not None
        return 128 - code if code < 0 else code

    def send(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        self.sent.add(number)
        self.popen.send_signal(number)

    def kill_group(self) -> None:
        """Kills it and everything that it started in its session."""
        self.sent.add(signal.SIGKILL)
        _kill_group(self.popen.pid)


class _Guard:
    """A process that outlives this one by a moment: if this one ends unexpectedly, it kills what was started."""

    def __init__(self) -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._watch(read)
        os.close(read)

    def _watch(self, read: int) -> NoReturn:
        try:
            os.setsid()
            for number in _FORWARDED:
                signal.signal(number, signal.SIG_IGN)
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2, self._write):  # does not hold our output open
                os.dup2(nothing, descriptor)
            running: set[int] = set()
            with os.fdopen(read, "rb") as lines:
                for line in lines:  # pid: it has started; -pid: it has ended
                    pid = int(line)
                    if pid > 0:
                        running.add(pid)
                    else:
                        running.discard(-pid)
            for pid in running:
                _kill_group(pid)
        finally:
            os._exit(0)

    def tell(self, pid: int) -> None:
        """A process group has started, or with a minus has ended."""
        os.write(self._write, f"{pid}\n".encode())

    def dismiss(self) -> None:
        """Ends it."""
        os.close(self._write)
        os.waitpid(self._pid, 0)


def _copy_lines(source: BinaryIO, target: int, prefix: bytes, lock: threading.Lock) -> None:
    """Copies every line, whatever its bytes, behind a prefix and with a newline; ends when the writers have closed."""
    with source:
        for line in source:
            waiting = memoryview(prefix + line.removesuffix(b"\n") + b"\n")
            try:
                with lock:
                    while waiting:
                        waiting = waiting[os.write(target, waiting) :]
            except BrokenPipeError:
                return  # nobody reads: closing our end tells the process, as if it wrote there itself


def start(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], started: Callable[[int], None]
) -> list[_Process]:
    """Starts the command in each environment, and calls `started` with each process id.

    Raises:
      OSError: the command cannot be started; none of it runs then.
    """
    lock = threading.Lock()
    processes: list[_Process] = []
    for number, environment in enumerate(environments):
        try:
            popen = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError:
            for process in processes:
                process.kill_group()
            raise
        started(popen.pid)
        process = _Process(number, popen)
        for source, target in ((popen.stdout, sys.stdout.fileno()), (popen.stderr, sys.stderr.fileno())):
            arguments = (source, target, f"[{number}] ".encode(), lock)
            process.readers.append(threading.Thread(target=_copy_lines, args=arguments, daemon=True))
            process.readers[-1].start()
        processes.append(process)
    return processes


class Run:
    """The processes from their start to their end."""

    def __init__(self, processes: Sequence[_Process], *, grace_seconds: float, ended: Callable[[int], None]):
        self._processes = list(processes)
        self._running = list(processes)
        self._ended = ended
        self._grace_seconds = grace_seconds
        self._failures: list[_Process] = []
        self._num_signals = 0
        self._deadline: float | None = None
        self._terminated = False

    def wait(self, signals: list[int]) -> int:
        """Waits until all have ended and returns the exit code of the run.

        Args:
          signals: those to forward; handlers append to it at any time.
        """
        while self._running:
            while signals:
                self._forward(signals.pop(0))
            for process in [process for process in self._running if process.code is not None]:
                self._reap(process)
            self._end_the_rest()
            time.sleep(_POLL_SECONDS)
        self._drain()
        if not self._failures:
            return 0
        first = min(self._failures, key=self._rank)
        if first.code is not None and first.code < 0 and not first.sent:  # it could say nothing itself
            print(f"[{first.number}] ended by signal {-first.code}", file=sys.stderr)
        return first.exit_code

    def _rank(self, process: _Process) -> int:
        """The failure that decides; of equal rank, the first."""
        return 2 if process.ended_by_us else int(bool(process.sent) and process.code in _ANSWERS)

    def _may_still_be_saved(self, process: _Process) -> bool:
        """Whether the others can be busy with what this one has done."""
        return self._num_signals > 0 and process.code == EXIT_STOPPED_BY_SIGNAL

    def _forward(self, number: int) -> None:
        self._num_signals += 1
        for process in self._running:
            process.send(number)
        if self._num_signals > 1:  # a second signal means: do not wait
            self._start_the_clock()

    def _reap(self, process: _Process) -> None:
        self._running.remove(process)
        self._ended(process.popen.pid)
        if process.code:
            self._failures.append(process)
            if not self._may_still_be_saved(process):
                self._start_the_clock()

    def _start_the_clock(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_seconds

    def _end_the_rest(self) -> None:
        if self._deadline is None or time.monotonic() < self._deadline:
            return
        for process in self._running:
            if self._terminated:
                process.kill_group()
            else:
                process.send(signal.SIGTERM)
        self._terminated = True
        self._deadline = time.monotonic() + self._grace_seconds

    def _drain(self) -> None:
        """Waits for the last lines; what a process left behind, holding its output, is ended after the grace."""
        deadline = time.monotonic() + self._grace_seconds
        for process in self._processes:
            for reader in process.readers:
                reader.join(max(0.0, deadline - time.monotonic()))
            if any(reader.is_alive() for reader in process.readers):
                process.kill_group()
                for reader in process.readers:
                    reader.join(1.0)  # longer only where something left the session, which is its own business


def main(argv: Sequence[str]) -> int:
    """Runs the command that the arguments name and returns the exit code of the run."""
    signals: list[int] = []
    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(number, lambda received, _: signals.append(received))
    options, command = parse(argv)
    port = free_port()
    environments = [
        environment_of(
            process,
            os.environ,
            num_processes=options.processes,
            devices_per_process=options.devices_per_process,
            port=port,
        )
        for process in range(options.processes)
    ]
    if signals:
        return EXIT_INTERRUPTED
    guard = _Guard()
    try:
        processes = start(command, environments, guard.tell)
    except OSError as error:
        _refuse(f"{command[0]} cannot be started: {error.strerror}.")
    code = Run(processes, grace_seconds=options.grace, ended=lambda pid: guard.tell(-pid)).wait(signals)
    guard.dismiss()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
