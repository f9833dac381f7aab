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
    machine = (
        "--json --devices 4 --hosts 2 ici_tensor_parallelism=2 num_epochs=2 steps=-1"
    )
    assert run_command(main, [*WORDS, *machine.split()]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["num_devices"], printed["num_hosts"]) == (4, 2)
    sizes = {axis: size for axis, size in printed["mesh"].items() if size > 1}
    assert sizes == {"fsdp": 2, "tensor": 2}
    assert printed["rows_per_micro_batch"] == 8
    own = sum(each["bytes_per_device"] for each in printed["parameters"])
    memory = printed["memory"]
    assert own == printed["state_bytes"]["params"] == memory["plan"]["params"]
    assert memory["total"] > memory["temporaries"] > 0
    collectives = printed["collectives"]
    found = {(row["kind"], *row["axes"]) for row in collectives}
    assert {("all-gather", "fsdp"), ("all-reduce", "tensor")} <= found
    assert printed["sent_bytes"] == sum(row["sent_bytes"] for row in collectives)
    flops = printed["flops"]
    own = flops["model_per_device_and_step"]
    assert own == flops["model_per_step"] / 4
    # Besides the model's there are only the scores, recomputed in the backward pass.
    assert 1 < flops["matmuls_per_device_by_dtype"]["f32"] / own < 1.5
    assert set(printed["roofline"].values()) == {None}  # a CPU's figures are unknown
    assert list(tmp_path.iterdir()) == []


def test_tables_of_the_devices_that_are_there(capsys):
    keys = "ici_data_parallelism=2 ici_tensor_parallelism=2 enable_diloco=true"
    assert run_command(main, [*WORDS, *keys.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("compiled for 8 x cpu (data 2 x fsdp 2 x tensor 2)")
    (query,) = [line for line in lines if line.startswith("layers.attention.query")]
    shape, axes = "2 x 2 x 16 x 4 x 4", "replica layers embed heads head_dim"
    expected = f"layers.attention.query {shape} float32 {axes} data - fsdp tensor - 512"
    assert query.split() == expected.split()
    gathers = {line.split()[1] for line in lines if line.startswith("all-gather")}
    assert "fsdp" in gathers
    assert "data" not in gathers
    every = next(line for line in lines if line.startswith("collectives every 30 "))
    assert lines[lines.index(every) + 1].split()[:2] == ["all-reduce", "data"]


def test_a_step_that_does_not_fit_is_an_error_line(monkeypatch, capsys):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Used 18.11G of 15.75G hbm.\nProgram: ..."
        )

    monkeypatch.setattr("maxtext_lite.analysis.program.compile_program", exhausted)
    assert run_command(main, ["--devices", "1", *WORDS]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "RESOURCE_EXHAUSTED: Used 18.11G of " in line


def test_a_process_of_its_own_simulates_what_it_is_asked_for():
    words = ["-m", "maxtext_lite.compile", "--devices", "4", "--json", *WORDS]
    result = subprocess.run(
        [*quick_python(), *words, "base_num_decoder_layers=1"],
        env=environment(devices=2),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["mesh"]["fsdp"] == 4
