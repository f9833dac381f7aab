"""The console script `maxtext-lite COMMAND ...`, and the arguments, errors and exit codes that all commands share."""

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from maxtext_lite import __version__
from maxtext_lite.config import UserError, parse_value
from maxtext_lite.config.bucket import is_bucket, local_copy
from maxtext_lite.config.errors import did_you_mean, number_text, sanitize_for_terminal, value_text
from maxtext_lite.config.json_file import user_path
from maxtext_lite.config.keys import known_keys
from maxtext_lite.config.phases import observers
from maxtext_lite.config.types import path_problem
from maxtext_lite.console import (
    StdoutLost,
    command_signals,
    complain,
    complaints,
    leave,
    log_real_warnings,
    watch_stdout,
)

COMMANDS: dict[str, str] = {
    "train": "pre-training, SFT and DPO; resumes automatically",
    "train_rl": "reinforcement learning: GRPO and its variants; resumes automatically",
    "prepare": "tokenize text once, for any number of runs; inspect datasets; train tokenizers",
    "plan": "batch sizes, pipeline, ramp-up and memory of any machine; or the fastest split",
    "advise": "batch size, learning rate, decay and ramp from published laws, as intervals",
    "compile": "compile the train step ahead of time, for any machine: memory, collectives, kernels, a roofline",
    "generate": "text from a run or a Hugging Face directory",
    "evaluate": "loss, perplexity, multiple choice and cloze questions",
    "harness": "lm-evaluation-harness on runs and Hugging Face directories",
    "convert": "models from and to Hugging Face directories",
    "convert_config": "translate a MaxText config or command line",
    "tune": "time the ways to split a batch on these devices",
    "branch": "short runs from one checkpoint at other batch sizes: the measured critical batch",
    "equiv": "check that splitting a config's batch differently changes nothing",
    "verify_resume": "the first step at which two runs differ, in which fields, and with which rows",
    "replay": "repeat a step and compare it; score each row alone, to find the cause of a spike",
    "report": "one HTML page of a run, or of several overlaid",
}
"""Each command, which is the module maxtext_lite.COMMAND, and what it does."""

EXIT_FAILED = 1
"""The exit code of every failure without its own code."""

EXIT_USER_ERROR = 2
"""The exit code of a wrong config, wrong data or wrong arguments, or a full stdout."""


_MOST_SAID = 300  # characters of a library's message


