"""Of every page: links lead somewhere, keys exist, commands print what stands below them, tables are the program's."""

import importlib
import importlib.util
import re
import shlex

import pytest

from maxtext_lite.batching import MESH_AXES
from maxtext_lite.cli import run_command
from maxtext_lite.config.keys import REMAT_POLICIES, ROPE_ENTRIES
from maxtext_lite.hf.families import FAMILIES
from maxtext_lite.hf.maxtext import maxtext_defaults
from maxtext_lite.hf.rotation import SCALINGS
from maxtext_lite.inference.requests import GenerateConfig
from maxtext_lite.post_training.keys import SHIPPED_REWARDS, RLRunConfig
from maxtext_lite.preparation.keys import PrepareConfig
from tests.source_tree import REPOSITORY

DOCS = REPOSITORY / "docs"
ROOT = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
PAGES = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in ROOT}
PAGES |= {
    path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))
}
EVERY_PAGE = pytest.mark.parametrize("name", PAGES)


def without_blocks(text, languages=r"\w*"):
    return re.sub(
        rf"^```(?:{languages})$.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL
    )


def anchors(path):
    """The slugs of a page's headings; those in blocks of code are none."""
    headings = re.findall(
        r"^#+ (.*)$", without_blocks(path.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in headings
    }


@EVERY_PAGE
def test_every_link_and_anchor_leads_somewhere(name):
    page = REPOSITORY / name if name in ROOT else DOCS / name
    for link, anchor in re.findall(
        r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", without_blocks(PAGES[name])
    ):
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


# Of other frameworks, of one command, of a list's entries, and what stands for any key.
OTHER_KEYS = "text key lr path data_only ids rows depends verify merge_lora rngs preferred_element_type"
KNOWN = {
    *RLRunConfig.model_fields,
    *GenerateConfig.model_fields,
    *PrepareConfig.model_fields,
    *OTHER_KEYS.split(),
}
# Values of keys in a table of other frameworks' keys, and words of theirs that are no keys.
VALUES = "array_record deepseek-v3 wsd linear cosine dpo sft fsdp tensor context data num_slices dcn_ token_mean "
VALUES += "seq_mean_token_mean seq_mean_token_sum_norm"
THEIR_VALUES = (
    "fsdp_transpose tensor_sequence context_usp_ulysses sequence diloco hf grain"
)


@EVERY_PAGE
def test_every_key_that_a_page_sets_exists(name):
    text = without_blocks(PAGES[name], "yaml|python|text")
    settings = [
        *re.findall(r"`([^`\n]+)`", text),
        *re.findall(r"^python -m .*$", text, re.MULTILINE),
    ]
    named = re.findall(
        r"(?<![\w.\-\[{$/:])([a-z][a-z_0-9]+)=(?!=)", "\n".join(settings)
    )
    assert {key for key in named if not key.startswith("xla_")} <= KNOWN


def rows(name, heading):
    """The cells of the tables below a heading."""
    part = re.split(rf"^#+ {heading}$", PAGES[name], flags=re.MULTILINE)[1].split(
        "\n## "
    )[0]
    return [
        line.strip("| ").split(" | ")
        for line in part.splitlines()
        if line.startswith("| `")
    ]


@pytest.mark.parametrize("heading", ["From MaxText", "From torchtitan", "From TRL"])
def test_the_keys_that_a_row_names_exist_on_both_sides(heading):
    assert len(rows("coming_from.md", heading)) >= 10
    for row in rows("coming_from.md", heading):
        before, here = (
            set(re.findall(r"`([a-z][a-z_]*)(?::[^`]*)?`", cell))
            for cell in (row[0], row[-1])
        )
        assert here <= RLRunConfig.model_fields.keys() | set(VALUES.split()), row
        assert heading != "From MaxText" or before <= maxtext_defaults().keys() | set(
            THEIR_VALUES.split()
        ), row


def commands():
    """Of every page but those of test_readme: command, kind and text of what it prints."""
    found = []
    note = r"<!-- (output|output has|errors|output: its first lines) -->\n```text\n(.*?)^```$"
    block = re.compile(
        rf"^```bash\n(python [^`]*?)^```\n{note}", re.MULTILINE | re.DOTALL
    )
    shown = re.compile(
        r"^```\n\$ (python [^\n]*\n)(.*?)^```$", re.MULTILINE | re.DOTALL
    )
    for name, page in PAGES.items():
        if name not in ("README.md", "running.md", "launching.md"):
            for command, kind, text in block.findall(page):
                found.append((command, kind, text))
            for command, text in shown.findall(page):
                kind = "errors" if text.startswith("error: ") else "output has"
                found.append((command, kind, text))
    return found


def test_the_pages_have_the_commands_that_they_should():
    assert len(commands()) == 20


@pytest.mark.parametrize(("command", "kind", "text"), commands())
def test_a_command_prints_what_its_page_says(command, kind, text, capsys):
    _, option, name, *words = shlex.split(command.replace("\\\n", " "))
    if option == "-c":
        exec(name, {})
        code = 0
    else:
        code = run_command(importlib.import_module(name).main, words)
    out, err = capsys.readouterr()
    assert code == (2 if kind == "errors" else 0)
    if kind == "output has":
        assert set(text.splitlines()) <= set(out.splitlines())
    elif kind == "output: its first lines":
        assert out.startswith(text)
    else:
        assert (err if kind == "errors" else out) == text


def first_words(page):
    """The word in the first cell of each row of a page's tables, and the other cells."""
    lines = [line for line in PAGES[page].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        row[0].strip("`"): row[1:] for row in cells if re.fullmatch(r"`\w+`", row[0])
    }


def test_tables_of_what_there_is_are_those_of_the_program():
    parallelism, post_training = (
        first_words("parallelism.md"),
        first_words("post_training.md"),
    )
    assert {
        axis for axis, row in parallelism.items() if row[0].startswith("`{ici,dcn}_")
    } == set(MESH_AXES)
    for policy, (saved, host) in REMAT_POLICIES.items():
        assert parallelism[policy] == [", ".join(saved), ", ".join(host)]
    assert set(SHIPPED_REWARDS) <= post_training.keys()
    assert set(FAMILIES) <= first_words("models.md").keys()
    assert all(f"`{word}`" in PAGES["hugging_face.md"] for word in SCALINGS)
    for kind, (needed, optional) in ROPE_ENTRIES.items():
        assert set(re.findall(r"`(\w+)`", first_words("models.md")[kind][0])) == {
            *needed,
            *optional,
        }
