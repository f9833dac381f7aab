"""A mixture of sources as one source: where its rows come from, over the history of a run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.history import MIXTURE, History, MixtureComponent
from maxtext_lite.data.mixture_rule import MixtureRule, position_of, rule_of
from maxtext_lite.data.order import FILE_ORDER, example_ids
from maxtext_lite.data.rows import Documents
from maxtext_lite.data.source import ExampleSource, check_id

NO_END = sys.maxsize
"""The end of rows that have none."""


@dataclasses.dataclass(frozen=True)
class MixtureSegment:
    """Rows mixed by one rule: from the first row of a mixture, or from where a source dropped out.

    Attributes:
      first: position in the run of the first row; `stop`: that after the last row, or NO_END.
      sources: fingerprints, in the order of the rule.
      given: rows that each source gave before.
    """

    first: int
    stop: int
    sources: tuple[str, ...]
    rule: MixtureRule
    given: tuple[int, ...]

    def counts(self, examples_seen: int) -> dict[str, int]:
        """Rows that each source has contributed up to a position within the segment or at its end."""
        more = self.rule.counts(examples_seen - self.first)
        return {name: given + n for name, given, n in zip(self.sources, self.given, more, strict=True)}


class MixtureSchedule:
    """Which source gives each row of a run, according to its history. Picklable and immutable.

    A source that has reached its limit drops out at its next turn; the others keep their ratios.

    Attributes:
      last: the current mixture of the run.
      segments: in order, without gaps; the last one ends only if no source is left.
      left_out: the sources that have dropped out of the last mixture, in order: fingerprints, and the positions in the
        run where each would have given another row.
      lone: the fingerprint of the source with which the run began alone; None: it began with several.
    """

    def __init__(self, history: History):
        first = history[0].parts
        self.lone = first[0].fingerprint if len(first) == 1 else None
        self.last = history[-1]
        self.segments: list[MixtureSegment] = []
        given: dict[str, int] = {}
        ends = [mixture.examples_seen for mixture in history[1:]]
        for mixture, end in zip(history, [*ends, NO_END], strict=True):
            self.left_out: dict[str, int] = {}
            start = mixture.examples_seen
            live = list(mixture.parts)
            while live:
                segment, exhausted = _segment(live, start, end, given)
                self.segments.append(segment)
                given |= segment.counts(segment.stop)
                if exhausted is None:
                    break
                start = segment.stop
                self.left_out[exhausted.fingerprint] = start
                live.remove(exhausted)

    @property
    def end(self) -> int:
        """The position from which no source has a row left, or NO_END."""
        return self.segments[-1].stop

    def given(self, examples_seen: int) -> dict[str, int]:
        """Rows consumed from each source among the first `examples_seen` rows of the run."""
        counts: dict[str, int] = {}
        for segment in self.segments:
            if segment.first <= examples_seen:
                counts |= segment.counts(min(examples_seen, segment.stop))
        return counts

    def seed(self, fingerprint: str, seed: int) -> int:
        """The seed of a source's order: data_shuffle_seed itself if the run began with this source alone."""
        if seed == FILE_ORDER or fingerprint == self.lone:
            return seed
        return _hash(f"{seed}:{fingerprint}")

    def salt(self, fingerprint: str) -> int:
        """An offset for hashing the rows of a source; 0 if the run began with this source alone."""
        return 0 if fingerprint == self.lone else _hash(fingerprint)


def _segment(
    live: Sequence[MixtureComponent],
    start: int,
    end: int,
    given: Mapping[str, int],
) -> tuple[MixtureSegment, MixtureComponent | None]:
    """The rows from `start` that these sources give, and the source whose limit ends them before `end`, if any."""
    rule = rule_of([Fraction(part.row_weight) for part in live])
    before = tuple(given.get(part.fingerprint, 0) for part in live)
    exhausted: MixtureComponent | None = None
    for number, (part, rows) in enumerate(zip(live, before, strict=True)):
        if part.most_rows is None:
            continue
        stop = start + position_of(rule, number, max(part.most_rows - rows, 0))
        if stop < end:
            end = stop
            exhausted = part
    return MixtureSegment(start, end, tuple(part.fingerprint for part in live), rule, before), exhausted


