"""Sources of examples: text tokenized at start-up or before, random tokens, or (`answers`) conversations.

A source is a sequence with random access; `order` and `feed` decide which example is read when.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from maxtext_lite.config import DataConfig, UserError, single_path
from maxtext_lite.data.answers import open_answer_file, open_answers
from maxtext_lite.data.examples import check_id, num_held_out
from maxtext_lite.data.fetched import find_prepared
from maxtext_lite.data.manifest import token_dtype
from maxtext_lite.data.megatron import open_megatron
from maxtext_lite.data.packing import FIELDS, Documents, Rows, TokenStream, segments_row
from maxtext_lite.data.preparing.documents import read_documents
from maxtext_lite.data.preparing.text_cache import cached_text, text_fingerprint
from maxtext_lite.data.row_index import FittedRows, IndexPlace, rows_of
from maxtext_lite.data.text_encoder import TextEncoder, spelled_notes
from maxtext_lite.data.text_files import find_files
from maxtext_lite.data.token_stream import open_prepared
from maxtext_lite.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

SYNTHETIC_TRAINING_EXAMPLES = 2**31 - 1
SYNTHETIC_EVALUATION_EXAMPLES = 64

_DOCUMENTS_PER_ENCODING = 4096  # bounds the memory of the tokenizer library's results


class ExampleSource(Protocol):
    """A picklable sequence of examples, each as `packing.build_row` describes it."""

    @property
    def fingerprint(self) -> str:
        """Equal for sources with the same examples in the same order, wherever their files are."""
        ...

    @property
    def fields(self) -> Sequence[str]:
        """Names of an example's arrays; `packing.field_dtype` gives their dtypes."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Sentences on what the files contain and the examples do not."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of an example: the length of its arrays."""
        ...

    @property
    def num_target_tokens(self) -> int:
        """Target tokens of all examples."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]: ...

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples; repeated ids count repeatedly."""
        ...

    def documents(self, example_ids: np.ndarray) -> Documents | None:
        """The documents in these examples; None if they are unknown, or each example is one document."""
        ...


def open_sources(config: DataConfig, *, vocab_size: int | None = None) -> tuple[ExampleSource, ExampleSource | None]:
    """The training examples, and the held-out ones.

    Held out are the examples of `eval_dataset_path`, or without one the last floor(eval_fraction x examples) rows in
    file order, at least one. No target of a held-out row is a token of a training row, except with packing=best_fit,
    where a document longer than a row may have pieces on both sides.

    Args:
      vocab_size: rows of the embedding table, which the tokenizer must fit and below which synthetic tokens are drawn;
        None: the tokenizer's own size.
    Returns:
      (training, held out); the latter is None if eval_fraction is 0 and eval_dataset_path is empty.
    Raises:
      UserError: a file or the tokenizer is missing or unreadable, or nothing is left to train on or to hold out.
    """
    tokenizer = _tokenizer(config, vocab_size)
    if config.dataset_type == "synthetic":
        drawn_below = tokenizer.vocab_size if vocab_size is None else vocab_size
        return (
            SyntheticSource(0, SYNTHETIC_TRAINING_EXAMPLES, config.max_target_length, drawn_below),
            SyntheticSource(1, SYNTHETIC_EVALUATION_EXAMPLES, config.max_target_length, drawn_below),
        )
    encoder = TextEncoder(config, tokenizer)
    open_rows = _OPENED_BY.get(config.dataset_type)
    if open_rows is None:
        return open_answers(config, encoder)
    everything = open_rows(config, encoder, key="dataset_path", path=single_path(config.dataset_path))
    if config.eval_dataset_path:
        held_out_path = single_path(config.eval_dataset_path)
        return everything, open_rows(config, encoder, key="eval_dataset_path", path=held_out_path)
    what = f"examples of {config.max_target_length} tokens"
    held_out = num_held_out(config.eval_fraction, len(everything), what, more="text, a smaller max_target_length or")
    if not held_out:
        return everything, None
    first = len(everything) - held_out
    parts = everything.rows(0, first), everything.rows(first, len(everything))
    for part, use in zip(parts, ("train on", "hold out"), strict=True):
        if not part.num_target_tokens:
            raise UserError(f"eval_fraction={config.eval_fraction} leaves no target token to {use}.")
    return parts


