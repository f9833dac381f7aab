"""The command `generate`: text from a run directory, streamed to the terminal, or tokens as JSON."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from maxtext_lite.cli import ArgumentParser, run_command
from maxtext_lite.config import Config, UserError, load_config, parse_value
from maxtext_lite.config.errors import did_you_mean

EXAMPLE = "generate RUN_DIR prompt='To be' max_new_tokens=100 temperature=0.8 top_k=0 top_p=0.95"


class GenerateConfig(BaseModel):
    """What `generate` takes as key=value.

    Attributes:
      prompt: text to go on from; "" starts a new document.
      prompt_ids: prompts as lists of tokens, instead of `prompt`; needs no tokenizer.
      max_new_tokens: tokens to add.
      temperature: divides the logits; 0: always the likeliest token.
      top_k: draw among the k likeliest tokens; 0: all.
      top_p: draw among the fewest tokens whose probabilities reach p; 1: all.
      stop_token_ids: tokens after which a text ends; with `prompt`, end-of-text by default.
      seed: of the draws.
      ici_tensor_parallelism: devices to spread the model over.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt: str = ""
    prompt_ids: list[list[int]] | None = None
    max_new_tokens: int = Field(200, ge=1)
    temperature: float = Field(0.8, ge=0, lt=math.inf)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    stop_token_ids: list[int] | None = None
    seed: int = Field(0, ge=0, lt=2**32)
    ici_tensor_parallelism: int = Field(1, ge=1)


def parse_generate_config(overrides: Sequence[str]) -> GenerateConfig:
    """The keys of `generate` from key=value words, of which the last of a key wins.

    Raises:
      UserError: with every problem.
    """
    values: dict[str, Any] = {}
    problems = []
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            problems.append(f"'{word}' is not of the form key=value. Example: {EXAMPLE}")
        elif key not in GenerateConfig.model_fields:
            problems.append(f"unknown key '{key}' (command line).{did_you_mean(key, GenerateConfig.model_fields)}")
        else:
            try:
                values[key] = text if key == "prompt" else parse_value(text).value
            except ValueError as error:
                problems.append(f"{key}={text} {error}.")
    try:
        config = GenerateConfig.model_validate(values)
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join(str(part) for part in detail["loc"])
            problems.append(f"{key}={detail['input']}: {detail['msg']}.")
        raise UserError(problems) from None
    if "prompt" in values and config.prompt_ids is not None:
        problems.append("prompt and prompt_ids contradict each other; give one of them.")
    if config.prompt_ids is not None and not (config.prompt_ids and all(config.prompt_ids)):
        problems.append("prompt_ids holds an empty prompt; each needs at least one token. Nearest that works: [[0]].")
    if any("\ud800" <= character <= "\udfff" for character in config.prompt):
        problems.append("prompt is not UTF-8 text.")
    if problems:
        raise UserError(problems)
    return config


def main(argv: Sequence[str]) -> int:
    """Prints what a run's model writes; returns the exit code.

    Raises:
      UserError: with every problem of the arguments or the run directory.
    """
    parser = ArgumentParser(prog="maxtext-lite generate", description=f"{__doc__} Example: {EXAMPLE}")
    parser.add_argument("run_directory", help="a run directory, as `train` names it at its end")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=", ".join(GenerateConfig.model_fields))
    parser.add_argument(
        "--json",
        action="store_true",
        help="print, for each prompt, its new tokens and their log-probabilities under the model",
    )
    arguments = parser.parse_intermixed_args(argv)
    asked = parse_generate_config(arguments.overrides)
    directory = Path(arguments.run_directory)
    if not (directory / "config.yml").is_file():
        raise UserError(f"{directory} is not a run directory: it has no config.yml.")
    return _generate(directory, load_config(directory / "config.yml"), asked, as_json=arguments.json)


def _generate(directory: Path, config: Config, asked: GenerateConfig, *, as_json: bool) -> int:
    import jax  # only once the arguments are known to be right

    from maxtext_lite.data import check_vocabulary, load_tokenizer
    from maxtext_lite.parallel import start_devices
    from maxtext_lite.training.sampler import Sampler

    tokenizer = None
    if asked.prompt_ids is None:
        tokenizer = load_tokenizer(config)
        check_vocabulary(tokenizer, config.vocab_size)
        # A new document begins after the end of another, which is how the model has seen them begin.
        prompts = [[int(token) for token in tokenizer.encode(asked.prompt)] or [tokenizer.end_of_text_id]]
        stop = asked.stop_token_ids if asked.stop_token_ids is not None else [tokenizer.end_of_text_id]
    else:
        prompts, stop = asked.prompt_ids, asked.stop_token_ids or []
    _refuse_impossible(prompts, asked, config, len(start_devices()))
    with jax.default_matmul_precision(config.matmul_precision):
        sampler = Sampler.from_run(directory, config, tensor_parallelism=asked.ici_tensor_parallelism)
        texts = sampler.stream(
            prompts,
            max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            stop_token_ids=stop,
            seed=asked.seed,
        )
        if as_json or tokenizer is None:
            new: list[dict[str, list[Any]]] = [{"tokens": [], "log_probabilities": []} for _ in prompts]
            for index, token, log_probability in texts:
                new[index]["tokens"].append(token)
                new[index]["log_probabilities"].append(log_probability)
            print(json.dumps(new))
            return 0
        print(asked.prompt, end="", flush=True)
        decoder = tokenizer.stream_decoder()
        for _, token, _ in texts:
            if token not in stop:
                print(decoder.push(token), end="", flush=True)
        print(decoder.flush())
    return 0


def _refuse_impossible(prompts: list[list[int]], asked: GenerateConfig, config: Config, num_devices: int) -> None:
    problems = [
        f"{key}: token {token} is not in 0..{config.vocab_size - 1} (vocab_size). Nearest that works: "
        f"{min(max(token, 0), config.vocab_size - 1)}."
        for key, tokens in (
            ("prompt_ids", [t for prompt in prompts for t in prompt]),
            ("stop_token_ids", asked.stop_token_ids or []),
        )
        for token in tokens
        if not 0 <= token < config.vocab_size
    ]
    tensor = asked.ici_tensor_parallelism
    width = config.base_mlp_dim if config.num_experts == 1 else config.moe_mlp_dim
    works = [
        n for n in range(1, num_devices + 1) if config.base_num_kv_heads % n == width % n == config.vocab_size % n == 0
    ]
    if tensor not in works:
        nearest = min(works, key=lambda n: abs(n - tensor))
        problems.append(
            f"ici_tensor_parallelism={tensor} does not divide the model's heads, mlp and vocabulary over "
            f"{num_devices} devices. Nearest that works: {nearest}."
        )
    if problems:
        raise UserError(problems)


if __name__ == "__main__":
    sys.exit(run_command(main))
