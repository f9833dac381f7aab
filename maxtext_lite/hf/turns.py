"""The tokens of a rendered chat template, with the contents of turns as plain characters."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.text_encoder import (
    EncodedDocuments,
    TextEncoder,
    TextKeys,
    any_of_names,
    encode_in_pieces,
    joined,
)
from maxtext_lite.data.tokenizer import BREAK, PlacedTokens, Tokenizer

Turn = dict[str, str]
"""{"role": "user", "content": ...}, and possibly "name"; the roles that templates know are system, user, assistant."""


class TurnEncoder(TextEncoder):
    """Encodes conversations. The special tokens that a template writes count as such; those that turns spell do not.

    Raises:
      UserError: as `TextEncoder`.
    """

    def __init__(self, config: TextKeys, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._num_spelled = 0
        self._is_control = self.is_special
        self._special_like = any_of_names(tokenizer.special_like)

    def hide_written_by(self, rendered: str) -> None:
        """Also hides in contents of turns the added tokens that a chat template writes, as in this rendering."""
        token_ids = set(self.tokenizer.encode(rendered).tolist()) - self.tokenizer.special_ids
        written = {name: each for name, each in self.tokenizer.special_like.items() if each in token_ids}
        self.names = [*dict.fromkeys([*self.names, *written])]
        self.refused = any_of_names(self.names)
        self._is_control = self.is_special.copy()
        self._is_control[[*written.values()]] = True

    def hide(self, where: str, text: str, keep: re.Pattern[str] | None = None) -> str:
        """The content of a turn, with a `BREAK` between the characters of special tokens that must be plain.

        A template carries these along; `place` reads the names as characters, and `reveal` spells them again.

        Args:
          keep: spells those that are special tokens all the same.
        Raises:
          UserError: it spells one that it must not spell, or cannot; names `where`.
        """

        def hide_name(found: re.Match[str]) -> str:
            if keep and keep.fullmatch(found[0]):
                return found[0]
            self._num_spelled += 1
            if len(found[0]) == 1 and self.in_text == "plain":
                raise UserError(
                    f"{where}: a turn has the special token {found[0]}, one character that cannot be plain. Nearest "
                    "that works: special_tokens_in_text=encode."
                )
            return BREAK.join(found[0])

        self.check(where, keep.sub(" ", text) if keep else text)
        if BREAK in text:
            raise UserError(f"{where}: a turn has the character U+10FFFF, which no text may have. Remove it.")
        hidden = self.refused.sub(hide_name, text)
        return text if self.in_text == "encode" else hidden

    def take_num_spelled(self) -> int:
        """The number of special tokens that contents given to `hide` spell, since the last call."""
        count = self._num_spelled
        self._num_spelled = 0
        return count

    def reveal(self, text: str) -> str:
        """The text as it was before `hide`."""
        return text.replace(BREAK, "")

    def check_carried(self, turns: list[Turn], render: Callable[[list[Turn]], str]) -> None:
        """Refuses turns whose hidden names are not in their rendering where these names would be.

        Raises:
          UserError: the template cannot carry them.
        """
        spelled = [{key: self.reveal(each) for key, each in turn.items()} for turn in turns]
        if spelled != turns and render(spelled) != self.reveal(render(turns)):
            raise UserError(
                "the chat template does not write a special token that a turn spells as plain characters. Nearest that "
                "works: special_tokens_in_text=encode."
            )

    def place(self, texts: Sequence[str]) -> list[PlacedTokens]:
        """The tokens of rendered texts, with their special tokens; what `hide` has hidden is plain characters.

        Raises:
          UserError: a special token that must be plain has no plain characters.
        """
        others = iter(self.tokenizer.encode_placed([text for text in texts if BREAK not in text]))
        return [self._place_hidden(text) if BREAK in text else next(others) for text in texts]

    def encode_rendered(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`place` without the places, faster."""
        others = iter(encode_in_pieces(self.tokenizer, [text for text in texts if BREAK not in text]))
        return [self._place_hidden(text).token_ids if BREAK in text else next(others) for text in texts]

    def _place_hidden(self, text: str) -> PlacedTokens:
        placed = self.tokenizer.encode_broken(text)
        written = [self.tokenizer.special_like[name] for name in self._special_like.findall(text)]
        self.check_plain(self.reveal(text), placed.token_ids, self._is_control, written)
        return placed

    def rendered_documents(self, texts: Sequence[str], dtype: np.dtype[Any]) -> EncodedDocuments:
        """`documents` that a template has rendered, which writes a begin-of-text itself."""
        ended = [*map(self.ended, self.encode_rendered(texts))]
        return joined(ended, dtype, self.take_num_spelled())