def open_path(config: DataConfig, *, key: str, path: str, vocab_size: int | None) -> ExampleSource:
    """All examples of a path; other arguments and errors as of `open_sources`.

    Args:
      key: what messages call the path.
    """
    encoder = TextEncoder(config, _tokenizer(config, vocab_size))
    open_rows = _OPENED_BY.get(config.dataset_type)
    if open_rows is None:
        return open_answer_file(config, encoder, key=key, path=path)
    return open_rows(config, encoder, key=key, path=path)


def _tokenizer(config: DataConfig, vocab_size: int | None) -> Tokenizer:
    tokenizer = load_tokenizer(config)
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)
    return tokenizer


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Rows of tokenized documents.

    Attributes:
      stream: token ids of all documents.
      document_starts: where each document starts, then the stream's length; int64.
      row_layout: the rows of the stream.
      first_row: the row of example 0.
      num_rows: number of examples.
      stream_fingerprint: hash of tokens and documents.
      notes: as in `ExampleSource`.
    """

    stream: TokenStream
    document_starts: np.ndarray
    row_layout: Rows
    first_row: int
    num_rows: int
    stream_fingerprint: str
    notes: tuple[str, ...] = ()

    fields = FIELDS

    @property
    def num_documents(self) -> int:
        """Documents of the whole stream with at least one token."""
        return len(self.document_starts) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of an example, T."""
        return self.row_layout.num_tokens

    @property
    def fingerprint(self) -> str:
        """Hash of contents, tokenizer, row length, packing, and which rows belong to the source."""
        layout = f"{type(self.row_layout).__name__}:{self.row_layout.num_tokens}:{self.first_row}:{self.num_rows}"
        return f"text:{layout}:{self.stream_fingerprint}"

    @property
    def num_target_tokens(self) -> int:
        """Target tokens of all examples."""
        return self.row_layout.count_targets_between(self.first_row, self.first_row + self.num_rows)

    def rows(self, first: int, stop: int) -> TextSource:
        """The source of examples `first` to `stop - 1` of this one."""
        return dataclasses.replace(self, first_row=self.first_row + first, num_rows=stop - first)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """One example: see `packing.build_row`. Raises IndexError outside [0, len)."""
        check_id(example_id, self.num_rows)
        return self.row_layout.build(self.stream, self.first_row + example_id)

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples; repeated ids count repeatedly."""
        return self.row_layout.count_targets(self.first_row + example_ids)

    def documents(self, example_ids: np.ndarray) -> Documents:
        """See `ExampleSource`."""
        return self.row_layout.documents(self.first_row + example_ids)


@dataclasses.dataclass(frozen=True)
class SyntheticSource:
    """Full rows of uniformly random tokens, one document each: a pure function of (seed, example id)."""

    seed: int
    num_examples: int
    num_tokens: int
    vocab_size: int

    fields = FIELDS
    notes = ()

    @property
    def fingerprint(self) -> str:
        """Everything that the tokens depend on."""
        return f"synthetic:{self.seed}:{self.num_examples}:{self.num_tokens}:{self.vocab_size}"

    @property
    def num_target_tokens(self) -> int:
        """Target tokens of all examples."""
        return self.num_examples * self.num_tokens

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """One example, as `packing.build_row` describes it. Raises IndexError outside [0, len)."""
        check_id(example_id, self.num_examples)
        generator = np.random.Generator(np.random.Philox(key=np.array([self.seed, example_id], np.uint64)))
        drawn = generator.integers(self.vocab_size, size=self.num_tokens + 1, dtype=np.int32)
        return segments_row([(drawn, 1.0)], self.num_tokens)

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples: all of their tokens."""
        return len(example_ids) * self.num_tokens

    def documents(self, example_ids: np.ndarray) -> None:
        """None: each example is one."""


