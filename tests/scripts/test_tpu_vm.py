"""scripts/tpu_vm.sh against a stand-in of gcloud, whose workers are folders in which the real worker script runs."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.source_tree import REPOSITORY
from tests.test_scripts import STUB

# Records its arguments and plays a cloud: the file `state` is the TPU, the folders worker-0 and worker-1 its workers.
GCLOUD = '''#!{python}
import json, os, pathlib, shutil, subprocess, sys
cloud = pathlib.Path({cloud!r})
arguments = sys.argv[1:]
with (cloud / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
assert arguments[:2] == ["compute", "tpus"] and "--quiet" in arguments
group, verb = arguments[2:4]
options = dict(word[2:].split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
workers = sorted(cloud.glob("worker-?"))

def scripted(name):
    """The next line of a file of the test, "" at its end."""
    path = cloud / name
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("".join(line + "\\n" for line in lines[1:]))
    return lines[0] if lines else ""

if verb == "describe":
    scripted_state = scripted("states")
    if scripted_state == "down":
        sys.exit("ERROR: the network is down")
    if scripted_state:
        (cloud / "state").write_text(scripted_state)
    if not (cloud / "state").exists():
        sys.exit("ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource was not found")
    print((cloud / "state").read_text())
elif verb == "create":
    error = scripted("create_errors")
    if error:
        sys.exit("ERROR: " + error)
    for number in range(2):
        stub = cloud / f"worker-{{number}}" / "stub"
        stub.mkdir(parents=True)
        for name, text in {{"too_old": "0", "no_venv": "0", "version": "3.12.1"}}.items():
            (stub / name).write_text(text)
        shutil.copy(cloud / "train", stub / "maxtext_lite.train")
    (cloud / "state").write_text("ACTIVE" if group == "queued-resources" else "READY")
elif verb == "delete":
    (cloud / "state").unlink()
    for worker in workers:
        shutil.rmtree(worker)
elif verb == "start":
    (cloud / "state").write_text("READY")
elif verb in ("ssh", "scp"):
    if scripted("connections") == "lost":
        sys.exit(255)
    chosen = workers if options["worker"] == "all" else [workers[int(options["worker"])]]
    if verb == "scp":
        source, target = arguments[4:6]
        for worker in chosen:
            shutil.copy(source, worker / target.partition(":")[2])
    else:
        codes = []
        for worker in chosen:
            environment = {{"HOME": str(worker), "STUB_DIRECTORY": str(worker / "stub"), "CLOUD": str(cloud),
                           "WORKER": worker.name, "PATH": str(cloud / "python") + ":/usr/bin:/bin"}}
            codes.append(subprocess.run(["bash", "-c", options["command"]], cwd=worker, env=environment).returncode)
        sys.exit(next((code for code in codes if code), 0))
'''


class Cloud:
    """A checkout, the stand-in, and what has been asked of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "cloud"
        self.checkout = directory / "a checkout"
        self.bin = directory / "bin"
        for folder in (self.directory, self.checkout, self.bin, self.directory / "python"):
            folder.mkdir()
        shutil.copytree(REPOSITORY / "scripts", self.checkout / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.checkout)
        self.program(self.bin / "gcloud", GCLOUD.format(python=sys.executable, cloud=str(self.directory)))
        self.program(
            self.directory / "python" / "python3",
            STUB,
        )
        self.trains("echo a step")

    def program(self, path: Path, text: str) -> None:
        """Makes a file that can be run."""
        path.write_text(text)
        path.chmod(0o755)

    def trains(self, script: str) -> None:
        """What `python -m maxtext_lite.train` does, in bash; $WORKER is the worker, $CLOUD a folder of all."""
        (self.directory / "train").write_text(script + "\n")

    def script(self, name: str, *lines: str) -> None:
        (self.directory / name).write_text("".join(line + "\n" for line in lines))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.checkout / "scripts" / "tpu_vm.sh"), *arguments],
            env={"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": "/nonexistent", "TMPDIR": str(self.directory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def up(self, *arguments: str) -> tuple[int, str]:
        return self.run("up", *TPU, "--poll", "0", *arguments)

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each call after `compute tpus`."""
        path = self.directory / "calls.jsonl"
        return [json.loads(line)[2:] for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def verbs(self) -> list[str]:
        """What was asked for, looks at the state left out."""
        return [verb for _, verb, *_ in self.calls if verb != "describe"]

    def trained(self, worker: int) -> list[str]:
        """The calls of Python on a worker that trained."""
        lines = (self.directory / f"worker-{worker}" / "stub" / "calls.txt").read_text().splitlines()
        return [line for line in lines if line.startswith("-m maxtext_lite.")]


TPU = ("--name", "my-tpu", "--zone", "us-east5-b", "--project", "some-project", "--type", "v6e-8")
WHERE = ["--zone=us-east5-b", "--project=some-project", "--quiet"]


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    return Cloud(tmp_path)


def test_up_creates_installs_trains_on_all_workers_and_shows_the_log(cloud: Cloud):
    cloud.trains('echo "a step on $WORKER, KEY is $KEY"')
    code, output = cloud.up("--spot", "--env", "KEY=two words; and $more", "--setup", "touch 'is set up'", "--",
                            "my.yml", "steps=3", "run_name=x y", "prompt='$HOME'")  # fmt: skip
    assert code == 0, output
    assert cloud.verbs == ["create", "ssh", "scp", "ssh", "ssh", "ssh", "ssh", "ssh"]
    create = next(call for call in cloud.calls if call[1] == "create")
    assert create == [
        "tpu-vm",
        "create",
        "my-tpu",
        "--accelerator-type=v6e-8",
        "--version=v2-alpha-tpuv6e",
        "--spot",
        *WHERE,
    ]
    for worker in range(2):
        assert cloud.trained(worker) == ["-m maxtext_lite.train my.yml steps=3 run_name=x y prompt='$HOME'"]
        home = cloud.directory / f"worker-{worker}"
        assert (home / "is set up").exists()
        assert (home / "maxtext_lite" / "pyproject.toml").exists()
        installs = [line for line in (home / "stub" / "calls.txt").read_text().splitlines() if "pip install" in line]
        assert [line.endswith("maxtext_lite[tpu]") for line in installs] == [True]
        log = (home / "maxtext_lite_run" / "log").read_text()
        assert f"a step on worker-{worker}, KEY is two words; and $more" in log
    assert "a step on worker-0" in output
    assert "a step on worker-1" not in output
    assert "checkpoints stay on this TPU" in output
    assert not list(cloud.directory.glob("tmp.*")), "what was made for the copy is removed"


# A Python that is too old, as Ubuntu 22.04's is, but has pip.
OLD_PYTHON = """#!/usr/bin/env bash
case "$*" in
"-c import ensurepip, sys, venv; "*) exit 1 ;;
"-m uv python find --system 3.12") echo "$CLOUD/python/new" ;;
*) printf '%s\\n' "$*" >>"$CLOUD/$WORKER.old_python" ;;
esac
"""


def test_a_worker_whose_python_is_too_old_gets_one(cloud: Cloud):
    (cloud.directory / "python" / "python3").rename(cloud.directory / "python" / "new")
    cloud.program(cloud.directory / "python" / "python3", OLD_PYTHON)
    code, output = cloud.up()
    assert code == 0, output
    for worker in range(2):
        lines = (cloud.directory / f"worker-{worker}.old_python").read_text().splitlines()
        assert lines == ["-m pip install --quiet --user uv", "-m uv python install --quiet 3.12"]
        assert len(cloud.trained(worker)) == 1


def test_a_tpu_that_is_there_is_used_and_a_run_under_way_is_followed(cloud: Cloud):
    assert cloud.up()[0] == 0
    cloud.trains("exit 9")
    before = len(cloud.verbs)
    for worker in range(2):  # it trains still
        stub = cloud.directory / f"worker-{worker}" / "stub"
        (stub / "maxtext_lite.train").write_text('echo still; while [ ! -f "$CLOUD/over" ]; do sleep 0.1; done\n')
    code, output = cloud.run("start", *TPU)
    assert code == 0, output
    process = cloud.start("up", *TPU, "--poll", "0")
    for line in process.stdout:
        if "still" in line:
            break
    (cloud.directory / "over").touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert {"create", "scp"} & set(cloud.verbs[before:]) == set()
    assert cloud.run("status", *TPU) == (0, "my-tpu: ready\nrun=0\nrun=0\n")


@pytest.mark.parametrize(("codes", "exit_code"), [((1, 2), 2), ((3, 1), 3), ((0, 1), 1)])
def test_the_failure_of_one_worker_is_the_runs_and_its_log_is_shown(
    cloud: Cloud, codes: tuple[int, int], exit_code: int
):
    cloud.trains(f'echo "error: of $WORKER"\n[ "$WORKER" = worker-0 ] && exit {codes[0]}\nexit {codes[1]}')
    code, output = cloud.up()
    assert code == exit_code, output
    assert "error: of worker-1" in output
    assert cloud.verbs.count("create") == 1


# The first attempt is taken away as a spot TPU is: the processes end, a moment later its state says so.
PREEMPTED_ONCE = """
echo x >>"$CLOUD/attempts"
if [ "$(wc -l <"$CLOUD/attempts")" -le 2 ]; then
  printf 'READY\\nPREEMPTED\\n' >"$CLOUD/states"
  exit 1
