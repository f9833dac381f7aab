"""Score a run or Hugging Face directory: its own loss, perplexity, multiple choice, cloze."""

import sys
from collections.abc import Sequence

from maxtext_lite.cli import ArgumentParser, run_command
from maxtext_lite.command_keys import model_arguments, parse_keys
from maxtext_lite.config import UserError
from maxtext_lite.config.records import json_text
from maxtext_lite.hf.model_directory import directory_config
from maxtext_lite.inference.requests import EvaluateConfig

EXAMPLE = "evaluate RUN_DIR text=held_out.txt max_length=1024"
_PATHS = ("data", "text", "choices", "cloze")


def parse_evaluate_config(overrides: Sequence[str]) -> EvaluateConfig:
    """The keys of `evaluate` from key=value words; of several for a key, the last wins.

    Raises:
      UserError: with every problem.
    """
    config, problems = parse_keys(EvaluateConfig, overrides, texts=_PATHS, example=EXAMPLE)
    if problems:
        raise UserError(problems)
    given = [key for key in _PATHS if getattr(config, key)]
    if len(given) != 1:
        said = f"{' and '.join(given)} contradict each other" if given else "there is nothing to evaluate"
        problems.append(f"{said}: give one of data, text, choices and cloze. Example: {EXAMPLE}")
    if config.stride > config.max_length - 1:
        problems.append(
            f"stride={config.stride} is more than max_length={config.max_length} - 1: the first token of a window has "
            f"no context. Nearest that works: {config.max_length - 1}."
        )
    if config.stride and not config.text:
        problems.append(f"stride={config.stride} has no effect without text. Nearest that works: 0.")
    if problems:
        raise UserError(problems)
    return config


def main(argv: Sequence[str]) -> int:
    """Prints the scores of a model on a text or on questions; returns the exit code.

    Raises:
      UserError: with every problem of the arguments, the directory or the file.
    """
    parser = ArgumentParser(prog="maxtext-lite evaluate", description=f"{__doc__} Example: {EXAMPLE}")
    model_arguments(parser, EvaluateConfig, "a run directory or a Hugging Face directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args(argv)
    asked = parse_evaluate_config(arguments.overrides)
    config = directory_config(arguments.directory, asked.dtype)
    # These import jax, once the config is known to be right.
    if asked.data:
        from maxtext_lite.inference.scoring import file_loss as evaluate
    else:
        from maxtext_lite.inference.scoring import evaluate

    found = evaluate(arguments.directory, config, asked)
    if arguments.json:
        print(json_text(found))
    else:
        print("  ".join(f"{name} {value:,.6g}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
