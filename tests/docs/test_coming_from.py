"""The commands of docs/coming_from.md print what the page says, and the keys that it names exist."""

import re

import pytest
import yaml

from maxtext_lite.config import RLRunConfig
from maxtext_lite.config.maxtext import maxtext_defaults
from maxtext_lite.convert_config import main
from tests.docs.test_readme import blocks
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "coming_from.md").read_text(encoding="utf-8")


@pytest.mark.fast
def test_the_command_prints_what_the_page_says(capsys):
    (block,) = blocks(PAGE)
    words = block.text.replace("\\\n", " ").split()
    assert words[:3] == ["python", "-m", "maxtext_lite.convert_config"]
    assert main(words[3:]) == block.exit_code
    assert capsys.readouterr().out == block.output


def rows(heading):
    """The cells of the tables below a heading."""
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]


def keys(cell):
    return set(re.findall(r"`([a-z][a-z_]*)(?::[^`]*)?`", cell))


@pytest.mark.parametrize("heading", ["From MaxText", "From torchtitan", "From TRL"])
def test_the_keys_that_a_row_names_here_exist(heading):
    known = RLRunConfig.model_fields.keys() | {"num_slices", "dcn_"}
    values = {"array_record", "deepseek-v3", "wsd", "linear", "cosine", "dpo", "sft"}
    values |= {"fsdp", "tensor", "context", "data", "token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"}
    assert len(rows(heading)) >= 10
    for row in rows(heading):
        assert keys(row[-1]) - known - values == set(), row


def test_the_keys_of_maxtext_are_its_own():
    axes = {"fsdp_transpose", "tensor_sequence", "context_usp_ulysses", "sequence", "diloco"}
    for row in rows("From MaxText"):
        assert keys(row[0]) - maxtext_defaults().keys() - axes - {"hf", "grain"} == set(), row


def test_every_page_has_a_place_on_the_site():
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    named = set(re.findall(r"[\w/]+\.md", str(site["nav"])))
    pages = {path.name for path in (REPOSITORY / "docs").glob("*.md")}
    assert named == pages | {"index.md", "contributing.md", "changelog.md"}
    assert site["strict"]
    assert set(site["validation"].values()) == {"warn"}


def test_every_name_of_the_reference_has_a_docstring():
    import importlib

    names = re.findall(r"^::: ([\w.]+)\.(\w+)$", (REPOSITORY / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert len(names) == 9
    for module, name in names:
        assert getattr(importlib.import_module(module), name).__doc__
