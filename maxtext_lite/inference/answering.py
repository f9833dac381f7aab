"""A model's continuations of prompts: streamed to the terminal, as JSON, or as turns of a conversation."""

import collections
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.records import json_text
from maxtext_lite.hf.chat import ChatTemplate, chat_template, check_contents
from maxtext_lite.inference.decoding import Sampling
from maxtext_lite.inference.requests import GenerateConfig
from maxtext_lite.inference.sampler import Sampler, load_on_mesh, mesh_problems
from maxtext_lite.inference.stream_text import TextTokens, TimedTokens, WrittenText, write_texts
from maxtext_lite.parallel import start_devices

Turns = list[dict[str, str]]


@dataclass(frozen=True)
class _Prompter:
    """The conversion of texts to prompts, and of a model's tokens to texts.

    Attributes:
      template: with chat, renders turns as a prompt; otherwise None.
    """

    asked: GenerateConfig
    tokens: TextTokens
    template: ChatTemplate | None

    @classmethod
    def of(cls, directory: Path, config: Config, asked: GenerateConfig) -> "_Prompter":
        tokens = TextTokens.of(directory, config)
        if not asked.chat:
            return cls(asked, tokens, None)
        if config.tokenizer_path or config.chat_template:
            return cls(asked, tokens, chat_template(config))
        if tokens.carried is None:
            raise UserError(f"{directory} has no chat template: it did not come from a Hugging Face directory.")
        return cls(asked, tokens, ChatTemplate(tokens.carried))

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end a text: the requested ones, or the model's."""
        asked = self.asked.stop_token_ids
        return self.tokens.stop_token_ids if asked is None else asked

    @property
    def first_turns(self) -> Turns:
        """The turns before the user's first."""
        return [{"role": "system", "content": self.asked.system}] if self.asked.system else []

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text; with chat, of a conversation with the text as the user's first turn."""
        if self.template:
            return self.after([*self.first_turns, {"role": "user", "content": text}])
        return self.tokens.encoder.prompt(text).tolist()

    def after(self, turns: Turns) -> list[int]:
        """The prompt for the model's answer to these turns."""
        assert self.template is not None, "turns need chat"
        encoder = self.tokens.encoder
        hidden = [turn | {"content": encoder.hide("the prompt", turn["content"])} for turn in turns]
        text = self.template.render(hidden)
        encoder.check_carried(hidden, self.template.render)
        check_contents([turn for turn in hidden if turn["role"] != "assistant"], text)
        (token_ids,) = encoder.encode_rendered([text])
        return encoder.or_end(token_ids).tolist()

    def begin(self, prompt: list[int]) -> WrittenText:
        """An empty text to add tokens to: the continuation of a prompt, or with chat an answer to it."""
        before = () if self.template else prompt
        return self.tokens.begin(self.asked.stop_strings, self.stop_token_ids, prompt=before)


def generate(directory: Path, config: Config, asked: GenerateConfig, *, as_json: bool) -> None:
    """Prints the continuations of the prompts by a directory's model, and the speed to stderr.

    With chat and without a prompt, answers each line of the input.

    Raises:
      UserError: the model does not allow the request, or lacks parameters, a tokenizer or a chat template; lists every
        problem of the prompts and the mesh. Or a token's log-probability is not finite, or a conversation has become
        too long.
    """
    prompter = None if asked.prompt_ids is not None else _Prompter.of(directory, config, asked)
    texts = [asked.prompt] if asked.prompts is None else asked.prompts
    prompts = [prompter.prompt(text) for text in texts] if prompter else asked.prompt_ids or []
    if problems := [
        *_prompt_problems(prompts, asked, config),
        *mesh_problems(config, len(start_devices()), asked.mesh),
    ]:
        raise UserError(problems)
    with jax.default_matmul_precision(config.matmul_precision):
        sampler = Sampler(*load_on_mesh(directory, config, asked.mesh, asked.parameters))

        def stream(prompts: list[list[int]]) -> TimedTokens:
            if problems := _length_problems(prompts, asked, config):  # of a later turn
                raise UserError(problems)
            return TimedTokens(
                sampler.stream(
                    prompts,
                    max_new_tokens=asked.max_new_tokens,
                    sampling=Sampling(asked.temperature, asked.top_k, asked.top_p),
                    stop_token_ids=prompter.stop_token_ids if prompter else asked.stop_token_ids or [],
                    seed=asked.seed,
                )
            )

        if prompter and asked.chat and not asked.model_fields_set & {"prompt", "prompts"}:
            _converse(stream, prompter)
            return
        tokens = stream(prompts)
        if as_json or prompter is None:
            print(json_text(_answers(tokens, prompts, prompter)))
        else:
            # A continued text includes its prompt; an answer does not.
            _print_texts(tokens, prompts, prompter, ["" if asked.chat else text for text in texts])
    print(tokens, file=sys.stderr)


