"""The command `generate`: text from a run or a Hugging Face directory, streamed to the terminal, or tokens as JSON."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from maxtext_lite.cli import ArgumentParser, local_path, parse_keys, run_command
from maxtext_lite.config import Config, UserError, load_config
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.hf.config import hf_directory, tokenizer_keys
from maxtext_lite.convert import hf_config
from maxtext_lite.generation.stream_text import TimedTokens, WrittenText

EXAMPLE = "generate RUN_DIR prompt='To be' max_new_tokens=100 temperature=0.8 top_k=0 top_p=0.95"
_TEXTS = ("prompt", "system")


class GenerateConfig(BaseModel):
    """What `generate` takes as key=value.

    Attributes:
      prompt: text to go on from; "" starts a new document.
      prompts: several of them, at once.
      prompt_ids: prompts as lists of tokens, instead of `prompt`; needs no tokenizer.
      chat: a prompt is what a user says, and the model's chat template makes of it what the model answers; without
        a prompt, a conversation in which each line of the input is what the user says.
      system: with chat, what is said to the model first.
      max_new_tokens: tokens to add.
      temperature: divides the logits; 0: always the likeliest token.
      top_k: draw among the k likeliest tokens; 0: all.
      top_p: draw among the fewest tokens whose probabilities reach p; 1: all.
      stop_token_ids: tokens after which a text ends; of text, by default end-of-text and what the model names.
      stop_strings: texts before which a text ends.
      seed: of the draws.
      dtype: of activations; "": as the directory's config says.
      ici_tensor_parallelism: devices that share heads, mlp and vocabulary.
      ici_fsdp_parallelism: devices that share the rest of the parameters, and the prompts.
      ici_data_parallelism: devices that each have a copy of the model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt: str = ""
    prompts: list[str] | None = None
    prompt_ids: list[list[int]] | None = None
    chat: bool = False
    system: str = ""
    max_new_tokens: int = Field(200, ge=1, lt=2**31)
    temperature: float = Field(0.8, ge=0, lt=math.inf)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    stop_token_ids: list[int] | None = None
    stop_strings: list[str] = []
    seed: int = Field(0, ge=0, lt=2**32)
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    ici_tensor_parallelism: int = Field(1, ge=1)
    ici_fsdp_parallelism: int = Field(1, ge=1)
    ici_data_parallelism: int = Field(1, ge=1)


