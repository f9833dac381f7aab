"""The section of docs/parallelism.md on context parallelism: its commands run and print what it says."""

import re
import shlex

import pytest

from maxtext_lite.cli import run_command
from maxtext_lite.parallel import context_order
from maxtext_lite.plan import main
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "parallelism.md").read_text(encoding="utf-8")
SECTION = re.search(r"^## Context parallelism\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
COMMANDS = re.findall(
    r"^```bash\npython -m maxtext_lite\.plan ([^\n]*)\n```\n<!-- (output has|errors) -->\n```text\n(.*?)^```$",
    SECTION,
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("arguments", "kind", "text"), COMMANDS)
def test_the_commands_print_what_the_page_says(arguments, kind, text, capsys):
    code = run_command(main, shlex.split(arguments))
    out, err = capsys.readouterr()
    if kind == "errors":
        assert (code, err) == (2, text)
    else:
        assert code == 0
        assert [line for line in text.splitlines() if line not in out.splitlines()] == []


def test_every_command_of_the_section_is_run():
    assert len(COMMANDS) == SECTION.count("```bash") == 4


def test_the_chunks_of_four_shards():
    rows = re.findall(r"^\| (\d) \| (\d+) - (\d+) \| (\d+) - (\d+) \| (\d+) \|$", SECTION, re.MULTILINE)
    by_shard = context_order(4096, 4).reshape(4, 2, 512)
    for shard, *chunk_ends, pairs in (map(int, row) for row in rows):
        assert chunk_ends == by_shard[shard][:, [0, -1]].ravel().tolist()
        assert pairs == round((by_shard[shard] + 1).sum() / 1000)
    assert len(rows) == 4
