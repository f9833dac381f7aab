import importlib
import importlib.metadata
import re
import subprocess
import sys

import jax
import numpy as np
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


def test_the_help_names_the_config_that_a_command_takes_by_default(capsys):
    for command, config in (("train", "configs/base.yml"), ("train_rl", "configs/post_train/rl.yml")):
        assert main([command, "--help"]) == 0
        assert f"(default: {config})" in " ".join(capsys.readouterr().out.split())


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


@pytest.mark.parametrize(
    "words", [["--version"], ["plan", "--version"], ["generate", "--version"], ["report", "--version"]]
)
def test_every_command_says_its_version_and_needs_nothing_else_for_it(words, capsys):
    assert main(words) == 0
    name, version, _, jax_version, _, _ = capsys.readouterr().out.split()
    assert name == "maxtext_lite"
    assert version == importlib.metadata.version("maxtext-lite")
    assert jax_version == f"{importlib.metadata.version('jax')},"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=1e-3"], "unknown key 'lr' (command line). Did you mean 'learning_rate'?"),
        (["--steps=5"], "unrecognized arguments: --steps=5. Did you mean 'steps=5'? `maxtext-lite plan --help`"),
        (["--steps", "5"], "unrecognized arguments: --steps. Did you mean 'steps=5'?"),
        (["steps:5"], "'steps:5' (command line) is not of the form key=value. Did you mean 'steps=5'?"),
        (["steps", "5"], "'steps' (command line) is not of the form key=value. Did you mean 'steps=5'?"),
        (["--devices=--"], "argument --devices: expected one argument. `maxtext-lite plan --help`"),
        (["--device-type=h200"], "unrecognized arguments: --device-type=h200. Did you mean '--device'? `maxtext-lite"),
        (["--exmaples", "5"], "unrecognized arguments: --exmaples. Did you mean '--examples'?"),
        (["--zzz"], "unrecognized arguments: --zzz. `maxtext-lite plan --help`"),
        (["bse.yaml"], "no config file 'bse.yaml'. Did you mean 'base.yml'?"),
        (["\x1b[2Jsteps=5"], r"unknown key '\x1b[2Jsteps' (command line). Did you mean 'steps'?"),
        (
            ["--draw-to", "gs://a"],
            "argument --draw-to: gs://a is a URL (gs:), and only local paths are read and written",
        ),
    ],
)
def test_what_may_be_meant_is_said_in_one_line(words, message, capsys):
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["report", "s3://b/run"],
        ["report", "run", "--output", "s3://b/x.html"],
        ["generate", "hf://user/model"],
        ["evaluate", "gs:/b/run"],
        ["evaluate", "run", "text=https://x/y.txt"],
        ["convert", "import", "hf://user/model", "out"],
        ["convert", "export", "run", "gs://b/out"],
        ["train", "gs://b/config.yml"],
        ["train_rl", "base_output_directory=gs:/b"],
    ],
)
def test_no_command_takes_a_url_for_a_path(words, capsys):
    assert main(words) == 2
    assert "is a URL (" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "train_rl"])
def test_an_empty_name_is_no_config(command, capsys):
    assert main([command, "", "steps=1"]) == 2
    assert capsys.readouterr().err == "error: no config file ''.\n"


def _more_than_any_device_has(_):
    jax.numpy.zeros(2**50)


def _more_than_any_host_has(_):
    np.zeros(2**58)


@pytest.mark.parametrize("allocate", [_more_than_any_device_has, _more_than_any_host_has])
def test_a_full_memory_is_one_line(allocate, capsys):
    assert run_command(allocate, []) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"error: the memory is full: .*allocat\w* .* Use fewer or shorter ", line)


def test_other_errors_of_a_program_keep_their_traceback():
    def main(_):
        raise RuntimeError("INTERNAL: a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_command(main, [])
