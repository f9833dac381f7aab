"""What all commands share: words in any order, exit codes, one line for an error, a version, the console script."""

import importlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from maxtext_lite.cli import (
    COMMANDS,
    ArgumentParser,
    config_arguments,
    main,
    run_command,
)
from maxtext_lite.config import UserError


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["a.yml", "a=1", "--flag", "b=--x"], ("a.yml", ["a=1", "b=--x"], True)),
        (["--flag", "a.yml", "a=-1"], ("a.yml", ["a=-1"], True)),
    ],
)
def test_options_and_overrides_come_in_any_order(words, found):
    parser = ArgumentParser(prog="maxtext-lite test", description=None)
    config_arguments(parser)
    parser.add_argument("--flag", action="store_true")
    arguments = parser.parse(words)
    assert (arguments.config, arguments.overrides, arguments.flag) == found


@pytest.mark.fast
def test_a_user_error_becomes_error_lines_and_exit_code_2(capsys):
    def fails(argv):
        raise UserError(["one.", "two\nlines."])

    assert run_command(fails, []) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: one.\nerror: two lines.\n"
    assert captured.out == ""


@pytest.mark.fast
def test_other_exit_codes_and_exceptions_pass():
    assert run_command(lambda argv: len(argv), ["a", "b", "c"]) == 3

    def breaks(argv):
        raise RuntimeError("INTERNAL: a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_command(breaks, [])


@pytest.mark.parametrize(
    "allocate", [lambda _: jax.numpy.zeros(2**50), lambda _: np.zeros(2**58)]
)
def test_a_full_memory_of_a_device_or_the_host_is_one_line(allocate, capsys):
    assert run_command(allocate, []) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the memory is full: ")


def test_the_console_script_lists_the_commands_runs_one_and_refuses_others(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command} " in out
        assert importlib.util.find_spec(f"maxtext_lite.{command}") is not None
    assert main(["plan", "--devices", "2"]) == 0
    assert "global_batch_to_train" in capsys.readouterr().out
    assert main(["plam"]) == 2
    assert "Did you mean 'plan'?" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["maxtext_lite plan", "maxtext_lite.plan"])
def test_python_m_ends_with_the_exit_code_of_the_command(module):
    command = [sys.executable, "-m", *module.split(), "steps=x"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
