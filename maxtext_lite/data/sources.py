"""Sources of examples, opened by the name in `dataset_type`; text and random tokens are here.

A source is a sequence with random access; `order` and `feed` decide which example is read when.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from maxtext_lite.config import DataConfig, SourceList, UserError
from maxtext_lite.config.keys import source_kind
from maxtext_lite.config.registry import resolve
from maxtext_lite.data.cache import IndexPlace
from maxtext_lite.data.history import Mixture, MixtureComponent, continued, history_of, parts_of
from maxtext_lite.data.rows import (
    FIELDS,
    Documents,
    PackedRows,
    Rows,
    TokenizedDocuments,
    count_by_length,
    document_rows,
    segments_row,
)
from maxtext_lite.data.source import ExampleSource, check_id, num_held_out
from maxtext_lite.data.text_cache import tokenized_text
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.text_files import find_files
from maxtext_lite.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

SYNTHETIC_TRAINING_EXAMPLES = 2**31 - 1
SYNTHETIC_EVALUATION_EXAMPLES = 64

_MOST_COUNTED = 2**25  # documents that take about a second


Opened = tuple[ExampleSource, ExampleSource | None]
"""Training examples and held-out ones."""


def open_sources(config: DataConfig, *, vocab_size: int | None = None) -> Opened:
    """The training examples and the held-out ones; several listed sources become one source each.

    Held out are the examples of `eval_dataset_path`, or without one the last floor(eval_fraction x examples) rows of
    each source in file order, at least one. No target of a held-out row is a token of a training row, except with
    packing=best_fit, where a document longer than a row may have pieces on both sides.

    Args:
      vocab_size: rows of the embedding table, which the tokenizer must fit and below which synthetic tokens are drawn;
        None: the tokenizer's own size.
    Returns:
      (training, held out); the latter is None if eval_fraction is 0 and eval_dataset_path is empty.
    Raises:
      UserError: a file or the tokenizer is missing or unreadable, nothing is left to train on or to hold out, or two
        sources have the same rows.
    """
    if isinstance(config.eval_dataset_path, SourceList):
        without = config.model_copy(update={"eval_dataset_path": "", "eval_fraction": 0.0})
        training, _ = open_sources(without, vocab_size=vocab_size)
        return training, _open_sets(config, config.eval_dataset_path, vocab_size)
    if isinstance(config.dataset_path, SourceList):
        return _open_mixture(config, config.dataset_path, vocab_size)
    opens = functools.partial(_opens(config), config, _tokenizer(config, vocab_size), vocab_size=vocab_size)
    path = config.dataset_path
    if not config.eval_dataset_path or not source_kind(config.dataset_type).reads_files:
        return opens(key="dataset_path", path=path, eval_fraction=config.eval_fraction)
    training, _ = opens(key="dataset_path", path=path)
    held_out, _ = opens(key="eval_dataset_path", path=config.eval_dataset_path)
    return training, held_out


def _open_sets(config: DataConfig, sets: SourceList, vocab_size: int | None) -> ExampleSource:
    """The held-out sets with their names, as one source."""
    from maxtext_lite.data.mixture import mix

    opened: list[tuple[MixtureComponent, ExampleSource]] = []
    for entry in sets.entries:
        source = open_path(config, key="eval_dataset_path", path=entry.path, vocab_size=vocab_size)
        opened.append((MixtureComponent(entry.name, source.fingerprint, "1", None), source))
    return mix(opened)


def _open_mixture(config: DataConfig, sources: SourceList, vocab_size: int | None) -> Opened:
    from maxtext_lite.data.mixture import mix

    has_eval_path = bool(config.eval_dataset_path)
    opened: list[Opened] = []
    one = config
    for entry in sources.entries:
        only = one.model_copy(update={"dataset_path": entry.path})
        opened.append(open_sources(only, vocab_size=vocab_size))
        if has_eval_path:  # its text is opened with the first source
            one = one.model_copy(update={"eval_dataset_path": "", "eval_fraction": 0.0})
    parts = parts_of(config, [training for training, _ in opened])
    by_fingerprint = sorted(zip(parts, opened, strict=True), key=lambda pair: pair[0].fingerprint)
    training = mix([(part, training) for part, (training, _) in by_fingerprint])
    if has_eval_path:
        return training, opened[0][1]
    held_out = [(part, source) for part, (_, source) in by_fingerprint if source is not None]
    return training, mix(held_out) if held_out else None


def with_history(
    config: DataConfig,
    source: ExampleSource,
    saved: Sequence[Mapping[str, Any]] = (),
    seen: tuple[int, int] = (0, 0),
) -> tuple[ExampleSource, list[dict[str, Any]]]:
    """A source as a run reads it, and the history of the run's mixtures as JSON for further checkpoints.

    A run that never had another source reads the source itself. Data that cannot be mixed have no history.

    Args:
      saved: the history in the checkpoint from which the run continues.
      seen: examples and target tokens that the run has seen.
    Raises:
      UserError: a source has the name of an earlier one but other rows.
    """
    if not source_kind(config.dataset_type).is_mixable:
        return source, []
    parts = parts_of(config, [source])
    history = history_of(parts)
    if saved:
        before = tuple(Mixture.of(entries) for entries in saved)
        history = continued(before, parts, examples_seen=seen[0], tokens_seen=seen[1])
    if source.parts or len(history) > 1:
        from maxtext_lite.data.mixture import MixtureSchedule, MixtureSource

        sources = tuple(source.named().values())
        source = MixtureSource(tuple(parts), sources, MixtureSchedule(history))
    return source, [dataclasses.asdict(mixture) for mixture in history]


def open_path(
    config: DataConfig,
    *,
    key: str,
    path: str,
    vocab_size: int | None,
) -> ExampleSource:
    """All examples of a path; other arguments and errors as for `open_sources`.

    Args:
      key: what messages call the path.
    """
    tokenizer = _tokenizer(config, vocab_size)
    source, _ = _opens(config)(config, tokenizer, key=key, path=path, vocab_size=vocab_size)
    return source


def _opens(config: DataConfig) -> Callable[..., Opened]:
    """The function that opens a path of the config's dataset_type; it takes the arguments of `open_text`."""
    return resolve(source_kind(config.dataset_type).opens)


