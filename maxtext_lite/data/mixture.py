"""A mixture of sources: which source gives each row, the history over restarts, and the shares of a run.

Nothing is drawn or stored, so that the rows at any positions are known without earlier ones. Weights are exact
fractions, and rounding happens in integers, so that all hosts agree.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from maxtext_lite.batching import BatchPlan
from maxtext_lite.batching.schedule import decay, warm_up
from maxtext_lite.config import Config, DataConfig, SourceList, UserError
from maxtext_lite.config.errors import any_of, rounded_text
from maxtext_lite.config.keys import name_of_path, source_kind
from maxtext_lite.data.order import FILE_ORDER, check_id, example_ids, examples_hash
from maxtext_lite.data.own_examples import OwnExamples
from maxtext_lite.data.rows import Documents
from maxtext_lite.data.sources import ExampleSource, Opened, open_path, open_sources

LONGEST_PERIOD = 2**16
"""Rows of the longest period that is tabulated."""

_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)


def rule_of(weights: Sequence[Fraction]) -> MixtureRule:
    """The rule for these weights of rows, of which only ratios matter.

    Raises:
      ValueError: there are no weights, or one is not above 0.
    """
    if not weights or min(weights) <= 0:
        raise ValueError(f"no mixture of the weights {[str(weight) for weight in weights]}")
    total = sum(weights, Fraction(0))
    shares = tuple(weight / total for weight in weights)
    period = math.lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return _periodic(tuple(int(share * period) for share in shares))
    return _tree(shares)


@dataclasses.dataclass(frozen=True)
class PeriodicRule:
    """Tijdeman's rule, tabulated over one period.

    After any n rows, source s has given n x share rows to within 1 - 1 / (2k - 2) for k sources, exactly for one. So at
    the end of the period, where every source is due a whole number of rows, each has given exactly that, and the period
    repeats.

    Attributes:
      source_of: the source of each row of a period, int64.
      rank_of: the number of rows that this source has given earlier in the period, int64.
      rows: rows of each source in a period, int64.
    Source: Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32, theorem 1.
    """

    source_of: np.ndarray
    rank_of: np.ndarray
    rows: np.ndarray

    def rows_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source at each of these positions of the mixture, and the position within that source; int64."""
        periods, places = np.divmod(positions, len(self.source_of))
        sources = self.source_of[places]
        return sources, periods * self.rows[sources] + self.rank_of[places]

    def counts(self, n: int) -> list[int]:
        """Rows that each source has given after n rows."""
        periods, part = divmod(n, len(self.source_of))
        begun = np.bincount(self.source_of[:part], minlength=len(self.rows))
        return [periods * int(whole) + int(more) for whole, more in zip(self.rows, begun, strict=True)]


