"""Runs of maxtext_lite in processes of their own: several runs in the same processes, or one by its command."""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.conftest import QUICK_COMPILATION
from tests.source_tree import REPOSITORY

SECONDS = 600  # for anything: machines are slow and loaded, and a process that hangs is ended by its test

# Every process does the same runs, as one command after another would: to start processes takes longer than to train.
# In the overrides, {process} is the number of the process; a first word without = is a config file.
# What Python opened under the directory is recorded after each run. The watchdog ends those that wait for a failed one.
RUNS = """
import json, os, sys
directory, record, all_overrides = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
process = os.environ.get("JAX_PROCESS_ID", "0")
opened = []
def hook(event, arguments):
    if event == "open" and str(arguments[0]).startswith(directory):
        opened.append(str(arguments[0]))
sys.addaudithook(hook)
from maxtext_lite.cli import run_command
from maxtext_lite.config import load_config
from maxtext_lite.config.phases import observers
from maxtext_lite.operations.watchdog import watchdog
watchdog.start(300)
observers.append(watchdog)
def main(argv):
    from maxtext_lite.training import train
    for words in all_overrides:
        words = [word.replace("{process}", process) for word in words]
        file = words.pop(0) if words and "=" not in words[0] else None
        config = load_config(file, words)
        run = train
        if config.run_kind == "rl":
            from maxtext_lite.post_training.rollout_steps import train_rl as run  # takes a second
        run(config)
        assert "torch" not in sys.modules  # it is installed for tests alone, and takes seconds to import
        with open(os.path.join(record, process), "w") as file:
            json.dump(sorted(set(opened)), file)
    return 0
sys.exit(run_command(main))
"""


@functools.cache
def quick_python() -> tuple[str, ...]:
    """What stands for `python` where its seconds of imports prove nothing: see fork_server.py, started here once."""
    if sys.platform != "linux":
        return (sys.executable,)
    folder = Path(tempfile.mkdtemp())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    command = [
        sys.executable,
        str(REPOSITORY / "tests" / "fork_server.py"),
        str(listener.fileno()),
    ]
    server = subprocess.Popen(  # it ends as its standard input ends, with this process
        command,
        stdin=subprocess.PIPE,
        env=environment(),
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    listener.close()

    def end() -> None:
        server.communicate()
        shutil.rmtree(folder)

    atexit.register(end)
    words = (
        sys.executable,
        "-I",
        "-S",
        str(REPOSITORY / "tests" / "fork_client.py"),
        str(folder / "socket"),
    )
    (folder / "python").write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    (folder / "python").chmod(0o755)
    return words


def folder_of_python() -> Path:
    """For PATH: its `python` is the quick one, where there is one."""
    return Path(quick_python()[-1]).parent


def environment(devices: int | None = None) -> dict[str, str]:
    """The environment of a process with simulated devices, with conftest's cache of compiled code and nothing else."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("NPROC", "OMP_NUM_THREADS")
    }
    flags = (
        [] if devices is None else [f"--xla_force_host_platform_device_count={devices}"]
    )
    return kept | {
        "XLA_FLAGS": " ".join([*flags, *QUICK_COMPILATION]),
        "PYTHONPATH": str(REPOSITORY),
    }


def launched(
    command: Sequence[str], *options: str, processes: int, devices: int
) -> tuple[list[str], dict[str, str]]:
    """A command that runs as several processes with several devices each, and its environment.

    Args:
      options: of scripts/launch_local.py.
    """
    if processes == 1:
        return list(command), environment(devices)
    launcher = [
        sys.executable,
        str(REPOSITORY / "scripts" / "launch_local.py"),
        "--processes",
        str(processes),
    ]
    return [
        *launcher,
        "--devices-per-process",
        str(devices),
        *options,
        "--",
        *command,
    ], environment()


def run_launched(
    command: Sequence[str], *options: str, processes: int, devices: int
) -> subprocess.CompletedProcess[str]:
    """How a command ended as several processes with several devices each, and what they said."""
    command, variables = launched(
        command, *options, processes=processes, devices=devices
    )
    return subprocess.run(
        command,
        env=variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def in_turn(
    overrides: Sequence[Sequence[str]],
    *,
    processes: int,
    devices: int,
    watched: Path | str = "/nothing",
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Does the runs one after another, in the same processes, up to one that fails.

    Returns:
      How it ended, and the files under `watched` that each process opened.
    """
    with tempfile.TemporaryDirectory() as record:
        result = run_launched(
            [
                *quick_python(),
                "-c",
                RUNS,
                str(watched),
                record,
                json.dumps([list(each) for each in overrides]),
            ],
            processes=processes,
            devices=devices,
        )
        records = [Path(record) / str(process) for process in range(processes)]
        assert all(each.exists() for each in records), result.stderr[-4000:]
        return result, [json.loads(each.read_text()) for each in records]


def train_in_turn(overrides: Sequence[Sequence[str]], **how: Any) -> list[list[str]]:
    """The same where no run fails: the files that each process opened."""
    result, opened = in_turn(overrides, **how)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return opened


# The command `train`, which first leaves its process id in a file named after the process.
TRAIN = """
import os, pathlib, runpy, sys
path = pathlib.Path(sys.argv.pop(1)) / os.environ.get("JAX_PROCESS_ID", "0")
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
runpy.run_module("maxtext_lite.train", run_name="__main__", alter_sys=True)
"""


@dataclasses.dataclass(frozen=True)
class UnderWay:
    """The command `train`, under way in one or several processes."""

    popen: subprocess.Popen[str]
    ids: Path

    def process_id(self, process: int) -> int:
        """Of process number `process` of the run, once it has begun."""
        self.wait_until((self.ids / str(process)).exists)
        return int((self.ids / str(process)).read_text())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until something has come about; fails where the command ends before."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.popen.poll() is None, "".join(self.popen.communicate())
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self) -> tuple[int, str, str]:
        """Its exit code, output and errors, once it has ended."""
        output, errors = self.popen.communicate(timeout=SECONDS)
        return self.popen.returncode, output, errors