def example_shape(config: DataConfig) -> tuple[int, tuple[str, ...]]:
    """Tokens of an example, and the names of its arrays."""
    return config.rows_per_example * config.max_target_length, (*FIELDS, *source_kind(config.dataset_type).fields)


def _tokenizer(config: DataConfig, vocab_size: int | None) -> Tokenizer:
    tokenizer = load_tokenizer(config)
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)
    return tokenizer


@dataclasses.dataclass(frozen=True)
class TextSource(ExampleSource):
    """Rows of tokenized documents.

    Attributes:
      text: the documents.
      row_layout: the rows of their stream.
      first_row: the row of example 0.
      num_rows: number of examples.
    """

    text: TokenizedDocuments
    row_layout: Rows
    first_row: int
    num_rows: int

    fields = FIELDS

    @property
    def num_documents(self) -> int:
        """Documents of the whole stream with at least one token."""
        return len(self.text.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of an example, T."""
        return self.row_layout.num_tokens

    @property
    def fingerprint(self) -> str:
        """Hash of contents, tokenizer, row length, packing, and which rows belong to the source."""
        layout = f"{type(self.row_layout).__name__}:{self.row_layout.num_tokens}:{self.first_row}:{self.num_rows}"
        return f"text:{layout}:{self.text.fingerprint}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the text, and one on rows of best fit."""
        return (*self.text.notes, *self.row_layout.notes)

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
        """One example: see `Rows.build`. Raises IndexError outside [0, len)."""
        check_id(example_id, self.num_rows)
        return self.row_layout.build(self.text.stream, self.first_row + example_id)

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples; repeated ids count repeatedly."""
        return self.row_layout.count_targets(self.first_row + example_ids)

    def documents(self, example_ids: np.ndarray) -> Documents:
        """The documents in these examples."""
        return self.row_layout.documents(self.first_row + example_ids)

    def describe(self) -> list[dict[str, Any]]:
        """Documents and tokens of all files, and examples and their target tokens of one epoch.

        `lengths` counts documents by the power of two that their tokens reach, from 2**0; it is absent if there are too
        many to count.
        """
        about: dict[str, Any] = {
            "name": "",
            "documents": self.num_documents,
            "tokens": int(self.text.starts[-1]),
            "examples": len(self),
            "target_tokens": self.num_target_tokens,
            "slots_used": self.num_target_tokens / (len(self) * self.num_tokens),
        }
        about |= self.row_layout.describe()
        if self.num_documents <= _MOST_COUNTED:
            counts, _, _ = count_by_length(self.text.starts)
            about["lengths"] = np.trim_zeros(counts, "b").tolist()
        return [about]


@dataclasses.dataclass(frozen=True)
class SyntheticSource(ExampleSource):
    """Full rows of uniformly random tokens, one document each: a pure function of (seed, example id)."""

    seed: int
    num_examples: int
    num_tokens: int
    vocab_size: int

    fields = FIELDS

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
        """One example, as `Rows.build` describes it. Raises IndexError outside [0, len)."""
        check_id(example_id, self.num_examples)
        key = np.array([self.seed, example_id], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        drawn = generator.integers(self.vocab_size, size=self.num_tokens + 1, dtype=np.int32)
        return segments_row([(drawn, 1.0)], self.num_tokens)

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples: all of their tokens."""
        return len(example_ids) * self.num_tokens


def open_synthetic(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    key: str,
    path: str,
    eval_fraction: float = 0.0,
    vocab_size: int | None = None,
) -> Opened:
    """Random tokens for training and others for evaluation; takes the arguments of `open_text`, some without effect."""
    del key, path, eval_fraction
    drawn_below = tokenizer.vocab_size if vocab_size is None else vocab_size
    return (
        SyntheticSource(0, SYNTHETIC_TRAINING_EXAMPLES, config.max_target_length, drawn_below),
        SyntheticSource(1, SYNTHETIC_EVALUATION_EXAMPLES, config.max_target_length, drawn_below),
    )


def open_text(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    key: str,
    path: str,
    eval_fraction: float = 0.0,
    vocab_size: int | None = None,
) -> Opened:
    """The rows of plain text.

    Args:
      key: what messages call the path.
      eval_fraction: the share of rows to hold out; 0: none.
      vocab_size: as in `open_sources`.
    Raises:
      UserError: the files cannot be read or have no text, or nothing is left to train on or to hold out.
    """
    del vocab_size
    text = tokenized_text(config, TextEncoder(config, tokenizer), find_files(key, path))
    return open_rows(config, text, f"{key}={path!r} has no text: every document in it is empty.", eval_fraction)


def open_rows(
    config: DataConfig,
    text: TokenizedDocuments,
    nothing: str,
    eval_fraction: float,
) -> Opened:
    """The rows of tokenized documents to train on, and the last ones, which are held out.

    Args:
      nothing: refuses documents without targets.
    """
    layout = rows_of(config.packing, text.starts, config.max_target_length, text.place)
    if len(layout) == 0 or not layout.count_targets_between(0, len(layout)):
        raise UserError(nothing)
    everything = TextSource(text, layout, 0, len(layout))
    what = f"examples of {config.max_target_length} tokens"
    held_out = num_held_out(eval_fraction, len(everything), what, more="text, a smaller max_target_length or")
    if not held_out:
        return everything, None
    first = len(everything) - held_out
    parts = everything.rows(0, first), everything.rows(first, len(everything))
    for part, use in zip(parts, ("train on", "hold out"), strict=True):
        if not part.num_target_tokens:
            raise UserError(f"eval_fraction={eval_fraction} leaves no target token to {use}.")
    return parts


def rows_of(packing: bool | str, document_starts: np.ndarray, num_tokens: int, place: IndexPlace | None = None) -> Rows:
    """The rows of a stream.

    Args:
      packing: the value of the key.
      place: where to keep the index of rows that need one; None: in memory.
    """
    if packing is True:
        return PackedRows(document_starts, num_tokens)
    if packing is False:
        return document_rows(document_starts, num_tokens, place)
    from maxtext_lite.data.best_fit import best_fit_rows  # few runs

    return best_fit_rows(document_starts, num_tokens, place)
