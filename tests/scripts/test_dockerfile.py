"""scripts/Dockerfile without a docker: what it copies is enough to run, and what it says of user and signals holds."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from maxtext_lite.process.signals import runs_a_command
from tests.source_tree import REPOSITORY

TEXT = (REPOSITORY / "scripts" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
STAGES = {
    name: body.strip().splitlines()
    for name, body in re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", TEXT, re.MULTILINE | re.DOTALL)
}
TARGETS = [name for name in STAGES if name != "base"]


def test_there_is_an_image_for_each_kind_of_machine():
    assert set(TARGETS) == {"cpu", "cuda13", "tpu"}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_locked_has_its_extra_and_does_not_run_as_root(target: str):
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install, copy, user = STAGES[target]
    named = re.fullmatch(r'RUN pip install -c constraints\.txt -e "\.\[(.*)\]"', install)
    assert named is not None
    assert set(named[1].split(",")) == {"gcs"} | ({target} & set(extras))
    assert set(named[1].split(",")) <= set(extras)
    assert copy == "COPY . ."
    assert user == "USER 1000"


def test_signals_reach_the_command_which_takes_them_from_its_first_import_on():
    (line,) = [line for line in STAGES["base"] if line.startswith("ENTRYPOINT ")]
    words = json.loads(line.removeprefix("ENTRYPOINT "))  # the exec form: no shell stands between
    assert runs_a_command([*words, "train"])


def test_what_the_image_is_built_from_is_enough_to_run(tmp_path: Path):
    patterns = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
    assert [each for each in REPOSITORY.iterdir() if each.name in kept] != []
    for name in kept:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    for line in STAGES["base"]:
        if line.startswith("COPY "):
            for name in line.split()[1:-1]:
                assert (tmp_path / name).exists(), f"{line}: .dockerignore leaves {name} out"
    assert not any(fnmatch.fnmatch(name, pattern) for name in (".venv", "runs", ".git") for pattern in kept)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-m", "maxtext_lite", "plan", "configs/base.yml", "--devices=8"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "8" in result.stdout
