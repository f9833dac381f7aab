"""A tokenizer trained on text: byte-level BPE as a tokenizer.json, or sentencepiece's BPE as a tokenizer.model."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import writing
from maxtext_lite.config.json_file import is_there, user_path
from maxtext_lite.config.whole_file import write_whole
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.tokenizer import load_tokenizer
from maxtext_lite.data.tokenizer_files import WORD_PATTERN
from maxtext_lite.preparation.keys import PrepareConfig, TokenizerConfig
from maxtext_lite.preparation.shards import document_reader
from maxtext_lite.preparation.tasks import find_inputs, split_into_tasks

END_OF_TEXT = "<|endoftext|>"
"""The special token of a byte-level BPE."""

_BYTES = 256
_LONGEST_SENTENCE = 2**14  # characters; sentencepiece silently drops sentences above its limit
_MOST_BYTES = 4  # of a character


def train_tokenizer(config: TokenizerConfig) -> Path:
    """Trains a tokenizer on all documents of the input, and returns the file for `tokenizer_path`.

    Raises:
      UserError: an input cannot be read or has a bad line, the output contains a tokenizer already, or the text does
        not yield a vocabulary of this size.
    """
    name = "tokenizer.json" if config.tokenizer_type == "huggingface" else "tokenizer.model"
    path = user_path(config.output) / name
    if is_there(path):
        raise UserError(f"output={config.output!r} already contains {name}.")
    train = _byte_level if config.tokenizer_type == "huggingface" else _sentencepiece
    content = train(_texts(config), config.vocab_size)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        if config.tokenizer_type == "huggingface":
            stated = {"eos_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
            write_whole(path.with_name("tokenizer_config.json"), f"{json.dumps(stated, indent=1)}\n".encode())
        write_whole(path, content)
    return path


def _texts(config: TokenizerConfig) -> Iterator[str]:
    """The documents of the input."""
    reads = PrepareConfig(input=config.input, text_field=config.text_field)
    reader = document_reader(reads, TextEncoder(reads, load_tokenizer(reads)))  # used only for conversations
    tasks = split_into_tasks(find_inputs(config.input), task_bytes=2**30, field=reads.field)
    return reader.texts(piece for task in tasks for piece in task.pieces)


def _byte_level(texts: Iterator[str], vocab_size: int) -> bytes:
    import tokenizers

    least = _BYTES + 1
    if vocab_size < least:
        raise UserError(
            f"vocab_size={vocab_size} has no room for {_BYTES} bytes and {END_OF_TEXT}. Nearest that works: {least}."
        )
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = words.Sequence([
        words.Split(tokenizers.Regex(WORD_PATTERN), "isolated"),
        words.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=words.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (found := tokenizer.get_vocab_size()) < vocab_size:
        raise UserError(f"vocab_size={vocab_size}: the text yields at most {found}. Nearest that works: {found}.")
    return tokenizer.to_str(pretty=True).encode()


def _sentencepiece(texts: Iterator[str], vocab_size: int) -> bytes:
    import sentencepiece

    def sentences() -> Iterator[str]:
        for line in (line for text in texts for line in text.split("\n") if line):
            yield from (line[start : start + _LONGEST_SENTENCE] for start in range(0, len(line), _LONGEST_SENTENCE))

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=_MOST_BYTES * _LONGEST_SENTENCE,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).rpartition("] ")[2].split()) or "there is no text"
        raise UserError(f"vocab_size={vocab_size}: {reason}") from None
    return model.getvalue()
