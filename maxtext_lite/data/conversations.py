"""From lines of JSON to the tokens of a conversation or a text, and which of them are answers, to be learned.

An answer is located in the rendered text: between what the chat template renders up to it (the turns before it and the
beginning of the answer) and what it has rendered after it. Both must be prefixes of the whole text, or the template is
refused. The whole text is tokenized at once, and a token belongs to an answer if all of its characters do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.chat import DATE_OF_TRAINING_DATA, ChatKeys, ChatTemplate, Turn, chat_template
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.text_files import check_unicode
from maxtext_lite.data.tokenizer import PlacedTokens

ROLES = ("system", "user", "assistant")
SFT_FIELDS = '"messages", or "prompt" and "completion"'
"""Fields of a line for SFT."""
UNRENDERED = ("tools", "functions", "documents", "chat_template_kwargs")
"""Keys of a line that are for a template beside its turns."""
_NOTHING_IN_JSON = ("[]", "{}", "null")  # datasets with one type per column have such a key as JSON
_NOT_LEARNED = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a turn that say more than its content."""
DPO_FIELDS = '"chosen" and "rejected", with their "prompt"'
"""Fields of a line for DPO."""


Encoded = TypeVar("Encoded")


class Rendered(NamedTuple):
    """A text with its answers.

    Attributes:
      where: file and line.
      text: of turns, with stand-ins for what `TextEncoder.hide` hides.
      answers: for each answer, its first character and the one after its last.
      is_plain: no chat template rendered it, so that the tokenizer's own tokens precede it and end-of-text follows.
    """

    where: str
    text: str
    answers: tuple[tuple[int, int], ...]
    is_plain: bool


class Tokenized(NamedTuple):
    """The tokens of a text.

    Attributes:
      token_ids: int32 [number of tokens].
      is_answer: bool, whether each token is to be learned.
      num_cut: answers that begin or end inside a token; such tokens are not learned.
      num_spelled: special tokens that a text without turns spells, and that it has.
    """

    token_ids: np.ndarray
    is_answer: np.ndarray
    num_cut: int
    num_spelled: int = 0


