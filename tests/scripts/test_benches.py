"""The benches run and print whole tables; what they measure is not looked at."""

import importlib
import json
import os
import subprocess
import sys

import pytest

from tests.processes import quick_python
from tests.source_tree import REPOSITORY
from tests.training.conftest import TINY


def test_accumulation_over_a_pipeline():
    done = subprocess.run(
        [*quick_python(), "scripts/bench_accumulation.py", "--devices", "2", "--stages", "2", "--global-batch", "4",
         "--micro-batch", "2", "--repeats", "2", *TINY, "warmup_steps=1"],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    splits, accumulation, noise = (part.strip().splitlines() for part in done.stdout.split(":\n\n")[1:])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in splits[2:] if line.startswith("|")]
    # (A, pipeline microbatches, schedule): M must divide the micro-batch of 4 / A rows
    assert [tuple(row[1:4]) for row in cells] == [
        ("1", "2", "gpipe"), ("1", "2", "1f1b"), ("1", "4", "gpipe"), ("1", "4", "1f1b"),
        ("2", "2", "gpipe"), ("2", "2", "1f1b"),
    ]  # fmt: skip
    assert all(float(row[-2]) > 0 for row in cells)
    assert [line.split("|")[1].strip() for line in accumulation[2:6]] == ["1", "2", "4", "8"]
    assert noise[0].startswith("| wall-clock time")


@pytest.mark.fast
def test_import_stays_within_its_memory():
    done = subprocess.run(
        [*quick_python(), "scripts/bench_import.py", "--model", "smollm2-135m", "--layers", "4", "--mesh",
         "fsdp=2,tensor=3"],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    header, _, row = done.stdout.splitlines()
    cells = dict(zip(header.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    # vocabulary 49152 x 576 and four layers of 3.54M parameters each, in bfloat16
    assert (cells["largest tensor"], cells["checkpoint"], cells["devices"]) == ("54 MiB", "81 MiB", "81 MiB")


def test_overlap_of_rollout_and_training():
    done = subprocess.run(
        [*quick_python(), "scripts/bench_overlap.py", "--devices", "2", "--chunks", "2", "--prompts", "2", "--steps",
         "1", "--repeats", "1", *TINY[:7]],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[6:]]
    assert [(row[0], row[-2]) for row in rows] == [
        ("in turns", "0.00"), ("one after the other", "0.00"), ("beside each other", "0.50"),
    ]  # fmt: skip
    assert rows[1][4] == "1.00 (1.00 .. 1.00)"
    assert [row[-1] for row in rows[:2]] == ["0.00", "0.00"]


def test_points_compile_or_say_why_not(tmp_path):
    (tmp_path / "points.txt").write_text(
        f"# NAME | TOPOLOGY | keys\none | 1 | {' '.join(TINY)}\n\nwrong | 1 | learning_rte=1  # no such key\n"
    )
    done = subprocess.run(
        [*quick_python(), "scripts/bench_aot.py", str(tmp_path / "points.txt"), "--out", str(tmp_path / "out.jsonl")],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    header, _, one, wrong = ([cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines())
    assert len(header) == len(one) == len(wrong)
    cells = dict(zip(header, one, strict=True))
    assert cells["asynchronous"] == "none cross"
    assert cells["matmul TFLOP"].startswith("f32 ")
    assert (cells["GB sent"], cells["bound on MFU"], cells["kernels"]) == ("0", "not known", "none")
    assert wrong[2].startswith("failed: error: unknown key 'learning_rte'")
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (first["point"], first["num_devices"], second["point"], second["exit_code"]) == ("one", 1, "wrong", 2)


def test_held_out_losses_in_eight_bits():
    done = subprocess.run(
        [*quick_python(), "scripts/bench_eight_bits.py", "--seeds", "1", "--only", "int8", "--", *TINY,
         "steps=2", "warmup_steps=1", "dataset_type=synthetic", "eval_steps=1"],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[4:]]
    ((word, loss, *_, ratio, spread),) = rows
    assert (word, ratio, spread) == ("`int8`", "1.0000", "0.00%")
    assert 5 < float(loss) < 6  # log 264 is 5.6


def test_loading_and_generating_beside_transformers(monkeypatch, capsys):
    """In this process, which has the libraries already: each part has one of its own otherwise."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    bench = importlib.import_module("bench_generate")
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: None)  # of this process it would stay
    words = "--layers 1 --vocabulary 96 --dtypes float32 --batches 2 --repeats 1 --tokens 5"
    monkeypatch.setattr("sys.argv", ["bench_generate.py", *words.split()])

    def ask(part, directory, dtype):
        with monkeypatch.context() as within:
            within.setattr("sys.argv", [*sys.argv, "--part", part, str(directory), dtype])
            assert bench.main() == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(bench, "_ask", ask)
    assert bench.main() == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    loads, steps = rows[:5], rows[6:]
    assert [row[1] for row in loads[2:]] == ["ours", "transformers", "ratio"]
    assert {len(row) for row in loads} == {2 + 3 * 3}
    assert (len(steps), steps[2][:2], steps[2][-1]) == (3, ["float32", "2"], "100%")


def test_readers_of_prepared_data():
    done = subprocess.run(
        [*quick_python(), "scripts/bench_data.py", "--rows", "64", "--tokens", "512", "--copies", "1", "--rounds",
         "1"],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[4:]]
    assert [row[0] for row in rows] == ["ours, concat", "ours, best_fit", "ours, none", "grain", "sequential"]
    for row in rows:
        row_rate, token_rate = (float(cell.replace(",", "")) for cell in row[1:3])
        # The targets of a row; both rates are printed as whole numbers.
        assert 0.5 * 512 * (row_rate - 0.5) < token_rate + 0.5
        assert token_rate - 0.5 <= 512 * (row_rate + 0.5)
    assert [row[3] for row in rows if row[0] == "grain"] == ["1.00"]
