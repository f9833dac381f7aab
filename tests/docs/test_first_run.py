"""The notebook examples/first_run.ipynb is one by the format's rules, and its cells run in order, in a tiny shape."""

import json
import re

import pytest

from maxtext_lite.config import load_config
from tests.source_tree import REPOSITORY

NOTEBOOK = json.loads((REPOSITORY / "examples" / "first_run.ipynb").read_text(encoding="utf-8"))
TINY = [
    "dataset_type=synthetic", "max_target_length=8", "base_emb_dim=8", "head_dim=4", "base_mlp_dim=8",
    "base_num_decoder_layers=1", "steps=2", "warmup_steps=1", "enable_checkpointing=false", "eval_interval=-1",
]  # fmt: skip


def test_the_notebook_is_one_by_the_rules_of_its_format():
    """Those of nbformat 4.5 that a notebook of text and code without outputs can break."""
    assert NOTEBOOK.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert set(NOTEBOOK["metadata"]["kernelspec"]) >= {"name", "display_name"}
    of_code = {"cell_type", "id", "metadata", "source", "outputs", "execution_count"}
    for cell in NOTEBOOK["cells"]:
        assert cell.keys() == (of_code if cell["cell_type"] == "code" else of_code - {"outputs", "execution_count"})
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    names = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(names) == len(set(names)) == 8
    assert {cell["cell_type"] for cell in NOTEBOOK["cells"]} == {"code", "markdown"}


@pytest.mark.fast
def test_every_cell_runs_and_the_losses_are_the_same_however_the_batch_is_split(tmp_path, monkeypatch, capsys):
    def tiny(path=None, overrides=()):
        return load_config(path, [*overrides, *TINY])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("maxtext_lite.load_config", tiny)
    names: dict = {}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, f"first_run.ipynb, cell {cell['id']}", "exec"), names)
    points = re.search(r'points="([^"]*)"', names["Curve"]([3.0, 1.0, 2.0])._repr_svg_())
    assert points is not None
    assert points[1] == "40.0,20.0 310.0,160.0 580.0,90.0"
    said = capsys.readouterr().out
    whole, split = (names["losses"](names[name]) for name in ("whole", "split"))
    assert len(whole) == len(split) == 2
    assert split == pytest.approx(whole, rel=1e-5)
    assert names["split"].run_directory != names["whole"].run_directory
    assert "64 examples = 1 x 64 devices x 1 accumulation" in said
