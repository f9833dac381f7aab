"""Where the answers of a conversation are in what its chat template renders, and what ends them.

A template that marks answers with `{% generation %}` says so itself. Otherwise an answer is what the template adds to
the generation prompt once the turn is there: its content and what closes it. A conversation is one text if that text
begins with what generation at each answer's turn would see, followed by the answer; otherwise, where earlier thinking is
removed or a last answer closes differently, it is one text for each answer.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.data.chat import ChatTemplate, Turn, check_contents, spoken_parts
from maxtext_lite.data.tokenizer import Tokenizer

_NEXT = "Ask8t0"
"""The content of a user's turn that follows an answer, to see what closes the answer then."""
_OPENED = re.compile(r"<(\w*:?think\w*)>\s*$")


class LearnedText(NamedTuple):
    """A text of a conversation.

    Attributes:
      answers: for each answer in it the first character and the one after its last.
      begins_as_generated: the text has one answer, and what precedes it must have the tokens that generation sees.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    begins_as_generated: bool = False


class AnswerFinder:
    """Finds the answers of conversations in their renderings.

    Args:
      tokenizer: knows the special tokens that close an answer.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._ends = dict[str, str]()  # by what closes the last answer of a conversation

    def texts(self, turns: Sequence[Turn], learned: Sequence[int]) -> list[LearnedText]:
        """The texts of a conversation with the answers of these turns.

        Raises:
          UserError: the template refuses the turns, or their answers or ends cannot be found.
        """
        if self._template.has_marks:
            return [self._marked(turns, learned)]
        whole, starts = self._template.turn_starts(turns)
        check_contents(turns, whole)
        spans = None if starts is None else self._spans(turns, learned, whole, starts)
        if spans is None:
            answers = [self._answer(turns, at, whole) for at in learned]
        else:
            answers = [(whole[:start], whole[start:stop]) for start, stop in spans]
        answers = [
            (before, self._with_end(turns, at, answer)) for at, (before, answer) in zip(learned, answers, strict=True)
        ]
        places = tuple((len(before), len(before) + len(answer)) for before, answer in answers)
        joined = [before + answer for before, answer in answers]
        if joined[-1].startswith(whole):  # the token of the next role closes the last answer
            whole = joined[-1]
        opens_thinking = any(_OPENED.search(before) for before, _ in answers)
        if all(whole.startswith(each) for each in joined):
            if not opens_thinking or self._begins_with_prompts(whole, [before for before, _ in answers]):
                return [LearnedText(whole, places)]
        return [LearnedText(text, (place,), True) for text, place in zip(joined, places, strict=True)]

    def _begins_with_prompts(self, whole: str, prompts: Sequence[str]) -> bool:
        """Whether the tokens of a text begin with those of each prompt; a line break may join the next one's token."""
        tokens = self._tokenizer.encode(whole)
        for prompt in self._tokenizer.encode_documents(prompts):
            if not np.array_equal(prompt, tokens[: len(prompt)]):
                return False
        return True

    def _marked(self, turns: Sequence[Turn], learned: Sequence[int]) -> LearnedText:
        """The whole conversation, with the answers that the template marks."""
        whole, spans = self._template.render_marked(turns)
        check_contents(turns, whole)
        if learned[0] > next(at for at, turn in enumerate(turns) if turn["role"] == "assistant"):
            spans = spans[len(self._template.render_marked(turns[: learned[0]])[1]) :]
        marked = "".join(whole[slice(*span)] for span in spans)
        found = 0
        for at in learned:
            for part in spoken_parts(turns[at]["content"]) or [turns[at]["content"].strip()]:
                place = marked.find(part, found)
                if place < 0:
                    raise UserError(f"the chat template's generation marks do not contain the answer of turn {at + 1}.")
                found = place + len(part)
        return LearnedText(whole, tuple(spans))

    def _answer(self, turns: Sequence[Turn], at: int, whole: str) -> tuple[str, str]:
        """What generation sees at a turn, and the answer with all that the template writes after a last one."""
        before = self._template.render(turns[:at])
        after = whole if at == len(turns) - 1 else self._template.render(turns[: at + 1], answer_follows=False)
        if after.startswith(before):
            return before, after[len(before) :]
        opened = _OPENED.search(before)
        if opened and after.startswith(before[: opened.start()]):
            continued = _continued(opened, turns[at]["content"].strip(), after[opened.start() :])
            if continued is not None:
                return before, continued
        same = len(os.path.commonprefix([before, after]))
        raise UserError(
            f"the chat template renders '{value_text(before[max(same - 20, 0) : same + 20])}' before the answer of turn "
            f"{at + 1} is there, and '{value_text(after[max(same - 20, 0) : same + 20])}' afterwards, so that answers "
            "cannot be told apart from the rest. Set chat_template to one that begins an answer with its generation "
            "prompt, or marks answers with {% generation %}."
        )

    def _spans(
        self, turns: Sequence[Turn], learned: Sequence[int], whole: str, starts: list[int]
    ) -> list[tuple[int, int]] | None:
        """`_answer` of all these turns in `whole`, from where a causal template begins each; None if that is not enough.

        Whatever the template renders around the first answer must stand around every other answer too.
        """
        first, ends = learned[0], [*starts[1:], len(whole)]
        if len(learned) == 1:  # two renderings are needed either way
            return None
        before = self._template.render(turns[:first])
        after = self._template.render(turns[: first + 1], answer_follows=False)
        if not (before.startswith(whole[: starts[first]]) and after.startswith(whole[: ends[first]])):
            return None
        begin, end = before[starts[first] :], after[ends[first] :]
        places = [(starts[at] + len(begin), min(ends[at] + len(end), len(whole))) for at in learned]
        as_given = all(
            whole.startswith(begin, starts[at]) and (at == len(turns) - 1 or whole.startswith(end, ends[at]))
            for at in learned
        )
        return places if as_given else None

    def _with_end(self, turns: Sequence[Turn], at: int, answer: str) -> str:
        """The answer up to and including what ends it."""
        content = turns[at]["content"].strip()
        parts = spoken_parts(content) or [content]
        place = answer.rfind(parts[-1])
        if place < 0 or not all(part in answer for part in parts):
            raise UserError(f"the chat template does not render the answer of turn {at + 1} ('{value_text(content)}').")
        place += len(parts[-1])
        closing = answer[place:]
        if closing not in self._ends:
            self._ends[closing] = self._find_end(turns[: at + 1], parts[-1], closing)
        return answer[:place] + self._ends[closing]

    def _find_end(self, turns: Sequence[Turn], content: str, closing: str) -> str:
        """What ends an answer, of which `closing` is all that the template writes after a last answer.

        It ends with the last special token that also stands there when the user's turn follows; or else with the last
        one at all; or else, if the next role's special token follows in its place, with that.
        """
        followed = self._closing_before_user(turns, content)
        stops = self._special_stops(closing)
        if stops:
            shared = len(os.path.commonprefix([closing, followed]))
            return closing[: max((stop for stop in stops if stop <= shared), default=stops[-1])]
        space = followed[: len(followed) - len(followed.lstrip())]
        kept = closing if followed.startswith(closing) else space
        if not closing.strip() or kept == closing:
            placed = self._tokenizer.encode_placed([followed[len(kept) :]])[0]
            if len(placed.token_ids) and int(placed.token_ids[0]) in self._tokenizer.special_ids:
                return followed[: len(kept) + int(placed.stops[0])]
        if not closing:
            raise UserError(
                "the chat template closes an answer with nothing, and what follows begins with no special token "
                f"('{value_text(followed[:20])}'), so that a model would not learn to stop. Set chat_template to one "
                "that writes a token after each answer."
            )
        return closing

    def _closing_before_user(self, turns: Sequence[Turn], content: str) -> str:
        """What the template writes after an answer before the next user's content; "" if it refuses the turn."""
        try:
            text = self._template.render([*turns, {"role": "user", "content": _NEXT}], answer_follows=False)
        except UserError:
            return ""
        text = text[: max(text.rfind(_NEXT), 0)]
        place = text.rfind(content)
        return text[place + len(content) :] if place >= 0 else ""

    def _special_stops(self, text: str) -> list[int]:
        """The character after each special token that a text spells."""
        (placed,) = self._tokenizer.encode_placed([text])
        pairs = zip(placed.token_ids.tolist(), placed.stops.tolist(), strict=True)
        return [stop for token, stop in pairs if token in self._tokenizer.special_ids]


def _continued(opened: re.Match[str], content: str, rendered: str) -> str | None:
    """How an answer continues a prompt that opens its thinking; None if that cannot be told from its rendering.

    It thinks as its rendering or its content does, or else closes the thinking at once.

    Args:
      rendered: the rendering from where the prompt opens the thinking.
    """
    begin, end = f"<{opened[1]}>", f"</{opened[1]}>"
    parts = spoken_parts(content)
    if rendered.startswith(begin):
        said = rendered.removeprefix(begin)
    elif not parts or not rendered.lstrip().startswith(parts[-1]):
        return None
    elif end in content:
        said = content.removeprefix(begin) + rendered.lstrip().removeprefix(parts[-1])
    else:
        return f"\n{end}\n\n{rendered.lstrip()}"
    return said.lstrip("\n") if opened[0].endswith("\n") else said
