"""The console script `maxtext-lite COMMAND ...`, and what all commands share: arguments, errors and exit codes."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from maxtext_lite.config import UserError, parse_value
from maxtext_lite.config.errors import did_you_mean

COMMANDS: dict[str, str] = {
    "train": "pre-training, SFT and DPO; resumes by itself",
    "train_rl": "reinforcement learning: GRPO and its variants; resumes by itself",
    "plan": "batch sizes, pipeline, ramp-up and memory for a machine that need not exist",
    "compile": "the train step compiled ahead of time: shardings, collectives, memory and FLOPs",
    "generate": "text from a run directory or a Hugging Face directory",
    "evaluate": "perplexity of a text, and multiple choice or cloze questions by log-likelihood",
    "convert": "models from and to Hugging Face directories",
    "report": "one HTML page of a run, or of several over each other",
}
"""Each command, the module maxtext_lite.COMMAND, and what it does."""

EXIT_USER_ERROR = 2
"""The exit code of a wrong config, wrong data or wrong arguments."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are UserErrors."""

    def __init__(self, *, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments, options and key=value in any order; `config` is a path or None, `overrides` a list.

        Raises:
          UserError: an argument is wrong or unknown.
        """
        arguments = self.parse_intermixed_args(argv)
        words: list[str] = arguments.words
        has_file = bool(words) and "=" not in words[0]
        arguments.config = words[0] if has_file else None
        arguments.overrides = words[1:] if has_file else words
        return arguments

    def error(self, message: str) -> NoReturn:
        """Raises the UserError of a wrong argument."""
        raise UserError(f"{message}. `{self.prog} --help` lists what there is.")


def config_arguments(parser: ArgumentParser) -> None:
    """Adds `[CONFIG.yml] [key=value ...]`; `ArgumentParser.parse` gives them as `config` and `overrides`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[CONFIG.yml] [key=value ...]",
        help="a config (default: configs/base.yml) and values that win over it",
    )


Keys = TypeVar("Keys", bound=BaseModel)


def parse_keys(
    kind: type[Keys], words: Sequence[str], *, texts: Collection[str], example: str
) -> tuple[Keys, list[str]]:
    """The keys of a command that takes no config, from key=value words, of which the last of a key wins.

    Args:
      texts: keys whose value is the text as it stands, not YAML.
      example: a command, for the message about a word without `=`.
    Returns:
      The keys, and problems that leave their values readable: further ones can be found beside them.
    Raises:
      UserError: a value is not of its key's kind; with every problem so far.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            problems.append(f"'{word}' is not of the form key=value. Example: {example}")
        elif key not in kind.model_fields:
            problems.append(f"unknown key '{key}' (command line).{did_you_mean(key, kind.model_fields)}")
        else:
            try:
                values[key] = text if key in texts else parse_value(text).value
            except ValueError as error:
                problems.append(f"{key}={text} {error}.")
    try:
        return kind.model_validate(values), problems
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join(str(part) for part in detail["loc"])
            problems.append(f"{key}={detail['input']}: {detail['msg']}.")
        raise UserError(problems) from None


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Runs a command's `main(argv)` and returns its exit code; a UserError becomes `error:` lines and exit code 2.

    Args:
      argv: the arguments; default: those of the process.
    """
    try:
        code = main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except UserError as error:
        for problem in error.problems:
            print("error: " + " ".join(problem.split("\n")), file=sys.stderr)
        if "jax" in sys.modules:  # otherwise no other process can be waiting
            from maxtext_lite.parallel import end_soon

            end_soon(EXIT_USER_ERROR)
        return EXIT_USER_ERROR
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """The console script: runs the command that the first argument names."""
    return run_command(_dispatch, argv)


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: maxtext-lite COMMAND [CONFIG.yml] [key=value ...]\n")
        for command, meaning in COMMANDS.items():
            print(f"  {command:<10} {meaning}")
        print("\n`maxtext-lite COMMAND --help` says more; `python -m maxtext_lite.COMMAND` is the same.")
        return 0 if argv else EXIT_USER_ERROR
    command, *rest = argv
    if command not in COMMANDS:
        raise UserError(
            f"unknown command '{command}'.{did_you_mean(command, COMMANDS)} There are: {', '.join(COMMANDS)}."
        )
    module = importlib.import_module(f"maxtext_lite.{command}")
    return int(module.main(rest))