class ArgumentParser(argparse.ArgumentParser):
    """argparse without abbreviations, with --version, and with UserErrors as its errors.

    Attributes:
      keys: a function that gives the keys that the command takes as key=value, for hints.
    """

    def __init__(self, *, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.add_argument("--version", action="version", version=version_text(), help="print the version and exit")
        self.keys: Callable[[], Collection[str]] = tuple
        self._argv: Sequence[str] = ()

    def parse_intermixed_args(  # pyright: ignore[reportIncompatibleMethodOverride]  (argparse's has overloads)
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """As argparse's, which makes a list of the value of --option=-- instead of refusing it."""
        self._argv = args or ()
        for option, _, value in (word.partition("=") for word in self._argv):
            if option.startswith("-") and value == "--":
                self.error(f"argument {option}: expected one argument")
        return super().parse_intermixed_args(args, namespace)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments, options and key=value in any order; `config` is a path or None, `overrides` a list.

        Raises:
          UserError: an argument is wrong or unknown.
        """
        arguments = self.parse_intermixed_args(argv)
        words: list[str] = arguments.words
        has_file = bool(words) and "=" not in words[0]
        if has_file and not Path(words[0]).exists():
            from maxtext_lite.config.hints import override_meant

            has_file = not override_meant(words, self.keys())  # which `load_config` refuses with a hint
        arguments.config = words[0] if has_file else None
        arguments.overrides = words[1:] if has_file else words
        return arguments

    def error(self, message: str) -> NoReturn:
        """Raises a UserError about a wrong argument."""
        from maxtext_lite.config.hints import override_hint

        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0]
        hint = override_hint(self._argv[self._argv.index(unknown) :], self.keys()) if unknown in self._argv else ""
        if unknown.startswith("--") and not hint:
            options = [option for action in self._actions for option in action.option_strings]
            hint = did_you_mean(unknown.partition("=")[0], options)
        raise UserError(f"{message}.{hint} `{self.prog} --help` lists all arguments.")


def version_text() -> str:
    """`maxtext_lite 0.1.0 (jax 0.10.2, Python 3.11.2)`, without importing any of them."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        of_jax = version("jax")
    except PackageNotFoundError:
        of_jax = "not installed"
    return f"maxtext_lite {__version__} (jax {of_jax}, Python {sys.version.split()[0]})"


def config_arguments(parser: ArgumentParser, default: str = "configs/base.yml") -> None:
    """Adds `[CONFIG.yml] [key=value ...]`; `ArgumentParser.parse` gives them as `config` and `overrides`."""
    parser.keys = known_keys
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[CONFIG.yml] [key=value ...]",
        help=f"a config (default: {default}) and overrides",
    )


def machine_arguments(parser: argparse.ArgumentParser, device_help: str) -> None:
    """Adds `--devices`, `--hosts` and `--device`, a machine that need not exist."""
    parser.add_argument("--devices", type=whole_number, default=1, help="number of devices in the mesh (default 1)")
    parser.add_argument("--hosts", type=whole_number, default=1, help="number of hosts (default 1)")
    parser.add_argument("--device", metavar="NAME", help=f"device type, such as v5e or h100, for {device_help}")


def whole_number(text: str) -> int:
    """The whole number of an option, as in YAML.

    Raises:
      argparse.ArgumentTypeError: it is not a whole number.
    """
    value = _scalar(text)
    if isinstance(value, int):
        return value
    raise argparse.ArgumentTypeError(f"{value_text(text)} is not a whole number")


def real_number(text: str) -> float:
    """The number of an option, which may be infinite.

    Raises:
      argparse.ArgumentTypeError: it is not a number.
    """
    value = _scalar(text)
    if isinstance(value, int | float) and value == value:
        return value
    raise argparse.ArgumentTypeError(f"{value_text(text)} is not a number")


def _scalar(text: str) -> object:
    try:
        value = parse_value(text).value
    except ValueError:
        return None
    return None if isinstance(value, bool) else value


Number = TypeVar("Number", int, float)


def bounded(parse: Callable[[str], Number], least: Number, most: float = math.inf) -> Callable[[str], Number]:
    """The type of an option whose number is from `least` to `most`."""

    def check(text: str) -> Number:
        value = parse(text)
        if least <= value <= most:
            return value
        bounds = f"at least {number_text(least)}"
        if most != math.inf:
            bounds = f"from {number_text(least)} to {number_text(most)}"
        nearest = number_text(least if value < least else most)
        rule = f"{value_text(value)} must be {bounds}. Nearest that works: {nearest}"
        raise argparse.ArgumentTypeError(rule)

    return check


gigabytes = bounded(real_number, 0.001, 1e6)
"""The type of an option with the memory of a device, in units of 1e9 bytes."""


at_least_one = bounded(whole_number, 1)
"""The type of an option that counts something."""
tolerance = bounded(real_number, 0, 1)
"""The type of an option for a relative difference."""


def local_path(text: str) -> Path:
    """The path of an argument.

    Raises:
      argparse.ArgumentTypeError: it cannot be a path.
    """
    if problem := path_problem(text):
        raise argparse.ArgumentTypeError(f"{value_text(text)} {problem.rstrip('.')}")
    return user_path(text)


def run_path(text: str) -> Path:
    """The path of a run directory or a similar one; for one in a bucket, of its local copy.

    Raises:
      argparse.ArgumentTypeError: it cannot be a path.
      UserError: the bucket cannot be read.
    """
    return local_copy(text, "RUN_DIR") if is_bucket(text) and not path_problem(text, of_run=True) else local_path(text)


def check_one_host(num_hosts: int, command: str) -> None:
    """Refuses several hosts.

    Raises:
      UserError: there are several.
    """
    if num_hosts > 1:
        raise UserError(f"{command} runs on one host, and there are {num_hosts}. Nearest that works: 1.")


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Runs a command's `main(argv)` and returns its exit code; a UserError becomes `error:` lines and exit code 2.

    A full stdout also gives 2; a stdout whose reader has exited (head, less) gives 1 without a message.

    Args:
      argv: the arguments; default: those of the process.
    """
    watch_stdout()
    log_real_warnings()
    complaints.clear()
    try:
        code = _exit_code(main, sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except StdoutLost as lost:
        if lost.reason:
            complain(f"error: stdout cannot be written: {lost.reason}.")
        code = EXIT_USER_ERROR if lost.reason else EXIT_FAILED
    if code in (EXIT_FAILED, EXIT_USER_ERROR) and "jax" in sys.modules:  # otherwise no other process can be waiting
        from maxtext_lite.parallel import end_soon

        end_soon(code)
    command_signals.finish(code)
    errors = [line.removeprefix("error: ") for line in complaints if line.startswith("error: ")]
    for observer in observers:
        observer.finish(code, " ".join(errors))
    if command_signals.installed:  # the process is the command's own
        leave(code)
    return code


def _exit_code(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    try:
        return main(argv)
    except UserError as error:
        for problem in error.problems:
            complain(f"error: {sanitize_for_terminal(problem)}")
        return EXIT_USER_ERROR
    except SystemExit as end:  # from argparse, after --help
        return int(end.code or 0)
    except (MemoryError, RuntimeError) as error:  # jax raises RuntimeErrors; jax may not be imported
        said = str(error).strip().partition("\n")[0]
        if not isinstance(error, MemoryError) and not said.startswith("RESOURCE_EXHAUSTED"):
            raise
        complain(
            f"error: the memory is full: {sanitize_for_terminal(said[:_MOST_SAID])} Use fewer or shorter examples or "
            "prompts at once, or fewer new tokens; in training also remat_policy=full. `plan` shows what takes what."
        )
        return EXIT_USER_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    """The console script: runs the command that the first argument names."""
    return run_command(_dispatch, argv)


def _dispatch(argv: Sequence[str]) -> int:
    if argv[:1] == ["--version"]:
        print(version_text())
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: maxtext-lite COMMAND [CONFIG.yml] [key=value ...]\n")
        for command, meaning in COMMANDS.items():
            print(f"  {command:<14} {meaning}")
        print("\n`maxtext-lite COMMAND --help` has the details. `python -m maxtext_lite.COMMAND` works too.")
        return 0 if argv else EXIT_USER_ERROR
    command, *rest = argv
    command = command.replace("-", "_")
    if command not in COMMANDS:
        raise UserError(
            f"unknown command '{command}'.{did_you_mean(command, COMMANDS)} There are: {', '.join(COMMANDS)}."
        )
    module = importlib.import_module(f"maxtext_lite.{command}")
    return int(module.main(rest))
