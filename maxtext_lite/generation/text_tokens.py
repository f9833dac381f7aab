"""The tokenizer of a directory's model, and how its texts begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxtext_lite.config import Config
from maxtext_lite.config.hf.directory import hf_directory
from maxtext_lite.data import Tokenizer, check_vocabulary, load_tokenizer
from maxtext_lite.generation.stream_text import WrittenText
from maxtext_lite.hf import stop_ids_with


def stop_tokens(carried: Path | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens after which a text ends: those in the model's files, and end-of-text.

    Args:
      carried: the directory of the files that came with the model; None if it was trained from scratch.
    """
    return tuple(dict.fromkeys([*(stop_ids_with(carried, tokenizer) if carried else ()), tokenizer.end_of_text_id]))


@dataclass(frozen=True)
class TextTokens:
    """The conversion between texts and a model's tokens.

    Attributes:
      carried: the directory of the files that came with the model; None if it was trained from scratch.
      stop_token_ids: tokens after which a text ends.
    """

    tokenizer: Tokenizer
    carried: Path | None
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, directory: Path, config: Config) -> TextTokens:
        """The conversion for a directory's model.

        Raises:
          UserError: there is no tokenizer, or it has more tokens than the model.
        """
        tokenizer = load_tokenizer(config)
        check_vocabulary(tokenizer, config.vocab_size)
        carried = hf_directory(directory)
        return cls(tokenizer, carried, stop_tokens(carried, tokenizer))

    def encode(self, text: str, *, plain: bool = False) -> list[int]:
        """The tokens of a text, with the special tokens that its tokenizer puts first in training.

        Args:
          plain: without them, as the text has its own, such as a rendered chat template.
        """
        encode = self.tokenizer.encode_with_special if self.carried and not plain else self.tokenizer.encode
        return encode(text).tolist()

    def begin(self, stop_strings: Sequence[str], stop_token_ids: Sequence[int] | None = None) -> WrittenText:
        """An empty text that ends before any of `stop_strings`, and at these tokens or the model's."""
        stop = self.stop_token_ids if stop_token_ids is None else stop_token_ids
        return WrittenText(self.tokenizer.stream_decoder(), stop, stop_strings)
