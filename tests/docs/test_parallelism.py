"""docs/parallelism.md: its tables are the program's, its commands print what it says (contexts and experts apart)."""

import re
import shlex

import pytest

from maxtext_lite.batching import MESH_AXES
from maxtext_lite.batching.topology import mesh_key
from maxtext_lite.cli import run_command
from maxtext_lite.config.remat import REMAT_POLICIES
from maxtext_lite.plan import main
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "parallelism.md").read_text(encoding="utf-8")
OURS = PAGE[: PAGE.index("## Context parallelism")]
COMMANDS = re.findall(
    r"^```bash\npython -m maxtext_lite\.plan ([^\n]*)\n```\n<!-- output( has)? -->\n```text\n(.*?)^```$",
    OURS,
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("arguments", "some", "text"), COMMANDS)
def test_the_commands_print_what_the_page_says(arguments, some, text, capsys):
    assert run_command(main, shlex.split(arguments)) == 0
    printed = capsys.readouterr().out
    if some:
        assert [line for line in text.splitlines() if line not in printed.splitlines()] == []
    else:
        assert printed == text


def test_every_command_is_run():
    assert len(COMMANDS) == OURS.count("```bash") == 3


def test_the_axes():
    rows = re.findall(r"^\| `(\w+)` \| `\{ici,dcn\}(_\w+)` \|", OURS, re.MULTILINE)
    assert sorted(axis for axis, _ in rows) == sorted(MESH_AXES)
    for axis, key in rows:
        assert mesh_key("ici", axis) == f"ici{key}"


def test_the_policies():
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in OURS.splitlines() if line.startswith("|")
    ]
    found = {row[0].strip("`"): tuple(row[1:]) for row in cells if row[0].strip("`") in REMAT_POLICIES}
    assert found == {policy: (", ".join(saved), ", ".join(host)) for policy, (saved, host) in REMAT_POLICIES.items()}
