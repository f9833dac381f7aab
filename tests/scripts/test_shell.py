"""The shell scripts, tried on stand-ins for Python in a copy of the checkout; of the launchers, what they would run."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.source_tree import REPOSITORY

# Stands in for an interpreter: `-m venv` makes an environment of itself, every other call is written to calls.txt and
# answered as the files of the test say: the file `MODULE` holds what `python -m MODULE` then runs.
STUB = """#!/usr/bin/env bash
here=${STUB_DIRECTORY:?}
case "$*" in
"-c import sys; sys.exit(sys.version_info < (3, 11))") exit "$(cat "$here/too_old")" ;;
"-c import ensurepip, venv") exit "$(cat "$here/no_venv")" ;;
"-c ") exit 0 ;;
--version) echo "Python 3.12.1" ;;
"-m pip --version") exit 0 ;;
"-m venv"*)
  mkdir -p "${!#}/bin"
  touch "${!#}/pyvenv.cfg"
  cp "$0" "${!#}/bin/python"
  cp "$0" "${!#}/bin/shellcheck"
  ;;
-c*) echo runs/default ;; # the run directory
*)
  printf '%s\\n' "$*" >>"$here/calls.txt"
  if [ -f "$here/$2" ]; then . "$here/$2"; fi
  ;;
