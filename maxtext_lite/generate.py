"""Generate text from a run or Hugging Face directory, as it is sampled, or its tokens as JSON."""

import sys
from collections.abc import Sequence

from maxtext_lite.cli import ArgumentParser, run_command
from maxtext_lite.command_keys import model_arguments, parse_keys
from maxtext_lite.config import UserError
from maxtext_lite.hf.model_directory import directory_config
from maxtext_lite.inference.requests import GenerateConfig

EXAMPLE = "generate RUN_DIR prompt='To be' max_new_tokens=100 temperature=0.8 top_k=0 top_p=0.95"
_TEXTS = ("prompt", "system")


def parse_generate_config(overrides: Sequence[str]) -> GenerateConfig:
    """The keys of `generate` from key=value words; of several for a key, the last wins.

    Raises:
      UserError: with every problem.
    """
    config, problems = parse_keys(GenerateConfig, overrides, texts=_TEXTS, example=EXAMPLE)
    given = [key for key in ("prompt", "prompts", "prompt_ids") if key in config.model_fields_set]
    if len(given) > 1:
        problems.append(f"{given[0]} and {given[1]} contradict each other; give one of them.")
    if config.prompts == []:
        problems.append("prompts is empty; it needs at least one text.")
    if config.chat and config.prompt_ids is not None:
        problems.append("chat and prompt_ids contradict each other: a chat template is for text.")
    if config.system and not config.chat:
        problems.append("system has no effect without chat=true.")
    if not all(config.stop_strings):
        problems.append("stop_strings has an empty text, which occurs everywhere.")
    if config.prompt_ids is not None and not (config.prompt_ids and all(config.prompt_ids)):
        problems.append("prompt_ids has an empty prompt; each needs at least one token. Nearest that works: [[0]].")
    texts = {"prompt": config.prompt, "prompts": "".join(config.prompts or []), "system": config.system}
    problems += [
        f"{key} is not UTF-8 text."
        for key, text in texts.items()
        if any("\ud800" <= character <= "\udfff" for character in text)
    ]
    if problems:
        raise UserError(problems)
    return config


def main(argv: Sequence[str]) -> int:
    """Prints generated text or tokens; returns the exit code.

    Raises:
      UserError: with every problem of the arguments or the directory.
    """
    parser = ArgumentParser(prog="maxtext-lite generate", description=f"{__doc__} Example: {EXAMPLE}")
    model_arguments(parser, GenerateConfig, "a run directory, as printed by `train`, or a Hugging Face directory")
    parser.add_argument("--chat", action="store_true", help="the same as chat=true")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the new tokens of each prompt and their log-probabilities under the model",
    )
    arguments = parser.parse_intermixed_args(argv)
    asked = parse_generate_config([*(["chat=true"] if arguments.chat else []), *arguments.overrides])
    if arguments.json and asked.chat and not asked.model_fields_set & {"prompt", "prompts"}:
        raise UserError("--json needs a prompt: with chat and without one, each line of the input is answered as text.")
    config = directory_config(arguments.directory, asked.dtype)
    from maxtext_lite.inference.answering import generate  # imports jax, once the config is known to be right

    generate(arguments.directory, config, asked, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
