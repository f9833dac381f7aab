"""Examples for SFT and DPO: rows that hold whole conversations or texts, in which answers alone have loss weight."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from maxtext_lite.config import DataConfig, UserError, single_path
from maxtext_lite.data.conversations import DPO_FIELDS, SFT_FIELDS, Rendered, Renderer, Tokenized
from maxtext_lite.data.examples import check_id, num_held_out
from maxtext_lite.data.packing import FIELDS, REFERENCE, Documents, FilledRows, fill_rows
from maxtext_lite.data.text_files import json_objects
from maxtext_lite.data.tokenizer import Tokenizer

_LINES_PER_ENCODING = 1024  # bounds the memory of what the tokenizer library returns


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Tokens of many texts, one after the other.

    Attributes:
      token_ids: int32.
      is_answer: bool, as long.
      starts: where each sequence starts, then the number of tokens; int64.
    """

    token_ids: np.ndarray
    is_answer: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, tokenized: Sequence[Tokenized]) -> Sequences:
        """These sequences, in their order."""
        lengths = [len(each.token_ids) for each in tokenized]
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(each.token_ids for each in tokenized)]),
            np.concatenate([np.zeros(0, bool), *(each.is_answer for each in tokenized)]),
            np.cumsum([0, *lengths], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def slots(self) -> np.ndarray:
        """Slots that each takes in a row: all of its tokens but the last, which is a target only."""
        return np.diff(self.starts) - 1

    @property
    def targets(self) -> np.ndarray:
        """Target tokens of each: its answers' tokens but the first of all, which nothing comes before."""
        targets = self.is_answer.copy()
        targets[self.starts[:-1]] = False
        return np.add.reduceat(targets, self.starts[:-1], dtype=np.int64) if len(self) else np.zeros(0, np.int64)

    def row(self, numbers: np.ndarray, num_tokens: int) -> dict[str, np.ndarray]:
        """The row of these sequences, with the fields of `packing.build_row`; segments follow the order of numbers."""
        tokens, targets, segments, positions = np.zeros((4, num_tokens), np.int32)
        weights = np.zeros(num_tokens, np.float32)
        first = 0
        for segment, number in enumerate(numbers.tolist(), start=1):
            start, stop = self.starts[number : number + 2].tolist()
            here = slice(first, first + stop - start - 1)
            tokens[here], targets[here] = self.token_ids[start : stop - 1], self.token_ids[start + 1 : stop]
            weights[here] = self.is_answer[start + 1 : stop]
            segments[here], positions[here] = segment, np.arange(stop - start - 1)
            first = here.stop
        return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions, "weights": weights}

    def content(self) -> bytes:
        """A hash of all of it."""
        content = hashlib.sha256(self.starts.tobytes())
        content.update(self.token_ids.tobytes())
        content.update(self.is_answer.tobytes())
        return content.digest()


