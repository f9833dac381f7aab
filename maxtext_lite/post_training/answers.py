"""Examples for SFT and DPO: rows of whole conversations or texts; only answers have loss weight."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from maxtext_lite.config import DataConfig, UserError
from maxtext_lite.config.errors import counted
from maxtext_lite.data.best_fit import FilledRows, fill_rows
from maxtext_lite.data.rows import FIELDS, REFERENCE, Documents, segments_row
from maxtext_lite.data.source import ExampleSource, check_id, num_held_out
from maxtext_lite.data.text_encoder import LONGEST_TAIL, spelled_notes
from maxtext_lite.data.text_files import json_objects
from maxtext_lite.data.tokenizer import Tokenizer
from maxtext_lite.post_training.conversations import DPO_FIELDS, SFT_FIELDS, Rendered, Renderer, Tokenized


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Tokens of many texts, one after the other.

    Attributes:
      token_ids: int32.
      is_answer: bool, for each token.
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
        """Slots of a row that each takes: all of its tokens but the last, which is only a target."""
        return np.diff(self.starts) - 1

    @property
    def targets(self) -> np.ndarray:
        """Target tokens of each: its answers' tokens, except its very first token, which nothing precedes."""
        targets = self.is_answer.copy()
        targets[self.starts[:-1]] = False
        return np.add.reduceat(targets, self.starts[:-1], dtype=np.int64) if len(self) else np.zeros(0, np.int64)

    def ends(self, row_tokens: int) -> Counter[tuple[int, ...]]:
        """The last few tokens of each sequence's last answer that a row of this many tokens does not truncate."""
        goes_on = np.append(self.is_answer[1:], False)
        goes_on[self.starts[1:] - 1] = self.slots >= row_tokens
        ends = np.flatnonzero(self.is_answer & ~goes_on)
        sequences = np.searchsorted(self.starts, ends, side="right")
        last = ends[np.append(np.diff(sequences) > 0, True)[: len(ends)]].tolist()
        return Counter(self._tail(end) for end in last)

    def _tail(self, end: int) -> tuple[int, ...]:
        """The last tokens of the answer that ends with this token."""
        first = end
        while first > max(end + 1 - LONGEST_TAIL, 0) and self.is_answer[first - 1]:
            first -= 1
        return tuple(self.token_ids[first : end + 1].tolist())

    def row(self, numbers: np.ndarray, num_tokens: int) -> dict[str, np.ndarray]:
        """The row of these sequences, in this order, with the fields of `Rows.build`."""
        parts = [slice(*self.starts[number : number + 2].tolist()) for number in numbers.tolist()]
        return segments_row([(self.token_ids[part], self.is_answer[part][1:]) for part in parts], num_tokens)

    def content(self) -> bytes:
        """A hash of everything."""
        content = hashlib.sha256(self.starts.tobytes())
        content.update(self.token_ids.tobytes())
        content.update(self.is_answer.tobytes())
        return content.digest()


