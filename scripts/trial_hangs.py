#!/usr/bin/env python3
"""Blocks, stops or kills one process of a run in each of its phases, and shows how the others end.

  python scripts/trial_hangs.py --processes 4 --phases step save --how block stop kill --who 0 2

Each line: the phase, who, how; the exit code of each process; whether a restart ends with the losses of an
undisturbed run; and the error lines, as far as they differ. Exit code 1 if a process ended otherwise than the watchdog
says, or a restart did.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import Popen

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "scripts"))
from launch_local import environment_of, free_port  # noqa: E402

PYTHON = os.environ.get("PYTHON", sys.executable)
PHASES = ("start-up", "compile", "reading", "step", "save", "evaluation")
MODEL = (
    "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=2", "base_mlp_dim=16", "head_dim=8",
    "base_num_decoder_layers=1", "max_target_length=16", "per_device_batch_size=1",
)  # fmt: skip
TINY = (
    *MODEL, "dataset_type=synthetic", "steps=6", "warmup_steps=1", "eval_interval=2", "eval_steps=1",
    "checkpoint_period=2",
)  # fmt: skip

# The command `train`; the process that is asked to hang does so where it enters the phase, from step 3 on.
PROGRAM = """
import os, runpy, signal, sys, time
from maxtext_lite.console import command_signals
from maxtext_lite.operations.watchdog import watchdog
command_signals.install()
phase, how = sys.argv.pop(1), sys.argv.pop(1)
enter = watchdog.enter
def hang(now, step=0, *, enter=enter):
    enter(now, step)
    if now == phase and (step >= 3 or now == "compile"):
        os.write(2, f"HERE {os.getpid()}\\n".encode())
        if how == "block":
            os.read(os.pipe()[0], 1)
        time.sleep(2.5)  # the others are told every second
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
if how != "nothing":
    watchdog.enter = hang
    if phase == "start-up":
        from maxtext_lite.training import opening
        first = opening.machine_of
        opening.machine_of = lambda devices: (hang("start-up", 3, enter=lambda *_: None), first(devices))[1]