@contextlib.contextmanager
def train_under_way(
    overrides: Sequence[str], *, processes: int, devices: int
) -> Iterator[UnderWay]:
    """The command `train`; where the block leaves it running it is killed, and the launcher's guard kills the rest."""
    with tempfile.TemporaryDirectory() as ids:
        command, variables = launched(
            [*quick_python(), "-c", TRAIN, ids, *overrides],
            processes=processes,
            devices=devices,
        )
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, env=variables, stdout=pipe, stderr=pipe, text=True
        ) as popen:
            try:
                yield UnderWay(popen, Path(ids))
            finally:
                if popen.poll() is None:
                    popen.kill()


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What a run left behind."""

    directory: Path

    @property
    def steps(self) -> list[dict]:
        return [record for record in self._records if "loss" in record]

    @property
    def evaluations(self) -> list[dict]:
        return [record for record in self._records if "eval_loss" in record]

    @property
    def _records(self) -> list[dict]:
        text = (self.directory / "metrics.jsonl").read_text()
        return [
            json.loads(line)
            for line in text.splitlines(keepends=True)
            if line.endswith("\n")
        ]

    @property
    def last_step(self) -> int:
        """The last on record; 0 before the first."""
        if not (self.directory / "metrics.jsonl").exists():
            return 0
        steps = self.steps  # read once: a run that resumes writes the file anew
        return steps[-1]["step"] if steps else 0

    def sequence(self, *keys: str) -> list[tuple]:
        """These values of each step."""
        return [tuple(record[key] for key in keys) for record in self.steps]

    @property
    def checkpoints(self) -> list[int]:
        """The steps that were saved."""
        return sorted(
            int(path.name)
            for path in (self.directory / "checkpoints").glob("*")
            if path.name.isdigit()
        )

    def parameters(self, step: int) -> dict:
        """The parameters that were saved after a step, in host memory, read by Orbax alone."""
        path = (self.directory / "checkpoints" / str(step) / "params").absolute()
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            saved = checkpointer.metadata(path).item_metadata.tree
            as_arrays = jax.tree.map(
                lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved
            )
            return checkpointer.restore(
                path, ocp.args.PyTreeRestore(restore_args=as_arrays)
            )