@dataclasses.dataclass(frozen=True)
class AnswerSource(ExampleSource):
    """Examples of whole sequences, each of one row, for SFT.

    Attributes:
      columns: for each row of an example, all sequences from which that row takes its own.
      rows: numbers of the sequences of each example, the same in every column.
      row_tokens: tokens of one row.
      content: hash of the sequences and of the tokenizer.
      notes: what became of lines that the examples do not contain unchanged; sentences for the user.
      ends: the special and added tokens with which answers end, the most frequent first.
    """

    columns: tuple[Sequences, ...]
    rows: FilledRows
    row_tokens: int
    content: str
    notes: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()

    dataset_type = "sft"
    fields = FIELDS

    @property
    def num_tokens(self) -> int:
        """Tokens of an example: its rows, one after another."""
        return len(self.columns) * self.row_tokens

    @property
    def fingerprint(self) -> str:
        """Hash of contents, tokenizer, row length and packing; a reference has no part in it."""
        return f"{self.dataset_type}:{self.row_tokens}:{len(self.rows)}:{self.content}"

    @property
    def num_target_tokens(self) -> int:
        """Target tokens of all examples."""
        return int(self._targets.sum())

    @property
    def num_sequences(self) -> int:
        """Sequences: several in a row with packing; a pair counts as one."""
        return len(self.columns[0])

    @property
    def packed_text(self) -> str:
        """How many conversations or pairs the rows hold."""
        if self.num_sequences == len(self):
            return ""
        what = "conversations" if self.dataset_type == "sft" else "pairs"
        return f" (rows of {self.row_tokens:,} tokens, packed from {self.num_sequences:,} {what})"

    @property
    def _targets(self) -> np.ndarray:
        """Target tokens by number of a sequence, summed over the columns."""
        return np.sum([sequences.targets for sequences in self.columns], axis=0)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """One example: see `Rows.build`. Raises IndexError outside [0, len)."""
        check_id(example_id, len(self))
        rows = [self._row(column, self.rows.of(example_id)) for column in range(len(self.columns))]
        return {name: np.concatenate([row[name] for row in rows]) for name in self.fields}

    def _row(self, column: int, numbers: np.ndarray) -> dict[str, np.ndarray]:
        return self.columns[column].row(numbers, self.row_tokens)

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples; repeated ids count repeatedly."""
        of_rows = np.add.reduceat(self._targets[self.rows.members], self.rows.starts[:-1])
        return int(of_rows[example_ids].sum())

    def documents(self, example_ids: np.ndarray) -> Documents:
        """The documents in these examples: the sequences of all rows."""
        found = [self.rows.documents(example_ids, column.starts, self.row_tokens) for column in self.columns]
        return Documents(*map(np.concatenate, zip(*found, strict=True)))


@dataclasses.dataclass(frozen=True)
class PairSource(AnswerSource):
    """Examples of two rows, for DPO: chosen and rejected sequences, with segment k of both rows a pair.

    Attributes:
      reference: for each pair, the reference's summed log-probabilities of the chosen and of the rejected answer,
        float32 [pairs, 2]; None until they are known.
    """

    reference: np.ndarray | None = None

    dataset_type = "dpo"
    fields = (*FIELDS, REFERENCE)

    def with_reference(self, reference: np.ndarray) -> PairSource:
        """The same examples with the reference's log-probabilities, float32 [pairs, 2]."""
        return dataclasses.replace(self, reference=reference)

    def _row(self, column: int, numbers: np.ndarray) -> dict[str, np.ndarray]:
        row = super()._row(column, numbers)
        row[REFERENCE] = np.zeros(self.row_tokens, np.float32)
        if self.reference is not None:
            is_first = (row["segments"] > 0) & (row["positions"] == 0)
            row[REFERENCE][is_first] = self.reference[numbers, column]
        return row


def open_answers(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    key: str,
    path: str,
    eval_fraction: float = 0.0,
    vocab_size: int | None = None,
) -> tuple[AnswerSource, AnswerSource | None]:
    """The examples of dataset_type=sft or dpo; arguments as for `sources.open_text`.

    Held out are the last floor(eval_fraction x lines), at least one.

    Raises:
      UserError: a file is missing, a line is invalid, or nothing is left to train on or to hold out.
    """
    del vocab_size
    renderer = Renderer(config, tokenizer)
    lines = list(_read_lines(config, renderer, key, path))
    named = f"{key}={path!r}"
    count = num_held_out(eval_fraction, len(lines), "lines")
    if not count:
        return _source(config, renderer, lines, named), None
    return _source(config, renderer, lines[:-count], named), _source(config, renderer, lines[-count:], named)


_Line = list[tuple[Rendered, ...]]
"""A line's examples: one text each for SFT, two for DPO; none if a pair's answers are equal."""


def _read_lines(config: DataConfig, renderer: Renderer, key: str, path: str) -> Iterator[_Line]:
    is_sft = config.dataset_type == "sft"
    reads = f"dataset_type={config.dataset_type} reads .jsonl files"
    for where, value in json_objects(key, path, reads=reads, wanted=SFT_FIELDS if is_sft else DPO_FIELDS):
        if is_sft:
            yield [(rendered,) for rendered in renderer.sft_texts(where, value)]
        else:
            same = "chosen" in value and value["chosen"] == value.get("rejected")
            yield [] if same else [renderer.dpo_texts(where, value)]