@dataclasses.dataclass(frozen=True)
class AnswerSource:
    """Rows of whole sequences, for SFT.

    Attributes:
      notes: what became of lines that are not there as they stand in the files; sentences for the user.
      content: hash of the sequences and of the tokenizer.
    """

    sequences: Sequences
    rows: FilledRows
    num_tokens: int
    notes: tuple[str, ...]
    content: str

    fields = FIELDS

    @property
    def fingerprint(self) -> str:
        """Hash of contents, tokenizer, row length and packing."""
        return f"sft:{self.num_tokens}:{len(self.rows)}:{self.content}"

    @property
    def num_target_tokens(self) -> int:
        """Target tokens of all examples."""
        return int(self.sequences.targets.sum())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """One example: see `packing.build_row`. Raises IndexError outside [0, len)."""
        check_id(example_id, len(self))
        return self.sequences.row(self.rows.of(example_id), self.num_tokens)

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples, each counted as often as it stands there."""
        return _count(self.sequences.targets, self.rows, example_ids)

    def documents(self, example_ids: np.ndarray) -> Documents:
        """See `sources.ExampleSource`."""
        return self.rows.documents(example_ids, self.sequences.starts, self.num_tokens)


@dataclasses.dataclass(frozen=True)
class PairSource:
    """Examples of two rows, for DPO: one of chosen and one of rejected sequences, segment k of both being a pair.

    Attributes:
      row_tokens: tokens of one of the two rows.
      reference: for each pair, summed log-probabilities of its chosen and its rejected answers, float32 [pairs, 2];
        None until they are known.
      notes, content: as of `AnswerSource`.
    """

    chosen: Sequences
    rejected: Sequences
    rows: FilledRows
    row_tokens: int
    notes: tuple[str, ...]
    content: str
    reference: np.ndarray | None = None

    fields = (*FIELDS, REFERENCE)

    @property
    def num_tokens(self) -> int:
        """Tokens of an example: of its row of chosen sequences, and then of that of rejected ones."""
        return 2 * self.row_tokens

    @property
    def num_pairs(self) -> int:
        """Pairs of all examples."""
        return len(self.chosen)

    @property
    def fingerprint(self) -> str:
        """Hash of contents, tokenizer, row length and packing; the reference is none of it."""
        return f"dpo:{self.row_tokens}:{len(self.rows)}:{self.content}"

    @property
    def num_target_tokens(self) -> int:
        """Target tokens of all examples."""
        return int(self.chosen.targets.sum() + self.rejected.targets.sum())

    def with_reference(self, reference: np.ndarray) -> PairSource:
        """The same examples, with the reference's log-probabilities, float32 [pairs, 2]."""
        return dataclasses.replace(self, reference=reference)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """One example: the fields of `packing.build_row` and REFERENCE, 0 until it is known; each [2 row_tokens].

        Raises:
          IndexError: outside [0, len).
        """
        check_id(example_id, len(self))
        pairs = self.rows.of(example_id)
        halves = []
        for side, sequences in enumerate((self.chosen, self.rejected)):
            row = sequences.row(pairs, self.row_tokens)
            row[REFERENCE] = np.zeros(self.row_tokens, np.float32)
            if self.reference is not None:
                is_first = (row["segments"] > 0) & (row["positions"] == 0)
                row[REFERENCE][is_first] = self.reference[pairs, side]
            halves.append(row)
        chosen, rejected = halves
        return {name: np.concatenate([chosen[name], rejected[name]]) for name in self.fields}

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples, each counted as often as it stands there."""
        return _count(self.chosen.targets + self.rejected.targets, self.rows, example_ids)

    def documents(self, example_ids: np.ndarray) -> Documents:
        """See `sources.ExampleSource`: those of both rows."""
        sides = (self.chosen.starts, self.rejected.starts)
        both = [self.rows.documents(example_ids, starts, self.row_tokens) for starts in sides]
        return Documents(*map(np.concatenate, zip(*both, strict=True)))


def open_answers(
    config: DataConfig, tokenizer: Tokenizer, *, begins_as_elsewhere: bool
) -> tuple[AnswerSource | PairSource, AnswerSource | PairSource | None]:
    """The training examples of dataset_type=sft or dpo, and the held-out ones.

    Held out are the lines of `eval_dataset_path`; without one, the last floor(eval_fraction x lines), at least one.

    Raises:
      UserError: a file is missing or a line is not one, or nothing is left to train on or to hold out.
    """
    renderer = Renderer(config, tokenizer, begins_as_elsewhere=begins_as_elsewhere)
    lines = list(_read_lines(config, renderer, "dataset_path", single_path(config.dataset_path)))

    def source(lines: Sequence[_Line], key: str) -> AnswerSource | PairSource:
        return _source(config, tokenizer, renderer, lines, f"{key}={getattr(config, key)!r}")

    if config.eval_dataset_path:
        held_out = list(_read_lines(config, renderer, "eval_dataset_path", config.eval_dataset_path))
        return source(lines, "dataset_path"), source(held_out, "eval_dataset_path")
    count = num_held_out(config.eval_fraction, len(lines), "lines")
    if not count:
        return source(lines, "dataset_path"), None
    return source(lines[:-count], "dataset_path"), source(lines[-count:], "dataset_path")


_Line = tuple[Rendered, ...] | None
"""The texts of a line, one for SFT and two for DPO; None for a pair whose answers are the same."""


def _read_lines(config: DataConfig, renderer: Renderer, key: str, path: str) -> Iterator[_Line]:
    is_sft = config.dataset_type == "sft"
    reads = f"dataset_type={config.dataset_type} reads .jsonl files"
    for where, value in json_objects(key, path, reads=reads, wanted=SFT_FIELDS if is_sft else DPO_FIELDS):
        if is_sft:
            yield (renderer.sft_text(where, value),)
        else:
            same = "chosen" in value and value["chosen"] == value.get("rejected")
            yield None if same else renderer.dpo_texts(where, value)


def _source(
    config: DataConfig, tokenizer: Tokenizer, renderer: Renderer, lines: Sequence[_Line], named: str
) -> AnswerSource | PairSource:
    kept, notes = _fitted(config, renderer, lines)
    if not kept:
        raise UserError(f"{named} has no answer to learn from. {' '.join(notes)}".rstrip())
    columns = [Sequences.of(column) for column in zip(*kept, strict=True)]
    slots = np.max([sequences.slots for sequences in columns], axis=0)
    rows = fill_rows(slots, config.max_target_length, packing=bool(config.packing))
    content = hashlib.sha256(tokenizer.fingerprint.encode())
    for sequences in columns:
        content.update(sequences.content())
    if config.dataset_type == "sft":
        return AnswerSource(columns[0], rows, config.max_target_length, notes, content.hexdigest())
    return PairSource(columns[0], columns[1], rows, config.max_target_length, notes, content.hexdigest())


def _fitted(
    config: DataConfig, renderer: Renderer, lines: Sequence[_Line]
) -> tuple[list[tuple[Tokenized, ...]], tuple[str, ...]]:
    """The tokens of each line that has an answer in the row, and sentences about those that do not fit.

    Raises:
      UserError: with long_examples=refuse, a line is too long; names it.
    """
    most = config.max_target_length + 1  # the last token is a target only
    counts: dict[str, int] = dict.fromkeys(("long", "without", "cut", "same"), 0)
    kept: list[tuple[Tokenized, ...]] = []
    texts = [line for line in lines if line is not None]
    counts["same"] = len(lines) - len(texts)
    for first in range(0, len(texts), _LINES_PER_ENCODING):
        some = texts[first : first + _LINES_PER_ENCODING]
        tokens = iter(renderer.tokens([rendered for line in some for rendered in line]))
        for line in some:
            tokenized = tuple(next(tokens) for _ in line)
            longest = max(len(each.token_ids) for each in tokenized)
            counts["cut"] += sum(each.num_cut for each in tokenized)
            if longest > most:
                if config.long_examples == "refuse":
                    raise UserError(
                        f"{line[0].where}: {longest} tokens are more than the {most} of max_target_length="
                        f"{config.max_target_length} and one target. Nearest that work: max_target_length={longest - 1}"
                        ", long_examples=truncate or long_examples=drop."
                    )
                counts["long"] += 1
                if config.long_examples == "drop":
                    continue
                tokenized = tuple(_first_tokens(each, most) for each in tokenized)
            if all(each.is_answer[1:].any() for each in tokenized):
                kept.append(tokenized)
            else:
                counts["without"] += 1
    return kept, _sentences(config, len(lines), counts)


def _first_tokens(tokenized: Tokenized, most: int) -> Tokenized:
    return tokenized._replace(token_ids=tokenized.token_ids[:most], is_answer=tokenized.is_answer[:most])


def _sentences(config: DataConfig, num_lines: int, counts: Mapping[str, int]) -> tuple[str, ...]:
    """What became of lines that are not there as they stand."""
    long = "truncated to it" if config.long_examples == "truncate" else "dropped"
    sentences = {
        "long": f"of {num_lines} lines are longer than max_target_length={config.max_target_length} and were {long}.",
        "without": f"of {num_lines} lines have no token of an answer in their row and were dropped.",
        "same": f"of {num_lines} lines have the same chosen and rejected answer and were dropped.",
        "cut": "answers begin or end inside a token, which is not learned.",
    }
    return tuple(f"{counts[name]} {sentence}" for name, sentence in sentences.items() if counts[name])


def _count(targets: np.ndarray, rows: FilledRows, example_ids: np.ndarray) -> int:
    return int(np.add.reduceat(targets[rows.members], rows.starts[:-1])[example_ids].sum())


def example_shape(config: DataConfig) -> tuple[int, tuple[str, ...]]:
    """Tokens of an example, and the names of its arrays."""
    fields = PairSource.fields if config.dataset_type == "dpo" else FIELDS
    return config.rows_per_example * config.max_target_length, fields
