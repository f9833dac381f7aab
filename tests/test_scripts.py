"""The shell scripts, tried on stand-ins for Python in a copy of the checkout: nothing is downloaded or trained."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.source_tree import REPOSITORY

SCRIPTS = sorted(
    [*(REPOSITORY / "scripts").glob("*.sh"), REPOSITORY / "scripts" / "slurm.sbatch", REPOSITORY / ".ci" / "run"]
)
COMMANDS = [path for path in SCRIPTS if path.name != "environment.sh"]  # which is sourced by the others

# Stands in for an interpreter: `-m venv` makes an environment of itself, every other call is written to calls.txt and
# answered as the files of the test say: the file `MODULE` holds what `python -m MODULE` then runs.
STUB = """#!/usr/bin/env bash
here=${STUB_DIRECTORY:?}
case "$*" in
"-c import sys; sys.exit(sys.version_info < (3, 11))") exit "$(cat "$here/too_old")" ;;
"-c import ensurepip, venv") exit "$(cat "$here/no_venv")" ;;
"-c ") exit 0 ;;
--version) echo "Python $(cat "$here/version")" ;;
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


class Checkout:
    """A copy of what the scripts need, with a stand-in for Python."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "a checkout"
        self.stub_directory = directory / "stub"
        self.root.mkdir()
        self.stub_directory.mkdir()
        shutil.copytree(REPOSITORY / "scripts", self.root / "scripts")
        shutil.copytree(REPOSITORY / ".ci", self.root / ".ci")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.root)
        for name, text in {"too_old": "0", "no_venv": "0", "version": "3.12.1"}.items():
            self.answer(name, text)
        self.python = self.stub_directory / "python3"
        self.python.write_text(STUB)
        self.python.chmod(0o755)

    def answer(self, name: str, text: str) -> None:
        (self.stub_directory / name).write_text(text)

    @property
    def calls(self) -> list[str]:
        """The calls of the stand-in since the last look."""
        file = self.stub_directory / "calls.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        path = f"{self.stub_directory}:/usr/bin:/bin"
        return subprocess.Popen(
            # A shell's background job ignores SIGINT, and so does all that it starts; bash cannot undo that, env can.
            ["/usr/bin/env", "--default-signal=INT", str(self.root / script), *arguments],
            cwd=self.stub_directory,
            env={"PATH": path, "HOME": "/nonexistent", "STUB_DIRECTORY": str(self.stub_directory), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(script, *arguments, **environment)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def is_install(call: str) -> bool:
    return call.startswith("-m pip install ")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_commands_are_executable(path: Path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert os.access(path, os.X_OK) == (path in COMMANDS)


def test_train_installs_the_lock_then_trains_then_samples_the_same_run(checkout: Checkout):
    code, output = checkout.run("scripts/train.sh", "steps=3", "run_name=x y")
    assert code == 0, output
    install, train, sample = checkout.calls
    root = checkout.root
    assert is_install(install)
    assert install.endswith(f"-c {root}/constraints.txt -e {root}")
    assert train == "-m maxtext_lite.train configs/base.yml steps=3 run_name=x y"
    assert sample.startswith("-m maxtext_lite.generate runs/default ")


def test_a_second_run_installs_nothing(checkout: Checkout):
    checkout.run("scripts/train.sh")
    assert any(map(is_install, checkout.calls))
    checkout.run("scripts/train.sh")
    assert not any(map(is_install, checkout.calls))


def test_a_new_lock_or_another_extra_is_installed(checkout: Checkout):
    checkout.run("scripts/train.sh")
    assert any(map(is_install, checkout.calls))
    checkout.run("scripts/test.sh")
    assert any(call.endswith(f"-e {checkout.root}[test]") for call in checkout.calls)
    checkout.run("scripts/train.sh", MAXTEXT_LITE_EXTRAS="cuda13")
    assert any(call.endswith(f"-e {checkout.root}[cuda13]") for call in checkout.calls)
    checkout.run("scripts/test.sh", MAXTEXT_LITE_EXTRAS="cuda13")
    assert not any(map(is_install, checkout.calls))
    with (checkout.root / "constraints.txt").open("a") as lock:
        lock.write("example==1\n")
    checkout.run("scripts/train.sh")
    assert any(map(is_install, checkout.calls))


def test_a_failed_install_is_reported_and_repeated_in_full(checkout: Checkout):
    checkout.answer("pip", "exit 9")
    code, output = checkout.run("scripts/train.sh")
    assert code == 1
    assert "error: the installation failed" in output
    assert not any("maxtext_lite" in call and "-m maxtext_lite" in call for call in checkout.calls)
    checkout.answer("pip", "exit 0")
    code, _ = checkout.run("scripts/train.sh")
    assert code == 0
    install = next(filter(is_install, checkout.calls))
    assert "--ignore-installed" in install
    checkout.run("scripts/train.sh")
    assert not any(map(is_install, checkout.calls))


def test_an_own_config_takes_the_place_of_base_yml(checkout: Checkout):
    checkout.run("scripts/train.sh", "my.yml", "steps=3")
    assert "-m maxtext_lite.train my.yml steps=3" in checkout.calls


@pytest.mark.parametrize("exit_code", [1, 2, 3, 75])
def test_the_exit_code_of_training_is_that_of_the_script_and_nothing_is_sampled(checkout: Checkout, exit_code: int):
    checkout.answer("maxtext_lite.train", f"exit {exit_code}")
    code, _ = checkout.run("scripts/train.sh")
    assert code == exit_code
    assert not any("generate" in call for call in checkout.calls)


@pytest.mark.parametrize(
    ("words", "directory"),
    [
        (["run_name=g", "--device-memory-gb", "4"], "runs/g"),
        (["data_only=true", "ids=true"], ""),
        (["enable_checkpointing=false"], ""),
    ],
)
def test_the_run_to_sample_is_read_from_all_that_train_takes(words, directory, monkeypatch, capsys):
    code = re.search(r" -c '\n(.*?)\n' ", (REPOSITORY / "scripts/train.sh").read_text(), re.DOTALL)
    assert code
    monkeypatch.setattr("sys.argv", ["-c", "configs/base.yml", *words])
    exec(code[1], {})
    assert capsys.readouterr().out == f"{directory}\n"


def test_a_sample_that_fails_does_not_make_a_training_fail(checkout: Checkout):
    checkout.answer("maxtext_lite.generate", "exit 2")
    code, output = checkout.run("scripts/train.sh")
    assert code == 0, output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("whole_group", [False, True], ids=["script_only", "as_ctrl_c"])
def test_a_signal_reaches_training_once_and_its_exit_code_comes_back(
    checkout: Checkout, number: signal.Signals, whole_group: bool
):
    name = number.name.removeprefix("SIG")
    checkout.answer(
        "maxtext_lite.train",
        f"trap 'echo got {name}; sleep 0.3; exit 75' {name}\ntouch \"$here/ready\"\n"
        "for _ in $(seq 300); do sleep 0.1; done\n",
    )
    process = checkout.start("scripts/train.sh")
    deadline = time.monotonic() + 30
    while not (checkout.stub_directory / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if whole_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75, output
    assert output.count(f"got {name}") == 1
    assert not any("generate" in call for call in checkout.calls)


def test_a_python_that_is_too_old_is_refused_by_its_name(checkout: Checkout):
    checkout.answer("too_old", "1")
    checkout.answer("version", "3.9.2")
    code, output = checkout.run("scripts/train.sh", PYTHON=str(checkout.python))
    assert code == 1
    assert re.search(r"error: PYTHON=\S+ is not Python 3\.11 or newer \(Python 3\.9\.2\)", output)
    assert not checkout.calls


def test_a_missing_venv_module_names_the_debian_package(checkout: Checkout):
    checkout.answer("no_venv", "1")
    code, output = checkout.run("scripts/train.sh", PYTHON=str(checkout.python))
    assert code == 1
    assert "apt-get install python3-venv" in output


def test_a_folder_that_is_no_environment_is_left_alone(checkout: Checkout):
    (checkout.root / ".venv").mkdir()
    (checkout.root / ".venv" / "thesis.txt").touch()
    code, output = checkout.run("scripts/train.sh")
    assert code == 1
    assert "is not a virtual environment" in output
    assert (checkout.root / ".venv" / "thesis.txt").exists()


def test_the_test_script_and_ci_run_pytest_on_the_whole_suite_and_pass_arguments_on(checkout: Checkout):
    code, output = checkout.run("scripts/test.sh", "tests/config", "-x")
    assert code == 0, output
    assert re.fullmatch(r"-m pytest -n \d+ --dist loadscope --no-loadscope-reorder tests/config -x", checkout.calls[-1])
    checkout.answer("pytest", "exit 5")
    code, _ = checkout.run(".ci/run", CI="true")
    assert code == 5
    ci = r"-m pytest -n \d+ --dist loadscope --no-loadscope-reorder --hypothesis-profile=ci"
    assert re.fullmatch(ci, checkout.calls[-1])


CHECKS = [
    "-m ruff check .",
    "-m ruff format --check .",
    "-m pyright --pythonpath",
    "scripts/check.sh",
    "scripts/audit.py",
]


def test_ci_checks_the_source_before_the_tests(checkout: Checkout):
    code, output = checkout.run(".ci/run")
    assert code == 0, output
    calls = [call for call in checkout.calls if not is_install(call)]
    assert len(calls) == 6
    assert all(check in call for check, call in zip(CHECKS, calls, strict=False))


@pytest.mark.parametrize("tool", ["ruff", "pyright"])
def test_what_a_check_finds_ends_ci_before_the_tests(checkout: Checkout, tool: str):
    checkout.answer(tool, "exit 1")
    code, _ = checkout.run(".ci/run")
    assert code == 1
    calls = [call for call in checkout.calls if not is_install(call)]
    assert len(calls) == 5, "all checks, and no test"


def test_help_describes_the_training_script_and_does_nothing(checkout: Checkout):
    code, output = checkout.run("scripts/train.sh", "--help")
    assert code == 0
    assert "scripts/train.sh steps=1000" in output
    assert not checkout.calls