def _open_text(config: DataConfig, encoder: TextEncoder, *, key: str, path: str) -> TextSource:
    files = find_files(key, path)
    nothing = f"{key}={path!r} has no text: every document in it is empty."
    cached = cached_text(config, encoder, files)
    if cached is not None:
        notes = (cached.note, *spelled_notes(cached.spelled_special_tokens, encoder.in_text))
        found = (cached.stream, cached.document_starts, cached.fingerprint)
        return _source(config, *found, nothing, cached.place, notes)
    stream, starts, num_spelled = _tokenize(read_documents(files, encoder), encoder)
    content = text_fingerprint(stream, starts, tokenizer=encoder.tokenizer.fingerprint, dtype=str(stream.dtype))
    return _source(config, stream, starts, content, nothing, None, spelled_notes(num_spelled, encoder.in_text))


def _open_prepared(config: DataConfig, encoder: TextEncoder, *, key: str, path: str) -> TextSource:
    directory, shards = find_prepared(key, path)
    stream, starts = open_prepared(key, directory, shards)
    manifest, tokenizer = stream.manifest, encoder.tokenizer
    if manifest.tokenizer != tokenizer.fingerprint:
        raise UserError(
            f"{key}={path!r} was prepared with the tokenizer {manifest.tokenizer}; that of the config is "
            f"{tokenizer.fingerprint}. Name the tokenizer of the data, or prepare them again."
        )
    if problem := encoder.disagreement(manifest.begin_ids, add_eos=manifest.add_eos):
        raise UserError(f"{key}={path!r}: {problem} Or prepare the data again.")
    place = IndexPlace(directory / "rows", manifest.fingerprint)
    notes = spelled_notes(manifest.spelled_special_tokens, manifest.special_tokens_in_text)
    nothing = f"{key}={path!r} has no document."
    return _source(config, stream, starts, manifest.fingerprint, nothing, place, notes)


def _open_megatron(config: DataConfig, encoder: TextEncoder, *, key: str, path: str) -> TextSource:
    tokenizer = encoder.tokenizer
    found = open_megatron(key, path, tokenizer)
    nothing = f"{key}={path!r} has no document of two tokens."
    content = f"{tokenizer.fingerprint}:{found.content}"
    documents, unended = len(found.document_starts) - 1, found.unended_documents
    note = f"{unended:,} of {documents:,} documents do not end with the end-of-text token."
    notes = (note,) if unended else ()
    begin = found.stream[: len(encoder.begin_ids)]
    if not np.array_equal(begin, encoder.begin_ids):
        notes += ("the first document does not begin as this tokenizer begins texts; add_bos=false says so.",)
    return _source(config, found.stream, found.document_starts, content, nothing, found.place, notes)


def _source(
    config: DataConfig,
    stream: TokenStream,
    document_starts: np.ndarray,
    content: str,
    nothing: str,
    place: IndexPlace | None,
    notes: tuple[str, ...] = (),
) -> TextSource:
    """The source of all rows of a stream; refuses one without targets, in the words of `nothing`."""
    layout = rows_of(config.packing, document_starts, config.max_target_length, place)
    if len(layout) == 0 or not layout.count_targets_between(0, len(layout)):
        raise UserError(nothing)
    if isinstance(layout, FittedRows):
        notes = (*notes, layout.note)
    return TextSource(stream, document_starts, layout, 0, len(layout), content, notes)


_OPENED_BY = {"text": _open_text, "array_record": _open_prepared, "megatron": _open_megatron}


def _tokenize(documents: Iterator[str], encoder: TextEncoder) -> tuple[np.ndarray, np.ndarray, int]:
    """(stream, document_starts) without the empty documents, and how many special tokens they spell."""
    dtype = np.dtype(token_dtype(encoder.tokenizer.vocab_size))
    streams, lengths, num_spelled = [np.zeros(0, dtype)], [np.zeros(0, np.int64)], 0
    while texts := list(itertools.islice(documents, _DOCUMENTS_PER_ENCODING)):
        encoded = encoder.documents(texts, dtype)
        streams.append(encoded.stream)
        lengths.append(encoded.lengths[encoded.lengths > 0])
        num_spelled += encoded.num_spelled
    document_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths), dtype=np.int64)])
    return np.concatenate(streams), document_starts, num_spelled
