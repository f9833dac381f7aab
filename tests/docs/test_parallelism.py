"""docs/parallelism.md: its tables are the program's, its commands print what it says."""

import re
import shlex

import pytest

from maxtext_lite.batching import MESH_AXES
from maxtext_lite.batching.topology import mesh_key
from maxtext_lite.cli import run_command
from maxtext_lite.config.sections import REMAT_POLICIES
from maxtext_lite.plan import main
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "parallelism.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"^```bash\npython -m maxtext_lite\.plan ([^\n]*)\n```\n<!-- (output|output has|errors) -->\n```text\n(.*?)^```$",
    PAGE,
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("arguments", "kind", "text"), COMMANDS)
def test_the_commands_print_what_the_page_says(arguments, kind, text, capsys):
    code = run_command(main, shlex.split(arguments))
    out, err = capsys.readouterr()
    if kind == "errors":
        assert (code, err) == (2, text)
    elif kind == "output":
        assert (code, out) == (0, text)
    else:
        assert code == 0
        assert [line for line in text.splitlines() if line not in out.splitlines()] == []


def test_every_command_is_run():
    assert len(COMMANDS) == PAGE.count("```bash") == 7


@pytest.mark.fast
def test_the_axes():
    rows = re.findall(r"^\| `(\w+)` \| `\{ici,dcn\}(_\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(axis for axis, _ in rows) == sorted(MESH_AXES)
    for axis, key in rows:
        assert mesh_key("ici", axis) == f"ici{key}"


def test_the_policies():
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")
    ]
    found = {row[0].strip("`"): tuple(row[1:]) for row in cells if row[0].strip("`") in REMAT_POLICIES}
    assert found == {policy: (", ".join(saved), ", ".join(host)) for policy, (saved, host) in REMAT_POLICIES.items()}
