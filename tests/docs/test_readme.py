"""The commands of README.md, docs/running.md and docs/launching.md run as written and print what their page says, but
for those that repeat another one: see REPEATED.

A block of commands is ```bash. A comment on the line before may say `<!-- not run: WHY -->` or `<!-- exit code N -->`.
A ```text block after `<!-- output -->` is what the block before it prints, to the letter.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from maxtext_lite.cli import COMMANDS
from tests.conftest import QUICK_COMPILATION
from tests.processes import RunFiles, folder_of_python
from tests.source_tree import REPOSITORY

BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


# A resume, a run on other devices, and a step compiled with more micro-batches, which whole tests elsewhere are about.
REPEATED = (" steps=30", "--xla_force_host_platform_device_count=8", " --json |")


@dataclass
class Commands:
    """A block of commands, what it must exit with, and what it must print where the page says so."""

    text: str
    exit_code: int = 0
    output: str | None = None


def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Commands]:
    found = []
    for match in BLOCK.finditer(text_of(page)):
        note = match["note"] or ""
        if match["language"] == "bash" and not note.startswith("not run: "):
            code = re.fullmatch(r"exit code (\d+)", note)
            found.append(Commands(match["text"], int(code[1]) if code else 0))
        elif match["language"] == "text" and note == "output":
            found[-1].output = match["text"]
    return found


def run(block: Commands, folder: Path) -> None:
    """Runs a block as a user who activated .venv: without what conftest.py sets, but for quick compilation."""
    ours = ("XLA_FLAGS", "NPROC", "OMP_NUM_THREADS", "PYTHONPATH")
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ours and not key.startswith("PYTEST")
    }
    path = f"{folder_of_python()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env={
            **kept,
            "PATH": path,
            "COLUMNS": "120",
            "XLA_FLAGS": " ".join(QUICK_COMPILATION),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert result.returncode == block.exit_code, result.stdout
    if block.output is not None:
        assert result.stdout.replace(str(REPOSITORY), "REPOSITORY") == block.output


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder in which the commands of README.md and docs/running.md have run, in their order."""
    folder = tmp_path_factory.mktemp("readme")
    first, second = blocks("README.md"), blocks("docs/running.md")
    assert (len(first), len(second)) == (3, 6)
    for block in [*first, *second]:
        if not any(word in block.text for word in REPEATED):
            run(block, folder)
    return folder


def test_the_run_of_the_page_has_each_step_once_and_the_files_that_the_page_lists(ran):
    tiny = RunFiles(ran / "runs" / "tiny")
    assert tiny.sequence("step") == [(step,) for step in range(1, 21)]
    (listed,) = re.findall(
        r"^A run lives in `base_output_directory/run_name`: (.*)$",
        text_of("docs/running.md"),
        re.MULTILINE,
    )
    for name in re.findall(r"`([^`]+)`", listed):
        assert (tiny.directory / name).exists()
    assert (ran / "runs" / "first" / "report.html").is_file()
    assert (ran / "first-hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("number", [0, 2, 3])  # 1 is what most tests of hosts do
def test_a_command_of_the_page_on_launching_prints_what_it_says(number):
    block = blocks("docs/launching.md")[number]
    assert block.output is not None
    run(block, REPOSITORY)


@pytest.mark.fast
def test_the_readme_shows_every_command_and_stays_short():
    shown = text_of("README.md") + text_of("docs/coming_from.md")
    assert set(
        re.findall(r"^python -m maxtext_lite\.(\w+)", shown, re.MULTILINE)
    ) == set(COMMANDS)
    assert text_of("README.md").count("\n") <= 120
