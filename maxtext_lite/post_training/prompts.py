"""Prompts for reinforcement learning: lines of JSON files, or generated arithmetic problems."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from maxtext_lite.config import UserError, single_path
from maxtext_lite.config.errors import counted
from maxtext_lite.data.order import example_ids
from maxtext_lite.data.source import ExampleSource, check_id, num_held_out
from maxtext_lite.data.text_encoder import spelled_notes
from maxtext_lite.data.text_files import json_objects
from maxtext_lite.data.tokenizer import load_tokenizer
from maxtext_lite.post_training.conversations import Rendered, Renderer, refuse_unrendered, turns_under
from maxtext_lite.post_training.keys import ANSWER_REWARDS, RLRunConfig, num_problems, reward_names

ASKED = '"prompt", "question", "messages", "conversations" or "instruction"'
"""Fields of a line."""
_CONVERSATIONS = ("messages", "conversations", "instruction")  # whose last turn may be the answer
_ASKED_BY = ("messages", "prompt", "question", "conversations", "instruction")
ARGUMENTS = ("prompts", "completions", "prompt_ids", "completion_ids")
"""Arguments of reward functions, besides those named after the keys of lines."""
_ORDER_OF_PROBLEMS = 20  # a seed for every run: which problems are held out must not depend on data_shuffle_seed


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
      number: in its source.
      text: the decoded tokens, as reward functions see them, without those that the tokenizer adds in front.
      is_plain: no chat template rendered it: its response continues a text.
      token_ids: the tokens that the model continues, at most max_prefill_predict_length.
      fields: the keys of its line, for reward functions; among them "answer" if there is one.
    """

    number: int
    text: str
    token_ids: tuple[int, ...]
    fields: Mapping[str, Any]
    is_plain: bool = False


class PromptSource(ExampleSource):
    """A sequence of prompts, which a run reads in the order of examples.

    Attributes:
      field_names: the keys that some prompt has among its `fields`.
    """

    field_names: Any

    def __getitem__(self, number: int) -> Any:
        """A `Prompt`. Raises IndexError outside [0, len)."""
        raise NotImplementedError


def open_prompts(config: RLRunConfig) -> tuple[PromptSource, PromptSource | None]:
    """The prompts to train on, and the held-out ones.

    Held out are the lines of `eval_dataset_path`, or without one the last floor(eval_fraction x lines), at least one,
    as in SFT. Of generated problems equally many are held out, which a fixed permutation spreads over all of them.

    Returns:
      (training, held out); the latter is None if eval_fraction is 0 and eval_dataset_path is empty.
    Raises:
      UserError: a file is missing, a line is not a prompt or lacks the answer that a reward function needs, a prompt is
        too long and must not be dropped, or nothing is left to train on or to hold out.
    """
    maker = _PromptMaker(config, Renderer(config, load_tokenizer(config)))
    held_out: PromptSource | None = None
    if config.dataset_type == "arithmetic":
        total = num_problems(config)
        count = 0 if config.eval_dataset_path else num_held_out(config.eval_fraction, total, "problems")
        training = ArithmeticPrompts(maker, 0, total - count)
        training.check_lengths()
        if count:
            held_out = ArithmeticPrompts(maker, total - count, count)
    else:
        lines = list(_read_lines(maker, "dataset_path", single_path(config.dataset_path)))
        if not lines:
            raise UserError(f"dataset_path={config.dataset_path!r} has no line and thus no prompt.")
        # Lines are counted before any is dropped: these are the lines that SFT would hold out.
        count = 0 if config.eval_dataset_path else num_held_out(config.eval_fraction, len(lines), "lines")
        training = _fitted(maker, lines[: len(lines) - count], "dataset_path")
        if count:
            held_out = _fitted(maker, lines[-count:], "dataset_path")
    if config.eval_dataset_path:
        lines = list(_read_lines(maker, "eval_dataset_path", single_path(config.eval_dataset_path)))
        held_out = _fitted(maker, lines, "eval_dataset_path")
    return training, held_out


@dataclass(frozen=True)
class FilePrompts(PromptSource):
    """Prompts from files.

    Attributes:
      notes: about lines whose prompts are too long.
      fingerprint: hash of texts, tokens, fields, tokenizer, template and limit.
    """

    prompts: tuple[Prompt, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()

    @property
    def field_names(self) -> tuple[str, ...]:
        """The keys that some line has."""
        return tuple(dict.fromkeys(key for prompt in self.prompts for key in prompt.fields))

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, number: int) -> Prompt:
        """A prompt. Raises IndexError outside [0, len)."""
        check_id(number, len(self), "prompt")
        return self.prompts[number]


