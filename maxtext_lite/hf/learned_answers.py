"""Where the answers of a conversation are in what its chat template renders, and what ends them.

A template that marks answers with `{% generation %}` says so itself. Otherwise an answer is what the template adds to
the generation prompt once the turn is there: its content and what closes it. A conversation is one text if that text
begins with what generation at each answer's turn would see, followed by the answer. Where earlier turns are rendered
differently, or a last answer closes differently, each answer has a text of its own.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.hf.chat import ChatTemplate, check_contents, spoken_parts
from maxtext_lite.hf.turns import Turn, TurnEncoder

_QUESTION, _ANSWER = "Ask8t0", "Say8t0"
"""Contents of turns that show what the template writes around them."""
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
      encoder: knows the special tokens that close an answer.
    """

    def __init__(self, template: ChatTemplate, encoder: TurnEncoder) -> None:
        self._template = template
        self._encoder = encoder
        self._ends = dict[str, str]()  # by what closes the last answer of a conversation

    def texts(self, turns: Sequence[Turn], learned: Sequence[int]) -> list[LearnedText]:
        """The texts of a conversation with the answers of these turns.

        Raises:
          UserError: the template refuses the turns, or their answers or ends cannot be found.
        """
        if self._template.has_marks:
            return [self._marked(turns, learned)]
        whole = self._template.render(turns, answer_follows=False)
        prompts: list[str] = []
        answered: list[str] = []
        places: list[tuple[int, int]] = []
        for at in learned:
            prompt, answer = self._answer(turns, at, whole)
            text = prompt + self._with_end(turns, at, answer)
            prompts.append(prompt)
            answered.append(text)
            places.append((len(prompt), len(text)))
        if answered[-1].startswith(whole):  # the token of the next role closes the last answer
            whole = answered[-1]
        if all(whole.startswith(text) for text in answered) and self._keeps_tokens(whole, prompts):
            check_contents(turns, whole)
            return [LearnedText(whole, tuple(places))]
        for at, text in zip(learned, answered, strict=True):
            check_contents(turns[: at + 1], text)
        return [LearnedText(text, (place,), True) for text, place in zip(answered, places, strict=True)]

    def _keeps_tokens(self, whole: str, prompts: Sequence[str]) -> bool:
        """Whether prompts that open thinking have the same tokens in the whole text.

        The line break after <think> and the one before </think> may have a common token, which generation cannot write.
        """
        if not any(_OPENED.search(prompt) for prompt in prompts):
            return True
        (tokens,) = self._encoder.encode_rendered([whole])
        return all(np.array_equal(prompt, tokens[: len(prompt)]) for prompt in self._encoder.encode_rendered(prompts))

    def _marked(self, turns: Sequence[Turn], learned: Sequence[int]) -> LearnedText:
        """The whole conversation, with the answers that the template marks."""
        whole, spans = self._template.render_marked(turns)
        check_contents(turns, whole)
        if learned[0] > next(at for at, turn in enumerate(turns) if turn["role"] == "assistant"):
            spans = spans[len(self._template.render_marked(turns[: learned[0]])[1]) :]
        marked = "".join(whole[slice(*span)] for span in spans)
        contents = [turns[at]["content"].strip() for at in learned]
        if not any(part in marked for content in contents for part in spoken_parts(content) or [content]):
            raise UserError(
                "the {% generation %} marks of the chat template contain no answer"
                + (f", only '{value_text(marked[:20])}'." if marked else ".")
            )
        return LearnedText(whole, tuple(spans))

    def _answer(self, turns: Sequence[Turn], at: int, whole: str) -> tuple[str, str]:
        """What generation sees at a turn, and the answer with all that the template writes after a last one."""
        before = self._template.render(turns[:at])
        after = whole
        if at < len(turns) - 1:
            after = self._template.render(turns[: at + 1], answer_follows=False)
        if after.startswith(before):
            return before, after[len(before) :]
        question = turns[at - 1]["content"].strip()
        asked = before[max(before.rfind(question), 0) :]
        if asked in after:  # earlier turns differ, as where the system's text is in the last turn if that is the user's
            return before, after.rpartition(asked)[2]
        opened = _OPENED.search(before)
        if opened and after.startswith(before[: opened.start()]):
            continued = _continued(opened, turns[at]["content"].strip(), after[opened.start() :])
            if continued is not None:
                return before, continued
        same = _num_shared(before, after)
        start = max(same - 20, 0)
        raise UserError(
            f"what the chat template renders before the answer of turn {at + 1} ends with "
            f"'{value_text(before[start:])}', but is '{value_text(after[start : same + 20])}' once the answer is "
            "there. Set chat_template to one that begins an answer with its generation prompt, or marks answers with "
            "{% generation %}."
        )

    def _with_end(self, turns: Sequence[Turn], at: int, answer: str) -> str:
        """The answer up to and including what ends it."""
        content = turns[at]["content"].strip()
        parts = spoken_parts(content) or [content]
        known = [each for each in self._ends if _is_closed(answer, parts, each)]
        if known:
            closing = max(known, key=len)
        else:
            said = {"role": "assistant", "content": _ANSWER}
            closing = self._template.render([*turns[:at], said], answer_follows=False).rpartition(_ANSWER)[2]
            if not _is_closed(answer, parts, closing):
                raise UserError(
                    f"the chat template does not render the answer of turn {at + 1} ('{value_text(content)}')."
                )
            self._ends[closing] = self._find_end([*turns[:at], said], closing)
        return answer.removesuffix(closing) + self._ends[closing]

    def _find_end(self, turns: Sequence[Turn], closing: str) -> str:
        """What ends an answer; `closing` is all that the template writes after a last answer.

        It ends with the last special token that is also there when the user's turn follows; or else with the last one
        at all; or else, if the next role's special token follows in its place, with that.

        Args:
          turns: the last one is an answer of _ANSWER.
        """
        try:
            text = self._template.render([*turns, {"role": "user", "content": _QUESTION}], answer_follows=False)
            followed = text.rpartition(_QUESTION)[0].rpartition(_ANSWER)[2]
        except UserError:  # a template for one question and one answer
            followed = ""
        stops = self._special_stops(closing)
        if stops:
            shared = _num_shared(closing, followed)
            return closing[: max((stop for stop in stops if stop <= shared), default=stops[-1])]
        kept = closing if followed.startswith(closing) else followed[: len(followed) - len(followed.lstrip())]
        if kept == closing or not closing.strip():
            (next_role,) = self._encoder.place([followed[len(kept) :]])
            if len(next_role.token_ids) and int(next_role.token_ids[0]) in self._encoder.tokenizer.control_ids:
                return followed[: len(kept) + int(next_role.stops[0])]
        if not closing:
            raise UserError(
                "the chat template writes nothing after an answer, and what follows begins with no special token "
                f"('{value_text(followed[:20])}'), so a model would not learn to stop. Set chat_template to one "
                "that writes a token after each answer."
            )
        return closing

    def _special_stops(self, text: str) -> list[int]:
        """The character after each special token that a text spells."""
        (placed,) = self._encoder.place([text])
        pairs = zip(placed.token_ids.tolist(), placed.stops.tolist(), strict=True)
        return [stop for token, stop in pairs if token in self._encoder.tokenizer.control_ids]


def _num_shared(one: str, other: str) -> int:
    """The length of the texts' common prefix, in characters."""
    for place, (character, beside) in enumerate(zip(one, other, strict=False)):
        if character != beside:
            return place
    return min(len(one), len(other))


def _is_closed(answer: str, parts: Sequence[str], closing: str) -> bool:
    """Whether an answer is what its turn says, with `closing` after it."""
    said = answer.removesuffix(closing).rstrip()
    return answer.endswith(closing) and said.endswith(parts[-1]) and all(part in said for part in parts)


def _continued(opened: re.Match[str], content: str, rendered: str) -> str | None:
    """How an answer continues a prompt that opens its thinking; None if that cannot be told from its rendering.

    It thinks as its rendering or its content does, or else closes the thinking at once.

    Args:
      rendered: the rendering from where the prompt opens the thinking.
    """
    begin = f"<{opened[1]}>"
    end = f"</{opened[1]}>"
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
