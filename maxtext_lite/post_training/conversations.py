"""JSON lines to the tokens of conversations and texts, and which of them are answers to learn.

The whole text is tokenized at once, and a token belongs to an answer if all of its characters do.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.text_encoder import EncodedDocuments, TextKeys
from maxtext_lite.data.text_files import check_unicode
from maxtext_lite.data.tokenizer import PlacedTokens, Tokenizer
from maxtext_lite.hf.chat import (
    DATE_OF_TRAINING_DATA,
    THINKING_DELIMITERS,
    ChatKeys,
    ChatTemplate,
    chat_template,
    check_contents,
)
from maxtext_lite.hf.learned_answers import AnswerFinder
from maxtext_lite.hf.turns import Turn, TurnEncoder

ROLES = ("system", "user", "assistant")
SFT_FIELDS = '"messages", "prompt" and "completion", "conversations", or "instruction" and "output"'
"""Fields of a line for SFT."""
UNRENDERED = ("tools", "functions", "documents", "chat_template_kwargs")
"""Keys of a line that are for a template beside its turns."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ROLES}}
"""Roles by the names under "from" in ShareGPT's turns."""
_NOTHING_IN_JSON = ("[]", "{}", "null")  # datasets with one type per column have such a key as JSON
_NOT_LEARNED = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a turn that say more than its content."""
DPO_FIELDS = '"chosen" and "rejected", with their "prompt"'
"""Fields of a line for DPO."""


_TEXTS_PER_ENCODING = 1024  # bounds the memory of the tokenizer library's results

Encoded = TypeVar("Encoded")


class Rendered(NamedTuple):
    """A text with its answers.

    Attributes:
      where: file and line.
      text: of turns, with the names that `TurnEncoder.hide` hides.
      answers: for each answer, its first character and the one after its last.
      is_plain: no chat template rendered it; the tokenizer's own tokens precede it, and end-of-text follows.
      is_marked: the chat template itself marks the answers; a token in which one begins or ends is then learned, too,
        as in transformers.
      begins_as_generated: what precedes its one answer has the tokens that generation sees there.
      num_spelled: special tokens that contents of its turns spell; of texts from one line, the first counts all.
    """

    where: str
    text: str
    answers: tuple[tuple[int, int], ...]
    is_plain: bool
    is_marked: bool = False
    begins_as_generated: bool = False
    num_spelled: int = 0


class Tokenized(NamedTuple):
    """The tokens of a text.

    Attributes:
      token_ids: int32 [number of tokens].
      is_answer: bool, whether each token is learned.
      num_cut: answers that begin or end inside a token; such tokens are not learned.
      num_spelled: special tokens that a text without turns spells, and that it has.
    """

    token_ids: np.ndarray
    is_answer: np.ndarray
    num_cut: int
    num_spelled: int = 0


class RendererKeys(ChatKeys, TextKeys, Protocol):
    """The keys of a config about the tokens of conversations."""


class Renderer:
    """Renders lines as texts; the chat template is loaded with the first turns."""

    optional = UNRENDERED

    def __init__(self, config: RendererKeys, tokenizer: Tokenizer):
        self._config = config
        self.encoder = TurnEncoder(config, tokenizer)
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self._finder: AnswerFinder | None = None

    def sft_texts(self, where: str, value: Mapping[str, Any]) -> tuple[Rendered, ...]:
        """The text of a line for SFT; several if its answers have no common text (see `learned_answers`).

        Raises:
          UserError: the line is invalid, or its turns cannot be rendered; names `where`.
        """
        refuse_unrendered(where, value)
        prompt, completion = (value.get(key) for key in ("prompt", "completion"))
        if value.get("messages") is not None:
            key = "messages"
        elif isinstance(prompt, list) and isinstance(completion, list):
            turns = self._turns(where, "prompt", prompt)
            return self._conversation(where, [*turns, *self._turns(where, "completion", completion)], len(turns))
        elif isinstance(prompt, str) and isinstance(completion, str):
            return (_plain(where, prompt, completion, "completion"),)
        elif value.get("conversations") is not None:
            key = "conversations"
        elif isinstance(value.get("instruction"), str) and isinstance(value.get("output"), str):
            key = "instruction"
        else:
            raise UserError(f"{where}: not a JSON object with {SFT_FIELDS}, all texts or all lists of turns.")
        turns = turns_under(where, key, value)
        named = "instruction and output" if key == "instruction" else key
        named = f"system and {named}" if value.get("system") and key != "messages" else named
        return self._conversation(where, self._turns(where, named, turns), 0)

    def dpo_texts(self, where: str, value: Mapping[str, Any]) -> tuple[Rendered, Rendered]:
        """The texts of a line for DPO: with the chosen answer, and with the rejected one.

        If both are lists of turns and "prompt" is not, the prompt is the turns that both begin with.

        Raises:
          UserError: the line is invalid, or its turns cannot be rendered; names `where`.
        """
        refuse_unrendered(where, value)
        prompt, chosen, rejected = (value.get(key) for key in ("prompt", "chosen", "rejected"))
        if isinstance(chosen, list) and isinstance(rejected, list):
            chosen_turns = self._turns(where, "chosen", chosen)
            rejected_turns = self._turns(where, "rejected", rejected)
            before = self._turns(where, "prompt", prompt) if isinstance(prompt, list) else []
            shared = 0 if before else _shared(chosen_turns, rejected_turns)
            return (
                self._pair(where, [*before, *chosen_turns], len(before) + shared),
                self._pair(where, [*before, *rejected_turns], len(before) + shared),
            )
        if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
            return _plain(where, prompt, chosen, "chosen"), _plain(where, prompt, rejected, "rejected")
        raise UserError(f"{where}: not a JSON object with {DPO_FIELDS}, all texts or all lists of turns.")

    def prompt_text(self, where: str, key: str, value: str | Sequence[object]) -> Rendered:
        """The text of a prompt, to be followed by an answer: plain text, or turns that end with the user's.

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
        text = self._render(where, turns, answer_follows=True)
        return Rendered(where, text, (), False, num_spelled=self.encoder.take_num_spelled())

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

    def encode(self, texts: Sequence[str], dtype: np.dtype[Any]) -> EncodedDocuments:
        """The tokens of such texts."""
        return self.encoder.rendered_documents(texts, dtype)

    def template_fingerprint(self) -> str:
        """The fingerprint of the chat template."""
        return chat_template(self._config).fingerprint

    def prompt_tokens(self, rendered: Sequence[Rendered]) -> Iterator[np.ndarray]:
        """The tokens of prompts, int32 [number of tokens] each, the same as `tokens` puts before an answer."""
        encoder = self.encoder
        for each, token_ids in self._encoded(rendered, encoder.encode_rendered):
            yield encoder.or_end(encoder.begin(token_ids) if each.is_plain else token_ids)

    def tokens(self, rendered: Sequence[Rendered]) -> Iterator[Tokenized]:
        """The tokens of texts."""
        for each, placed in self._encoded(rendered, self.encoder.place):
            yield self._tokenized(each, placed)

    def _encoded(
        self, rendered: Sequence[Rendered], encode: Callable[[list[str]], list[Encoded]]
    ) -> Iterator[tuple[Rendered, Encoded]]:
        """Each text with the result of `encode`, which gets many at a time; its refusals name the line."""
        for first in range(0, len(rendered), _TEXTS_PER_ENCODING):
            some = rendered[first : first + _TEXTS_PER_ENCODING]
            yield from zip(some, self._of_lines(some, encode), strict=True)

    def _as_generated(self, rendered: Rendered, placed: PlacedTokens) -> PlacedTokens:
        """A text's tokens, encoded in parts where a token would join the prompt with a word of the answer.

        Generation sees the tokens of the prompt, and cannot write such a token.
        """
        text = rendered.text
        cuts = list[int]()
        for start, stop in rendered.answers:
            first_word = start + len(text[start:stop]) - len(text[start:stop].lstrip())
            joins = bool(((placed.starts < start) & (placed.stops > first_word)).any())
            if not joins and rendered.begins_as_generated:
                (prompt,) = self.encoder.encode_rendered([text[:start]])
                joins = not np.array_equal(prompt, placed.token_ids[: len(prompt)])
            if joins:
                cuts.append(start)
        if not cuts:
            return placed
        edges = [*cuts, len(text)]
        (prompt,) = self.encoder.place([text[: cuts[0]]])
        # Some tokenizers begin a text with a space unless a special token precedes it.
        for lead in ("", self._tokenizer.spell(self._tokenizer.end_of_text_id)):
            num_lead = len(self._tokenizer.encode(lead))
            parts = [prompt]
            for start, stop in itertools.pairwise(edges):
                (part,) = self.encoder.place([lead + text[start:stop]])
                shift = start - len(lead)
                ids, starts, stops = (each[num_lead:] for each in part)
                parts.append(PlacedTokens(ids, starts + shift, stops + shift))
            joined = PlacedTokens(*map(np.concatenate, zip(*parts, strict=True)))
            if self._spelled(joined.token_ids) == self._spelled(placed.token_ids):
                return joined
        return placed

    def _spelled(self, token_ids: np.ndarray) -> str:
        return "".join(map(self._tokenizer.spell, token_ids.tolist()))

    def _of_lines(self, rendered: Sequence[Rendered], encode: Callable[[list[str]], list[Encoded]]) -> list[Encoded]:
        """The result of `encode` for texts; its refusals name the line."""
        try:
            return encode([each.text for each in rendered])
        except UserError as error:
            if len(rendered) == 1:
                raise UserError(f"{rendered[0].where}: {error}") from None
        return [encoded for each in rendered for encoded in self._of_lines([each], encode)]

    def _tokenized(self, rendered: Rendered, placed: PlacedTokens) -> Tokenized:
        if not (rendered.is_plain or rendered.is_marked):
            placed = self._as_generated(rendered, placed)
        is_answer = np.zeros(len(placed.token_ids), bool)
        special = list(self._tokenizer.control_ids)
        num_cut = 0
        for start, stop in rendered.answers:
            touching = (placed.starts < stop) & (placed.stops > start)
            begins = touching & (placed.starts >= start)
            # The token that ends an answer may have the line break after it.
            within = begins & ((placed.stops <= stop) | np.isin(placed.token_ids, special))
            is_cut = bool((touching & ~within).any()) and not rendered.is_marked
            num_cut += is_cut
            if is_cut and not rendered.is_plain and not self._tokenizer.decode(placed.token_ids[within]).strip():
                raise UserError(
                    f"{rendered.where}: an answer is part of a token that begins before it, so only its end would "
                    "be learned. Set chat_template to one whose generation prompt does not end with a space."
                )
            is_answer |= touching if rendered.is_marked else within
        if not rendered.is_plain:
            return Tokenized(placed.token_ids, is_answer, num_cut)
        ended = self.encoder.end(placed.token_ids)
        begun = self.encoder.begin(ended)
        if not len(self.encoder.begin_ids) and not rendered.answers[0][0]:  # after the end of another text
            begun = np.concatenate([self.encoder.or_end(begun[:0]), begun])
        before = len(begun) - len(ended)
        after = len(ended) - len(is_answer)
        return Tokenized(
            begun,
            np.concatenate([np.zeros(before, bool), is_answer, np.ones(after, bool)]),
            num_cut,
            self.encoder.count_spelled(rendered.text) if self._tokenizer.reads_special else 0,
        )

    def _turns(self, where: str, key: str, value: object) -> list[Turn]:
        """The turns of a list, with special tokens that their contents spell hidden."""
        turns = _turns(where, key, value)
        hidden = list[Turn]()
        with self._template_of(where):
            pass  # which says what else its contents must not spell
        for turn in turns:
            keep = THINKING_DELIMITERS if turn["role"] == "assistant" else None
            texts = {name: self.encoder.hide(where, text, keep) for name, text in turn.items() if name != "role"}
            hidden.append(turn | texts)
        return hidden

    def _conversation(self, where: str, turns: list[Turn], first_learned: int) -> tuple[Rendered, ...]:
        _check_order(where, turns)
        learned = [at for at in range(first_learned, len(turns)) if turns[at]["role"] == "assistant"]
        if not learned:
            raise UserError(f"{where}: there is no answer to learn from: no turn of the assistant.")
        with self._template_of(where) as template:
            if self._finder is None:
                self._finder = AnswerFinder(template, self.encoder)
            self.encoder.check_carried(turns, functools.partial(template.render, answer_follows=False))
            finder = self._finder
            self.encoder.check_carried(turns, lambda turns: "".join(text.text for text in finder.texts(turns, learned)))
            texts = finder.texts(turns, learned)
        return tuple(
            Rendered(
                where,
                text.text,
                text.answers,
                is_plain=False,
                is_marked=template.has_marks,
                begins_as_generated=text.begins_as_generated,
                num_spelled=self.encoder.take_num_spelled(),
            )
            for text in texts
        )

    def _pair(self, where: str, turns: list[Turn], first_learned: int) -> Rendered:
        """The one text of a conversation that is half of a pair."""
        rendered, *others = self._conversation(where, turns, first_learned)
        if others:
            raise UserError(
                f"{where}: the chat template renders earlier turns differently when more follow, so the answers of a "
                "pair share no text. Give pairs of one answer each."
            )
        return rendered

    def _render(self, where: str, turns: list[Turn], *, answer_follows: bool) -> str:
        with self._template_of(where) as template:
            render = functools.partial(template.render, answer_follows=answer_follows)
            text = render(turns)
            self.encoder.check_carried(turns, render)
            check_contents(turns, text)
            return text

    @contextlib.contextmanager
    def _template_of(self, where: str) -> Iterator[ChatTemplate]:
        """The template; problems with it and refusals by it are reported for the line."""
        try:
            if self._config.tokenizer_type == "sentencepiece":
                raise UserError(
                    "tokenizer_type=sentencepiece does not know the special tokens of chat templates. "
                    "Save the tokenizer as a tokenizer.json, or give plain texts instead of turns."
                )
            if self._template is None:
                self._template = chat_template(self._config, today=DATE_OF_TRAINING_DATA)
                self.encoder.hide_written_by(_rendered_example(self._template))
            yield self._template
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def _rendered_example(template: ChatTemplate) -> str:
    """What a template writes around the contents of turns, and not around thinking; "": it refuses the usual turns."""
    turns = [{"role": role, "content": "a"} for role in (*ROLES, "user")]
    for given in (turns, turns[1:]):
        with contextlib.suppress(UserError):
            return THINKING_DELIMITERS.sub("", template.render(given))
    return ""


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
    """The turns of a list, reduced to role, content and, if there is one, the speaker's name."""
    if not isinstance(value, list) or not value:
        raise UserError(f'{where}: "{key}" is not a list of turns, {{"role": ..., "content": ...}}.')
    turns = []
    for number, turn in enumerate(value, start=1):
        named = f'{where}: turn {number} of "{key}"'
        turn = _with_role(turn)
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise UserError(f'{named} is not an object with a "role" and a "content", or "from" and "value".')
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


