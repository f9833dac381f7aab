"""The code of docs/library.md runs as written, in order, and so do the examples."""

import json
import re
import runpy
import sys

import pytest

from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
TINY = (
    "tokenizer_type=byte", "vocab_size=264", "max_target_length=16", "base_emb_dim=16", "base_num_query_heads=2",
    "base_num_kv_heads=2", "head_dim=8", "base_mlp_dim=32", "base_num_decoder_layers=2", "warmup_steps=1",
    "per_device_batch_size=1", "gradient_accumulation_steps=2", "dataset_type=synthetic", "eval_steps=2",
    "eval_interval=2", "base_output_directory=.",
)  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What is defined once all blocks of the page have run, and the directory that they wrote to."""
    directory = tmp_path_factory.mktemp("library")
    names: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for number, block in enumerate(BLOCKS):
            exec(compile(block, f"library.md, block {number + 1}", "exec"), names)
    return names, directory


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.fast
def test_every_block_of_the_page_runs(page):
    names, directory = page
    runs = re.findall(r"run_name=(\w+)", PAGE)
    assert len(BLOCKS) == 7
    assert {path.parent.name for path in directory.rglob("metrics.jsonl")} == set(runs)
    by_run = {path.parent.name: records(path.parent) for path in directory.rglob("metrics.jsonl")}
    assert all(record["learning_rate"] is None for record in by_run["own_rate"] if "loss" in record)
    assert all(record["learning_rate"] > 0 for record in by_run["own_optimizer"] if "loss" in record)
    steps = [record["step"] for record in by_run["own_callback"] if "loss" in record]
    assert [step for step, _ in names["enough"].seen] == steps == [1, 2]
    assert not names["result"].interrupted


def test_the_page_s_refusal_is_what_it_says(page, capsys):
    names, _ = page
    with pytest.raises(names["UserError"], match=r"the sum of 4 rows is .*, those of their two halves are"):
        names["train"](
            names["config"],
            objective=lambda predictions, rows: (names["jnp"].mean(predictions.nll()), names["jnp"].float32(1)),
        )


def test_there_are_the_four_examples_that_the_page_names_and_each_is_short():
    assert [path.stem for path in EXAMPLES] == ["own_block", "own_callback", "own_data", "own_loss"]
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 40 for path in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs_in_a_directory_of_its_own(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    steps = 20 if example.stem == "own_callback" else 4
    monkeypatch.setattr(sys, "argv", [str(example), *TINY, f"steps={steps}"])
    runpy.run_path(str(example), run_name="__main__")
    found = records(tmp_path / example.stem)
    steps_done = [record["step"] for record in found if "loss" in record]
    evaluations = [record["eval_loss"] for record in found if "eval_loss" in record]
    assert all(record["loss"] > 0 for record in found if "loss" in record)
    if example.stem == "own_callback":
        assert f"after {steps_done[-1]} steps" in capsys.readouterr().out
    else:
        assert steps_done == [1, 2, 3, 4]
    assert len(evaluations) >= 2