def _hash(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big")


@dataclasses.dataclass(frozen=True)
class MixtureSource(ExampleSource):
    """Sources with consecutively numbered examples: the first source's, then the second's, and so on.

    Attributes:
      parts: the part of each source in the mixture, in the order of fingerprints; for held-out examples those of the
        corresponding training sources, or the held-out sets of the config, in their order.
      sources: in the same order.
      stream: which source gives each row of the run; None for held-out examples, which are read in order.
    """

    parts: tuple[MixtureComponent, ...] = ()
    sources: tuple[ExampleSource, ...] = ()
    stream: MixtureSchedule | None = None

    @functools.cached_property
    def _first_ids(self) -> np.ndarray:
        lengths = [len(source) for source in self.sources]
        return np.cumsum([0, *lengths], dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the sources, without their weights."""
        return MIXTURE + ",".join(part.fingerprint for part in self.parts)

    @property
    def fields(self) -> Sequence[str]:
        """The same for all sources."""
        return self.sources[0].fields

    @property
    def num_tokens(self) -> int:
        """The same for all sources."""
        return self.sources[0].num_tokens

    @property
    def num_target_tokens(self) -> int:
        """Target tokens of all examples."""
        return sum(source.num_target_tokens for source in self.sources)

    @property
    def num_sequences(self) -> int:
        """Those of all sources."""
        return sum(source.num_sequences for source in self.sources)

    @property
    def notes(self) -> Sequence[str]:
        """The notes of the sources, with their names."""
        found: list[str] = []
        for name, source in self.named().items():
            found += [f"{name}: {note}" for note in source.notes]
        return found

    @property
    def ends(self) -> tuple[int, ...]:
        """The special tokens that end some source's answers."""
        return tuple(dict.fromkeys(end for source in self.sources for end in source.ends))

    def describe(self) -> list[dict[str, Any]]:
        """The entries of all sources, with their names."""
        found: list[dict[str, Any]] = []
        for name, source in self.named().items():
            found += [about | {"name": name} for about in source.describe()]
        return found

    def named(self) -> dict[str, ExampleSource]:
        """The sources by name."""
        return {part.name: source for part, source in zip(self.parts, self.sources, strict=True)}

    def __len__(self) -> int:
        return int(self._first_ids[-1])

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """One example. Raises IndexError outside [0, len)."""
        check_id(example_id, len(self))
        number = int(self._numbers(np.array(example_id)))
        return self.sources[number][example_id - int(self._first_ids[number])]

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples; repeated ids count repeatedly."""
        numbers = self._numbers(example_ids)
        tokens = 0
        for number, source in enumerate(self.sources):
            tokens += source.count_targets(example_ids[numbers == number] - self._first_ids[number])
        return tokens

    def documents(self, example_ids: np.ndarray) -> Documents | None:
        """The documents in these examples; None if a source does not know its own."""
        numbers = self._numbers(example_ids)
        found: list[Documents] = []
        for number in np.unique(numbers).tolist():
            own = np.flatnonzero(numbers == number)
            documents = self.sources[number].documents(example_ids[own] - self._first_ids[number])
            if documents is None:
                return None
            found.append(documents._replace(rows=own[documents.rows]))
        return Documents(*map(np.concatenate, zip(*found, strict=True)))

    def _numbers(self, ids: np.ndarray) -> np.ndarray:
        """The number of each example's source; int64."""
        return np.searchsorted(self._first_ids, ids, side="right") - 1

    def row_ids(self, ids: np.ndarray) -> list[tuple[str, int]]:
        """For each example the name of its source and its number there."""
        numbers = self._numbers(ids)
        rows = ids - self._first_ids[numbers]
        names = [self.parts[number].name for number in numbers.tolist()]
        return [*zip(names, rows.tolist(), strict=True)]

    def ids_of_run(
        self,
        first: int,
        count: int,
        seed: int,
    ) -> np.ndarray:
        """The examples at these positions of the run, or of the held-out examples; int64."""
        if self.stream is None:
            return super().ids_of_run(first, count, seed)
        assert first + count <= self.stream.end
        ids = np.empty(count, np.int64)
        places = {part.fingerprint: place for place, part in enumerate(self.parts)}
        for segment in self.stream.segments:
            here = np.arange(max(first, segment.first), min(first + count, segment.stop))
            sources, ranks = segment.rule.rows_at(here - segment.first)
            for number in np.unique(sources).tolist():
                fingerprint = segment.sources[number]
                if fingerprint not in places:
                    raise UserError("dataset_path: the run has read rows here from a source that is no longer listed.")
                place = places[fingerprint]
                own = sources == number
                # The positions within a source are consecutive, whatever lies between its rows.
                position = segment.given[number] + int(ranks[own][0])
                num_examples = len(self.sources[place])
                own_seed = self.stream.seed(fingerprint, seed)
                own_ids = example_ids(position, int(own.sum()), num_examples=num_examples, seed=own_seed)
                ids[here[own] - first] = self._first_ids[place] + own_ids
        return ids

    def hashed(self, ids: np.ndarray) -> np.ndarray:
        """For each example its number in its source plus an offset of the source, uint64: ids depend on the list."""
        salts = [self._stream.salt(part.fingerprint) for part in self.parts]
        numbers = self._numbers(ids)
        rows = ids - self._first_ids[numbers]
        return rows.astype(np.uint64) + np.array(salts, np.uint64)[numbers]

    def epochs(self, examples_seen: int) -> dict[str, float]:
        """How often each source has been read up to a position of the run, by name."""
        given = self._stream.given(examples_seen)
        named = zip(self.parts, self.sources, strict=True)
        return {part.name: given.get(part.fingerprint, 0) / len(source) for part, source in named}

    def tokens_by_source(
        self,
        first: int,
        stop: int,
        seed: int,
    ) -> dict[str, int]:
        """Exact target tokens that each source gives between two positions of the run, by name."""
        before = self._stream.given(first)
        after = self._stream.given(stop)
        tokens: dict[str, int] = {}
        for part, source in zip(self.parts, self.sources, strict=True):
            first_row = before.get(part.fingerprint, 0)
            stop_row = after.get(part.fingerprint, 0)
            own_seed = self._stream.seed(part.fingerprint, seed)
            tokens[part.name] = source.target_tokens(first_row, stop_row, own_seed)
        return tokens

    def target_tokens(self, first: int, stop: int, seed: int) -> int:
        """Exact target tokens between two positions of the run."""
        return sum(self.tokens_by_source(first, stop, seed).values())

    def exhausted(self, end: int) -> dict[str, int]:
        """The sources that reach their limit before a run's end: names, and the positions of their next turns."""
        left_out = self._stream.left_out
        names = {part.fingerprint: part.name for part in self.parts}
        return {names[each]: position for each, position in left_out.items() if position < end}

    def shares(
        self,
        first: int,
        end: int,
    ) -> list[dict[str, Any]]:
        """What a run consumes from each source between two positions, as JSON.

        `rows` and `token_share` are for these positions, by the sources' mean target tokens; `epochs` for the whole
        run.
        """
        before = self.epochs(first)
        after = self.epochs(end)
        table: list[dict[str, Any]] = []
        for name, source in self.named().items():
            epochs = after[name] - before[name]
            about = {
                "name": name,
                "examples": len(source),
                "target_tokens": source.num_target_tokens,
                "rows": round(epochs * len(source)),
                "token_share": epochs * source.num_target_tokens,
                "epochs": after[name],
            }
            table.append(about)
        total = sum(row["token_share"] for row in table) or 1
        for row in table:
            row["token_share"] /= total
        return table

    @property
    def end(self) -> int:
        """The position in the run from which no source has a row left."""
        return self._stream.end

    @property
    def counted(self) -> tuple[int, int]:
        """The examples and target tokens of the run before its current mixture."""
        return self._stream.last.examples_seen, self._stream.last.tokens_seen

    @property
    def _stream(self) -> MixtureSchedule:
        assert self.stream is not None, "these examples belong to no run"
        return self.stream


def mix(sources: Sequence[tuple[MixtureComponent, ExampleSource]]) -> MixtureSource:
    """The sources as one, in the order of the list."""
    return MixtureSource(tuple(part for part, _ in sources), tuple(source for _, source in sources))