def _with_role(turn: Any) -> Any:
    """A turn in ShareGPT's spelling with its role and content; any other as it is."""
    if isinstance(turn, dict) and isinstance(turn.get("from"), str) and turn.get("role") is None:
        return turn | {"role": _SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}
    return turn


def turns_under(where: str, key: str, value: Mapping[str, Any]) -> Any:
    """What a line has under `key`, unchecked: turns with roles, whatever their spelling, or no list.

    Under "conversations" and "instruction" the system's turn, and under "instruction" the output, are among them.

    Raises:
      UserError: a part of the line would not be rendered; names `where`.
    """
    turns = value.get(key)
    if key == "instruction":
        turns = _alpaca_turns(where, {"output": None, **value})
        turns = turns[:-1] if value.get("output") is None else turns
    if not isinstance(turns, list):
        return turns
    system = value.get("system") if key in ("conversations", "instruction") else None
    before = [{"role": "system", "content": system}] if system else []
    return [*before, *map(_with_role, turns)]


def _alpaca_turns(where: str, value: Mapping[str, Any]) -> list[Turn]:
    """The turns of an instruction, with its optional input on a new line, and an output."""
    if value.get("history"):
        raise UserError(f'{where}: "history" would not be rendered. Give the turns under "messages".')
    asked = f"{value['instruction']}\n{value['input']}" if value.get("input") else value["instruction"]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": value["output"]}]


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