esac
"""
# A shell's background job ignores SIGINT, and so does all that it starts; bash cannot undo that, env can.
WITH_SIGNALS = ["/usr/bin/env", "--default-signal=INT,TERM,HUP"]


class Checkout:
    """A copy of what the scripts need, with a stand-in for Python."""

    def __init__(self, directory):
        self.root = directory / "a checkout"
        self.stub = directory / "stub"
        self.root.mkdir()
        self.stub.mkdir()
        shutil.copytree(REPOSITORY / "scripts", self.root / "scripts")
        shutil.copytree(REPOSITORY / ".ci", self.root / ".ci")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.root)
        self.answer("too_old", "0")
        self.answer("no_venv", "0")
        self.answer("python3", STUB)
        (self.stub / "python3").chmod(0o755)

    def answer(self, name, text):
        (self.stub / name).write_text(text)

    def calls(self):
        """The calls of the stand-in since the last look."""
        file = self.stub / "calls.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    def start(self, script, *arguments, **variables):
        path = f"{self.stub}:/usr/bin:/bin"
        own = dict.fromkeys(("HOME", "STUB_DIRECTORY"), str(self.stub))
        return subprocess.Popen(
            [*WITH_SIGNALS, str(self.root / script), *arguments],
            cwd=self.stub,
            env={"PATH": path, **own, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, script, *arguments, **variables):
        process = self.start(script, *arguments, **variables)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def is_install(call):
    return call.startswith("-m pip install ")


@pytest.mark.fast
def test_train_installs_the_lock_once_then_trains_then_samples_the_same_run(checkout):
    code, output = checkout.run("scripts/train.sh", "steps=3", "run_name=x y")
    assert code == 0, output
    install, *run = checkout.calls()
    assert is_install(install)
    assert install.endswith(f"-c {checkout.root}/constraints.txt -e {checkout.root}")
    assert run[0] == "-m maxtext_lite.train configs/base.yml steps=3 run_name=x y"
    assert run[1].startswith("-m maxtext_lite.generate runs/default ")
    checkout.run("scripts/train.sh", "my.yml", "steps=3")
    assert checkout.calls()[0] == "-m maxtext_lite.train my.yml steps=3"
    checkout.run("scripts/test.sh", "tests/config", "-x")  # another extra
    install, tests = checkout.calls()
    assert install.endswith("[test]")
    assert tests.startswith("-m pytest ")
    assert tests.endswith(" tests/config -x")


def test_extras_once_installed_stay(checkout):
    checkout.run(
        "scripts/slurm.sbatch", "--install", MAXTEXT_LITE_EXTRAS="cuda12,wandb"
    )
    assert checkout.calls()[0].endswith("[cuda12,wandb]")
    checkout.run("scripts/slurm.sbatch", "--install")  # as a job does before it trains
    assert not checkout.calls()
    (checkout.root / "pyproject.toml").write_text("changed")
    checkout.run("scripts/slurm.sbatch", "--install")
    assert checkout.calls()[0].endswith("[cuda12,wandb]")


def test_a_failed_install_is_reported_and_repeated_in_full(checkout):
    checkout.answer("pip", "exit 9")
    code, output = checkout.run("scripts/train.sh", MAXTEXT_LITE_EXTRAS="tpu")
    assert code == 1
    assert "error: " in output
    assert checkout.calls()[0].endswith("[tpu]")
    assert not any("maxtext_lite.train" in call for call in checkout.calls())
    checkout.answer("pip", "exit 0")
    assert checkout.run("scripts/train.sh")[0] == 0
    install = checkout.calls()[0]
    assert "--ignore-installed" in install
    assert install.endswith(str(checkout.root))  # without what cannot be installed


def test_extras_of_an_interrupted_install_are_installed_by_the_next(checkout):
    for others, installed in (
        ({}, "[cuda12,wandb]"),
        ({"MAXTEXT_LITE_EXTRAS": ""}, ""),
    ):
        own = checkout.stub / f"venv{installed}"
        checkout.answer("pip", "kill -KILL $PPID; exit 1")
        checkout.run(
            "scripts/slurm.sbatch",
            "--install",
            MAXTEXT_LITE_VENV=str(own),
            MAXTEXT_LITE_EXTRAS="cuda12,wandb",
        )
        checkout.answer("pip", "exit 0")
        checkout.calls()
        checkout.run(
            "scripts/slurm.sbatch", "--install", MAXTEXT_LITE_VENV=str(own), **others
        )
        assert checkout.calls()[0].endswith(f"{checkout.root}{installed}")


def test_the_exit_code_of_training_is_that_of_the_script_and_nothing_is_sampled(
    checkout,
):
    checkout.answer("maxtext_lite.train", "exit 3")
    assert checkout.run("scripts/train.sh")[0] == 3
    assert not any("generate" in call for call in checkout.calls())


@pytest.mark.parametrize(
    ("name", "whole_group"),
    [("TERM", False), ("INT", True)],
    ids=["script_only", "as_ctrl_c"],
)
def test_a_signal_reaches_training_once_and_its_exit_code_comes_back(
    checkout, name, whole_group
):
    saves = (
        f"trap 'echo got {name}; sleep 0.3; exit 75' {name}\ntouch \"$here/ready\"\n"
    )
    checkout.answer(
        "maxtext_lite.train", saves + "for _ in $(seq 300); do sleep 0.1; done\n"
    )
    process = checkout.start("scripts/train.sh")
    deadline = time.monotonic() + 60
    while not (checkout.stub / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1)  # until the script waits for it
    (os.killpg if whole_group else os.kill)(process.pid, signal.Signals[f"SIG{name}"])
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert output.count(f"got {name}") == 1
    assert not any("generate" in call for call in checkout.calls())


def test_a_dry_run_on_tpu_vms_prints_commands_and_runs_none(checkout):
    """Those of `up` stand in docs/launching.md."""
    checkout.answer("gcloud", "#!/usr/bin/env bash\necho called\n")
    (checkout.stub / "gcloud").chmod(0o755)
    tpu = (
        "--name my-tpu --zone us-east5-b --project some-project --type v6e-8 --dry-run"
    )
    commands = "create install start logs status stop ssh delete"
    for command in commands.split():
        code, output = checkout.run("scripts/tpu_vm.sh", command, *tpu.split())
        assert code == 0, output
        for line in output.splitlines():
            assert line.startswith("gcloud compute tpus ")
    wrong = ("up", "--name", "My TPU", "--dry-run")
    assert checkout.run("scripts/tpu_vm.sh", *wrong)[0] == 2
    assert checkout.run("scripts/slurm.sbatch", "steps=3")[0] == 2  # this is no job
