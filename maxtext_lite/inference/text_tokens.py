"""The tokens of a directory's model: how its texts begin and end, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxtext_lite.config import Config
from maxtext_lite.data import Tokenizer, check_vocabulary, load_tokenizer
from maxtext_lite.hf.directory import hf_directory
from maxtext_lite.hf.stop_tokens import stop_tokens
from maxtext_lite.hf.turns import TurnEncoder
from maxtext_lite.inference.stream_text import StreamDecoder, WrittenText, marked_stops


@dataclass(frozen=True)
class TextTokens:
    """The conversion between texts and a model's tokens.

    Attributes:
      carried: the directory of the files that came with the model; None if it was trained from scratch.
      stop_token_ids: tokens after which a text ends.
    """

    encoder: TurnEncoder
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
        stop = stop_tokens([directory], tokenizer)
        return cls(TurnEncoder(config, tokenizer), hf_directory(directory), stop)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.encoder.tokenizer

    def begin(
        self, stop_strings: Sequence[str], stop_token_ids: Sequence[int] | None = None, *, prompt: Sequence[int] = ()
    ) -> WrittenText:
        """An empty text that ends before any of `stop_strings`, and at these tokens or the model's.

        Args:
          prompt: the tokens of the text that it continues; none for an answer, which is a text by itself.
        """
        stop = self.stop_token_ids if stop_token_ids is None else stop_token_ids
        strings, stand_ins = marked_stops(self.encoder, stop_strings)
        return WrittenText(StreamDecoder(self.tokenizer, prompt), stop, strings, stand_ins)
