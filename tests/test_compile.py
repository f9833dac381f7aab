"""The command `compile` describes the train step of any machine, reads no data, writes nothing."""

import json
import os
import subprocess

import jax
import pytest

from maxtext_lite.cli import run_command
from maxtext_lite.compile import main
from tests.processes import environment, quick_python
from tests.training.conftest import TINY

WORDS = [*TINY, "per_device_batch_size=2", "dataset_path=nowhere.txt"]


@pytest.fixture(autouse=True)
def _restored(monkeypatch, tmp_path):
    """A process that simulates devices sets XLA_FLAGS; this one has its eight devices already."""
    assert jax.device_count() == 8
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.chdir(tmp_path)


@pytest.mark.fast
def test_json_of_a_described_machine_without_data_or_a_run_directory(capsys, tmp_path):
    machine = [
        "--json",
        "--devices",
        "4",
        "--hosts",
        "2",
        "ici_tensor_parallelism=2",
        "num_epochs=2",
        "steps=-1",
    ]
    assert run_command(main, [*WORDS, *machine]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["num_devices"], printed["num_hosts"], printed["device_kind"]) == (
        4,
        2,
        "cpu",
    )
    assert {axis: size for axis, size in printed["mesh"].items() if size > 1} == {
        "fsdp": 2,
        "tensor": 2,
    }
    assert printed["rows_per_micro_batch"] == 8
    table = next(
        each for each in printed["parameters"] if each["name"] == "embedding.table"
    )
    assert table == {
        "name": "embedding.table",
        "shape": [264, 16],
        "dtype": "float32",
        "axes": ["vocab", "embed"],
        "partition_spec": [["tensor"], ["fsdp"]],
        "bytes_per_device": 264 * 16 * 4 // 4,
    }
    assert (
        sum(each["bytes_per_device"] for each in printed["parameters"])
        == printed["state_bytes"]["params"]
    )
    collectives = printed["collectives"]
    assert {("all-gather", "fsdp"), ("all-reduce", "tensor")} <= {
        (row["kind"], *row["axes"]) for row in collectives
    }
    for row in collectives:
        assert row["times"] >= row["operations"] > 0
        assert sum(row["bytes_by_dtype"].values()) == row["bytes"] > 0
        assert 0 < row["sent_bytes"] < 2 * row["bytes"]
    assert printed["sent_bytes"] == sum(row["sent_bytes"] for row in collectives)
    memory = printed["memory"]
    assert memory["total"] > memory["temporaries"] > 0
    assert memory["plan"]["params"] == printed["state_bytes"]["params"]
    assert memory["plan_error_percent"]["total"] == pytest.approx(
        100 * (memory["plan"]["total"] / memory["total"] - 1)
    )
    flops = printed["flops"]
    assert flops["model_per_device_and_step"] == flops["model_per_step"] / 4
    # Besides the model's there are only the scores, recomputed in the backward pass.
    assert (
        1
        < flops["matmuls_per_device_by_dtype"]["f32"]
        / flops["model_per_device_and_step"]
        < 1.5
    )
    assert printed["kernels"] == []
    assert printed["attention_kernel"]["name"] == "dot_product"
    assert set(printed["roofline"].values()) == {None}  # a CPU's figures are unknown
    assert list(tmp_path.iterdir()) == []


def test_tables_of_the_devices_that_are_there(capsys):
    assert (
        run_command(
            main,
            [
                *WORDS,
                "ici_data_parallelism=2",
                "ici_tensor_parallelism=2",
                "enable_diloco=true",
            ],
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == "compiled for 8 x cpu (data 2 x fsdp 2 x tensor 2) on 1 host: a step of 1 x 16 rows x 32 tokens"
    )
    (query,) = [line for line in lines if line.startswith("layers.attention.query")]
    shape, axes, split = (
        "2 x 2 x 16 x 4 x 4",
        "replica layers embed heads head_dim",
        "data - fsdp tensor -",
    )
    assert (
        query.split()
        == f"layers.attention.query {shape} float32 {axes} {split} 512".split()
    )
    gathers = {
        tuple(line.split()[:2]) for line in lines if line.startswith("all-gather")
    }
    assert ("all-gather", "fsdp") in gathers
    assert ("all-gather", "data") not in gathers
    (meeting,) = [
        number
        for number, line in enumerate(lines)
        if line.startswith("collectives every 30 steps")
    ]
    assert lines[meeting + 1].split()[:2] == ["all-reduce", "data"]


def test_a_step_that_does_not_fit_is_an_error_line(monkeypatch, capsys):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Used 18.11G of 15.75G hbm.\nProgram: ..."
        )

    monkeypatch.setattr("maxtext_lite.aot.program.compile_program", exhausted)
    assert run_command(main, ["--devices", "1", *WORDS]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "RESOURCE_EXHAUSTED: Used 18.11G of " in line


def test_a_process_of_its_own_simulates_what_it_is_asked_for():
    command = [
        *quick_python(),
        "-m",
        "maxtext_lite.compile",
        "--devices",
        "4",
        "--json",
        *WORDS,
    ]
    result = subprocess.run(
        command, env=environment(devices=2), capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["mesh"]["fsdp"] == 4