class Renderer:
    """Renders lines as texts; the chat template is loaded with the first turns."""

    def __init__(self, config: ChatKeys, encoder: TextEncoder):
        self._config, self.encoder, self._tokenizer = config, encoder, encoder.tokenizer
        self._template: ChatTemplate | None = None

    def sft_text(self, where: str, value: Mapping[str, Any]) -> Rendered:
        """The text of a line for SFT.

        Raises:
          UserError: the line is invalid, or its turns cannot be rendered; names `where`.
        """
        refuse_unrendered(where, value)
        if "messages" in value:
            turns = self._turns(where, "messages", value["messages"])
            return self._conversation(where, turns, 0)
        prompt, completion = (value.get(key) for key in ("prompt", "completion"))
        if isinstance(prompt, list) and isinstance(completion, list):
            turns = self._turns(where, "prompt", prompt)
            return self._conversation(where, [*turns, *self._turns(where, "completion", completion)], len(turns))
        if isinstance(prompt, str) and isinstance(completion, str):
            return _plain(where, prompt, completion, "completion")
        raise UserError(f"{where}: not a JSON object with {SFT_FIELDS}, both texts or both lists of turns.")

    def dpo_texts(self, where: str, value: Mapping[str, Any]) -> tuple[Rendered, Rendered]:
        """The texts of a line for DPO: with the chosen answer, and with the rejected one.

        If both are lists of turns and "prompt" is not, the prompt is the turns that both begin with.

        Raises:
          UserError: the line is invalid, or its turns cannot be rendered; names `where`.
        """
        refuse_unrendered(where, value)
        prompt, chosen, rejected = (value.get(key) for key in ("prompt", "chosen", "rejected"))
        if isinstance(chosen, list) and isinstance(rejected, list):
            chosen_turns, rejected_turns = (
                self._turns(where, "chosen", chosen),
                self._turns(where, "rejected", rejected),
            )
            before = self._turns(where, "prompt", prompt) if isinstance(prompt, list) else []
            shared = 0 if before else _shared(chosen_turns, rejected_turns)
            return (
                self._conversation(where, [*before, *chosen_turns], len(before) + shared),
                self._conversation(where, [*before, *rejected_turns], len(before) + shared),
            )
        if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
            return _plain(where, prompt, chosen, "chosen"), _plain(where, prompt, rejected, "rejected")
        raise UserError(f"{where}: not a JSON object with {DPO_FIELDS}, all texts or all lists of turns.")

    def prompt_text(self, where: str, key: str, value: str | Sequence[object]) -> Rendered:
        """The text of a prompt, to be followed by an answer: plain text, or turns of which the last is the user's.

        Args:
          key: the prompt's key in the line.
        Raises:
          UserError: it is invalid, or its turns cannot be rendered; names `where`.
        """
        if isinstance(value, str):
            check_unicode(where, key, value)
            return Rendered(where, value, (), True)
        turns = self._turns(where, key, value)
        _check_order(where, turns)
        if turns[-1]["role"] != "user":
            raise UserError(f"{where}: the last turn of \"{key}\" is the {turns[-1]['role']}'s, not the user's.")
        return Rendered(where, self._render(where, turns, answer_follows=True), (), False)

    def document(self, where: str, key: str, value: Mapping[str, Any]) -> str:
        """The text of the conversation in a line or row, which is learned as a whole.

        Args:
          key: of its turns.
        Raises:
          UserError: it is invalid, or its turns cannot be rendered; names `where`.
        """
        refuse_unrendered(where, {name: each for name, each in value.items() if name != key})
        turns = self._turns(where, key, value.get(key))
        _check_order(where, turns)
        return self._render(where, turns, answer_follows=False)

    def prompt_tokens(self, rendered: Sequence[Rendered]) -> list[np.ndarray]:
        """The tokens of prompts, int32 [number of tokens] each, the same as `tokens` puts before an answer."""
        encoder = self.encoder
        encoded = self._of_lines(rendered, encoder.encode_rendered)
        return [
            encoder.or_end(encoder.begin(token_ids) if each.is_plain else token_ids)
            for each, token_ids in zip(rendered, encoded, strict=True)
        ]

    def tokens(self, rendered: Sequence[Rendered]) -> list[Tokenized]:
        """The tokens of texts."""
        placed = self._of_lines(rendered, self.encoder.place)
        return [self._tokenized(*both) for both in zip(rendered, placed, strict=True)]

    def _of_lines(self, rendered: Sequence[Rendered], encode: Callable[[list[str]], list[Encoded]]) -> list[Encoded]:
        """What `encode` makes of texts; its refusals name the line."""
        try:
            return encode([each.text for each in rendered])
        except UserError as error:
            if len(rendered) == 1:
                raise UserError(f"{rendered[0].where}: {error}") from None
        return [encoded for each in rendered for encoded in self._of_lines([each], encode)]

    def _tokenized(self, rendered: Rendered, placed: PlacedTokens) -> Tokenized:
        is_answer = np.zeros(len(placed.token_ids), bool)
        num_cut = 0
        for start, stop in rendered.answers:
            within = (placed.starts >= start) & (placed.starts < stop) & (placed.stops <= stop)
            touching = (placed.starts < stop) & (placed.stops > start)
            num_cut += int((touching & ~within).any())
            is_answer |= self._without_what_follows(rendered.text, placed, within, stop)
        if not rendered.is_plain:
            return Tokenized(placed.token_ids, is_answer, num_cut)
        ended = self.encoder.end(placed.token_ids)
        begun = self.encoder.begin(ended)
        if not len(self.encoder.begin_ids) and not rendered.answers[0][0]:  # after the end of another text
            begun = np.concatenate([self.encoder.or_end(begun[:0]), begun])
        before, after = len(begun) - len(ended), len(ended) - len(is_answer)
        return Tokenized(
            begun,
            np.concatenate([np.zeros(before, bool), is_answer, np.ones(after, bool)]),
            num_cut,
            self.encoder.count_spelled(rendered.text),
        )

    def _without_what_follows(self, text: str, placed: PlacedTokens, within: np.ndarray, stop: int) -> np.ndarray:
        """An answer's tokens up to its end-of-turn token, without the line break that a template adds after it."""
        special = [at for at in np.flatnonzero(within) if int(placed.token_ids[at]) in self._tokenizer.control_ids]
        if special and not text[placed.stops[special[-1]] : stop].strip():
            within = within.copy()
            within[special[-1] + 1 :] = False
        return within

    def _turns(self, where: str, key: str, value: object) -> list[Turn]:
        """The turns of a list, with stand-ins for special tokens that their contents spell."""
        hide = self.encoder.hide
        return [
            turn | {name: hide(where, text) for name, text in turn.items() if name != "role"}
            for turn in _turns(where, key, value)
        ]

    def _conversation(self, where: str, turns: list[Turn], first_learned: int) -> Rendered:
        _check_order(where, turns)
        learned = [at for at in range(first_learned, len(turns)) if turns[at]["role"] == "assistant"]
        if not learned:
            raise UserError(f"{where}: there is no answer to learn from: no turn of the assistant.")
        with self._template_of(where) as template:
            whole, starts = template.turn_starts(turns)
            self.encoder.check_carried(turns, functools.partial(template.render, answer_follows=False))
        answers = None if starts is None else self._places(where, turns, learned, whole, starts)
        if answers is None:
            answers = [self._place(where, turns, at, whole) for at in learned]
        return Rendered(where, whole, tuple(answers), False)

    def _place(self, where: str, turns: list[Turn], at: int, whole: str) -> tuple[int, int]:
        """Where the answer of a turn is, from the renderings of the turns before it and including it."""
        before = self._render(where, turns[:at], answer_follows=True)
        after = whole if at == len(turns) - 1 else self._render(where, turns[: at + 1], answer_follows=False)
        for number, part in ((at, before), (at + 1, after)):
            if not whole.startswith(part):
                pairs = enumerate(zip(whole, part, strict=False))
                same = next((place for place, (one, other) in pairs if one != other), len(whole))
                raise UserError(
                    f"{where}: the chat template renders the first {number} turns differently when more follow "
                    f"(...{whole[max(same - 20, 0) : same + 20]!r}), so that answers cannot be told apart from the "
                    "rest. Set chat_template to a template that renders each turn by itself."
                )
        return len(before), len(after)

    def _places(
        self, where: str, turns: list[Turn], learned: list[int], whole: str, starts: list[int]
    ) -> list[tuple[int, int]] | None:
        """`_place` of all these turns, from where a causal template begins to render each; None if that is not enough.

        Whatever the template renders around the first answer must stand around every other answer too.
        """
        first, ends = learned[0], [*starts[1:], len(whole)]
        if len(learned) == 1:  # two renderings are needed either way
            return None
        before = self._render(where, turns[:first], answer_follows=True)
        after = self._render(where, turns[: first + 1], answer_follows=False)
        if not (before.startswith(whole[: starts[first]]) and after.startswith(whole[: ends[first]])):
            return None
        begin, end = before[starts[first] :], after[ends[first] :]
        places = [(starts[at] + len(begin), min(ends[at] + len(end), len(whole))) for at in learned]
        as_given = all(
            whole.startswith(begin, starts[at]) and (at == len(turns) - 1 or whole.startswith(end, ends[at]))
            for at in learned
        )
        return places if as_given else None

    def _render(self, where: str, turns: list[Turn], *, answer_follows: bool) -> str:
        with self._template_of(where) as template:
            self.encoder.check_carried(turns, functools.partial(template.render, answer_follows=answer_follows))
            return template.render(turns, answer_follows=answer_follows)

    @contextlib.contextmanager
    def _template_of(self, where: str) -> Iterator[ChatTemplate]:
        """The template; problems with it and refusals by it are reported for the line."""
        try:
            if self._config.tokenizer_type == "sentencepiece":
                raise UserError(
                    "tokenizer_type=sentencepiece does not know the special tokens of chat templates. "
                    "Save the tokenizer as a tokenizer.json, or give texts."
                )
            if self._template is None:
                self._template = chat_template(self._config, today=DATE_OF_TRAINING_DATA)
            yield self._template
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def _plain(where: str, prompt: str, answer: str, key: str) -> Rendered:
    for name, text in (("prompt", prompt), (key, answer)):
        check_unicode(where, name, text)
    if not answer:
        raise UserError(f'{where}: "{key}" is empty: there is no answer to learn from.')
    return Rendered(where, prompt + answer, ((len(prompt), len(prompt) + len(answer)),), True)