runpy.run_module("maxtext_lite.train", run_name="__main__", alter_sys=True)
"""


def started(folder: Path, words_of: Callable[[int], Sequence[str]], *, count: int, devices: int) -> list[Popen]:
    """`count` Python processes of one run with these arguments, each with its own logN in the folder."""
    port, processes = free_port(), []
    for number in range(count):
        variables = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        if count > 1:
            variables = environment_of(number, variables, num_processes=count, devices_per_process=devices, port=port)
        with (folder / f"log{number}").open("w") as log:
            variables |= {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
            processes.append(Popen([PYTHON, *words_of(number)], env=variables, stdout=log, stderr=log))
    return processes


class Run:
    """A run directory, and the processes that write there."""

    def __init__(self, folder: Path, name: str, overrides: Sequence[str]):
        self.folder, self.directory = folder, folder / name
        self.words = [*overrides, "dataset_type=synthetic", f"base_output_directory={folder}", f"run_name={name}"]
        if any(word.startswith("dataset_type=") for word in overrides):
            self.words.remove("dataset_type=synthetic")
        self.processes: list[Popen] = []

    def start(self, count: int = 1, devices: int = 1) -> None:
        """Starts the command."""
        words = ["-m", "maxtext_lite.train", *self.words]
        self.began = time.monotonic()
        self.processes = started(self.folder, lambda _: words, count=count, devices=devices)

    @property
    def runs(self) -> bool:
        """Whether none of its processes has ended."""
        return all(process.poll() is None for process in self.processes)

    def end(self) -> list[int]:
        """The exit code of each process, once all have ended."""
        return [process.wait(600) for process in self.processes]

    @property
    def log(self) -> str:
        """The end of each process's output."""
        return "\n".join((self.folder / f"log{n}").read_text()[-1500:] for n in range(len(self.processes)))

    @property
    def lines(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def last_line(self) -> dict:
        """The last complete one; {} before the first."""
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
            with (self.directory / "metrics.jsonl").open("rb") as file:
                file.seek(-min(file.seek(0, os.SEEK_END), 8192), os.SEEK_END)
                return json.loads(file.read().split(b"\n")[-2])
        return {}


def compared(one: Run, other: Run, *options: str) -> tuple[bool, str]:
    """Whether `verify_resume` finds two runs the same, and what it says."""
    words = [PYTHON, "-m", "maxtext_lite.verify_resume", str(one.directory), str(other.directory), *options]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return ended.returncode == 0, ended.stdout


def run(folder: Path, overrides: list[str], *, count: int, devices: int, who: int, phase: str, how: str) -> list[tuple]:
    """Exit code and output of each process; a stopped process is continued once the others have ended."""

    def words_of(number: int) -> list[str]:
        return ["-c", PROGRAM, phase, how if number == who else "nothing", *TINY, *overrides]

    processes = started(folder, words_of, count=count, devices=devices)
    stopped = processes[who] if how == "stop" else None
    deadline = time.monotonic() + 400
    while any(each.poll() is None for each in processes if each is not stopped) and time.monotonic() < deadline:
        time.sleep(0.2)
    if stopped and (here := re.search(r"HERE (\d+)", (folder / f"log{who}").read_text())):
        os.kill(int(here[1]), signal.SIGCONT)
        time.sleep(5)
    for each in processes:
        if each.poll() is None:
            each.kill()
    return [(each.wait(), (folder / f"log{number}").read_text()) for number, each in enumerate(processes)]


def losses(directory: Path) -> dict[int, float]:
    """The recorded loss of each step."""
    path = directory / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def main() -> int:
    """Runs the requested trials; returns 1 if one ended otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--limit", type=int, default=10, help="hang_timeout_seconds")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--how", nargs="+", choices=("block", "stop", "kill"), default=("block", "stop", "kill"))
    parser.add_argument("--who", nargs="+", type=int, default=(0, 2))
    parser.add_argument("--restart", action="store_true")
    asked = parser.parse_args()
    wrong, size = 0, {"count": asked.processes, "devices": asked.devices}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = [f"base_output_directory={folder}", f"hang_timeout_seconds={asked.limit}"]
        nothing = {"who": -1, "phase": "-", "how": "nothing"}
        for code, log in run(folder, [*words, "run_name=whole"], **size, **nothing):
            assert code == 0, log[-3000:]
        whole = losses(folder / "whole")
        for number, (phase, who, how) in enumerate(itertools.product(asked.phases, asked.who, asked.how)):
            name, began = f"run_name=r{number}", time.monotonic()
            ended = run(folder, [*words, name], **size, who=who, phase=phase, how=how)
            seconds, codes = time.monotonic() - began, [code for code, _ in ended]
            others = [code for process, code in enumerate(codes) if process != who]
            fine = set(others) == {76} and codes[who] == {"block": 76, "kill": -9}.get(how, codes[who])
            said = "-"
            if asked.restart:
                again = run(folder, [*words, name], **size, **nothing)
                fine &= {code for code, _ in again} == {0} and losses(folder / f"r{number}") == whole
                found = losses(folder / f"r{number}")
                said = (
                    "same losses" if found == whole else f"restart {[code for code, _ in again]}: {found}, not {whole}"
                )
            wrong += not fine
            print(f"{'' if fine else 'WRONG '}{phase} process {who} {how}: {codes} {seconds:.0f} s, {said}", flush=True)
            lines = [re.findall(r"^error: .*?Exit code \d+", log, re.MULTILINE) for _, log in ended]
            stacks = len(list((folder / f"r{number}").glob("stacks-*.txt")))
            for line in dict.fromkeys(itertools.chain(*lines)):
                print(f"    {[line in each for each in lines].count(True)} x {line}; {stacks} stacks", flush=True)
            if not fine:
                print("\n".join(f"--- {process}\n{log[-2500:]}" for process, (_, log) in enumerate(ended)), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