class ArithmeticPrompts(PromptSource):
    """Some of the problems `a op b` with operands from 0 to `largest`, each once, generated on demand.

    All problems are ordered by a fixed permutation. Problem p of (largest + 1)^2 x operations has operation
    p // (largest + 1)^2; its operands are the two digits of the remainder in base largest + 1.

    Args:
      first, count: the positions in that order that belong to this source.
    """

    field_names = ("answer",)

    def __init__(self, maker: _PromptMaker, first: int, count: int) -> None:
        self._maker = maker
        self._first = first
        self._count = count
        config = maker.config
        self._operations = config.arithmetic_operations
        self._base = config.arithmetic_largest + 1

    @property
    def fingerprint(self) -> str:
        """Hash of everything that its prompts depend on; a chat template enters through the first problem."""
        content = self._maker.content()
        content.update(repr((self._operations, self._base, self._first, self._count)).encode())
        content.update(json.dumps(self[0].token_ids).encode())
        return f"arithmetic:{content.hexdigest()}"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Prompt:
        """A prompt; its field "answer" is the result.

        Raises:
          IndexError: outside [0, len).
          UserError: it has more tokens than max_prefill_predict_length.
        """
        check_id(number, self._count, "prompt")
        total = num_problems(self._maker.config)
        (problem,) = example_ids(self._first + number, 1, num_examples=total, seed=_ORDER_OF_PROBLEMS).tolist()
        operation, rest = divmod(problem, self._base**2)
        return self._prompt(number, self._operations[operation], *divmod(rest, self._base))

    def check_lengths(self) -> None:
        """Refuses problems that are too long.

        It checks those with the largest operands of each number of digits: no other problem is longer in bytes, or in a
        tokenizer that spells numbers by their digits.

        Raises:
          UserError: one is longer than max_prefill_predict_length.
        """
        largest = self._base - 1
        operands = {0, largest} | {10**digits - 1 for digits in range(1, len(str(largest)))}
        for operation, a, b in itertools.product(self._operations, operands, operands):
            self._prompt(0, operation, a, b)

    def _prompt(self, number: int, operation: str, a: int, b: int) -> Prompt:
        result = {"+": a + b, "-": a - b, "*": a * b}[operation]
        problem = f"{a}{operation}{b}="
        rendered = self._maker.rendered(f"arithmetic problem {problem}", "prompt", problem)
        (token_ids,) = self._maker.renderer.prompt_tokens([rendered])
        most = self._maker.config.max_prefill_predict_length
        if len(token_ids) > most:
            raise UserError(
                f"dataset_type=arithmetic: the prompt of {problem} has {len(token_ids)} tokens, more than "
                f"max_prefill_predict_length={most}. Use a smaller arithmetic_largest or prompt_template. "
                f"{_longer(self._maker.config, len(token_ids))}."
            )
        return self._maker.prompt(number, rendered, token_ids, {"answer": str(result)})


class _PromptMaker(NamedTuple):
    """How lines become prompts."""

    config: RLRunConfig
    renderer: Renderer

    def rendered(self, where: str, key: str, value: str | list[Any]) -> Rendered:
        """The text of a prompt: prompt_template around it or around the user's last turn, then the chat template."""
        template = self.config.prompt_template
        if isinstance(value, str):
            text = template.replace("{prompt}", value)
            turns = [{"role": "user", "content": text}]
            return self.renderer.prompt_text(where, key, turns if self.config.apply_chat_template else text)
        last = value[-1] if value else None
        if isinstance(last, dict) and isinstance(last.get("content"), str):
            value = [*value[:-1], {**last, "content": template.replace("{prompt}", last["content"])}]
        return self.renderer.prompt_text(where, key, value)

    def prompt(self, number: int, rendered: Rendered, token_ids: np.ndarray, fields: dict[str, Any]) -> Prompt:
        """A prompt with its tokens."""
        text = self.renderer.encoder.reveal(rendered.text)
        return Prompt(number, text, tuple(token_ids.tolist()), fields, rendered.is_plain)

    def content(self) -> Any:
        """A hash already fed with everything that all prompts depend on."""
        config = self.config
        settings = (config.prompt_template, config.apply_chat_template, config.max_prefill_predict_length)
        return hashlib.sha256(repr((self.renderer.encoder.tokenizer.fingerprint, *settings)).encode())


_PromptLine = tuple[Rendered, dict[str, Any]]
"""A prompt before tokenization, and the fields of its line."""


