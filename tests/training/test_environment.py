"""environment.json tells the truth."""

import importlib.metadata
import json
import platform
import re
import subprocess

import flax
import jax
import numpy as np
import optax
import pytest

from maxtext_lite.training import environment as module
from maxtext_lite.training.environment import environment
from tests.conftest import SIMULATED_DEVICES
from tests.source_tree import REPOSITORY


def test_versions_are_those_that_are_imported():
    found = environment()
    imported = {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__, "numpy": np.__version__}
    assert imported.items() <= found["packages"].items()
    assert {"jaxlib", "orbax-checkpoint", "grain"} <= set(found["packages"])
    assert found["python"] == platform.python_version()
    assert found["platform"] == platform.platform()


def test_it_names_every_device_and_can_be_written():
    found = environment()
    assert found["devices"] == [jax.devices()[0].device_kind] * SIMULATED_DEVICES
    assert found["num_processes"] == 1
    assert json.loads(json.dumps(found)) == found


def test_the_commit_is_that_of_the_source_not_of_the_working_directory(tmp_path, monkeypatch):
    def git(*arguments):
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.chdir(tmp_path)
    checked_out = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    assert environment()["git_commit"] == (checked_out.stdout.strip() or None)

    source = tmp_path / "source" / "environment.py"
    source.parent.mkdir()
    monkeypatch.setattr(module, "__file__", str(source))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert environment()["git_commit"] is None  # an installed package has none

    git("init", "-q", str(source.parent))
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    git("-C", str(source.parent), *identity, "commit", "-q", "--allow-empty", "-m", "m")
    commit = environment()["git_commit"]
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
    assert commit == git("-C", str(source.parent), "rev-parse", "HEAD")


@pytest.mark.parametrize(
    "git",
    [
        None,  # not there
        "",  # an executable that is none
        "#!/nowhere/sh\n",
        "#!/bin/sh\nexit 3\n",
        "#!/bin/sh\nkill -SEGV $$\n",
        "#!/bin/sh\necho 'warning: HEAD is ambiguous'\n",
        "#!/bin/sh\nprintf '\\377\\376'\n",
        "#!/bin/sh\nsleep 20\n",
    ],
)
def test_without_a_git_that_answers_there_is_no_commit(git, tmp_path, monkeypatch):
    if git is not None:
        (tmp_path / "git").write_text(git)
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if "sleep" not in (git or "") else f"{tmp_path}:/bin")
    monkeypatch.setattr(module, "_SECONDS_FOR_GIT", 0.2)
    assert environment()["git_commit"] is None


def test_the_commit_of_a_checkout_that_ignores_the_source_is_not_its_own(tmp_path, monkeypatch):
    source = tmp_path / "venv" / "environment.py"
    source.parent.mkdir()
    source.touch()
    (tmp_path / ".gitignore").write_text("venv\n")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    monkeypatch.setattr(module, "__file__", str(source))
    assert environment()["git_commit"] is None


def test_a_package_that_is_not_installed_is_left_out(monkeypatch):
    real = importlib.metadata.version

    def version(package):
        if package == "grain":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    packages = environment()["packages"]
    assert "grain" not in packages
    assert packages["jax"] == jax.__version__
