"""What `prepare` and `prepare inspect` may be asked for, as key=value."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from maxtext_lite.config.errors import WrongType
from maxtext_lite.config.field_types import Count, CountOrMinusOne, DataPath, Flag, Name, PathName, PathText, Share


def _paths(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        return value
    raise WrongType("is not a path, or a list of paths.")


class PrepareConfig(BaseModel):
    """What `prepare` takes as key=value.

    Attributes:
      input: a file, a directory, a glob or a Hugging Face dataset on disk, or a list of these.
      output: the directory of the prepared dataset, which may be in a bucket.
      tokenizer_type, tokenizer_path: as of a config.
      text_field: where the text of a line or row stands; with `chat`, the turns. "": text or messages.
      chat: a line or row is a conversation, written as one document by the chat template.
      chat_template: a file that holds one; "": that of the tokenizer's directory.
      num_workers: processes that tokenize; -1: one for each core.
      task_megabytes: bytes of input of a task, in units of 2^20; a task makes a shard.
      max_bad_fraction: of the lines of a task, how many may be none that can be read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input: Annotated[list[PathName], BeforeValidator(_paths)] = []
    output: DataPath = ""
    tokenizer_type: Literal["byte", "huggingface", "sentencepiece"] = "byte"
    tokenizer_path: PathText = ""
    text_field: Name | Literal[""] = ""
    chat: Flag = False
    chat_template: PathText = ""
    num_workers: CountOrMinusOne = -1
    task_megabytes: Count = 64
    max_bad_fraction: Share = 0.0

    @property
    def field(self) -> str:
        """The name of the text or the turns in a line or row."""
        return self.text_field or ("messages" if self.chat else "text")


class TokenizerConfig(BaseModel):
    """What `prepare tokenizer` takes as key=value.

    Attributes:
      input, text_field: as of `PrepareConfig`.
      output: the directory of the tokenizer.
      tokenizer_type: huggingface (byte-level BPE, a tokenizer.json) or sentencepiece (BPE, a tokenizer.model).
      vocab_size: ids, special tokens among them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input: Annotated[list[PathName], BeforeValidator(_paths)] = []
    output: PathText = ""
    tokenizer_type: Literal["huggingface", "sentencepiece"] = "huggingface"
    vocab_size: Count = 32_000
    text_field: Name | Literal[""] = ""


class InspectConfig(BaseModel):
    """What `prepare inspect` takes as key=value.

    Attributes:
      max_target_length: tokens of a row.
      packing: how rows are made; "": every way there is, compared.
      verify: compare all checksums and count which ids occur, for which everything is read.
      tokenizer_type, tokenizer_path: decode rows; they must be those of the dataset.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_target_length: Count = 1024
    packing: Literal["", "concat", "none", "best_fit"] = ""
    verify: Flag = True
    tokenizer_type: Literal["byte", "huggingface", "sentencepiece"] = "byte"
    tokenizer_path: PathText = ""
