"""The command `compile` describes the train step of any machine, reads no data, writes nothing, and refuses clearly."""

import json
import os
import re
import subprocess
import sys

import jax
import pytest

from maxtext_lite.cli import run_command
from maxtext_lite.compile import main
from tests.processes import environment

TINY = (
    "vocab_size=264", "base_emb_dim=16", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=4",
    "base_mlp_dim=24", "base_num_decoder_layers=2", "max_target_length=32", "per_device_batch_size=2",
    "dataset_path=nowhere.txt",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _restored(monkeypatch, tmp_path):
    """A process that simulates devices sets XLA_FLAGS; this one has its eight devices already."""
    assert jax.device_count() == 8
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.chdir(tmp_path)


def test_json_of_a_described_machine_without_data_or_a_run_directory(capsys, tmp_path):
    assert run_command(main, ["--json", "--devices", "4", "--hosts", "2", *TINY, "ici_tensor_parallelism=2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["num_devices"] == 4
    assert printed["num_hosts"] == 2
    assert printed["device_kind"] == "cpu"
    assert {axis: size for axis, size in printed["mesh"].items() if size > 1} == {"fsdp": 2, "tensor": 2}
    assert printed["rows_per_micro_batch"] == 8
    table = next(p for p in printed["parameters"] if p["name"] == "embedding.table")
    assert table == {
        "name": "embedding.table", "shape": [264, 16], "dtype": "float32", "axes": ["vocab", "embed"],
        "partition_spec": [["tensor"], ["fsdp"]], "bytes_per_device": 264 * 16 * 4 // 4,
    }  # fmt: skip
    assert sum(p["bytes_per_device"] for p in printed["parameters"]) == printed["state_bytes"]["params"]
    kinds = {(row["kind"], *row["axes"]) for row in printed["collectives"]}
    assert {("all-gather", "fsdp"), ("all-reduce", "tensor")} <= kinds
    assert all(row["bytes"] > 0 and row["times"] >= row["operations"] > 0 for row in printed["collectives"])
    assert printed["diloco_synchronisation"] is None
    memory = printed["memory"]
    assert memory["total"] > memory["temporaries"] > 0
    assert memory["plan"]["params"] == printed["state_bytes"]["params"]
    assert memory["plan_error_percent"]["total"] == pytest.approx(100 * (memory["plan"]["total"] / memory["total"] - 1))
    assert memory["plan_error_percent"]["code"] is None
    assert all(sum(row["bytes_by_dtype"].values()) == row["bytes"] for row in printed["collectives"])
    assert all(0 < row["sent_bytes"] < 2 * row["bytes"] for row in printed["collectives"])
    assert printed["sent_bytes"] == sum(row["sent_bytes"] for row in printed["collectives"])
    flops = printed["flops"]
    assert flops["model_per_device_and_step"] == flops["model_per_step"] / 4
    # Beside the model's there are only the scores, which are computed again in the backward pass.
    assert 1 < flops["matmuls_per_device_by_dtype"]["f32"] / flops["model_per_device_and_step"] < 1.5
    assert printed["kernels"] == []
    assert printed["attention_kernel"] == {"name": "dot_product", "passed_over": {}, "assumed": ""}
    assert printed["assumed"] == []
    sizes = [array["num_bytes"] for array in printed["largest_arrays"]]
    assert 1 < len(sizes) <= 5
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= memory["temporaries"] + memory["outputs"]
    assert all(array["type"].startswith(("f32[", "s32[")) and array["made_by"] for array in printed["largest_arrays"])
    assert printed["memory_traffic_bytes"] > memory["arguments"]
    assert printed["compiler"] == {"cycles": None, "seconds": None}
    assert set(printed["roofline"].values()) == {None}  # of a CPU no figures are known
    assert printed["versions"]["jax"] == jax.__version__
    assert list(tmp_path.iterdir()) == []


def test_tables_of_the_devices_that_are_there(capsys):
    assert run_command(main, [*TINY, "ici_data_parallelism=2", "ici_tensor_parallelism=2", "enable_diloco=true"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "compiled for 8 x cpu (data 2 x fsdp 2 x tensor 2) on 1 host: a step of 1 x 16 rows x 32 tokens"
    (query,) = [line for line in lines if line.startswith("layers.attention.query")]
    shape, axes, split = "2 x 2 x 16 x 4 x 4", "replica layers embed heads head_dim", "data - fsdp tensor -"
    assert query.split() == f"layers.attention.query {shape} float32 {axes} {split} 512".split()
    gathers = {tuple(line.split()[:2]) for line in lines if line.startswith("all-gather")}
    assert ("all-gather", "fsdp") in gathers
    assert ("all-gather", "data") not in gathers
    meeting = lines.index(next(line for line in lines if line.startswith("collectives every 30 steps")))
    assert lines[meeting + 1].split()[:2] == ["all-reduce", "data"]
    temporaries = next(line for line in lines if line.startswith("temporaries"))
    assert re.search(r" [+-]\d+\.\d %  ", temporaries)
    assert "no kernels" in lines
    assert [line.split()[:3] for line in lines if line.startswith("matmuls")] == [["matmuls", "not", "known"]]
    assert lines[-2].startswith("FLOPs of a step: ")
    assert lines[-1] == "bound on MFU: not known, as the device's figures are not"


def test_epochs_ask_for_no_data_as_they_change_no_shape(capsys):
    assert run_command(main, ["--json", "--devices", "1", *TINY, "num_epochs=2", "steps=-1"]) == 0
    assert json.loads(capsys.readouterr().out)["collectives"] == []


@pytest.mark.parametrize(("arguments", "message"), [
    (("--devices", "8", "--topology", "v5e:2x2"), "--devices and --topology contradict each other; give one of them."),
    (("--hosts", "2"), "--hosts=2 needs --devices, which is not given."),
    (("--slices", "2"), "--slices=2 needs --topology, which is not given."),
    (("--devices", "8", "--hosts", "0"), "--hosts=0 must be at least 1. Nearest that works: 1."),
    (("--devices", "0"), "num_devices=0 must be at least 1. Nearest that works: 1."),
    (("--devices", "9", "ici_tensor_parallelism=2"), "ici_tensor_parallelism=2 does not divide the 9 devices"),
    (("--devices", "16", "base_num_kv_heads=4"), "--devices=16: jax has started with 8. Nearest that works: 8."),
    (("--topology", "v0:1x1"), "--topology=v0:1x1 names no device that can be compiled for here. "),
    (("--topology", "2*v5e:2x2", "--slices", "3"), "--topology=2*v5e:2x2 and --slices=3 contradict each other"),
    (("--devices", "8", "learning_rte=1"), "unknown key 'learning_rte' (command line). Did you mean 'learning_rate'?"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(arguments, message, capsys):
    assert run_command(main, [*arguments, *TINY]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.startswith("error: " + message) for line in printed.err.splitlines()] == [True]


def test_a_step_that_does_not_fit_is_an_error_line_with_the_compilers_reason(monkeypatch, capsys):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 18.11G of 15.75G hbm.\nProgram: ...")

    monkeypatch.setattr("maxtext_lite.aot.program.compile_program", exhausted)
    assert run_command(main, ["--devices", "1", *TINY]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "error: the step does not fit on a cpu, by its compiler: RESOURCE_EXHAUSTED: Used 18.11G of "
    )
    assert said.count("\n") == 1


def test_a_process_of_its_own_simulates_what_it_is_asked_for():
    result = subprocess.run(
        [sys.executable, "-m", "maxtext_lite.compile", "--devices", "4", "--json", *TINY],
        env=environment(devices=2),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["mesh"]["fsdp"] == 4
