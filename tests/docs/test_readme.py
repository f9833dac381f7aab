"""Every command of README.md, then of docs/running.md, runs as written, in order, and prints what its page says.

A block of commands is ```bash. A comment on the line before may say `<!-- not run: WHY -->` or `<!-- exit code N -->`.
A ```text block after `<!-- output -->` is what the block before it prints, to the letter.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from maxtext_lite.cli import COMMANDS
from tests.conftest import QUICK_COMPILATION
from tests.processes import folder_of_python
from tests.source_tree import REPOSITORY

PAGES = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in ("README.md", "docs/running.md")}
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass
class Commands:
    """A block of commands, what it must exit with, and what it must print where the page says so."""

    text: str
    line: int
    exit_code: int = 0
    output: str | None = None


def blocks(page: str) -> list[Commands]:
    found: list[Commands] = []
    for match in BLOCK.finditer(page):
        note = match["note"] or ""
        if match["language"] == "bash" and not note.startswith("not run: "):
            code = re.fullmatch(r"exit code (\d+)", note)
            line = page[: match.start("text")].count("\n") + 1
            found.append(Commands(match["text"], line, int(code[1]) if code else 0))
        elif match["language"] == "text" and note == "output":
            found[-1].output = match["text"]
    return found


def environment() -> dict[str, str]:
    """That of a user who activated .venv: without what conftest.py sets, but for the platform and quick compilation."""
    ours = ("XLA_FLAGS", "NPROC", "OMP_NUM_THREADS", "PYTHONPATH")
    kept = {key: value for key, value in os.environ.items() if key not in ours and not key.startswith("PYTEST")}
    path = f"{folder_of_python()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "COLUMNS": "120", "XLA_FLAGS": " ".join(QUICK_COMPILATION)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all commands of the pages have run, in their order."""
    folder = tmp_path_factory.mktemp("readme")
    for name, block in [(name, block) for name, page in PAGES.items() for block in blocks(page)]:
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        said = f"{name}:{block.line} exited with {result.returncode} and printed\n{result.stdout}"
        assert result.returncode == block.exit_code, said
        if block.output is not None:
            assert result.stdout == block.output, said
    return folder


def test_every_command_runs_and_prints_what_its_page_says(ran: Path):
    assert [len(blocks(page)) for page in PAGES.values()] == [3, 6]
    assert (ran / "runs" / "first" / "report.html").is_file()
    assert (ran / "first-hf" / "model.safetensors").is_file()


@pytest.mark.fast
def test_the_readme_shows_every_command_and_stays_short():
    commands = {path.stem for path in (REPOSITORY / "maxtext_lite").glob("*.py")} & set(COMMANDS)
    assert commands == set(COMMANDS)
    shown = PAGES["README.md"] + (REPOSITORY / "docs" / "coming_from.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^python -m maxtext_lite\.(\w+)", shown, re.MULTILINE)) == commands
    assert PAGES["README.md"].count("\n") <= 120


def training_steps(run_directory: Path) -> list[dict]:
    """The lines of metrics.jsonl that are of training, not of evaluation."""
    lines = map(json.loads, (run_directory / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def test_the_run_of_the_page_has_each_step_once_after_it_was_resumed(ran: Path):
    assert [line["step"] for line in training_steps(ran / "runs" / "tiny")] == list(range(1, 31))


def test_the_run_directory_holds_what_the_page_lists(ran: Path):
    (sentence,) = re.findall(
        r"^A run lives in `base_output_directory/run_name`: (.*)$", PAGES["docs/running.md"], re.MULTILINE
    )
    listed = set(re.findall(r"`([^`]+)`", sentence))
    assert listed
    assert {name for name in listed if not (ran / "runs" / "tiny" / name).exists()} == set()


def test_eight_simulated_devices_give_the_losses_of_one_as_the_page_says(ran: Path):
    one = training_steps(ran / "runs" / "tiny")[:20]  # the other ten have another learning rate
    eight = training_steps(ran / "runs" / "tiny-on-eight")
    assert len(one) == len(eight) == 20
    assert [line["examples_hash"] for line in one] == [line["examples_hash"] for line in eight]
    losses_of_one, losses_of_eight = ([line["loss"] for line in lines] for lines in (one, eight))
    assert losses_of_eight[:5] == pytest.approx(losses_of_one[:5], rel=1e-5)
    assert losses_of_eight == pytest.approx(losses_of_one, rel=1e-4)


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/running.md", "docs/architecture.md", "docs/library.md"],
)
def test_every_link_leads_to_a_file(page: str):
    path = REPOSITORY / page
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert links
    assert not missing


def test_no_figure_is_left_to_be_measured():
    assert not [name for name, page in PAGES.items() if "TODO" in page]