def parse_generate_config(overrides: Sequence[str]) -> GenerateConfig:
    """The keys of `generate` from key=value words, of which the last of a key wins.

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
        problems.append("system has no use without chat=true.")
    if not all(config.stop_strings):
        problems.append("stop_strings holds an empty text, which is everywhere.")
    if config.prompt_ids is not None and not (config.prompt_ids and all(config.prompt_ids)):
        problems.append("prompt_ids holds an empty prompt; each needs at least one token. Nearest that works: [[0]].")
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
    """Prints what a model writes; returns the exit code.

    Raises:
      UserError: with every problem of the arguments or the directory.
    """
    parser = ArgumentParser(prog="maxtext-lite generate", description=f"{__doc__} Example: {EXAMPLE}")
    parser.keys = GenerateConfig.model_fields
    parser.add_argument(
        "directory",
        type=local_path,
        help="a run directory, as `train` names it at its end, or a Hugging Face directory",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=", ".join(GenerateConfig.model_fields))
    parser.add_argument("--chat", action="store_true", help="the same as chat=true")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print, for each prompt, its new tokens and their log-probabilities under the model",
    )
    arguments = parser.parse_intermixed_args(argv)
    asked = parse_generate_config([*(["chat=true"] if arguments.chat else []), *arguments.overrides])
    directory = arguments.directory
    return _generate(directory, model_config(directory, asked.dtype), asked, as_json=arguments.json)


def model_config(directory: Path, dtype: str) -> Config:
    """The config of a run or of a Hugging Face directory.

    Args:
      dtype: of activations; "": as the directory says.
    Raises:
      UserError: it is neither.
    """
    overrides = [f"dtype={dtype}"] if dtype else []
    if (directory / "config.yml").is_file():
        config = load_config(directory / "config.yml", overrides)
    elif (directory / "config.json").is_file():
        config = hf_config(directory, overrides)
    else:
        raise UserError(
            f"{directory} is not a run directory: it has no config.yml. Nor is it a Hugging Face directory: "
            "it has no config.json."
        )
    carried = hf_directory(directory)
    if carried is None or not config.tokenizer_path or Path(config.tokenizer_path).exists():
        return config
    return config.model_copy(update=tokenizer_keys(carried))  # the directory has been moved


@dataclass(frozen=True)
class _Texts:
    """How texts become tokens, and when one ends.

    Attributes:
      encode: the tokens of a prompt.
      stop: tokens after which a text ends.
      template: with chat, what makes a prompt of turns.
    """

    tokenizer: Any
    encode: Any
    stop: list[int]
    template: Any

    def ids(self, text: str) -> list[int]:
        """The tokens of a prompt; of none, end-of-text: a new document begins after the end of another."""
        return [int(token) for token in self.encode(text)] or [self.tokenizer.end_of_text_id]

    def begin(self, stop_strings: Sequence[str]) -> WrittenText:
        """A text that has not begun."""
        return WrittenText(self.tokenizer.stream_decoder(), self.stop, stop_strings)

    def answering(self, turns: Sequence[dict[str, str]]) -> list[int]:
        """The tokens that a model goes on from when it answers these turns."""
        return self.ids(self.template.render(turns))


def _texts(directory: Path, config: Config, asked: GenerateConfig) -> _Texts:
    from maxtext_lite.data import ChatTemplate, check_vocabulary, load_tokenizer
    from maxtext_lite.hf import stop_ids_of

    tokenizer: Any = load_tokenizer(config)
    check_vocabulary(tokenizer, config.vocab_size)
    carried = hf_directory(directory)
    file = Path(config.chat_template) if config.chat_template else None
    if asked.chat and carried is None and file is None:
        raise UserError(f"{directory} has no chat template: it did not come from a Hugging Face directory.")
    template = ChatTemplate(carried, file=file) if asked.chat else None
    # Models from elsewhere have seen texts begin with what their tokenizer puts there; a chat template writes it too.
    encode = tokenizer.encode_with_special if carried and not template else tokenizer.encode
    named = [] if carried is None else stop_ids_of(carried)
    stop = asked.stop_token_ids if asked.stop_token_ids is not None else [*named, tokenizer.end_of_text_id]
    return _Texts(tokenizer, encode, stop, template)


def _first_turns(asked: GenerateConfig) -> list[dict[str, str]]:
    return [{"role": "system", "content": asked.system}] if asked.system else []


def _generate(directory: Path, config: Config, asked: GenerateConfig, *, as_json: bool) -> int:
    import jax  # only once the arguments are known to be right

    from maxtext_lite.generation.sampler import Sampler
    from maxtext_lite.parallel import start_devices

    texts = None if asked.prompt_ids is not None else _texts(directory, config, asked)
    said = [asked.prompt] if asked.prompts is None else asked.prompts
    prompts = asked.prompt_ids or []
    if texts and asked.chat:
        prompts = [texts.answering([*_first_turns(asked), {"role": "user", "content": text}]) for text in said]
    elif texts:
        prompts = [texts.ids(text) for text in said]
    _refuse_impossible(prompts, asked, config, len(start_devices()))
    with jax.default_matmul_precision(config.matmul_precision):
        sampler = Sampler.from_run(
            directory,
            config,
            tensor_parallelism=asked.ici_tensor_parallelism,
            fsdp_parallelism=asked.ici_fsdp_parallelism,
            data_parallelism=asked.ici_data_parallelism,
        )

        def stream(prompts: list[list[int]]) -> TimedTokens:
            return TimedTokens(
                sampler.stream(
                    prompts,
                    max_new_tokens=asked.max_new_tokens,
                    temperature=asked.temperature,
                    top_k=asked.top_k,
                    top_p=asked.top_p,
                    stop_token_ids=(asked.stop_token_ids or []) if texts is None else texts.stop,
                    seed=asked.seed,
                )
            )

        if texts and asked.chat and not asked.model_fields_set & {"prompt", "prompts"}:
            _converse(stream, texts, asked)
            return 0
        tokens = stream(prompts)
        if as_json or texts is None:
            _print_json(tokens, len(prompts), texts, asked)
        else:
            _print_texts(tokens, texts, asked, said)
    print(tokens, file=sys.stderr)
    return 0


def _converse(stream: Any, texts: _Texts, asked: GenerateConfig) -> None:
    """Answers each line of the input, with all that was said before it in mind."""
    turns = _first_turns(asked)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        turns.append({"role": "user", "content": line.rstrip("\n")})
        answer = texts.begin(asked.stop_strings)
        for _, token, _ in stream([texts.answering(turns)]):
            print(answer.push(token), end="", flush=True)
            if answer.ended:
                break
        print(answer.end(), flush=True)
        turns.append({"role": "assistant", "content": answer.text})


def _print_json(tokens: Iterator[tuple[int, int, float]], count: int, texts: _Texts | None, asked: Any) -> None:
    new: list[dict[str, Any]] = [{"tokens": [], "log_probabilities": []} for _ in range(count)]
    written = None if texts is None else [texts.begin(asked.stop_strings) for _ in range(count)]
    for index, token, log_probability in tokens:
        if written and written[index].ended:
            continue
        new[index]["tokens"].append(token)
        new[index]["log_probabilities"].append(log_probability)
        if written:
            written[index].push(token)
            if all(text.ended for text in written):
                break
    for answer, text in zip(new, written or [], strict=False):
        text.end()
        answer["text"] = text.text
    print(json.dumps(new))


def _print_texts(
    tokens: Iterator[tuple[int, int, float]], texts: _Texts, asked: GenerateConfig, said: list[str]
) -> None:
    """Streams one text; of several, prints each when all are done, a line before each.

    A prompt is part of the text that goes on from it, but not of an answer.
    """
    shown = ["" if asked.chat else text for text in said]
    written = [texts.begin(asked.stop_strings) for _ in said]
    alone = len(written) == 1
    if alone:
        print(shown[0], end="", flush=True)
    for index, token, _ in tokens:
        piece = written[index].push(token)
        if alone:
            print(piece, end="", flush=True)
        if all(text.ended for text in written):
            break
    for number, text in enumerate(written):
        rest = text.end()
        if alone:
            print(rest, flush=True)
        else:
            print(f"---- {number}\n{shown[number]}{text.text}")


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
    positions, longest = config.trainable_position_size, max(map(len, prompts))
    if positions and longest + asked.max_new_tokens > positions:
        problems.append(
            f"max_new_tokens={asked.max_new_tokens} after a prompt of {longest} tokens goes past the model's "
            f"{positions} learned positions. Nearest that works: {max(positions - longest, 1)}."
        )
    sizes = asked.ici_tensor_parallelism, asked.ici_fsdp_parallelism, asked.ici_data_parallelism
    problems += mesh_problems(config, num_devices, *sizes)
    if problems:
        raise UserError(problems)


def mesh_problems(config: Config, num_devices: int, tensor: int, fsdp: int, data: int = 1) -> list[str]:
    """What keeps a model from lying on a mesh of these sizes of `num_devices`: a sentence for each key."""
    width = config.base_mlp_dim if config.num_experts == 1 else config.moe_mlp_dim
    heads, table = math.gcd(config.base_num_query_heads, config.base_num_kv_heads), config.vocab_size
    problems, devices = [], "1 device" if num_devices == 1 else f"{num_devices} devices"
    for key, value, others, divided, what in (
        ("ici_tensor_parallelism", tensor, fsdp * data, math.gcd(heads, width, table), "heads, mlp and vocabulary"),
        ("ici_fsdp_parallelism", fsdp, tensor * data, config.base_emb_dim, "embedding"),
        ("ici_data_parallelism", data, tensor * fsdp, 0, "copies"),
    ):
        works = [n for n in range(1, num_devices // others + 1) if divided % n == 0] or [1]
        if value not in works:
            problems.append(
                f"{key}={value_text(value)} does not divide the model's {what} over {devices}. "
                f"Nearest that works: {min(works, key=lambda n: abs(n - value))}."
            )
    return problems


if __name__ == "__main__":
    sys.exit(run_command(main))
