"""scripts/slurm.sbatch against stand-ins of srun, scancel and scontrol that record their arguments."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.source_tree import REPOSITORY
from tests.test_scripts import STUB

RECORD = """#!/usr/bin/env bash
printf '%s\\n' "${0##*/}$(printf ' %q' "$@")" >>"$CLUSTER/calls.txt"
"""
# Runs the tasks as one process in the background, as srun does in a job, and as it answers signals.
SRUN = (
    RECORD
    + """
trap 'exit 137' TERM
while [[ $1 == --* ]]; do shift; done
"$@" &
echo $! >"$CLUSTER/task.new" && mv "$CLUSTER/task.new" "$CLUSTER/task"
wait $!
"""
)
# Waits for the task, which says that it is under way before its number is known.
SCANCEL = (
    RECORD
    + '\nwhile [ ! -f "$CLUSTER/task" ]; do sleep 0.02; done'
    + '\nkill -s "${1#--signal=}" "$(cat "$CLUSTER/task")"\n'
)


class Cluster:
    """A checkout, an environment that is installed, and the stand-ins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "cluster"
        self.checkout = directory / "a checkout"
        self.stub = directory / "stub"
        for folder in (self.directory, self.checkout, self.stub):
            folder.mkdir()
        shutil.copytree(REPOSITORY / "scripts", self.checkout / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.checkout)
        for name, text in {"too_old": "0", "no_venv": "0", "version": "3.12.1"}.items():
            (self.stub / name).write_text(text)
        for name, text in {"srun": SRUN, "scancel": SCANCEL, "scontrol": RECORD, "python3": STUB}.items():
            (self.directory / name).write_text(text)
            (self.directory / name).chmod(0o755)

    def trains(self, script: str) -> None:
        (self.stub / "maxtext_lite.train").write_text(script + "\n")

    def start(self, *arguments: str, job: bool = True, **environment: str) -> subprocess.Popen[str]:
        script = self.checkout / "scripts" / "slurm.sbatch"
        if job:  # SLURM runs a copy
            script = shutil.copy(script, self.directory / "slurm_script")
            environment = {"SLURM_JOB_ID": "77", "SLURM_SUBMIT_DIR": str(self.checkout), **environment}
        path = f"{self.directory}:/usr/bin:/bin"
        return subprocess.Popen(
            ["/usr/bin/env", "--default-signal=TERM,USR1", str(script), *arguments],
            cwd=self.checkout,
            env={"PATH": path, "HOME": "/nonexistent", "CLUSTER": str(self.directory),
                 "STUB_DIRECTORY": str(self.stub), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def run(self, *arguments: str, job: bool = True, **environment: str) -> tuple[int, str]:
        process = self.start(*arguments, job=job, **environment)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    @property
    def calls(self) -> list[list[str]]:
        path = self.directory / "calls.txt"
        return [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_job_installs_then_runs_the_training_command_by_srun(cluster: Cluster):
    code, output = cluster.run("my.yml", "steps=3", "run_name=x y", SLURM_NTASKS_PER_NODE="4", SLURM_CPUS_ON_NODE="64")
    assert code == 0, output
    (srun,) = cluster.calls
    python = str(cluster.checkout / ".venv" / "bin" / "python")
    assert srun[0] == "srun"
    assert "--cpus-per-task=16" in srun
    assert srun[srun.index(python) :] == [python, "-m", "maxtext_lite.train", "my.yml", "steps=3", "run_name=x y"]
    install, train = (cluster.stub / "calls.txt").read_text().splitlines()
    assert install.endswith(f"-e {cluster.checkout}[cuda13]")
    assert train == "-m maxtext_lite.train my.yml steps=3 run_name=x y"


@pytest.mark.parametrize("exit_code", [1, 2, 3])
def test_a_failure_is_the_jobs_and_nothing_is_queued_again(cluster: Cluster, exit_code: int):
    cluster.trains(f"exit {exit_code}")
    assert cluster.run()[0] == exit_code
    assert [call[0] for call in cluster.calls] == ["srun"]


SAVES = """
trap 'echo saved; stopped=1' TERM
echo under way
while [ -z "${stopped:-}" ]; do sleep 0.05; done
exit 75
"""


def read_until(process: subprocess.Popen[str], text: str) -> None:
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"it ended before {text!r}")


def test_before_the_time_limit_the_run_saves_once_and_the_job_is_queued_again(cluster: Cluster):
    cluster.trains(SAVES)
    process = cluster.start()
    read_until(process, "under way")
    process.send_signal(signal.SIGUSR1)  # --signal=B:USR1@300
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert output.count("saved\n") == 1
    assert cluster.calls[1:] == [["scancel", "--signal=TERM", "77"], ["scontrol", "requeue", "77"]]


def test_a_job_that_is_cancelled_is_not_queued_again_though_its_run_saves(cluster: Cluster):
    cluster.trains(SAVES)
    process = cluster.start()
    read_until(process, "under way")
    process.send_signal(signal.SIGTERM)  # scancel tells the script and the tasks
    deadline = time.monotonic() + 30
    while not (cluster.directory / "task").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(int((cluster.directory / "task").read_text()), signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "saved\n" in output
    assert [call[0] for call in cluster.calls] == ["srun"]


@pytest.mark.parametrize("interrupted", [75, 76, 130])
@pytest.mark.parametrize(("restarts", "queued"), [("1", True), ("2", False)])
def test_the_number_of_restarts_is_limited(cluster: Cluster, restarts: str, queued: bool, interrupted: int):
    cluster.trains(f"exit {interrupted}")
    code, output = cluster.run(SLURM_RESTART_COUNT=restarts, MAXTEXT_LITE_MAX_RESTARTS="2")
    assert code == interrupted
    assert (["scontrol", "requeue", "77"] in cluster.calls) == queued
    assert ("not queued again after 2 restarts" in output) == (not queued)


@pytest.mark.parametrize("code", [134, 135, 139, 143])
def test_a_task_that_crashed_beside_others_is_as_one_that_was_killed(cluster: Cluster, code: int):
    cluster.trains(f"exit {code}")
    assert cluster.run(SLURM_JOB_NUM_NODES="2")[0] == 76
    assert ["scontrol", "requeue", "77"] in cluster.calls


def test_with_more_tasks_than_cores_each_gets_one(cluster: Cluster):
    code, output = cluster.run("--dry-run", job=False, SLURM_NTASKS_PER_NODE="8", SLURM_CPUS_ON_NODE="4")
    assert code == 0
    assert " --cpus-per-task=1 " in output


@pytest.mark.parametrize(("job", "exit_code"), [
    ({"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1"}, 76),
    ({"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "8"}, 76),
    ({"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "1"}, 137),
    ({}, 137),
])  # fmt: skip
def test_a_job_that_lost_one_of_several_tasks_is_queued_again(cluster: Cluster, job: dict[str, str], exit_code: int):
    cluster.trains("exit 137")  # what srun reports of several: the highest of their exit codes
    assert cluster.run(**job)[0] == exit_code
    assert (["scontrol", "requeue", "77"] in cluster.calls) == (exit_code == 76)


def test_a_dry_run_outside_a_job_prints_the_flags_and_the_command_and_runs_nothing(cluster: Cluster):
    code, output = cluster.run("--dry-run", "run_name=x y", job=False)
    assert code == 0
    *flags, command = output.splitlines()
    assert "--signal=B:USR1@300" in flags
    assert shlex.split(command)[-3:] == ["-m", "maxtext_lite.train", "run_name=x y"]
    assert shlex.split(command)[0] == "srun"
    assert cluster.calls == []
    assert not (cluster.checkout / ".venv").exists()


def test_outside_a_job_it_says_how_to_submit_it_and_can_install(cluster: Cluster):
    code, output = cluster.run("steps=3", job=False)
    assert code == 2
    assert output == "error: this runs in a job. Nearest that works: sbatch scripts/slurm.sbatch steps=3\n"
    assert cluster.run("--install", job=False, MAXTEXT_LITE_EXTRAS="cuda12")[0] == 0
    assert (cluster.stub / "calls.txt").read_text().splitlines()[-1].endswith("[cuda12]")
    assert cluster.calls == []
    code, output = cluster.run("--help", job=False)
    assert code == 0
    assert "sbatch scripts/slurm.sbatch steps=1000" in output


def test_a_job_submitted_from_elsewhere_is_refused(cluster: Cluster, tmp_path: Path):
    code, output = cluster.run(SLURM_SUBMIT_DIR=str(tmp_path))
    assert code == 2
    assert f"error: {tmp_path} is not the repository." in output


def test_the_flags_stand_before_any_command_where_sbatch_reads_them():
    lines = (REPOSITORY / "scripts" / "slurm.sbatch").read_text().splitlines()
    assert lines[0].startswith("#!")
    first_command = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    flags = [at for at, line in enumerate(lines) if re.match("#SBATCH --", line)]
    assert flags
    assert max(flags) < first_command
