"""The command `replay`."""

import dataclasses
import itertools
import json
import shutil

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.kernels import KERNELS
from maxtext_lite.replay import main
from maxtext_lite.train import main as train
from maxtext_lite.training import executables, replaying

SIZES = ["base_emb_dim=16", "base_mlp_dim=32", "base_num_decoder_layers=1", "base_num_query_heads=2",
         "base_num_kv_heads=1", "head_dim=8", "max_target_length=32", "per_device_batch_size=1", "warmup_steps=1",
         "gradient_accumulation_steps=2", "packing=best_fit", "eval_interval=-1", "eval_fraction=0",
         "checkpoint_period=2", "learning_rate=0.1", "learning_rate_schedule=constant",
         "data_shuffle_seed=-1"]  # fmt: skip
PLANTED = "~^|" * 10


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four steps of 16 rows with equal texts, except for one in step 4."""
    directory = tmp_path_factory.mktemp("runs")
    texts = ["the cat sat on the mat there"] * 64
    texts[57] = PLANTED
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    for name, own in (("even", lines[::2]), ("odd", lines[1::2])):
        (directory / f"{name}.jsonl").write_text("".join(own))
    sources = ", ".join(f"{{name: {name}, path: {directory}/{name}.jsonl, weight: 1}}" for name in ("even", "odd"))
    words = [f"dataset_path=[{sources}]", f"base_output_directory={directory}", "run_name=it", "steps=4"]
    assert train([*SIZES, *words]) == 0
    return directory / "it"


def _files(directory):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in directory.rglob("*")}


def test_a_spiked_step_is_done_again_to_the_bit_and_names_the_planted_row(run, capsys):
    before = _files(run)
    capsys.readouterr()
    assert main([str(run), "--step", "4", "--rows", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert _files(run) == before
    assert (found["same"], found["after"], found["elsewhere"], found["tolerance"]) == (True, 2, "", 0)
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[3])
    assert found["fields"]["loss"] == [record["loss"], record["loss"], True]
    planted, *others = found["rows"]
    # Text 57 of all is number 28 of the odd ones. As many tokens as bytes are targets: the end, and not the first.
    assert (planted["source"], planted["row"], planted["text"], planted["target_tokens"]) == ("odd", 28, PLANTED, 30)
    assert len(others) == 15
    assert max(row["grad_norm"] for row in others) < planted["grad_norm"] / 4
    # What rows are alone adds up to what they are together.
    rows = found["rows"]
    assert sum(row["loss_sum"] for row in rows) / sum(row["target_tokens"] for row in rows) == pytest.approx(
        record["loss"], rel=1e-6
    )
    norms = [row["grad_norm"] for row in rows]
    assert 2 * max(norms) - sum(norms) < record["grad_norm"] < sum(norms)


def test_a_step_is_repeated_with_the_settings_of_its_own_start(run, capsys, tmp_path):
    """config.yml is that of the newest start, here one with another learning rate and batch after step 4."""
    later = tmp_path / "later"
    shutil.copytree(run, later)
    text = (later / "config.yml").read_text()
    for key in ("learning_rate: 0.1", "gradient_accumulation_steps: 2", "steps: 4"):
        assert f"\n{key} " in text
        text = text.replace(f"\n{key} ", f"\n{key}0 ".replace("0.10", "0.2"))
    (later / "config.yml").write_text(text)
    capsys.readouterr()
    assert main([str(later), "--step", "4"]) == 0
    assert "step 4, from the checkpoint of step 2: equal to the bit" in capsys.readouterr().out


def test_a_step_after_a_resume_with_other_settings_needs_a_checkpoint_from_after_it(run, monkeypatch):
    newest, (first,) = replaying._starts(run / "checkpoints")
    assert newest == 4
    for changed in ({"seed": "5"}, {"steps": "9"}):  # other steps change no step at a constant rate
        resumed = {**first, "step": 1, "settings": {**first["settings"], **changed}}
        monkeypatch.setattr(replaying, "_starts", lambda _, starts=(first, resumed): (newest, starts))
        if "steps" in changed:
            assert main([str(run), "--step", "2"]) == 0
            continue
        with pytest.raises(UserError) as raised:
            main([str(run), "--step", "2"])
        assert raised.value.problems == (
            "--step=2: the run resumed with other settings after step 1, of which no intact checkpoint is left. "
            "Nearest that work: 1 or 3.",
        )


@pytest.mark.parametrize("anew", [True, False])
def test_a_step_that_a_gpu_compiled_anew_may_differ_in_rounding(run, capsys, tmp_path, monkeypatch, anew):
    """Its compiler times its choices. To the bit as ever: a step that is equal, and one that the run compiled."""
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    records = [json.loads(line) for line in (moved / "metrics.jsonl").read_text().splitlines()]
    records[3]["param_norm"] *= 1.00001
    (moved / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(replaying.jax, "default_backend", lambda: "gpu")
    hits = itertools.count()
    monkeypatch.setattr(executables, "num_found", lambda: 0 if anew else next(hits))
    capsys.readouterr()
    assert main([str(moved), "--step", "3", "--json"]) == 0
    assert (found := json.loads(capsys.readouterr().out))["elsewhere"] == ""
    assert found["tolerance"] == 0
    assert main([str(moved), "--step", "4", "--json"]) == (0 if anew else 1)
    found = json.loads(capsys.readouterr().out)
    assert (found["elsewhere"], found["same"]) == ("the step was compiled anew, on a GPU" if anew else "", anew)
    assert found["tolerance"] == (1e-4 if anew else 0)


def test_the_first_field_and_the_first_step_that_differ_are_named(run, capsys, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    shutil.rmtree(moved / "checkpoints")  # what is left begins with the run's first parameters
    records = [json.loads(line) for line in (moved / "metrics.jsonl").read_text().splitlines()]
    records[0]["loss"] *= 1.001
    records[1]["grad_norm"] *= 1.001
    records[1]["param_norm"] *= 1.00001  # within the tolerance for other versions
    (moved / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    about = json.loads((moved / "environment.json").read_text())
    now, about["packages"]["jax"] = about["packages"]["jax"], "0.1"
    (moved / "environment.json").write_text(json.dumps(about))
    capsys.readouterr()
    assert main([str(moved), "--step", "2"]) == 1
    first, *fields = capsys.readouterr().out.splitlines()
    assert first == (
        "step 2, from the run's initial parameters: not equal within 0.0001, first in grad_norm; step 1 already "
        f"differs (jax is {now}, then 0.1)"
    )
    assert [line.split()[1] for line in fields if line.startswith("!")] == ["grad_norm"]


def test_a_kernel_that_rounds_otherwise_each_time_is_not_compared_to_the_bit(run, capsys, monkeypatch):
    kernels = {name: dataclasses.replace(kernel, repeats=False) for name, kernel in KERNELS.items()}
    monkeypatch.setattr(replaying, "KERNELS", kernels)
    capsys.readouterr()
    assert main([str(run), "--step", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["elsewhere"], found["tolerance"]) == ("attention=dot_product rounds otherwise each time", 1e-4)
    assert {name for name, kernel in KERNELS.items() if not kernel.repeats} == {"cudnn_flash", "cudnn_masked"}


def test_the_first_steps_begin_with_the_parameters_of_the_first_start(run, capsys, tmp_path, monkeypatch):
    """Named relative to where the run began, and no longer by the start after it."""
    monkeypatch.chdir(tmp_path)
    words = [*SIZES, "dataset_type=synthetic", "dataset_path=", "packing=true", "base_output_directory=runs"]
    assert train([*words, "run_name=base", "steps=2"]) == 0
    assert train([*words, "run_name=on", "steps=2", "load_parameters_path=runs/base"]) == 0
    assert train([*words, "run_name=on", "steps=4", "load_parameters_path="]) == 0
    monkeypatch.chdir(tmp_path.parent)
    on = tmp_path / "runs" / "on"
    for step in (1, 2, 3):
        assert main([str(on), "--step", str(step)]) == 0
    shutil.rmtree(tmp_path / "runs" / "base")
    assert main([str(on), "--step", "3"]) == 0  # from the checkpoint of step 2
    with pytest.raises(UserError, match="is neither a run directory with a checkpoint nor a checkpoint") as refused:
        main([str(on), "--step", "2"])
    assert "Nearest" not in str(refused.value)
    (on / "checkpoints" / "2" / "about" / "metadata").write_text("{")
    with pytest.raises(UserError, match="no intact checkpoint is left before it"):
        main([str(on), "--step", "3"])
