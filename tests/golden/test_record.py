"""The golden record holds: for a few of its runs here, for all with the environment variable EVERY_GOLDEN_RUN."""

import copy
import json
import os
import subprocess
import sys

import pytest

from tests.golden.record import (
    DIFFERENT,
    RECORD,
    SAME,
    WITHIN,
    compare,
    main,
    read_record,
)
from tests.golden.runs import RUNS
from tests.source_tree import PACKAGE, REPOSITORY
from tests.test_layers import CORE

FEW = (
    "mesh data 2 fsdp 2 tensor 2",
    "resume on another mesh",
    "mesh expert 4 tensor 2",
)


@pytest.fixture(scope="module")
def record():
    return read_record()["runs"]


def core_alone(directory):
    """A copy of the repository's core, tests and configs: no room and no command."""
    kept = {*CORE, "__init__.py", "console.py", "assets"}
    package = directory / "maxtext_lite"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if path.name in kept:
            (package / path.name).symlink_to(path)
    for name in ("configs", "tests", "README.md"):
        (directory / name).symlink_to(REPOSITORY / name)
    return directory


def test_the_core_alone_trains_runs_as_recorded(record, tmp_path):
    copy = core_alone(tmp_path)
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.golden.record", "measure", str(out), *FEW]
    found = subprocess.run(
        command,
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr
    for name, run in json.loads(out.read_text()).items():
        verdict, what = compare(run, record[name], RUNS[name].tolerance)
        assert verdict in (SAME, WITHIN), (name, what)


@pytest.mark.skipif(
    not os.environ.get("EVERY_GOLDEN_RUN"),
    reason="takes minutes; EVERY_GOLDEN_RUN is not set",
)
def test_every_run_is_as_recorded(capfd):
    assert main(["check", "--tolerant"]) == 0, capfd.readouterr().out


@pytest.mark.fast
def test_the_record_has_every_run_and_stays_small(record):
    assert sorted(record) == sorted(RUNS)
    assert RECORD.stat().st_size < 150_000


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda run: None, SAME),
        (lambda run: run["parameters"].update(w=[2.0, "another"]), WITHIN),
        (lambda run: run.update(loss=[5.0, 4.0 * (1 + 9e-6)]), WITHIN),
        (lambda run: run.update(loss=[5.0, 4.0 * (1 + 2e-5)]), DIFFERENT),
        (lambda run: run.update(examples_hash=["0a", "0c"]), DIFFERENT),
        (lambda run: run["parameters"].pop("w"), DIFFERENT),
    ],
)
def test_what_differs_is_told_from_what_is_rounded(change, verdict):
    recorded = {
        "loss": [5.0, 4.0],
        "grad_norm": [1.0, 1.0],
        "examples_hash": ["0a", "0b"],
        "target_tokens": [100, 100],
        "parameters": {"w": [2.0, "a checksum"]},
    }
    found = copy.deepcopy(recorded)
    change(found)
    assert compare(found, recorded, 1e-5)[0] == verdict
