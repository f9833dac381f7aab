"""The keys of `prepare` and `prepare inspect`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from maxtext_lite.config.errors import WrongType
from maxtext_lite.config.types import (
    AutoOrFlag,
    Count,
    CountOrMinusOne,
    DataPath,
    Flag,
    Name,
    PathName,
    PathText,
    Section,
    Share,
    SpecialInText,
)


def _paths(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        return value
    raise WrongType("is not a path, or a list of paths.")


class PrepareConfig(Section):
    """The keys of `prepare`.

    Attributes:
      input: a file, a directory, a glob or a Hugging Face dataset on disk, or a list of these.
      output: the directory of the prepared dataset, which may be in a bucket.
      tokenizer_type, tokenizer_path, add_bos, add_eos, special_tokens_in_text: as in a run's config.
      text_field: the field of a line or row with the text, or with `chat` the turns; "": text or messages.
      chat: whether a line or row is a conversation, which the chat template renders as one document.
      chat_template: a file with a template; "": the one of the tokenizer's directory.
      num_workers: processes that tokenize; -1: one for each core.
      task_megabytes: input of a task in units of 2^20 bytes; each task makes a shard.
      max_bad_fraction: the largest share of a task's lines that may be unreadable.
    """

    input: Annotated[list[PathName], BeforeValidator(_paths)] = Field([])
    output: DataPath = ""
    tokenizer_type: Literal["byte", "huggingface", "sentencepiece"] = "byte"
    tokenizer_path: PathText = ""
    add_bos: AutoOrFlag = "auto"
    add_eos: Flag = True
    special_tokens_in_text: SpecialInText = "plain"
    text_field: Name | Literal[""] = ""
    chat: Flag = False
    chat_template: PathText = ""
    num_workers: CountOrMinusOne = -1
    task_megabytes: Count = 64
    max_bad_fraction: Share = 0.0

    @property
    def field(self) -> str:
        """The field of a line or row with the text or the turns."""
        return self.text_field or ("messages" if self.chat else "text")


class TokenizerConfig(Section):
    """The keys of `prepare tokenizer`.

    Attributes:
      input, text_field: as in `PrepareConfig`.
      output: the directory of the tokenizer.
      tokenizer_type: huggingface (byte-level BPE, a tokenizer.json) or sentencepiece (BPE, a tokenizer.model).
      vocab_size: number of ids, including special tokens.
    """

    input: Annotated[list[PathName], BeforeValidator(_paths)] = Field([])
    output: PathText = ""
    tokenizer_type: Literal["huggingface", "sentencepiece"] = "huggingface"
    vocab_size: Count = 32_000
    text_field: Name | Literal[""] = ""


class InspectConfig(Section):
    """The keys of `prepare inspect`.

    Attributes:
      max_target_length: tokens of a row.
      packing: how rows are made; "": compares all ways.
      verify: whether to compare all checksums and count the ids that occur, which reads everything.
      tokenizer_type, tokenizer_path: the dataset's tokenizer, to decode rows.
    """

    max_target_length: Count = 1024
    packing: Literal["", "concat", "none", "best_fit"] = ""
    verify: Flag = True
    tokenizer_type: Literal["byte", "huggingface", "sentencepiece"] = "byte"
    tokenizer_path: PathText = ""
