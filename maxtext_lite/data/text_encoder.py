"""How texts begin and end in tokens, and what the special tokens in a text become.

Prompts, documents, answers and texts to score all ask here. The tokens that begin texts come first, once. Nothing that
is continued or scored ends with end-of-text; a document ends with it once. A text from outside, a document or the
content of a turn, is only characters unless `special_tokens_in_text` says otherwise. For what a chat template renders
there is `hf.turns`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import counted, value_text
from maxtext_lite.data.tokenizer import Tokenizer, TokenizerKeys

_CHARACTERS_OF_A_PIECE, _PIECES_AT_ONCE = 2**19, 8
_CHARACTERS_OF_A_BEGINNING = 1000
LONGEST_TAIL = 4  # tokens of white space that a template writes after the last end of turn


class TextKeys(TokenizerKeys, Protocol):
    """The keys of a config about the tokens of texts."""

    @property
    def add_bos(self) -> bool | Literal["auto"]:
        """Whether texts begin with the begin-of-text token; auto: with what the tokenizer puts there by itself."""
        ...

    @property
    def add_eos(self) -> bool:
        """Whether documents end with end-of-text."""
        ...

    @property
    def special_tokens_in_text(self) -> Literal["plain", "encode", "refuse"]:
        """What special tokens that a document or the content of a turn spells become."""
        ...


class EncodedDocuments(NamedTuple):
    """The tokens of documents.

    Attributes:
      stream: those of all documents, one after the other.
      lengths: tokens of each, 0 for a document without text; int64.
      num_spelled: special tokens that their texts spell.
    """

    stream: np.ndarray
    lengths: np.ndarray
    num_spelled: int


class TextEncoder:
    """Encodes texts with a tokenizer, by the keys of a config.

    Attributes:
      begin_ids: the tokens that begin a text, int32; possibly none.
      adds_end: whether documents end with end-of-text.
      in_text: `special_tokens_in_text`.
      names: how the special tokens are spelled, which must stay characters.
      spelled: finds these names in a text; `refused`: those that `check` refuses.
      is_special: bool [vocab_size], whether a token is one of them.
    Raises:
      UserError: the tokenizer has no begin-of-text token for add_bos=true, or does not read special tokens in a text.
    """

    def __init__(self, config: TextKeys, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.adds_end = config.add_eos
        self.in_text: Literal["plain", "encode", "refuse"] = config.special_tokens_in_text
        begin = tokenizer.begin_ids if config.add_bos else ()
        if config.add_bos is True and not begin:
            if tokenizer.bos_id is None:
                raise UserError(
                    f"add_bos=true, but the tokenizer (tokenizer_type={config.tokenizer_type}) has no begin-of-text "
                    "token. Nearest that work: add_bos=auto or add_bos=false."
                )
            begin = (tokenizer.bos_id,)
        if self.in_text == "encode" and tokenizer.special_tokens and not tokenizer.reads_special:
            raise UserError(
                f"special_tokens_in_text=encode has no effect: {config.tokenizer_type} reads special tokens "
                "in a text as characters. Nearest that works: special_tokens_in_text=plain."
            )
        self.begin_ids = np.array(begin, np.int32)
        self._end = np.array([tokenizer.end_of_text_id], np.int32)
        self.names = [*filter(None, tokenizer.special_tokens)]
        self.spelled = self.refused = any_of_names(self.names)  # what documents spell, and must not become
        self.is_special = np.zeros(tokenizer.vocab_size, bool)
        self.is_special[[tokenizer.special_tokens[name] for name in self.names]] = True
        if tokenizer.unknown_token in self.names:  # unknown words have it, too
            self.is_special[tokenizer.special_tokens[tokenizer.unknown_token]] = False

    @property
    def settings(self) -> dict[str, Any]:
        """What tokens depend on besides the tokenizer, where it differs from the original behaviour."""
        found = dict[str, Any]()
        if len(self.begin_ids):
            found["begin_ids"] = self.begin_ids.tolist()
        if not self.adds_end:
            found["add_eos"] = False
        if self.names and self.in_text != "encode":
            found["special_tokens_in_text"] = self.in_text
        return found

    def disagreement(
        self,
        begin_ids: Sequence[int] | None,
        *,
        add_eos: bool,
    ) -> str | None:
        """How documents that begin with these tokens, and end with end-of-text or not, differ from the config's.

        Args:
          begin_ids: None: they begin as a chat template renders them, whatever the config says.
        """
        if begin_ids is not None and list(begin_ids) != self.begin_ids.tolist():
            stated = "true" if begin_ids else "false"
            tokens = ", ".join(map(str, begin_ids)) or "no token"
            return f"its documents begin with {tokens}, as add_bos={stated}. Nearest that works: add_bos={stated}."
        if add_eos != self.adds_end:
            stated = str(add_eos).lower()
            return f"it was prepared with add_eos={stated}. Nearest that works: add_eos={stated}."
        return None

    # ---- Beginnings and ends ------------------------------------------------------------------------------------

    def begin(self, token_ids: np.ndarray) -> np.ndarray:
        """The tokens of a text after those that begin texts, unless it has them already."""
        has_them = np.array_equal(token_ids[: len(self.begin_ids)], self.begin_ids)
        return token_ids if has_them else np.concatenate([self.begin_ids, token_ids])

    def end(self, token_ids: np.ndarray) -> np.ndarray:
        """The tokens of a text, then end-of-text, unless it ends with that already, apart from white space."""
        tail = token_ids[-LONGEST_TAIL:]
        ends = np.flatnonzero(tail == self._end)
        if len(ends):
            after = self.tokenizer.decode(tail[ends[-1] :].tolist())
            if not after.strip():
                return token_ids
        return np.concatenate([token_ids, self._end])

    def or_end(self, token_ids: np.ndarray) -> np.ndarray:
        """The tokens, or end-of-text if there are none: a text begins after the end of another."""
        return token_ids if len(token_ids) else self._end

    def prompt(self, text: str) -> np.ndarray:
        """The tokens of a text to be continued, at least one."""
        return self.or_end(self.begin(self.tokenizer.encode(text)))

    # ---- Documents ----------------------------------------------------------------------------------------------

    def documents(
        self,
        texts: Sequence[str],
        dtype: np.dtype[Any],
    ) -> EncodedDocuments:
        """The tokens of documents; an empty one leaves nothing in the stream.

        Raises:
          UserError: a text spells special tokens that it must not spell, or that have no plain characters.
        """
        encoded, num_spelled = self.encode(texts)
        finished: list[np.ndarray] = []
        for token_ids in encoded:
            ended = self.ended(token_ids)
            finished.append(self.begin(ended) if len(ended) else ended)
        return joined(finished, dtype, num_spelled)

    def ended(self, token_ids: np.ndarray) -> np.ndarray:
        """The tokens of a document with its end, unless it is empty."""
        return self.end(token_ids) if len(token_ids) and self.adds_end else token_ids

    def encode(self, texts: Sequence[str]) -> tuple[list[np.ndarray], int]:
        """The tokens of each document without beginning and end, and how many special tokens they spell.

        Raises:
          UserError: as `documents`.
        """
        with self._as_in_documents():
            encoded = encode_in_pieces(self.tokenizer, texts)
        if self.in_text != "encode":
            for text, token_ids in zip(texts, encoded, strict=True):
                self.check_plain(text, token_ids, self.is_special, ())
        return encoded, sum(map(self.count_spelled, texts))

    def first_token(self, text: str) -> str:
        """The characters of the first token of a document."""
        piece = self.tokenizer.pieces(text, _CHARACTERS_OF_A_BEGINNING)[0]
        with self._as_in_documents():
            (placed,) = self.tokenizer.encode_placed([piece])
        return piece[: placed.starts[1]] if len(placed.starts) > 1 else piece

    def _as_in_documents(self) -> contextlib.AbstractContextManager[None]:
        return self.tokenizer.plain() if self.in_text == "plain" else contextlib.nullcontext()

    # ---- Special tokens that a text spells ----------------------------------------------------------------------

    def count_spelled(self, text: str) -> int:
        """How many special tokens a text spells."""
        return len(self.spelled.findall(text)) if self.tokenizer.special_tokens else 0

    def check(self, where: str, text: str) -> None:
        """Refuses a text that spells a special token that it must not spell, or cannot; names `where`."""
        if self.in_text == "refuse" and (found := self.refused.search(text)):
            raise UserError(f"{where}: {_refusal(found[0])}")
        words = None if self.in_text == "encode" else self._words
        if words and words.search(self.tokenizer.normalize(text)):
            try:
                self.encode([text])
            except UserError as error:
                raise UserError(f"{where}: {error}") from None

    @functools.cached_property
    def _words(self) -> re.Pattern[str] | None:
        """The special tokens that are ordinary words of the tokenizer, too; None: none is."""
        names = [*filter(None, self.tokenizer.special_tokens)]
        with self.tokenizer.plain():
            encoded = self.tokenizer.encode_documents(names)
        words: list[str] = []
        for name, token_ids in zip(names, encoded, strict=True):
            if self.is_special[token_ids].any():
                words.append(name)
        return any_of_names(words) if words else None

    def check_plain(
        self,
        text: str,
        token_ids: np.ndarray,
        is_control: np.ndarray,
        written: Sequence[int],
    ) -> None:
        """Refuses control tokens among those of a text, except those `written` there by a template."""
        control = token_ids[is_control[token_ids]]
        for token_id, count in Counter(control.tolist()).items():
            if count <= written.count(token_id):
                continue
            name = self.tokenizer.spell(token_id)
            if self.in_text == "refuse":
                raise UserError(_refusal(name))
            spelled = f"a text ({value_text(text)}) spells the special token {value_text(name)}"
            raise UserError(
                f"{spelled}, which is also a word of the tokenizer: it cannot be plain characters. "
                "Nearest that works: special_tokens_in_text=encode."
            )


def joined(
    documents: Sequence[np.ndarray],
    dtype: np.dtype[Any],
    num_spelled: int,
) -> EncodedDocuments:
    """Documents from the tokens of each."""
    lengths = np.array([len(token_ids) for token_ids in documents], np.int64)
    stored = [token_ids.astype(dtype) for token_ids in documents]
    stream = np.concatenate([np.zeros(0, dtype), *stored])
    return EncodedDocuments(stream, lengths, num_spelled)


def spelled_notes(
    count: int,
    in_text: str,
    where: str = "the text",
) -> tuple[str, ...]:
    """A sentence on special tokens that texts spell, if there are any; `in_text` is special_tokens_in_text."""
    became = "plain characters" if in_text == "plain" else "this token" if count == 1 else "these tokens"
    return (f"{counted(count, 'special token')} spelled in {where} became {became}.",) if count else ()


def any_of_names(names: Iterable[str]) -> re.Pattern[str]:
    """Finds these names, the longest where one begins with another."""
    longest_first = sorted(filter(None, names), key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _refusal(name: str) -> str:
    return (
        f"special_tokens_in_text=refuse, and the text spells the special token {value_text(name)}. Nearest that work: "
        "special_tokens_in_text=plain or special_tokens_in_text=encode."
    )


def encode_in_pieces(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The token ids of each text; a long text is encoded in pieces."""
    pieces = [tokenizer.pieces(text, _CHARACTERS_OF_A_PIECE) for text in texts]
    if all(len(of_text) == 1 for of_text in pieces):
        return tokenizer.encode_documents(texts)
    encoded: list[np.ndarray] = []
    for of_text in pieces:
        parts: list[np.ndarray] = []
        for first in range(0, len(of_text), _PIECES_AT_ONCE):
            group = of_text[first : first + _PIECES_AT_ONCE]
            parts += tokenizer.encode_documents(group)
        encoded.append(np.concatenate(parts))
    return encoded