def _read_lines(maker: _PromptMaker, key: str, path: str) -> Iterator[_PromptLine]:
    compared = [name for name in reward_names(maker.config) if name in ANSWER_REWARDS]
    for where, value in json_objects(key, path, reads="prompts are read from .jsonl files", wanted=ASKED):
        line = _line(maker, where, value)
        if compared and not isinstance(line[1].get("answer"), str):
            raise UserError(
                f'{where}: there is no text or number as "answer", which reward_functions={compared[0]} compares '
                "responses with."
            )
        yield line


def _line(maker: _PromptMaker, where: str, value: Mapping[str, Any]) -> _PromptLine:
    taken = [key for key in ARGUMENTS if key in value]
    if taken:
        raise UserError(
            f'{where}: "{taken[0]}" is the name of an argument of reward functions. Rename that key of the line.'
        )
    refuse_unrendered(where, value, " Rename that key of the line if it is for reward functions.")
    key = next((key for key in _ASKED_BY if value.get(key) is not None), "prompt")
    asked = turns_under(where, key, value)
    answer = value.get("answer")
    if not isinstance(asked, list) and (key in _CONVERSATIONS or not isinstance(asked, str)):
        raise UserError(f"{where}: not a JSON object with {ASKED}, a text or a list of turns.")
    fields = {name: each for name, each in value.items() if name != "answer"}
    if key in _CONVERSATIONS:
        last = asked[-1] if asked else None
        if isinstance(last, dict) and last.get("role") == "assistant" and isinstance(last.get("content"), str):
            asked = asked[:-1]
            answer = last["content"] if answer is None else answer
    elif key == "prompt" and answer is None:
        answer = value.get("completion")
        if isinstance(answer, list) and answer and isinstance(answer[0], dict):  # turns that begin with the answer
            answer = answer[0].get("content")
        answer = answer if isinstance(answer, str) else None
    elif key == "question" and isinstance(answer, str) and "####" in answer:  # GSM8K: the solution, then the answer
        fields.setdefault("solution", answer)
        answer = answer.rpartition("####")[2].strip()
    if isinstance(answer, float) and not math.isfinite(answer):
        raise UserError(f'{where}: "answer" is too large a number. Give it as text.')
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = format(Decimal(repr(answer)), "f")
    if answer is not None:
        fields["answer"] = answer
    return maker.rendered(where, key, asked), fields


def _fitted(maker: _PromptMaker, lines: Sequence[_PromptLine], key: str) -> FilePrompts:
    """The prompts of lines, except those that are too long.

    Raises:
      UserError: a prompt is too long and long_examples=refuse, or no prompt is left.
    """
    most = maker.config.max_prefill_predict_length
    prompts = []
    content = maker.content()
    long: list[tuple[str, int]] = []
    tokens_of_lines = maker.renderer.prompt_tokens([rendered for rendered, _ in lines])
    for (rendered, fields), tokens in zip(lines, tokens_of_lines, strict=True):
        if len(tokens) > most:
            long.append((rendered.where, len(tokens)))
            continue
        prompts.append(maker.prompt(len(prompts), rendered, tokens, fields))
        content.update(json.dumps([prompts[-1].text, prompts[-1].token_ids, fields], sort_keys=True).encode())
    if long and maker.config.long_examples == "refuse":
        where, count = long[0]
        others = "" if len(long) == 1 else f" ({len(long)} of {len(lines)} lines have more than that)"
        raise UserError(
            f"{where}: the prompt has {count} tokens, more than max_prefill_predict_length={most}{others}. "
            f"{_longer(maker.config, max(count for _, count in long))} or long_examples=drop."
        )
    spelled = spelled_notes(sum(rendered.num_spelled for rendered, _ in lines), maker.renderer.encoder.in_text)
    notes = spelled if not long else (
        *spelled,
        f"{len(long):,} of {counted(len(lines), 'line')} {'was' if len(long) == 1 else 'were'} dropped: prompts longer "
        f"than max_prefill_predict_length={most}, as that of {long[0][0]} with {long[0][1]} tokens.",
    )  # fmt: skip
    if not prompts:
        raise UserError(f"{key}={getattr(maker.config, key)!r} has no prompt. {' '.join(notes)}".rstrip())
    return FilePrompts(tuple(prompts), f"prompts:{len(prompts)}:{content.hexdigest()}", notes)


def _longer(config: RLRunConfig, tokens: int) -> str:
    """The end of a refusal: limits that admit a prompt of `tokens` tokens."""
    response = config.max_target_length - config.max_prefill_predict_length
    room = "" if tokens < config.max_target_length else f" max_target_length={tokens + response}"
    works = "works" if config.dataset_type == "arithmetic" else "work"
    return f"Nearest that {works}: max_prefill_predict_length={tokens}{room}"
