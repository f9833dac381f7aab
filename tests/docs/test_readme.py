"""The commands of README.md, docs/running.md and docs/launching.md run as written and print what their page says, but
for those that repeat another one: see REPEATED.

A block of commands is ```bash. A comment on the line before may say `<!-- not run: WHY -->` or `<!-- exit code N -->`.
A ```text block after `<!-- output -->` is what the block before it prints, to the letter.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext_lite.cli import COMMANDS
from tests.conftest import QUICK_COMPILATION
from tests.processes import RunFiles, folder_of_python
from tests.source_tree import REPOSITORY

BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```bash\n(?P<text>.*?)^```$"
    r"(?:\n<!-- output -->\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
# Another run and its resume, the same on other devices, its page, and other programs compiled.
REPEATED = re.compile(
    r"^(XLA_FLAGS=.*\\\n +)?python -m maxtext_lite\."
    r"(train tiny|report runs/tiny|compile --|.* --json \|\n)(.*\\\n)*.*\n",
    re.MULTILINE,
)


def text_of(page):
    return (REPOSITORY / page).read_text(encoding="utf-8")


def blocks(page):
    """The note, the commands and the output of each block that is run."""
    found = [match.groupdict("") for match in BLOCK.finditer(text_of(page))]
    return [block for block in found if not block["note"].startswith("not run: ")]


def run(block, folder):
    """Runs a block as a user who activated .venv: without what conftest.py sets, but for quick compilation."""
    ours = ("XLA_FLAGS", "NPROC", "OMP_NUM_THREADS", "PYTHONPATH")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    path = f"{folder_of_python()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "COLUMNS": "120", "XLA_FLAGS": " ".join(QUICK_COMPILATION)}
    text = REPEATED.sub("", block["text"])
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=kept | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    code = block["note"].removeprefix("exit code ") or "0"
    assert str(result.returncode) == code, result.stdout
    if text and block["output"]:
        assert result.stdout.replace(str(REPOSITORY), "REPOSITORY") == block["output"]


def test_the_commands_of_the_pages_run_in_their_order_and_leave_the_files_that_are_listed(
    tmp_path,
):
    first, second = blocks("README.md"), blocks("docs/running.md")
    assert (len(first), len(second)) == (2, 7)
    for block in [*first, *second]:
        run(block, tmp_path)
    made = RunFiles(tmp_path / "runs" / "first")
    assert made.sequence("step") == [(step,) for step in range(1, 11)]
    (listed,) = re.findall(
        r"^A run lives in `base_output_directory/run_name`: (.*)$",
        text_of("docs/running.md"),
        re.MULTILINE,
    )
    for name in [*re.findall(r"`([^`]+)`", listed), "report.html"]:
        assert (made.directory / name).exists()
    assert (tmp_path / "first-hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("number", [0, 2, 3])  # 1 is what most tests of hosts do
def test_a_command_of_the_page_on_launching_prints_what_it_says(number):
    block = blocks("docs/launching.md")[number]
    assert block["output"]
    run(block, REPOSITORY)


@pytest.mark.fast
def test_every_command_is_shown_and_the_readme_stays_short():
    pages = [path.read_text("utf-8") for path in (REPOSITORY / "docs").glob("*.md")]
    shown = re.findall(r"python -m maxtext_lite\.(\w+)", "\n".join(pages))
    assert set(shown) >= set(COMMANDS)
    assert text_of("README.md").count("\n") <= 120
    assert len(text_of("README.md").split()) <= 900