def _converse(stream: Callable[[list[list[int]]], TimedTokens], prompter: _Prompter) -> None:
    """Answers each line of the input as the next turn of one conversation.

    Raises:
      UserError: the input is not UTF-8.
    """
    turns = prompter.first_turns
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
            line.encode()  # Python may have read other bytes as surrogates
        except UnicodeError:
            raise UserError("the input is not UTF-8 text.") from None
        if not line:
            return
        turns.append({"role": "user", "content": line.rstrip("\n")})
        prompt = prompter.after(turns)
        answer = prompter.begin(prompt)
        for _, piece in write_texts(stream([prompt]), [answer]):
            print(piece, end="", flush=True)
        print(flush=True)
        turns.append({"role": "assistant", "content": answer.text})


def _answers(tokens: TimedTokens, prompts: list[list[int]], prompter: _Prompter | None) -> list[dict[str, Any]]:
    """For each prompt its new tokens, their log-probabilities and, with a tokenizer, their text."""
    answers: list[dict[str, Any]] = [{"tokens": [], "log_probabilities": []} for _ in prompts]
    written = [*map(prompter.begin, prompts)] if prompter else []
    for number, token, log_probability in tokens:
        if written and written[number].ended:
            continue
        answers[number]["tokens"].append(token)
        answers[number]["log_probabilities"].append(log_probability)
        if written:
            written[number].push(token)
            if all(text.ended for text in written):
                break
    for answer, text in zip(answers, written, strict=False):
        text.end()
        answer["text"] = text.text
    return answers


def _print_texts(tokens: TimedTokens, prompts: list[list[int]], prompter: _Prompter, shown: list[str]) -> None:
    """Streams a single text; prints several, each after a separating line, once all are complete.

    Args:
      shown: the text to print before each.
    """
    written = [*map(prompter.begin, prompts)]
    pieces = write_texts(tokens, written)
    if len(written) == 1:
        print(shown[0], end="", flush=True)
        for _, piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
        return
    collections.deque(pieces, maxlen=0)
    for number, text in enumerate(written):
        print(f"---- {number}\n{shown[number]}{text.text}")


def _prompt_problems(prompts: list[list[int]], asked: GenerateConfig, config: Config) -> list[str]:
    problems: list[str] = []
    last = config.vocab_size - 1
    for key, lists in (("prompt_ids", prompts), ("stop_token_ids", [asked.stop_token_ids or []])):
        for token in itertools.chain.from_iterable(lists):
            if not 0 <= token <= last:
                near = min(max(token, 0), last)
                problems.append(f"{key}: token {token} is not in 0..{last} (vocab_size). Nearest that works: {near}.")
    return problems + _length_problems(prompts, asked, config)


def _length_problems(prompts: list[list[int]], asked: GenerateConfig, config: Config) -> list[str]:
    positions = config.trainable_position_size
    longest = max(map(len, prompts))
    most = positions + 1 - longest  # the last token is not fed back
    if not positions or asked.max_new_tokens <= most:
        return []
    works = f"Nearest that works: {most}." if most > 0 else "No max_new_tokens works: shorten the prompt."
    return [
        f"max_new_tokens={asked.max_new_tokens} after a prompt of {longest} tokens goes past the model's {positions} "
        f"learned positions. {works}"
    ]
