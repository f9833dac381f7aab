"""The commands `replay` and `verify_resume`."""

import json
import re
import shutil
from pathlib import Path

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.json_file import parse_json
from maxtext_lite.replay import main
from maxtext_lite.train import main as train
from maxtext_lite.verify_resume import main as verify_resume
from tests.processes import RunFiles
from tests.run_directories import lines_of, write_metrics

SIZES = """
base_emb_dim=16 base_mlp_dim=32 base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=1 head_dim=8
max_target_length=32 per_device_batch_size=8 warmup_steps=1 gradient_accumulation_steps=2 packing=best_fit
eval_interval=-1 eval_fraction=0 checkpoint_period=2 learning_rate=0.1 learning_rate_schedule=constant
data_shuffle_seed=-1
"""
PLANTED = "~^|" * 10


pytestmark = pytest.mark.usefixtures("one_device_for_all")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Of a run of four steps of 16 rows with equal texts, except for one in step 4."""
    directory = tmp_path_factory.mktemp("runs")
    texts = ["the cat sat on the mat there"] * 64
    texts[57] = PLANTED
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    sources = []
    for name, own in (("even", lines[::2]), ("odd", lines[1::2])):
        path = directory / f"{name}.jsonl"
        path.write_text("".join(own))
        sources.append(f"{{name: {name}, path: {path}, weight: 1}}")
    path = f"dataset_path=[{', '.join(sources)}]"
    return [*SIZES.split(), path, "steps=4", f"base_output_directory={directory}"]


@pytest.fixture(scope="module")
def run(words):
    assert train([*words, "run_name=it"]) == 0
    return Path(words[-1].partition("=")[2]) / "it"


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run, to change."""
    return shutil.copytree(run, tmp_path / "copy")


@pytest.fixture
def asked(capsys):
    """A function of a command and its words to its exit code and what it printed, read as JSON with --json."""

    def ask(command, *words):
        capsys.readouterr()
        code = command([*map(str, words)])
        said = capsys.readouterr().out
        return code, parse_json(said) if "--json" in words else said

    return ask


def change_lines(directory, changes):
    """Multiplies numbers of metrics.jsonl: {line: {name: factor}}."""
    records = lines_of(directory)
    for number, factors in changes.items():
        for name, factor in factors.items():
            records[number][name] *= factor
    write_metrics(directory, records)


def test_a_spiked_step_is_done_again_to_the_bit_and_names_the_planted_row(run, asked):
    files = lambda: {path: path.stat().st_mtime_ns for path in run.rglob("*")}  # noqa: E731
    before = files()
    code, found = asked(main, run, "--step", 4, "--rows", "--json")
    assert (code, files()) == (0, before)
    assert (found["same"], found["after"], found["tolerance"]) == (True, 2, 0)
    record = RunFiles(run).steps[3]
    assert found["fields"]["loss"] == [record["loss"], record["loss"], True]
    planted, *others = found["rows"]
    # Text 57 of all is number 28 of the odd ones. As many tokens as bytes are targets: the end, and not the first.
    assert (planted["source"], planted["row"]) == ("odd", 28)
    assert (planted["text"], planted["target_tokens"]) == (PLANTED, 30)
    assert len(others) == 15
    assert max(row["grad_norm"] for row in others) < planted["grad_norm"] / 4
    # What rows are alone adds up to what they are together.
    loss, tokens = (
        sum(row[name] for row in found["rows"])
        for name in ("loss_sum", "target_tokens")
    )
    assert loss / tokens == pytest.approx(record["loss"], rel=1e-6)
    norms = [row["grad_norm"] for row in found["rows"]]
    assert 2 * max(norms) - sum(norms) < record["grad_norm"] < sum(norms)


def test_a_step_is_repeated_with_the_settings_of_its_own_start(copy, asked):
    """config.yml is that of the newest start, here one with another learning rate and batch after step 4."""
    text = (copy / "config.yml").read_text()
    for key, then, now in (
        ("learning_rate", "0.1", "0.2"),
        ("gradient_accumulation_steps", "2", "20"),
        ("steps", "4", "40"),
    ):
        assert f"\n{key}: {then} " in text
        text = text.replace(f"\n{key}: {then} ", f"\n{key}: {now} ")
    (copy / "config.yml").write_text(text)
    code, said = asked(main, copy, "--step", 4)
    assert code == 0
    assert "step 4, from the checkpoint of step 2: equal to the bit" in said


def test_the_first_field_and_the_first_step_that_differ_are_named(copy, asked):
    # What is left begins with the run's first parameters.
    shutil.rmtree(copy / "checkpoints")
    changes = {0: {"loss": 1.001}, 1: {"grad_norm": 1.001, "param_norm": 1.00001}}
    change_lines(copy, changes)
    about = json.loads((copy / "environment.json").read_text())
    about["packages"]["jax"] = "0.1"  # of another version, which has a tolerance
    (copy / "environment.json").write_text(json.dumps(about))
    code, said = asked(main, copy, "--step", 2)
    first, *fields = said.splitlines()
    assert code == 1
    for part in ("not equal within 0.0001", "first in grad_norm; step 1 already"):
        assert part in first
    assert [line.split()[1] for line in fields if line.startswith("!")] == ["grad_norm"]


def test_the_first_steps_begin_with_the_parameters_of_the_first_start(
    run, words, tmp_path, asked, monkeypatch
):
    """Named relative to where the run began, and no longer by the start after it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "runs" / "base")
    own = ["run_name=on", "base_output_directory=runs", "steps=2"]
    assert train([*words, *own, "load_parameters_path=runs/base"]) == 0
    monkeypatch.chdir(tmp_path.parent)
    on = tmp_path / "runs" / "on"
    config = (on / "config.yml").read_text()
    named = re.sub(
        r"^load_parameters_path: .*", "load_parameters_path: ''", config, flags=re.M
    )
    assert named != config
    (on / "config.yml").write_text(named)
    assert asked(main, on, "--step", 2)[0] == 0
    shutil.rmtree(tmp_path / "runs" / "base")
    with pytest.raises(UserError, match="base"):
        main([str(on), "--step", "2"])


def test_verify_resume_finds_a_resumed_run_the_same(run, words, asked):
    """As killed before the checkpoint of step 4."""
    resumed = shutil.copytree(run, run.with_name("resumed"))
    shutil.rmtree(resumed / "checkpoints" / "4")
    assert train([*words, "run_name=resumed"]) == 0
    code, said = asked(verify_resume, run, resumed)
    assert code == 0
    assert said.startswith("4 steps and 0 evaluations in both runs")
    assert re.search(r"^checkpoints of step 4, \d+ arrays: equal$", said, re.MULTILINE)


@pytest.mark.fast
def test_verify_resume_names_the_first_difference_with_its_rows(run, copy, asked):
    change_lines(copy, {2: {"loss": 1.001}, 3: {"grad_norm": 2}})
    lines = (copy / "metrics.jsonl").read_text()
    of_step_3 = json.loads(lines.splitlines()[2])["examples_hash"]
    (copy / "metrics.jsonl").write_text(lines.replace(of_step_3, "0" * 16))
    code, found = asked(verify_resume, run, copy, "--json")
    first = found["first_difference"]
    assert (code, found["same"], first["step"]) == (1, False, 3)
    assert [*first["fields"]] == ["examples_hash", "loss"]
    assert len(first["rows"][0]) == 16