def refuse_unrendered(where: str, value: Mapping[str, Any], works: str = "") -> None:
    """Refuses a line with something that its template would not get.

    Args:
      works: a sentence on what to do.
    Raises:
      UserError: there is such a key; names `where`.
    """
    if offered := [name for name in UNRENDERED if value.get(name) and value[name] not in _NOTHING_IN_JSON]:
        raise UserError(f'{where}: "{offered[0]}" would not be rendered: templates get turns alone.{works}')


def _turns(where: str, key: str, value: object) -> list[Turn]:
    """The turns of a list, reduced to role, content and, where there is one, the name of who says it."""
    if not isinstance(value, list) or not value:
        raise UserError(f'{where}: "{key}" is not a list of turns, {{"role": ..., "content": ...}}.')
    turns = []
    for number, turn in enumerate(value, start=1):
        named = f'{where}: turn {number} of "{key}"'
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise UserError(f'{named} is not an object with a "role" and a "content".')
        role = turn["role"]
        if role not in ROLES:
            raise UserError(f"{named} has the role {role!r}, which is none of {', '.join(ROLES)}.")
        if unlearned := [name for name in _NOT_LEARNED if turn.get(name)]:
            raise UserError(f"{named} has {unlearned[0]}, which would not be learned.")
        if turn.get("weight") not in (None, 1):
            raise UserError(f"{named} has weight {turn['weight']!r}, but all answers are learned with weight 1.")
        if turn.get("train") not in (None, True):
            raise UserError(f"{named} has train {turn['train']!r}, but all answers are learned.")
        given: Turn = {"role": role, "content": turn.get("content")} | (
            {"name": turn["name"]} if turn.get("name") else {}
        )
        for key_of_turn, text in given.items():
            if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]  (the user's JSON)
                raise UserError(f"{named} has {key_of_turn} that is not text.")
            check_unicode(named, key_of_turn, text)
        if role == "assistant" and not given["content"].strip():
            raise UserError(f"{named} is empty: there is no answer to learn from.")
        turns.append(given)
    return turns


def _check_order(where: str, turns: list[Turn]) -> None:
    """Refuses turns that do not alternate between user and assistant after at most one system turn."""
    roles = [turn["role"] for turn in turns]
    first = 1 if roles[:1] == ["system"] else 0
    for at in range(first, len(roles)):
        expected = ("user", "assistant")[(at - first) % 2]
        if roles[at] != expected:
            raise UserError(
                f"{where}: turn {at + 1} of the conversation is the {roles[at]}'s, but the {expected}'s is due: "
                "after at most one system turn, user and assistant take turns."
            )


def _shared(chosen: list[Turn], rejected: list[Turn]) -> int:
    """Number of turns that both begin with."""
    shared = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        shared += 1
    return shared
