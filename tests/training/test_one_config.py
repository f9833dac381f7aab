"""Processes of one run that were started with different configs are told so before they open anything."""

import json

import pytest

from tests.processes import quick_python, run_launched

# Each pair of values is tried in turn: the first on process 0, the second on the last. No file of the data exists.
TRIED = """
import json, os, sys
from maxtext_lite.cli import run_command
from maxtext_lite.config import UserError, load_config
from maxtext_lite.training import train
from maxtext_lite.training.opening import start_run
record, tried = sys.argv[1], json.loads(sys.argv[2])
def main(argv):
    is_last = os.environ["JAX_PROCESS_ID"] == str(int(os.environ["JAX_NUM_PROCESSES"]) - 1)
    found = []
    for key, *values in tried:
        config = load_config(None, [f"{key}={values[is_last]}"])
        try:
            start_run(config)
        except UserError as error:
            found.append(list(error.problems))
        else:
            found.append([])
    with open(os.path.join(record, os.environ["JAX_PROCESS_ID"]), "w") as file:
        json.dump(found, file)
    train(load_config(None, ["dataset_path=missing.txt", f"seed={int(is_last)}", f"steps={7 + is_last}"]))
sys.exit(run_command(main))
"""

DIFFERENT = [
    ("seed", "0", "1"),
    ("learning_rate", "0.001", "0.002"),
    ("data_shuffle_seed", "0", "4"),
    ("checkpoint_period", "10", "20"),
    ("run_name", "one", "two"),
    ("base_output_directory", "here", "there"),
]
MAY_DIFFER = [
    ("grain_worker_count", "0", "2"),
    ("log_to", '""', "tensorboard"),
    ("prometheus_port", "0", "9100"),
    ("dataset_path", "a/text.jsonl", "b/text.jsonl"),
]


@pytest.mark.parametrize("processes", [2, 4])
def test_keys_that_differ_between_processes_are_named_on_all_of_them(
    processes, tmp_path
):
    tried = json.dumps([*DIFFERENT, *MAY_DIFFER])
    result = run_launched(
        [*quick_python(), "-c", TRIED, str(tmp_path), tried],
        processes=processes,
        devices=1,
    )
    assert result.returncode == 2, result.stderr
    assert "seed=0 on process 0" in result.stderr
    assert "steps=7 on process 0" in result.stderr
    assert "missing.txt" not in result.stderr
    for process in range(processes):
        found = json.loads((tmp_path / str(process)).read_text())
        for (key, first, last), problems in zip(DIFFERENT, found, strict=False):
            (problem,) = problems
            assert f"{key}={first} on process 0" in problem
            assert f"{last} on process {processes - 1}" in problem
        assert found[len(DIFFERENT) :] == [[]] * len(MAY_DIFFER)
