"""docs/hugging_face.md: its commands run as written, in order; its families are those that there are."""

import importlib
import re
import shlex

import pytest

from maxtext_lite.cli import run_command
from maxtext_lite.config.hf.families import FAMILIES
from tests.hf_models import save_with_tokenizer
from tests.source_tree import REPOSITORY

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PAGE = (REPOSITORY / "docs" / "hugging_face.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
            for line in block.splitlines()]  # fmt: skip


def test_the_commands_run(tmp_path, monkeypatch, capsys):
    save_with_tokenizer(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        python, module, name, *arguments = shlex.split(command)
        assert (python, module) == ("python", "-m")
        assert run_command(importlib.import_module(name).main, arguments) == 0, capsys.readouterr().err
    read = transformers.AutoModelForCausalLM.from_pretrained("tuned")
    assert read.dtype == torch.bfloat16
    assert (tmp_path / "imported" / "config.yml").is_file()


@pytest.mark.fast
def test_the_families():
    named = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert named[1:] == list(FAMILIES)  # below the heading


@pytest.mark.parametrize("word", ["linear", "dynamic", "llama3", "yarn"])
def test_the_rotations(word):
    from maxtext_lite.config.hf.positions import _SCALINGS

    assert word in _SCALINGS
    assert f"`{word}`" in PAGE
