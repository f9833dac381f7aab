"""Text to token ids and back: the interface of tokenizers, and the byte tokenizer; `tokenizer_files` has those from
files.

Every tokenizer has an end-of-text token. It ends each document of the training data: a model learns to stop, and
`generate` knows when it has.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.registry import resolve

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "<|im_end|>")
"""Names of the end-of-text token in published tokenizers, the most specific first."""

BREAK = "\U0010ffff"
"""Between the characters of a special token's name it makes these plain; Unicode leaves it to programs."""


class PlacedTokens(NamedTuple):
    """The tokens of a text, with the characters that each represents.

    Attributes:
      token_ids: int32 [number of tokens].
      starts: first character of each token; int64. A space that the tokenizer assigns to no token belongs to the next.
      stops: the character after the last of each; int64. A token may represent none, between two others.
    """

    token_ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Tokenizer(Protocol):
    """A tokenizer as the rest of the framework uses it.

    Attributes:
      vocab_size: the largest token id plus one.
      end_of_text_id: the token that ends a document.
      begin_ids: the tokens that it puts before a text by itself.
      bos_id: its begin-of-text token, whether it adds it or not; None: it has none.
      special_ids: tokens that are not text.
      reads_special: whether `encode` returns special tokens where a text spells them.
      special_tokens: their ids by how they are spelled.
      added_tokens: likewise, also of tokens that were added to a vocabulary and are text, such as <think> of Qwen 3.
      special_like: likewise, special tokens and the added ones that are spelled as such, between signs: <|user|>.
      unknown_token: how the token of unknown words is spelled; "": there is none.
      fingerprint: equal for tokenizers that give equal ids, wherever their files are.
    """

    vocab_size: int
    end_of_text_id: int
    begin_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    special_ids: frozenset[int]
    reads_special: bool = False
    special_tokens: Mapping[str, int] = {}
    added_tokens: Mapping[str, int] = {}
    special_like: Mapping[str, int] = {}
    unknown_token: str = ""
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 [number of tokens], without end-of-text or other additions."""
        ...

    @functools.cached_property
    def control_ids(self) -> frozenset[int]:
        """Tokens that a template may write to end a turn: special tokens and added ones."""
        return self.special_ids | frozenset(self.added_tokens.values())

    def normalize(self, text: str) -> str:
        """The text as its words are looked up: in small letters, for example."""
        return text

    def encode_broken(self, text: str) -> PlacedTokens:
        """The tokens of a text without its `BREAK`s; names that contain them are characters."""
        (placed,) = self.encode_placed([text.replace(BREAK, "")])
        places = [place for place, letter in enumerate(text) if letter != BREAK]
        kept = np.array(places, np.int64)
        starts = np.append(kept, len(text))[placed.starts]
        stops = np.append(0, kept + 1)[placed.stops]
        return PlacedTokens(placed.token_ids, starts, stops)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Within this, all methods read special tokens that a text spells as characters."""
        yield

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, in parallel if the library can."""
        return [self.encode(text) for text in texts]

    def pieces(self, text: str, most: int) -> list[str]:
        """Parts of about `most` characters whose joined tokens are the text's; the whole text if no cut is safe."""
        return [text]

    def encode_placed(self, texts: Sequence[str]) -> list[PlacedTokens]:
        """`encode` of each text, with the characters that each token represents."""
        ...

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        """The text; special tokens contribute none, or their own."""
        ...

    def spell(self, token_id: int) -> str:
        """How the vocabulary spells a token, also a special one; "" for an id outside it."""
        ...


class TokenizerKeys(Protocol):
    """The keys of a config that name a tokenizer."""

    @property
    def tokenizer_type(self) -> Literal["byte", "huggingface", "sentencepiece"]:
        """The library that reads it."""
        ...

    @property
    def tokenizer_path(self) -> str:
        """Its file or directory; "" for byte."""
        ...


def load_tokenizer(config: TokenizerKeys) -> Tokenizer:
    """The tokenizer that `tokenizer_type` and `tokenizer_path` name.

    Raises:
      UserError: the file is missing, unreadable or has no end-of-text token.
    """
    if config.tokenizer_type == "byte":
        return ByteTokenizer()
    return resolve("maxtext_lite.data.tokenizer_files:open_tokenizer")(config)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a tokenizer with ids that the embedding table (`vocab_size` rows) lacks.

    Raises:
      UserError: `vocab_size` is smaller than the tokenizer's.
    """
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} tokens. "
            f"Nearest that works: {tokenizer.vocab_size}."
        )


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte, and 256 for end-of-text."""

    vocab_size = 257
    end_of_text_id = 256
    special_ids = frozenset({256})
    fingerprint = "byte"

    def encode(self, text: str) -> np.ndarray:
        """The UTF-8 bytes, int32."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def pieces(self, text: str, most: int) -> list[str]:
        """Parts of exactly `most` characters, except the last."""
        starts = range(0, len(text), most)
        return [text[start : start + most] for start in starts] or [text]

    def encode_placed(self, texts: Sequence[str]) -> list[PlacedTokens]:
        """`encode` of each text; every byte of a character represents it."""
        placed = []
        for text in texts:
            token_ids = self.encode(text)
            # Bytes 0b10xxxxxx continue the character of the byte before.
            starts = np.cumsum((token_ids & 0xC0) != 0x80, dtype=np.int64) - 1
            placed.append(PlacedTokens(token_ids, starts, starts + 1))
        return placed

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        """The text; invalid UTF-8 becomes U+FFFD, and ids of 256 and above have no text."""
        content = bytes(int(i) for i in token_ids if i < 256)
        return content.decode("utf-8", errors="replace")

    def spell(self, token_id: int) -> str:
        """The character of an ASCII byte, another byte as <0xE6>, and END_OF_TEXT_NAMES[0] for end-of-text."""
        if token_id < 128:
            return chr(token_id)
        return f"<0x{token_id:02X}>" if token_id < 256 else END_OF_TEXT_NAMES[0] if token_id == 256 else ""