def _source(config: DataConfig, renderer: Renderer, lines: Sequence[_Line], named: str) -> AnswerSource:
    hidden = sum(rendered.num_spelled for line in lines for example in line for rendered in example)
    spelled = spelled_notes(hidden, renderer.encoder.in_text)
    kept, notes = _fitted(config, renderer, lines)
    notes += spelled
    if not kept:
        raise UserError(f"{named} has no answer to learn from. {' '.join(notes)}".rstrip())
    columns = tuple(Sequences.of(column) for column in zip(*kept, strict=True))
    slots = np.max([sequences.slots for sequences in columns], axis=0)
    rows = fill_rows(slots, config.max_target_length, packing=bool(config.packing))
    tokenizer = renderer.encoder.tokenizer
    content = hashlib.sha256(tokenizer.fingerprint.encode())
    for sequences in columns:
        content.update(sequences.content())
    source = AnswerSource if config.dataset_type == "sft" else PairSource
    ends = sum((sequences.ends(config.max_target_length) for sequences in columns), Counter[tuple[int, ...]]())
    known = (_closing(tail, tokenizer) for tail, _ in ends.most_common())
    learned = tuple(dict.fromkeys(end for end in known if end is not None))
    return source(columns, rows, config.max_target_length, content.hexdigest(), notes, learned)


def _closing(tail: Sequence[int], tokenizer: Tokenizer) -> int | None:
    """The control token that ends an answer with these last tokens; white space may follow it."""
    for at in range(len(tail) - 1, -1, -1):
        if tail[at] in tokenizer.control_ids:
            return tail[at]
        if tokenizer.decode(tail[at:]).strip():
            return None
    return None


def _fitted(
    config: DataConfig, renderer: Renderer, lines: Sequence[_Line]
) -> tuple[list[tuple[Tokenized, ...]], tuple[str, ...]]:
    """The tokens of each line with an answer in its row, and sentences about lines that do not fit.

    Raises:
      UserError: a line is too long and long_examples=refuse; names the line.
    """
    most = config.max_target_length + 1  # the last token is only a target
    kept: list[tuple[Tokenized, ...]] = []
    texts = [example for line in lines for example in line]
    counts = Counter(same=sum(not line for line in lines), split=sum(len(line) > 1 for line in lines))
    tokens = renderer.tokens([rendered for line in texts for rendered in line])
    for line in texts:
        tokenized = tuple(itertools.islice(tokens, len(line)))
        longest = max(len(each.token_ids) for each in tokenized)
        counts["cut"] += sum(each.num_cut for each in tokenized)
        counts["spelled"] += sum(each.num_spelled for each in tokenized)
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
            tokenized = tuple(each._replace(token_ids=each.token_ids[:most]) for each in tokenized)
            tokenized = tuple(each._replace(is_answer=each.is_answer[:most]) for each in tokenized)
        if not all(each.is_answer[1:].any() for each in tokenized):
            counts["without"] += 1
        elif len(tokenized) > 1 and all(map(np.array_equal, tokenized[0][:2], tokenized[1][:2])):
            counts["alike"] += 1
        else:
            kept.append(tokenized)
    return kept, _sentences(config, len(lines), len(texts), counts)


def _sentences(config: DataConfig, num_lines: int, num_examples: int, counts: Mapping[str, int]) -> tuple[str, ...]:
    """What became of lines that the examples do not contain unchanged."""
    became = "truncated to it" if config.long_examples == "truncate" else "dropped"
    of_lines = f"of {counted(num_lines, 'line')}"
    of = f"of {counted(num_examples, 'example')}" if counts["split"] else of_lines
    sentences = {
        "split": f"{of_lines} became an example for each answer, {counted(num_examples, 'example')} in all: the chat "
        "template renders earlier turns differently when more follow.",
        "long": f"{of} {_was(counts['long'])} longer than max_target_length={config.max_target_length} and {became}.",
        "without": f"{of} {_was(counts['without'])} dropped: no token of an answer in the row.",
        "alike": f"{of} {_was(counts['alike'])} dropped: the answers do not differ in their tokens in a row.",
        "same": f"{of_lines} {_was(counts['same'])} dropped: the chosen and the rejected answer are the same.",
        "cut": f"{'answer begins or ends' if counts['cut'] == 1 else 'answers begin or end'} inside a token, which is "
        "not learned.",
    }
    notes = tuple(f"{counts[name]:,} {sentence}" for name, sentence in sentences.items() if counts[name])
    return notes + spelled_notes(counts["spelled"], "encode", "prompts and answers without turns")


def _was(count: int) -> str:
    return "was" if count == 1 else "were"
