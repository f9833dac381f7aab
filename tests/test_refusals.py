"""Every row of refusals.yml is refused before any work, in one line that names the key, its value and what works."""

import importlib
import re
from pathlib import Path

import jax
import pytest
import yaml

from maxtext_lite.cli import run_command
from tests.refusals import changes
from tests.source_tree import REPOSITORY

# Every scalar stays the text that the command line would have.
ROWS = yaml.load(
    (REPOSITORY / "tests" / "refusals.yml").read_text(encoding="utf-8"),
    Loader=yaml.CBaseLoader,
)
jax.devices()  # from here on the process has its eight devices, which `compile --devices` cannot change
OPTIONS_OF_PLAN = {
    "num_devices": "--devices",
    "num_hosts": "--hosts",
    "device_memory_gb": "--device-memory-gb",
}


def case(number, row):
    """The case of a row; `--fast` takes every fifth."""
    marks = [pytest.mark.fast] if number % 5 == 0 else []
    return pytest.param(
        row, id=f"{row.get('command', 'plan')}-{row['key']}", marks=marks
    )


def names(line, key, value):
    """Whether a line names a key and, directly after it, its value where there is one."""
    text = (
        re.escape(key) if value is None else rf"{re.escape(key)}\W+{re.escape(value)}"
    )
    return re.search(rf"(?<![\w-]){text}(?!\w)", line) is not None


def proposes(line, nearest):
    """Whether a value, or several with `or` between, stand whole where a line names what works."""
    _, found, proposed = re.split(
        r"(Nearest that works?: |Did you mean ')", line, maxsplit=1
    )
    return (
        found
        and re.search(rf"(?<![\w.-]){re.escape(nearest)}(?!\w|\.\d)", proposed)
        is not None
    )


@pytest.mark.parametrize("row", [case(number, row) for number, row in enumerate(ROWS)])
def test_a_command_refuses_what_it_cannot_do_and_what_it_names_instead_works(
    row, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, text in row.get("files", {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    command = row.get("command", "plan")
    main = importlib.import_module(f"maxtext_lite.{command}").main
    assert run_command(main, row["arguments"]) == 2
    errors = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("error:")
    ]
    assert len(errors) == 1, errors
    (line,) = errors
    assert names(line, row["key"], row.get("value")), line
    if "nearest" not in row:
        return
    assert proposes(line, row["nearest"]), line
    if command == "plan" and "Nearest" in line:
        for change in changes(line.removeprefix("error: ")):
            words = [
                f"{OPTIONS_OF_PLAN.get(key, key)}={value}"
                for key, value in change.items()
            ]
            assert run_command(main, [*row["arguments"], *words]) == 0, (
                words,
                capsys.readouterr().err,
            )