@dataclasses.dataclass(frozen=True)
class TreeRule:
    """A Huffman tree over the sources, each node of which divides its rows in order, as exactly as whole rows allow.

    Of a node's first m rows, floor(m p + 1/2) go left, where p is the left child's share of the node's weight. This
    differs from m p by at most 1/2, and the rows that go right differ as little from m (1 - p). If a node of weight W
    has received m rows, e away from n W, then a child of weight w receives n w to within 1/2 + e w / W. For a source of
    weight w the difference is thus at most half the sum of w / W(v) over the nodes v on its path, including the source
    but not the root.

    Whatever the weights, this is below 1.68 = psi / 2, where psi is the sum of the reciprocal Fibonacci numbers:
    Huffman merges the two lightest nodes, so that a node's sibling weighs at least as much as each of the node's own
    children, which were merged earlier; weights along the way up thus grow at least like the Fibonacci numbers
    1, 1, 2, 3, 5, ...

    p is rounded to 64 bits, which changes a count by less than n / 2**63 rows.

    Attributes:
      children: left and right child of each node, the root first; a negative child means source -1 - child. int64
        [nodes, 2].
      left_shares: 2**64 p of each node, uint64.
    Source: for the growth of weights, Buro 1993, "On the maximum length of Huffman codes".
    """

    children: np.ndarray
    left_shares: np.ndarray

    def rows_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source at each of these positions of the mixture, and the position within that source; int64."""
        sources = np.empty(len(positions), np.int64)
        ranks = positions.astype(np.uint64)
        nodes, walking = np.zeros(len(positions), np.int64), np.arange(len(positions))
        while len(walking):
            here, rank = nodes[walking], ranks[walking]
            shares = self.left_shares[here]
            before = _rounded_share(rank, shares)
            right = _rounded_share(rank + np.uint64(1), shares) == before
            ranks[walking] = np.where(right, rank - before, before)
            nodes[walking] = self.children[here, right.astype(np.int64)]
            is_source = nodes[walking] < 0
            sources[walking[is_source]] = -1 - nodes[walking[is_source]]
            walking = walking[~is_source]
        return sources, ranks.astype(np.int64)

    def counts(self, n: int) -> list[int]:
        """Rows that each source has given after n rows."""
        counts = [0] * (len(self.children) + 1)
        waiting = [(0, n)]
        while waiting:
            node, rows = waiting.pop()
            left = (rows * int(self.left_shares[node]) + 2**63) >> 64
            for child, given in zip(self.children[node].tolist(), (left, rows - left), strict=True):
                if child < 0:
                    counts[-1 - child] = given
                else:
                    waiting.append((child, given))
        return counts


MixtureRule: TypeAlias = PeriodicRule | TreeRule


def position_of(rule: MixtureRule, source: int, rank: int) -> int:
    """The position of a mixture at which a source gives its row number `rank`, counted from 0."""
    low, high = rank, rank + 1
    while rule.counts(high)[source] <= rank:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if rule.counts(middle)[source] <= rank else (low, middle)
    return low


@functools.lru_cache(maxsize=16)
def _periodic(rows: tuple[int, ...]) -> PeriodicRule:
    """The period in which source s gives rows[s] rows.

    Among the sources that may give the next row, the one with the earliest deadline gives it, and among equals the
    first. Row j of s may be row n of the mixture, counted from 1, once n x share - j >= 1 / (2k - 2), and must be given
    before n x share - j exceeds 1 - 1 / (2k - 2).
    """
    period, unit = sum(rows), max(2 * len(rows) - 2, 1)
    becoming: list[list[int]] = [[] for _ in range(period + 1)]  # sources whose next row may be given from here on
    given = [0] * len(rows)

    def wait(source: int, n: int) -> None:
        first = -(-period * (1 + unit * given[source]) // (unit * rows[source]))
        becoming[max(first, n)].append(source)

    for source in range(len(rows)):
        wait(source, 1)
    ready: list[tuple[int, int]] = []
    source_of, rank_of = np.zeros((2, period), np.int64)
    for n in range(1, period + 1):
        for source in becoming[n]:
            last = (unit * (given[source] + 1) - 1) * period // (unit * rows[source])
            heapq.heappush(ready, (last, source))
        _, source = heapq.heappop(ready)
        source_of[n - 1], rank_of[n - 1] = source, given[source]
        given[source] += 1
        if given[source] < rows[source]:
            wait(source, n + 1)
    return PeriodicRule(source_of, rank_of, np.array(rows, np.int64))


def _rounded_share(rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """floor(rows x shares / 2**64 + 1/2), exact through 128-bit products; uint64."""
    rows_high, rows_low, shares_high, shares_low = rows >> _HALF, rows & _LOW, shares >> _HALF, shares & _LOW
    low, left, right = rows_low * shares_low, rows_high * shares_low, rows_low * shares_high
    middle = (low >> _HALF) + (left & _LOW) + (right & _LOW)
    high = rows_high * shares_high + (left >> _HALF) + (right >> _HALF) + (middle >> _HALF)
    return high + ((middle >> np.uint64(31)) & np.uint64(1))


@functools.lru_cache(maxsize=16)
def _tree(shares: tuple[Fraction, ...]) -> TreeRule:
    # Merge the two lightest; among equal weights, the earlier one.
    heap = [(share, source, -1 - source) for source, share in enumerate(shares)]
    heapq.heapify(heap)
    merged: list[tuple[int, int, Fraction]] = []
    while len(heap) > 1:
        (light, _, one), (heavy, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged.append((one, other, light / (light + heavy)))
        heapq.heappush(heap, (light + heavy, len(shares) + len(merged), len(merged) - 1))
    last = len(merged) - 1  # the root, which becomes node 0
    children = [[child if child < 0 else last - child for child in pair[:2]] for pair in reversed(merged)]
    left = [min(max(round(share * 2**64), 1), 2**64 - 1) for _, _, share in reversed(merged)]
    return TreeRule(np.array(children, np.int64), np.array(left, np.uint64))


_SALT_BYTES = 8


@dataclasses.dataclass(frozen=True)
class MixtureComponent:
    """The part of a source in a mixture.

    Attributes:
      name: for people; the fingerprint identifies the source.
      fingerprint: fingerprint of its rows.
      row_weight: exact, as "3/10"; the rows of a mixture are divided among its sources in proportion to it.
      most_rows: limit on the source's rows in the whole run; None: no limit.
    """

    name: str
    fingerprint: str
    row_weight: str
    most_rows: int | None


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The composition of a run's rows from one position on.

    Attributes:
      examples_seen: examples of the run before the mixture's first row; `tokens_seen`: their target tokens.
      parts: in the order of fingerprints, so that the order of sources in a config does not matter.
    """

    examples_seen: int
    tokens_seen: int
    parts: tuple[MixtureComponent, ...]

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Mixture:
        """The mixture in a checkpoint's JSON."""
        parts = tuple(MixtureComponent(**part) for part in entries["parts"])
        return cls(entries["examples_seen"], entries["tokens_seen"], parts)

    @property
    def meaning(self) -> list[tuple[str, Fraction, int | None]]:
        """Everything that the rows depend on: neither names nor the scale of the weights."""
        weights = [Fraction(part.row_weight) for part in self.parts]
        return [
            (part.fingerprint, weight / sum(weights), part.most_rows)
            for part, weight in zip(self.parts, weights, strict=True)
        ]