fi
echo resumed
"""


def test_a_preempted_tpu_is_made_anew_and_the_run_goes_on(cloud: Cloud):
    cloud.trains(PREEMPTED_ONCE)
    code, output = cloud.up("--spot", "--", "steps=5")
    assert code == 0, output
    assert "my-tpu was taken away; restart 1 of at most 100" in output
    assert "resumed" in output
    assert [verb for verb in cloud.verbs if verb not in ("ssh", "scp")] == ["create", "delete", "create"]
    assert cloud.trained(0) == ["-m maxtext_lite.train steps=5"]


@pytest.mark.parametrize("interrupted", [75, 76, 130])
def test_a_signal_that_nobody_sent_starts_the_run_again_on_the_same_tpu(cloud: Cloud, interrupted: int):
    cloud.trains(f'echo x >>"$CLOUD/attempts"; [ "$(wc -l <"$CLOUD/attempts")" -gt 2 ] || exit {interrupted}')
    code, output = cloud.up()
    assert code == 0, output
    assert "the run was interrupted; restart 1 of at most 100" in output
    assert cloud.verbs.count("create") == 1


def test_restarts_are_limited(cloud: Cloud):
    cloud.trains('echo x >>"$CLOUD/attempts"; exit 75')
    code, output = cloud.up("--max-restarts", "1", "--delete-at-end")
    assert code == 1
    assert "the run was interrupted once more after --max-restarts 1" in output
    assert (cloud.directory / "attempts").read_text() == "x\n" * 4  # two workers, twice
    assert cloud.verbs[-1] == "delete"


# Saves at the first SIGTERM, as training does; a second would have cost the checkpoint.
SAVES = """
trap 'echo saved >>"$CLOUD/$WORKER.saved"; stopped=1' TERM
echo under way
while [ -z "${stopped:-}" ]; do sleep 0.1; done
sleep 0.5
exit 75
"""


def test_stop_lets_the_run_save_once_and_up_ends_with_75(cloud: Cloud):
    cloud.trains(SAVES)
    process = cloud.start("up", *TPU, "--poll", "0")
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line == "under way\n":
            break
    code, output = cloud.run("stop", *TPU)
    assert code == 0, output
    assert output.splitlines() == ["run=75", "run=75"]
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 75, "".join(seen) + rest
    assert "stopped by `stop`, after saving" in rest
    assert [(cloud.directory / f"worker-{n}.saved").read_text() for n in range(2)] == ["saved\n", "saved\n"]
    code, output = cloud.run("logs", *TPU)
    assert (code, "under way\n" in output) == (75, True)


def test_a_machine_that_shuts_down_signals_every_process_and_training_gets_it_once(cloud: Cloud):
    cloud.trains(SAVES)
    assert cloud.run("create", *TPU)[0] == 0
    assert cloud.run("install", *TPU)[0] == 0
    assert cloud.run("start", *TPU)[0] == 0
    run = cloud.directory / "worker-0" / "maxtext_lite_run"
    wait_until(lambda: (run / "log").exists() and "under way" in (run / "log").read_text())
    for name in ("pid", "child"):
        os.kill(int((run / name).read_text()), signal.SIGTERM)
    wait_until((run / "exit_code").exists)
    assert (run / "exit_code").read_text() == "75\n"
    assert (cloud.directory / "worker-0.saved").read_text() == "saved\n"
    code, output = cloud.run("stop", *TPU)  # the other worker
    assert code == 0, output


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_where_there_is_no_capacity_it_waits_and_any_other_refusal_ends_it(cloud: Cloud):
    cloud.script("create_errors", 'There is no more capacity in the zone "us-east5-b"', "", "Quota exceeded")
    assert cloud.run("create", *TPU, "--poll", "0")[0] == 0
    assert cloud.verbs == ["create", "create"]
    assert cloud.run("delete", *TPU)[0] == 0
    code, output = cloud.run("create", *TPU, "--poll", "0")
    assert code == 1
    assert "ERROR: Quota exceeded" in output


def test_a_moment_without_network_is_survived_and_a_long_one_is_not(cloud: Cloud):
    cloud.script("states", "down", "down")
    assert cloud.run("create", *TPU, "--poll", "0")[0] == 0
    cloud.script("states", *["down"] * 9)
    code, output = cloud.run("create", *TPU, "--poll", "0")
    assert code == 1
    assert "ERROR: the network is down" in output


def test_a_lost_connection_is_taken_up_again(cloud: Cloud):
    cloud.trains("sleep 1; echo done")
    cloud.script("connections", "", "", "", "", "lost", "lost")  # the log, and the question what came of it
    code, output = cloud.up()
    assert code == 0, output
    assert "the workers do not answer" in output
    assert cloud.verbs.count("scp") == 1


def test_a_stopped_tpu_is_started(cloud: Cloud):
    assert cloud.up()[0] == 0
    (cloud.directory / "state").write_text("STOPPED")
    assert cloud.run("create", *TPU)[0] == 0
    assert cloud.verbs[-1] == "start"


def test_slices_are_a_queued_resource_and_all_their_workers_are_reached(cloud: Cloud):
    cloud.script("states", "", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
    code, output = cloud.up("--slices", "4", "--connect-flag", "--internal-ip", "--create-flag", "--network=n")
    assert code == 0, output
    create = next(call for call in cloud.calls if call[1] == "create")
    assert create == ["queued-resources", "create", "my-tpu", "--node-count=4", "--accelerator-type=v6e-8",
                      "--runtime-version=v2-alpha-tpuv6e", "--network=n", *WHERE]  # fmt: skip
    for call in cloud.calls:
        if call[1] in ("ssh", "scp"):
            assert call[0] == "queued-resources"
            assert ("--node=all" in call) == ("--worker=all" in call)
            assert "--internal-ip" in call
    assert cloud.run("delete", *TPU, "--slices", "4")[0] == 0
    assert cloud.calls[-1] == ["queued-resources", "delete", "my-tpu", *["--force"], *WHERE]


def test_one_queued_slice_is_named_as_its_node(cloud: Cloud):
    assert cloud.run("create", *TPU, "--queued")[0] == 0
    assert "--node-id=my-tpu" in next(call for call in cloud.calls if call[1] == "create")


def test_delete_and_ssh(cloud: Cloud):
    assert cloud.run("create", *TPU)[0] == 0
    code, output = cloud.run("ssh", *TPU, "--", "echo", "a  b", "$HOME")
    assert (code, output) == (0, "a  b $HOME\n" * 2)
    assert cloud.run("delete", *TPU)[0] == 0
    assert cloud.calls[-1] == ["tpu-vm", "delete", "my-tpu", *WHERE]


def test_a_dry_run_prints_the_commands_and_runs_none(cloud: Cloud):
    code, output = cloud.run("up", *TPU, "--spot", "--dry-run", "--delete-at-end", "--", "run_name=x y")
    assert code == 0
    assert cloud.calls == []
    commands = [shlex.split(line)[3:] for line in output.splitlines() if line.startswith("gcloud compute tpus ")]
    assert [command[:3] for command in commands] == [
        ["tpu-vm", verb, "my-tpu"] if verb != "scp" else ["tpu-vm", "scp", commands[1][2]]
        for verb in ("create", "scp", "ssh", "ssh", "ssh", "ssh", "delete")
    ]
    assert commands[3][4] == r"--command=env maxtext_lite/scripts/tpu_worker.sh start maxtext_lite.train run_name=x\ y"
    for command in ("create", "install", "start", "logs", "status", "stop", "ssh", "delete"):
        code, output = cloud.run(command, *TPU, "--dry-run")
        assert code == 0, output
        assert all(line.startswith("gcloud compute tpus ") for line in output.splitlines())
    assert cloud.calls == []


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "unknown command ''"),
    (("app",), "unknown command 'app'. There are: up, create, install, start, logs, status, stop, ssh, delete."),
    (("up",), "--name is missing"),
    (("up", "--name", "My TPU"), "--name My TPU is not lower-case letters, digits and hyphens."),
    (("up", "--name"), "--name needs a value."),
    (("up", "--name", "a", "--spt"), "unknown option --spt."),
    (("up", "--name", "a", "steps=3"), "unknown option steps=3."),
    (("up", "--name", "a", "--slices", "two"), "--slices two is not a whole number."),
    (("up", "--name", "a", "--slices", "0"), "--slices 0 must be at least 1. Nearest that works: 1."),
    (("up", "--name", "a", "--env", "x"), "--env x is not of the form KEY=VALUE."),
    (("up", "--name", "a"), "--type is missing: a has to be created"),
    (("up", "--name", "a", "--type", "v9-8"), "--type v9-8: name its runtime with --version"),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_made(cloud: Cloud, arguments: tuple[str, ...], message: str):
    code, output = cloud.run(*arguments)
    assert code == 2
    assert "error: " + message in output
    assert "create" not in cloud.verbs


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("stat", 2)])
def test_the_workers_script_says_what_it_takes(tmp_path: Path, word: str, code: int):
    script = REPOSITORY / "scripts" / "tpu_worker.sh"
    result = subprocess.run([script, word], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True)
    assert result.returncode == code
    assert b"tpu_worker.sh start MODULE" in result.stdout


def test_what_git_ignores_stays_here(cloud: Cloud):
    git = ["git", "-C", str(cloud.checkout), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (cloud.checkout / ".gitignore").write_text("runs/\n")
    for name in ("runs/old", "new file", "gone"):
        (cloud.checkout / name).parent.mkdir(exist_ok=True)
        (cloud.checkout / name).write_text("x")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "gone"], check=True)
    (cloud.checkout / "gone").unlink()
    assert cloud.run("create", *TPU)[0] == 0
    code, output = cloud.run("install", *TPU)
    assert code == 0, output
    copy = cloud.directory / "worker-1" / "maxtext_lite"
    assert (copy / "new file").exists()
    assert not (copy / "runs").exists()
    assert not (copy / ".git").exists()
