"""The code of docs/library.md, the examples and the notebook run as written, in tiny shapes."""

import json
import re
import runpy
from types import SimpleNamespace

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import train as TRAIN
from tests.processes import RunFiles
from tests.source_tree import REPOSITORY

LIBRARY = (REPOSITORY / "docs" / "library.md").read_text(encoding="utf-8")
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
# As the page on the library has it, so that programs are compiled once for both.
TINY = """
dataset_type=synthetic tokenizer_type=byte vocab_size=264 max_target_length=16 base_emb_dim=16 head_dim=8
base_num_query_heads=2 base_num_kv_heads=2 base_mlp_dim=32 base_num_decoder_layers=2 warmup_steps=1
"""
NO_FILES = ["eval_interval=-1", "enable_checkpointing=false"]


def set_for_all(monkeypatch, words):
    """Adds words to each config that a program loads."""
    monkeypatch.setattr(
        "maxtext_lite.load_config",
        lambda path=None, own=(): load_config(path, [*own, *words]),
    )


def test_every_block_of_the_page_on_the_library_runs(tmp_path, monkeypatch, one_device):
    """What is handed over with the config goes to as few runs as can be: one with the loss, data, block and optimizer,
    and one with a function that makes the optimizer and the callbacks."""
    calls = []

    def collected(config, **own):
        if config.run_name == "as_the_config_says":
            return TRAIN(config, **own)
        calls.append((config, own))
        return SimpleNamespace(step=1, interrupted=False)

    set_for_all(monkeypatch, NO_FILES)
    monkeypatch.setattr("maxtext_lite.training.train", collected)
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"^```python\n(.*?)^```$", LIBRARY, re.MULTILINE | re.DOTALL)
    assert len(code) == 7
    names = {}
    for number, block in enumerate(code):
        exec(compile(block, f"library.md, block {number + 1}", "exec"), names)
    assert {config.run_name for config, _ in calls} | {"as_the_config_says"} == set(
        re.findall(r"run_name=(\w+)", LIBRARY)
    )
    (loss, data, block, factory, rate, callback) = calls
    own = dict(pair for _, words in (loss, data, block, rate) for pair in words.items())
    assert own.keys() == {"objective", "source", "model", "optimizer"}
    (first, *_) = RunFiles(TRAIN(loss[0], **own).run_directory).steps
    assert first["learning_rate"] is None
    result = TRAIN(callback[0], **factory[1], **callback[1])
    steps = RunFiles(result.run_directory).steps
    assert all(line["learning_rate"] > 0 for line in steps)
    seen = [(line["step"], line["loss"]) for line in steps]
    assert names["enough"].seen == seen


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs_in_a_directory_of_its_own(
    example, tmp_path, monkeypatch, one_device
):
    monkeypatch.chdir(tmp_path)
    words = [*TINY.split(), *NO_FILES, "steps=3", "per_device_batch_size=1"]
    words.append("base_output_directory=.")
    if example.stem == "own_callback":  # which looks at evaluations
        words += ["eval_interval=2", "eval_steps=1"]
    monkeypatch.setattr("sys.argv", [str(example), *words])
    runpy.run_path(str(example), run_name="__main__")
    steps = RunFiles(tmp_path / example.stem).steps
    assert [record["step"] for record in steps] == [1, 2, 3]


def run_notebook(name):
    """Runs every cell of a notebook of examples/; returns its names."""
    path = REPOSITORY / "examples" / f"{name}.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = {}
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == []
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), names)
    return names


def test_the_first_notebook_runs_and_the_losses_are_the_same_however_the_batch_is_split(
    tmp_path, monkeypatch, capsys, one_device
):
    set_for_all(monkeypatch, [*TINY.split(), *NO_FILES, "steps=2"])
    monkeypatch.chdir(tmp_path)
    names = run_notebook("first_run")
    whole, split = (names["losses"](names[name]) for name in ("whole", "split"))
    assert len(whole) == 2
    assert split == pytest.approx(whole, rel=1e-5)
    assert "64 examples = 1 x 64 devices x 1 accumulation" in capsys.readouterr().out
    assert 'points="40.0,20.0' in names["Curve"]([3.0, 1.0, 2.0])._repr_svg_()


def test_the_notebook_on_lora_tunes_a_model_and_exports_its_adapters(
    tmp_path, monkeypatch, one_device
):
    hub = pytest.importorskip("huggingface_hub")
    from tests.hf_models import save_with_tokenizer

    words = ["steps=2", "num_epochs=0", "eval_interval=-1", "checkpoint_period=2"]
    set_for_all(monkeypatch, [*words, "weight_dtype=float32"])
    model = str(save_with_tokenizer(tmp_path / "model"))
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **options: model)
    monkeypatch.chdir(tmp_path)
    assert run_notebook("lora_sft")["result"].step == 2
    assert (tmp_path / "people-adapter" / "adapter_model.safetensors").is_file()


def test_the_notebook_on_rewards_uses_its_own(
    tmp_path, monkeypatch, capsys, one_device
):
    shapes = TINY.replace("dataset_type=synthetic", "").replace(
        "max_target_length=16", ""
    )
    set_for_all(monkeypatch, [*shapes.split(), "steps=10", "eval_interval=-1"])
    monkeypatch.chdir(tmp_path)
    result = run_notebook("own_reward")["rl"]
    first = RunFiles(result.run_directory).steps[0]
    assert {"rewards/exact_answer", "rewards/close"} <= first.keys()


def test_the_notebook_on_batch_size_measures_three_ways(
    tmp_path, monkeypatch, capsys, one_device
):
    shapes = TINY.replace("dataset_type=synthetic", "")
    set_for_all(monkeypatch, [*shapes.split(), "steps=64", "eval_steps=1"])
    monkeypatch.chdir(tmp_path)
    run_notebook("batch_size_study")
    out = capsys.readouterr().out
    assert "critical batch (" in out
    assert "Step Law" in out