History = tuple[Mixture, ...]
"""The mixtures of a run, the first from example 0."""


def history_of(parts: Sequence[MixtureComponent]) -> History:
    """The history of a run that begins with these parts."""
    return (Mixture(0, 0, tuple(sorted(parts, key=lambda part: part.fingerprint))),)


def continued(history: History, parts: Sequence[MixtureComponent], *, examples_seen: int, tokens_seen: int) -> History:
    """The history of a run that continues with these parts after `examples_seen` examples.

    Raises:
      UserError: a source has the name of an earlier one but other rows.
    """
    now = dataclasses.replace(history_of(parts)[0], examples_seen=examples_seen, tokens_seen=tokens_seen)
    known = {part.fingerprint for mixture in history for part in mixture.parts}
    named = {part.name: part.fingerprint for mixture in history for part in mixture.parts}
    changed = [
        f"dataset_path: the source named {part.name} has other rows than the run's source of that name: its content or "
        "its tokenizer has changed. Use the text and the tokenizer that the run began with, or give the new source a "
        "name of its own."
        for part in now.parts
        if part.fingerprint not in known and part.name in named
    ]
    if changed:
        raise UserError(changed)
    if now.meaning == history[-1].meaning:
        return history
    earlier = tuple(mixture for mixture in history if mixture.examples_seen < examples_seen)
    return (*earlier, now)


def as_json(history: History) -> list[dict[str, Any]]:
    """A history for a checkpoint; `Mixture.of` reads its entries."""
    return [dataclasses.asdict(mixture) for mixture in history]


@dataclasses.dataclass(frozen=True)
class MixtureSegment:
    """Rows mixed by one rule: from the first row of a mixture, or from where a source was left out.

    Attributes:
      first: position in the run of the first row; `stop`: that after the last row, None: no end.
      sources: fingerprints, in the order of the rule.
      given: rows that each source gave before.
    """

    first: int
    stop: int | None
    sources: tuple[str, ...]
    rule: MixtureRule
    given: tuple[int, ...]

    def counts(self, examples_seen: int) -> dict[str, int]:
        """Rows that each source has contributed up to a position within the stretch or at its end."""
        more = self.rule.counts(examples_seen - self.first)
        return {name: given + n for name, given, n in zip(self.sources, self.given, more, strict=True)}


