import importlib
import subprocess
import sys

import pytest

from maxtext_lite.cli import COMMANDS, ArgumentParser, config_arguments, main, run_command
from maxtext_lite.config import UserError


def parsed(argv):
    parser = ArgumentParser(prog="maxtext-lite test", description=None)
    config_arguments(parser)
    parser.add_argument("--flag", action="store_true")
    return parser.parse(argv)


@pytest.mark.parametrize(
    ("argv", "config", "overrides", "flag"),
    [
        ([], None, [], False),
        (["a.yml"], "a.yml", [], False),
        (["a=1", "b=2"], None, ["a=1", "b=2"], False),
        (["a.yml", "a=1", "--flag", "b=--x"], "a.yml", ["a=1", "b=--x"], True),
        (["--flag", "a.yml", "a=-1"], "a.yml", ["a=-1"], True),
    ],
)
def test_options_and_overrides_come_in_any_order(argv, config, overrides, flag):
    arguments = parsed(argv)
    assert (arguments.config, arguments.overrides, arguments.flag) == (config, overrides, flag)


def test_options_are_not_abbreviated():
    with pytest.raises(UserError, match="unrecognized arguments: --fla"):
        parsed(["--fla"])


def test_a_user_error_becomes_error_lines_and_exit_code_2(capsys):
    def fails(argv):
        raise UserError(["one.", "two\nlines."])

    assert run_command(fails, []) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: one.\nerror: two lines.\n"
    assert captured.out == ""


def test_other_exit_codes_and_exceptions_pass():
    assert run_command(lambda argv: len(argv), ["a", "b", "c"]) == 3

    def breaks(argv):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_command(breaks, [])


def test_the_console_script_runs_a_command(capsys):
    assert main(["plan", "--devices", "2"]) == 0
    assert "global_batch_to_train" in capsys.readouterr().out
    assert main(["plan", "steps=0"]) == 2
    assert capsys.readouterr().err == "error: steps=0 must be at least 1, or -1. Nearest that works: 1.\n"


def test_an_unknown_command_is_refused(capsys):
    assert main(["plam"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'plam'. Did you mean 'plan'?")


def test_without_a_command_it_lists_them(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_a_module_with_a_main(command):
    assert importlib.util.find_spec(f"maxtext_lite.{command}") is not None


def test_python_m_is_the_console_script():
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_lite", "plan", "steps=x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: steps=x is text, not a number.")


def test_a_reader_that_has_seen_enough_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m maxtext_lite plan --json | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""
