"""The tokenizer of a directory's model: how its texts begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxtext_lite.config import Config
from maxtext_lite.config.hf.config import hf_directory
from maxtext_lite.data import Tokenizer, check_vocabulary, load_tokenizer
from maxtext_lite.generation.stream_text import WrittenText
from maxtext_lite.hf import stop_ids_of


def stop_tokens(directory: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens after which a text ends: those that the model's files name, and end-of-text.

    Args:
      directory: of the model; "": it comes from nowhere else.
    """
    carried = hf_directory(directory) if directory else None
    return tuple(dict.fromkeys([*(stop_ids_of(carried) if carried else ()), tokenizer.end_of_text_id]))


@dataclass(frozen=True)
class TextTokens:
    """How texts become tokens of a model and back.

    Attributes:
      carried: where the files that came with the model lie; None where it was trained here from the start.
      stop_token_ids: tokens after which a text ends.
    """

    tokenizer: Tokenizer
    carried: Path | None
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, directory: Path, config: Config) -> TextTokens:
        """Those of a directory's model.

        Raises:
          UserError: there is no tokenizer, or it has more tokens than the model.
        """
        tokenizer = load_tokenizer(config)
        check_vocabulary(tokenizer, config.vocab_size)
        return cls(tokenizer, hf_directory(directory), stop_tokens(directory, tokenizer))

    def encode(self, text: str, *, plain: bool = False) -> list[int]:
        """The tokens of a text, beginning as the model has seen texts begin: with what its tokenizer puts there.

        Args:
          plain: the text itself says how it begins, as that of a chat template.
        """
        encode = self.tokenizer.encode_with_special if self.carried and not plain else self.tokenizer.encode
        return encode(text).tolist()

    def begin(self, stop_strings: Sequence[str], stop_token_ids: Sequence[int] | None = None) -> WrittenText:
        """A text that has not begun; it ends at `stop_strings`, and at these tokens or those of the model."""
        stop = self.stop_token_ids if stop_token_ids is None else stop_token_ids
        return WrittenText(self.tokenizer.stream_decoder(), stop, stop_strings)