class MixtureSchedule:
    """The row at each position of a run, according to its history. Picklable and immutable.

    A source that has reached its limit is left out from its next turn on; the others continue by their weights.

    Attributes:
      last: the current mixture of the run.
      stretches: in order, without gaps; the last one ends only if no source is left.
      left_out: the sources that the last mixture leaves out, in order: fingerprints, and the positions in the run where
        each would have given another row.
      lone: the fingerprint of the source with which the run began alone; None: it began with several.
    """

    def __init__(self, history: History):
        first, self.last = history[0].parts, history[-1]
        self.lone = first[0].fingerprint if len(first) == 1 else None
        self.stretches: list[MixtureSegment] = []
        given: dict[str, int] = {}
        ends = [mixture.examples_seen for mixture in history[1:]]
        for mixture, end in zip(history, [*ends, None], strict=True):
            self.left_out: dict[str, int] = {}
            start: int | None = mixture.examples_seen
            live = list(mixture.parts)
            while live and start is not None:
                stretch, ended = _stretch(live, start, end, given)
                self.stretches.append(stretch)
                if stretch.stop is not None:
                    given |= stretch.counts(stretch.stop)
                start = None
                if ended is not None and stretch.stop is not None:
                    start = self.left_out[ended.fingerprint] = stretch.stop
                    live.remove(ended)

    @property
    def end(self) -> int | None:
        """The position from which no source has a row left; None: there is none."""
        return self.stretches[-1].stop

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """The rows at positions `first .. first + count - 1` of the run.

        Returns:
          For each row the number of its source in the returned list of fingerprints, and its position within its
          source, which counts on through epochs; int64 [count].
        """
        numbers, positions, names = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], dict[str, int]()
        for stretch in self.stretches:
            stop = first + count if stretch.stop is None else min(first + count, stretch.stop)
            here = np.arange(max(first, stretch.first), stop, dtype=np.int64)
            if len(here):
                sources, ranks = stretch.rule.rows_at(here - stretch.first)
                own = [names.setdefault(name, len(names)) for name in stretch.sources]
                numbers.append(np.array(own, np.int64)[sources])
                positions.append(np.array(stretch.given, np.int64)[sources] + ranks)
        found = np.concatenate(numbers)
        if len(found) != count:
            raise IndexError(f"rows {first} to {first + count - 1} of a run whose sources end at {self.end}")
        return found, np.concatenate(positions), list(names)

    def given(self, examples_seen: int) -> dict[str, int]:
        """Rows that each source has given among the first `examples_seen` rows of the run."""
        counts: dict[str, int] = {}
        for stretch in self.stretches:
            if stretch.first <= examples_seen:
                end = examples_seen if stretch.stop is None else min(examples_seen, stretch.stop)
                counts |= stretch.counts(end)
        return counts

    def seed(self, fingerprint: str, seed: int) -> int:
        """The seed of a source's order: data_shuffle_seed itself for the source with which the run began alone."""
        if seed == FILE_ORDER or fingerprint == self.lone:
            return seed
        return int.from_bytes(hashlib.sha256(f"{seed}:{fingerprint}".encode()).digest()[:_SALT_BYTES], "big")

    def salt(self, fingerprint: str) -> int:
        """An offset for hashing the rows of a source; 0 for the source with which the run began alone."""
        if fingerprint == self.lone:
            return 0
        return int.from_bytes(hashlib.sha256(fingerprint.encode()).digest()[:_SALT_BYTES], "big")


def _stretch(
    live: Sequence[MixtureComponent], start: int, end: int | None, given: Mapping[str, int]
) -> tuple[MixtureSegment, MixtureComponent | None]:
    """The rows from `start` that these sources give, and the source whose limit ends them before `end`, if any."""
    rule = rule_of([Fraction(part.row_weight) for part in live])
    before = tuple(given.get(part.fingerprint, 0) for part in live)
    ended: MixtureComponent | None = None
    for number, (part, rows) in enumerate(zip(live, before, strict=True)):
        if part.most_rows is None:
            continue
        stop = start + position_of(rule, number, max(part.most_rows - rows, 0))
        if end is None or stop < end:
            end, ended = stop, part
    return MixtureSegment(start, end, tuple(part.fingerprint for part in live), rule, before), ended


MIXTURE = "mixture:"
"""Prefix of a mixture's fingerprint; the run's history records when it had which sources."""

_MOST_COUNTED = 2**20  # ids at a time


