"""scripts/skypilot.yaml: what its nodes would run, run by bash on stand-ins, and its exit codes."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from maxtext_lite.config import load_config
from maxtext_lite.parallel.cluster import process_info
from maxtext_lite.process.progress import EXIT_HANGS
from maxtext_lite.process.signals import EXIT_INTERRUPTED
from maxtext_lite.train import EXIT_STOPPED_BY_SIGNAL
from tests.source_tree import REPOSITORY

TASK = yaml.safe_load((REPOSITORY / "scripts" / "skypilot.yaml").read_text(encoding="utf-8"))
# Prints the variables and the words that it is given, instead of training.
PYTHON = """#!/usr/bin/env bash
env | grep ^JAX_
printf '%s\\n' "$@"
exit 76
"""


@pytest.fixture
def nodes(tmp_path: Path) -> list[tuple[dict[str, str], list[str]]]:
    """What each node's process is told: its variables, and its words."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    told = []
    for rank in range(TASK["num_nodes"]):
        sky = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(rank)}
        result = subprocess.run(
            ["bash", "-c", TASK["run"]],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], **TASK["envs"], **sky},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 76, result.stderr  # the exit code is that of the training command
        lines = result.stdout.splitlines()
        variables = dict(line.split("=", 1) for line in lines if line.startswith("JAX_"))
        told.append((variables, lines[len(variables) :]))
    return told


def test_the_nodes_find_each_other_and_run_the_training_command(nodes: list[tuple[dict[str, str], list[str]]]):
    found = [process_info(variables, on_tpu=False) for variables, _ in nodes]
    assert [(each.num_processes, each.process_id, each.address) for each in found] == [
        (2, 0, "10.0.0.7:1234"),
        (2, 1, "10.0.0.7:1234"),
    ]
    for _, words in nodes:
        assert words[:3] == ["-u", "-m", "maxtext_lite.train"]
        config = load_config(None, words[3:])
        assert (config.base_output_directory, config.steps) == ("gs://my-bucket/runs", 20000)


def test_it_starts_again_after_what_a_new_start_helps_against_and_after_nothing_else():
    recovery = TASK["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [EXIT_STOPPED_BY_SIGNAL, EXIT_HANGS, EXIT_INTERRUPTED]
    assert recovery["max_restarts_on_errors"] == 0


def test_the_setup_calls_what_the_repository_has():
    (source, call) = TASK["setup"].splitlines()
    assert source == ". scripts/environment.sh"
    assert f"\n{call.split()[0]}() {{" in (REPOSITORY / "scripts" / "environment.sh").read_text(encoding="utf-8")