@dataclasses.dataclass(frozen=True)
class MixtureSource:
    """Sources whose examples are numbered consecutively: those of the first, then those of the second, and so on.

    Attributes:
      parts: the part of each source in the mixture, in the order of fingerprints; for held-out examples those of the
        corresponding training sources, or the held-out sets of the config, in their order.
      sources: in the same order.
      stream: the example at each position of the run; None for held-out examples, which have no such positions.
    """

    parts: tuple[MixtureComponent, ...]
    sources: tuple[ExampleSource, ...]
    stream: MixtureSchedule | None = None

    @functools.cached_property
    def _first_ids(self) -> np.ndarray:
        return np.cumsum([0, *(len(source) for source in self.sources)], dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the sources, without their weights."""
        return MIXTURE + ",".join(part.fingerprint for part in self.parts)

    @property
    def fields(self) -> Sequence[str]:
        """See `ExampleSource`; the same for all sources."""
        return self.sources[0].fields

    @property
    def notes(self) -> Sequence[str]:
        """The notes of the sources, with their names."""
        named = zip(self.parts, self.sources, strict=True)
        return [f"{part.name}: {note}" for part, source in named for note in source.notes]

    @property
    def num_sequences(self) -> int:
        """See `ExampleSource`."""
        return sum(source.num_sequences for source in self.sources)

    @property
    def ends(self) -> tuple[int, ...]:
        """The special tokens with which the answers of some source end."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(source.ends for source in self.sources)))

    def describe(self) -> list[dict[str, Any]]:
        """The entries of all sources, with their names."""
        named = zip(self.parts, self.sources, strict=True)
        return [about | {"name": part.name} for part, source in named for about in source.describe()]

    @property
    def num_tokens(self) -> int:
        """See `ExampleSource`; the same for all sources."""
        return self.sources[0].num_tokens

    @property
    def num_target_tokens(self) -> int:
        """Target tokens of all examples."""
        return sum(source.num_target_tokens for source in self.sources)

    def __len__(self) -> int:
        return int(self._first_ids[-1])

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """One example. Raises IndexError outside [0, len)."""
        check_id(example_id, len(self))
        number = int(np.searchsorted(self._first_ids, example_id, side="right")) - 1
        return self.sources[number][example_id - int(self._first_ids[number])]

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples; repeated ids count repeatedly."""
        numbers = self._numbers(example_ids)
        return sum(
            source.count_targets(example_ids[numbers == number] - first)
            for number, (source, first) in enumerate(zip(self.sources, self._first_ids.tolist(), strict=False))
        )

    def documents(self, example_ids: np.ndarray) -> Documents | None:
        """See `ExampleSource`."""
        numbers, found = self._numbers(example_ids), list[Documents]()
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

    def with_stream(self, stream: MixtureSchedule) -> MixtureSource:
        """The same sources in a run with this history."""
        return dataclasses.replace(self, stream=stream)

    def ids_of_run(self, first: int, count: int, seed: int) -> np.ndarray:
        """The examples at these positions of the run, int64."""
        numbers, positions, fingerprints = self._stream.rows(first, count)
        ids = np.empty(count, np.int64)
        places = {part.fingerprint: place for place, part in enumerate(self.parts)}
        for number, fingerprint in enumerate(fingerprints):
            own = numbers == number
            if not own.any():
                continue
            if (place := places.get(fingerprint)) is None:
                raise UserError("dataset_path: the run has read rows here from a source that is no longer listed.")
            keys = {"num_examples": len(self.sources[place]), "seed": self._stream.seed(fingerprint, seed)}
            # The positions within a source are consecutive, whatever lies between its rows.
            ids[own] = self._first_ids[place] + example_ids(int(positions[own][0]), int(own.sum()), **keys)
        return ids

    def hashed(self, ids: np.ndarray) -> np.ndarray:
        """Values for `order.examples_hash` in place of ids, which change with the list of sources; uint64."""
        hashed = np.empty(len(ids), np.uint64)
        numbers = self._numbers(ids)
        for number, part in enumerate(self.parts):
            own = numbers == number
            rows = (ids[own] - self._first_ids[number]).astype(np.uint64)
            hashed[own] = rows + np.uint64(self._stream.salt(part.fingerprint))
        return hashed

    def row_ids(self, ids: np.ndarray) -> list[tuple[str, int]]:
        """For each example the name of its source and its number there."""
        numbers = self._numbers(ids)
        rows = (ids - self._first_ids[numbers]).tolist()
        return [(self.parts[number].name, row) for number, row in zip(numbers.tolist(), rows, strict=True)]

    def epochs(self, examples_seen: int) -> dict[str, float]:
        """How often each source has been read up to a position of the run, by name."""
        given = self._stream.given(examples_seen)
        named = zip(self.parts, self.sources, strict=True)
        return {part.name: given.get(part.fingerprint, 0) / len(source) for part, source in named}

    def target_tokens(self, first: int, stop: int, seed: int) -> dict[str, int]:
        """Exact target tokens that each source gives between two positions of the run, by name."""
        before, after = self._stream.given(first), self._stream.given(stop)
        return {
            part.name: _target_tokens(
                source,
                before.get(part.fingerprint, 0),
                after.get(part.fingerprint, 0),
                self._stream.seed(part.fingerprint, seed),
            )
            for part, source in zip(self.parts, self.sources, strict=True)
        }

    @property
    def _stream(self) -> MixtureSchedule:
        assert self.stream is not None, "these examples belong to no run"
        return self.stream


def each_config(config: DataConfig) -> list[DataConfig]:
    """The config of each source by itself; the first also gets the held-out text, if there is one without a name."""
    if isinstance(config.eval_dataset_path, SourceList):
        config = config.model_copy(update={"eval_dataset_path": "", "eval_fraction": 0.0})
    if not isinstance(config.dataset_path, SourceList):
        return [config]
    first, *others = [{"dataset_path": entry.path} for entry in config.dataset_path.entries]
    none = {"eval_dataset_path": "", "eval_fraction": 0.0} if config.eval_dataset_path else {}
    return [config.model_copy(update=update) for update in [first, *(other | none for other in others)]]


def joined(config: DataConfig, opened: Sequence[Opened], held_out: Sequence[ExampleSource]) -> Opened:
    """The sources opened for each of `each_config`, as one; the source itself if the config does not list several.

    Args:
      held_out: the held-out sets that the config names.
    Raises:
      UserError: two sources have the same rows.
    """
    training, held_out_of_training = _joined(config, opened)
    if not isinstance(config.eval_dataset_path, SourceList):
        return training, held_out_of_training
    named = zip(config.eval_dataset_path.entries, held_out, strict=True)
    parts = tuple(MixtureComponent(entry.name, source.fingerprint, "1", None) for entry, source in named)
    return training, MixtureSource(parts, tuple(held_out))


def _joined(config: DataConfig, opened: Sequence[Opened]) -> Opened:
    if not isinstance(config.dataset_path, SourceList):
        return opened[0]
    parts = parts_of(config, [training for training, _ in opened])
    training = _in_order(parts, [training for training, _ in opened])
    named = [(part, source) for part, (_, source) in zip(parts, opened, strict=True) if source is not None]
    if not named or config.eval_dataset_path:
        return training, opened[0][1]
    return training, _in_order(*zip(*named, strict=True))


def open_mixture(config: Config, *, vocab_size: int | None = None) -> Opened:
    """All sources that the config lists, opened by `open_sources` as for a run, as one.

    Raises:
      UserError: one cannot be opened, or two have the same rows.
    """
    return joined(config, *opened_sources(config, vocab_size=vocab_size))


def opened_sources(config: Config, *, vocab_size: int | None) -> tuple[Sequence[Opened], Sequence[ExampleSource]]:
    """What a run has of each source that the config lists, and each held-out set that it names.

    Arguments and errors as of `open_sources`.
    """
    opened = [open_sources(each, vocab_size=vocab_size) for each in each_config(config)]
    listed = config.eval_dataset_path
    entries = listed.entries if isinstance(listed, SourceList) else ()
    held_out = [open_path(config, key="eval_dataset_path", path=entry.path, vocab_size=vocab_size) for entry in entries]
    return opened, held_out


def parts_of(config: DataConfig, sources: Sequence[ExampleSource]) -> list[MixtureComponent]:
    """The part of each source in the mixture of a config; a single source has all of it.

    A weight is a share of target tokens; divided by the mean target tokens of the source's rows, it is one of rows.

    Raises:
      UserError: two sources have the same rows.
    """
    if isinstance(sources[0], MixtureSource):
        return list(sources[0].parts)
    if isinstance(sources[0], OwnExamples):
        return [MixtureComponent("", sources[0].fingerprint, "1", None)]
    if not isinstance(config.dataset_path, SourceList):
        return [MixtureComponent(name_of_path(config.dataset_path), sources[0].fingerprint, "1", None)]
    parts: dict[str, MixtureComponent] = {}
    for entry, source in zip(config.dataset_path.entries, sources, strict=True):
        if twin := parts.get(source.fingerprint):
            raise UserError(
                f"dataset_path: the sources {twin.name} and {entry.name} have the same rows. Leave out one, and "
                "give the other the sum of their weights."
            )
        most = None if entry.max_epochs == -1 else int(entry.max_epochs * len(source))
        weight = entry.weight * len(source) / source.num_target_tokens
        parts[source.fingerprint] = MixtureComponent(entry.name, source.fingerprint, str(weight), most)
    return list(parts.values())


def _in_order(parts: Sequence[MixtureComponent], sources: Sequence[ExampleSource]) -> MixtureSource:
    ordered = sorted(zip(parts, sources, strict=True), key=lambda pair: pair[0].fingerprint)
    return MixtureSource(tuple(part for part, _ in ordered), tuple(source for _, source in ordered))


def named_sources(source: ExampleSource) -> dict[str, ExampleSource]:
    """The sources of a mixture by name; any other source under an empty name."""
    if not isinstance(source, MixtureSource):
        return {"": source}
    return {part.name: each for part, each in zip(source.parts, source.sources, strict=True)}


def ids_of_run(source: ExampleSource, first: int, count: int, *, seed: int) -> np.ndarray:
    """The examples at positions `first` to `first + count - 1` of a run with one source or a mixture; int64."""
    if isinstance(source, MixtureSource):
        return source.ids_of_run(first, count, seed)
    return example_ids(first, count, num_examples=len(source), seed=seed)


def hash_of_run(source: ExampleSource, ids: np.ndarray) -> str:
    """`order.examples_hash` of examples that a run consumed, from one source or a mixture."""
    return examples_hash(source.hashed(ids) if isinstance(source, MixtureSource) else ids)


def target_tokens_between(source: ExampleSource, first: int, stop: int, *, seed: int) -> int:
    """Exact target tokens of the examples at positions `first` to `stop - 1` of a run."""
    if isinstance(source, MixtureSource):
        return sum(source.target_tokens(first, stop, seed).values())
    return _target_tokens(source, first, stop, seed)


def _target_tokens(source: ExampleSource, first: int, stop: int, seed: int) -> int:
    """The same for one source; of an incomplete epoch, the smaller of the part and the rest is counted."""
    if source.num_target_tokens == len(source) * source.num_tokens:  # every row is full
        return (stop - first) * source.num_tokens

    def count(start: int, end: int) -> int:
        pieces = [(at, min(at + _MOST_COUNTED, end)) for at in range(start, end, _MOST_COUNTED)]
        return sum(
            source.count_targets(example_ids(at, to - at, num_examples=len(source), seed=seed)) for at, to in pieces
        )

    tokens = 0
    while first < stop:
        epoch, place = divmod(first, len(source))
        here = min(stop - first, len(source) - place)
        if here == len(source):  # this and all other whole epochs
            here = (stop - first) // len(source) * len(source)
            tokens += here // len(source) * source.num_target_tokens
        elif 2 * here <= len(source):
            tokens += count(first, first + here)
        else:
            start, end = epoch * len(source), (epoch + 1) * len(source)
            tokens += source.num_target_tokens - count(start, first) - count(first + here, end)
        first += here
    return tokens


def with_history(
    config: DataConfig, source: Any, saved: Sequence[Mapping[str, Any]] = (), seen: tuple[int, int] = (0, 0)
) -> tuple[Any, list[dict[str, Any]]]:
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
    if isinstance(source, MixtureSource):
        source = source.with_stream(MixtureSchedule(history))
    elif len(history) > 1:
        source = MixtureSource(tuple(parts), (source,), MixtureSchedule(history))
    return source, as_json(history)


def steps_left(config: DataConfig, plan: BatchPlan, source: Any, *, step: int, examples_seen: int) -> int:
    """Steps that a run has left; with mixture_exhausted=stop, only those that end before a source does.

    Raises:
      UserError: a source would exceed its max_epochs, or no source would be left.
    """
    left = plan.length.steps_left(step, examples_seen)
    ends = plan.length.examples_after(left, examples_seen)
    ended = _ended(source, ends)
    if not ended:
        return left
    (name, position), *_ = ended.items()
    mode, last = config.mixture_exhausted, source.stream.end
    is_never_empty = last is None or ends <= last
    if mode == "drop" and is_never_empty:
        return left
    said = f"max_epochs of the source {name} is reached at example {position:,}"
    if mode == "drop" and last is not None:
        said, position = f"max_epochs leaves no source after example {last:,}", last
    fitting = plan.length.steps_within(examples_seen, position)
    if mode == "stop" and step + fitting:
        return fitting
    works = [f"steps={step + fitting}", "mixture_exhausted=stop"] if step + fitting else []
    works += ["mixture_exhausted=drop"] if is_never_empty else []
    raise UserError(
        f"dataset_path: {said}, and the run has {ends:,}. Nearest that work: {any_of([*works, 'a larger max_epochs'])}."
    )


def nothing_left(plan: BatchPlan, *, step: int, examples_seen: int) -> str:
    """Why a run of which `steps_left` are 0 has none left."""
    if plan.length.steps_left(step, examples_seen):
        return "its data end there"
    stated = plan.length.stated_steps
    return "none is left" if stated is None else f"none is left of the {stated} that are asked for"


def _ended(source: Any, end: int) -> dict[str, int]:
    """The sources that reach their limit before a run's end: names, and the positions of their next turns."""
    if not isinstance(source, MixtureSource) or source.stream is None:
        return {}
    names = {part.fingerprint: part.name for part in source.parts}
    return {names[each]: position for each, position in source.stream.left_out.items() if position < end}


def mixture_table(source: Any, first: int, end: int) -> list[dict[str, Any]]:
    """What a run takes from each source between two positions, as JSON; [] without a mixture.

    `rows` and `token_share` are for these positions, by the sources' mean target tokens; `epochs` for the whole run.
    """
    if not isinstance(source, MixtureSource) or source.stream is None:
        return []
    before, after = source.epochs(first), source.epochs(end)
    table: list[dict[str, Any]] = [
        {
            "name": part.name,
            "examples": len(each),
            "target_tokens": each.num_target_tokens,
            "rows": round((after[part.name] - before[part.name]) * len(each)),
            "token_share": (after[part.name] - before[part.name]) * each.num_target_tokens,
            "epochs": after[part.name],
        }
        for part, each in zip(source.parts, source.sources, strict=True)
    ]
    total = sum(row["token_share"] for row in table) or 1
    return [row | {"token_share": row["token_share"] / total} for row in table]


def mixture_sentences(config: DataConfig, source: Any, first: int, end: int) -> list[str]:
    """A `mixture_table` for people, with the sources that the run leaves out, or the one that ends it."""
    stops = config.mixture_exhausted == "stop"
    ended = list(_ended(source, sys.maxsize if stops else end).items())
    what = f"the run ends with example {end:,}" if stops else "the others go on"
    return [
        f"source {row['name']}: {row['examples']:,} examples, {row['target_tokens']:,} target tokens; {row['rows']:,} "
        f"rows to be read, {row['token_share']:.4%} of the tokens; {rounded_text(row['epochs'])} epochs in the "
        "whole run"
        for row in mixture_table(source, first, end)
    ] + [
        f"source {name} has given all rows of its max_epochs when its turn comes at example {position:,}: {what}"
        for name, position in (ended[:1] if stops else ended)
    ]


def early_stop_note(config: Config, plan: BatchPlan, *, steps: int, examples_seen: int) -> list[str]:
    """A sentence on the learning rate of a run that its data end before its schedule does; [] for any other run.

    The schedule ends where the run would without a limit of its data, as a run that resumes with more needs it.

    Args:
      steps, examples_seen: at the end of the run.
    """
    if not plan.length.steps_left(steps, examples_seen):
        return []
    last = plan.schedule_end(config.schedule_unit, steps, examples_seen)
    # Tokens are taken to be as many in each example.
    end = steps if config.schedule_unit == "steps" else examples_seen / plan.global_batch_to_train
    at_end, planned = (
        float(decay(config, np.float64(u), last, np) * warm_up(config, np.float64(u), last, np)) for u in (end, last)
    )
    if at_end <= planned:
        return []
    return [
        f"the run ends after {steps:,} of steps={plan.steps}, for which its learning rate is scheduled: the rate is "
        f"then still about {at_end:.1%} of its peak, not {planned:.1%}. A new run with steps={steps} completes its "
        "schedule."
    ]
