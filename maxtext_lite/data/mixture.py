"""A mixture of sources: which source gives each row, the history over restarts, and the shares of a run.

Nothing is drawn or stored, so that the rows at any positions are known without earlier ones. Weights are exact
fractions, and rounding happens in integers, so that all hosts agree.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import heapq
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
from maxtext_lite.data.order import FILE_ORDER, example_ids
from maxtext_lite.data.rows import Documents
from maxtext_lite.data.source import ExampleSource, check_id
from maxtext_lite.data.sources import Opened, open_path, open_sources

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
        ranks = positions.astype(np.uint64)
        nodes = np.zeros(len(positions), np.int64)
        walking = np.arange(len(positions))  # those that have not reached a source
        while len(walking):
            node = nodes[walking]
            rank = ranks[walking]
            shares = self.left_shares[node]
            before = _rounded_share(rank, shares)
            goes_right = _rounded_share(rank + np.uint64(1), shares) == before
            ranks[walking] = np.where(goes_right, rank - before, before)
            nodes[walking] = self.children[node, goes_right.astype(np.int64)]
            walking = walking[nodes[walking] >= 0]
        return -1 - nodes, ranks.astype(np.int64)

    def counts(self, n: int) -> list[int]:
        """Rows that each source has given after n rows."""
        counts = [0] * (len(self.children) + 1)
        waiting = [(0, n)]
        while waiting:
            node, rows = waiting.pop()
            if node < 0:
                counts[-1 - node] = rows
                continue
            left = (rows * int(self.left_shares[node]) + 2**63) >> 64
            left_child, right_child = self.children[node].tolist()
            waiting += [(left_child, left), (right_child, rows - left)]
        return counts


MixtureRule: TypeAlias = PeriodicRule | TreeRule


def position_of(rule: MixtureRule, source: int, rank: int) -> int:
    """The position of a mixture at which a source gives its row number `rank`, counted from 0."""
    end = rank + 1
    while rule.counts(end)[source] <= rank:
        end *= 2
    return bisect.bisect_right(range(end), rank, key=lambda rows: rule.counts(rows)[source]) - 1


@functools.lru_cache(maxsize=16)
def _periodic(rows: tuple[int, ...]) -> PeriodicRule:
    """The period in which source s gives rows[s] rows.

    Among the sources that may give the next row, the one with the earliest deadline gives it, and among equals the
    first. Row j of s may be row n of the mixture, counted from 1, once n x share - j >= 1 / (2k - 2), and must be given
    before n x share - j exceeds 1 - 1 / (2k - 2).
    """
    period = sum(rows)
    unit = max(2 * len(rows) - 2, 1)
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
        source_of[n - 1] = source
        rank_of[n - 1] = given[source]
        given[source] += 1
        if given[source] < rows[source]:
            wait(source, n + 1)
    return PeriodicRule(source_of, rank_of, np.array(rows, np.int64))


def _rounded_share(rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """floor(rows x shares / 2**64 + 1/2), exact through 128-bit products; uint64."""
    rows_high = rows >> _HALF
    rows_low = rows & _LOW
    shares_high = shares >> _HALF
    shares_low = shares & _LOW
    left = rows_high * shares_low
    right = rows_low * shares_high
    middle = (rows_low * shares_low >> _HALF) + (left & _LOW) + (right & _LOW)
    high = rows_high * shares_high + (left >> _HALF) + (right >> _HALF) + (middle >> _HALF)
    return high + ((middle >> np.uint64(31)) & np.uint64(1))


@functools.lru_cache(maxsize=16)
def _tree(shares: tuple[Fraction, ...]) -> TreeRule:
    heap = [(share, source, -1 - source) for source, share in enumerate(shares)]
    heapq.heapify(heap)
    root = len(shares) - 2  # nodes are numbered from the last one merged, the root
    children = np.zeros((len(shares) - 1, 2), np.int64)
    left_shares = np.zeros(len(shares) - 1, np.uint64)
    for node in range(root, -1, -1):
        # Merge the two lightest; among equal weights, the earlier one.
        light, _, left = heapq.heappop(heap)
        heavy, _, right = heapq.heappop(heap)
        children[node] = left, right
        left_shares[node] = min(max(round(light / (light + heavy) * 2**64), 1), 2**64 - 1)
        heapq.heappush(heap, (light + heavy, len(shares) + root - node, node))
    return TreeRule(children, left_shares)


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
        total = sum(Fraction(part.row_weight) for part in self.parts)
        return [(part.fingerprint, Fraction(part.row_weight) / total, part.most_rows) for part in self.parts]


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
    known = {part.fingerprint for mixture in history for part in mixture.parts}
    named = {part.name for mixture in history for part in mixture.parts}
    for part in parts:
        if part.name in named and part.fingerprint not in known:
            raise UserError(
                f"dataset_path: the source named {part.name} has other rows than the run's source of that name. Give "
                "it a name of its own, or use the run's text and tokenizer."
            )
    now = dataclasses.replace(history_of(parts)[0], examples_seen=examples_seen, tokens_seen=tokens_seen)
    if now.meaning == history[-1].meaning:
        return history
    earlier = [mixture for mixture in history if mixture.examples_seen < examples_seen]
    return (*earlier, now)


NO_END = sys.maxsize
"""The end of rows that have none."""


@dataclasses.dataclass(frozen=True)
class MixtureSegment:
    """Rows mixed by one rule: from the first row of a mixture, or from where a source was left out.

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

    A source that has reached its limit is left out from its next turn on; the others continue by their weights.

    Attributes:
      last: the current mixture of the run.
      segments: in order, without gaps; the last one ends only if no source is left.
      left_out: the sources that the last mixture leaves out, in order: fingerprints, and the positions in the run where
        each would have given another row.
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
        """Rows that each source has given among the first `examples_seen` rows of the run."""
        counts: dict[str, int] = {}
        for segment in self.segments:
            if segment.first <= examples_seen:
                counts |= segment.counts(min(examples_seen, segment.stop))
        return counts

    def seed(self, fingerprint: str, seed: int) -> int:
        """The seed of a source's order: data_shuffle_seed itself for the source with which the run began alone."""
        if seed == FILE_ORDER or fingerprint == self.lone:
            return seed
        return _hash(f"{seed}:{fingerprint}")

    def salt(self, fingerprint: str) -> int:
        """An offset for hashing the rows of a source; 0 for the source with which the run began alone."""
        return 0 if fingerprint == self.lone else _hash(fingerprint)


def _segment(
    live: Sequence[MixtureComponent], start: int, end: int, given: Mapping[str, int]
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
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


MIXTURE = "mixture:"
"""Prefix of a mixture's fingerprint; the run's history records when it had which sources."""


@dataclasses.dataclass(frozen=True)
class MixtureSource(ExampleSource):
    """Sources whose examples are numbered consecutively: those of the first, then those of the second, and so on.

    Attributes:
      parts: the part of each source in the mixture, in the order of fingerprints; for held-out examples those of the
        corresponding training sources, or the held-out sets of the config, in their order.
      sources: in the same order.
      stream: which source gives each row of the run; None for held-out examples, which are read in order.
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
        return [f"{name}: {note}" for name, source in self.named().items() for note in source.notes]

    @property
    def ends(self) -> tuple[int, ...]:
        """The special tokens with which the answers of some source end."""
        return tuple(dict.fromkeys(end for source in self.sources for end in source.ends))

    def describe(self) -> list[dict[str, Any]]:
        """The entries of all sources, with their names."""
        return [about | {"name": name} for name, source in self.named().items() for about in source.describe()]

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
        return [(self.parts[number].name, row) for number, row in zip(numbers.tolist(), rows.tolist(), strict=True)]

    def ids_of_run(self, first: int, count: int, seed: int) -> np.ndarray:
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
        salts = np.array([self._stream.salt(part.fingerprint) for part in self.parts], np.uint64)
        numbers = self._numbers(ids)
        return (ids - self._first_ids[numbers]).astype(np.uint64) + salts[numbers]

    def epochs(self, examples_seen: int) -> dict[str, float]:
        """How often each source has been read up to a position of the run, by name."""
        given = self._stream.given(examples_seen)
        named = zip(self.parts, self.sources, strict=True)
        return {part.name: given.get(part.fingerprint, 0) / len(source) for part, source in named}

    def tokens_by_source(self, first: int, stop: int, seed: int) -> dict[str, int]:
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

    @property
    def _stream(self) -> MixtureSchedule:
        assert self.stream is not None, "these examples belong to no run"
        return self.stream


# ---- The sources of a config ------------------------------------------------------------------------------------


def open_mixture(config: Config, *, vocab_size: int | None = None) -> Opened:
    """The training and held-out examples of all sources that the config lists, as one source each.

    Raises:
      UserError: one cannot be opened, or two have the same rows.
    """
    if isinstance(config.eval_dataset_path, SourceList):
        without = config.model_copy(update={"eval_dataset_path": "", "eval_fraction": 0.0})
        training, _ = open_mixture(without, vocab_size=vocab_size)
        sets: list[tuple[MixtureComponent, ExampleSource]] = []
        for entry in config.eval_dataset_path.entries:
            source = open_path(config, key="eval_dataset_path", path=entry.path, vocab_size=vocab_size)
            sets.append((MixtureComponent(entry.name, source.fingerprint, "1", None), source))
        return training, _mixed(sets)
    if not isinstance(config.dataset_path, SourceList):
        return open_sources(config, vocab_size=vocab_size)
    has_eval_path = bool(config.eval_dataset_path)
    opened: list[Opened] = []
    for entry in config.dataset_path.entries:
        opened.append(open_sources(config.model_copy(update={"dataset_path": entry.path}), vocab_size=vocab_size))
        if has_eval_path:  # its text is opened with the first source
            config = config.model_copy(update={"eval_dataset_path": "", "eval_fraction": 0.0})
    parts = parts_of(config, [training for training, _ in opened])
    by_fingerprint = sorted(zip(parts, opened, strict=True), key=lambda pair: pair[0].fingerprint)
    training = _mixed([(part, training) for part, (training, _) in by_fingerprint])
    held_out = [(part, source) for part, (_, source) in by_fingerprint if source is not None]
    if has_eval_path:
        return training, held_out[0][1]
    return training, _mixed(held_out) if held_out else None


def _mixed(sources: Sequence[tuple[MixtureComponent, ExampleSource]]) -> MixtureSource:
    return MixtureSource(tuple(part for part, _ in sources), tuple(source for _, source in sources))


def parts_of(config: DataConfig, sources: Sequence[ExampleSource]) -> list[MixtureComponent]:
    """The part of each source in the mixture of a config; a single source has all of it.

    A weight is a share of target tokens; divided by the mean target tokens of the source's rows, it is one of rows.

    Raises:
      UserError: two sources have the same rows.
    """
    if isinstance(sources[0], MixtureSource):
        return list(sources[0].parts)
    if not isinstance(config.dataset_path, SourceList):
        name = name_of_path(config.dataset_path) if sources[0].is_of_dataset_path else ""
        return [MixtureComponent(name, sources[0].fingerprint, "1", None)]
    parts: dict[str, MixtureComponent] = {}
    for entry, source in zip(config.dataset_path.entries, sources, strict=True):
        if source.fingerprint in parts:
            raise UserError(
                f"dataset_path: the sources {parts[source.fingerprint].name} and {entry.name} have the same rows. "
                "Leave out one, and give the other the sum of their weights."
            )
        most = None if entry.max_epochs == -1 else int(entry.max_epochs * len(source))
        weight = entry.weight * len(source) / source.num_target_tokens
        parts[source.fingerprint] = MixtureComponent(entry.name, source.fingerprint, str(weight), most)
    return list(parts.values())


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
        source = dataclasses.replace(source, stream=MixtureSchedule(history))
    elif len(history) > 1:
        source = MixtureSource(tuple(parts), (source,), MixtureSchedule(history))
    return source, [dataclasses.asdict(mixture) for mixture in history]


# ---- The end of a run, and what it reads --------------------------------------------------------------------------


def steps_left(config: DataConfig, plan: BatchPlan, source: Any, *, step: int, examples_seen: int) -> int:
    """Steps that a run has left; with mixture_exhausted=stop, only those that end before a source does.

    Raises:
      UserError: a source would exceed its max_epochs, or no source would be left.
    """
    left = plan.length.steps_left(step, examples_seen)
    end = plan.length.examples_after(left, examples_seen)
    exhausted = _exhausted(source, end)
    if not exhausted:
        return left
    mode = config.mixture_exhausted
    name, position = next(iter(exhausted.items()))
    reached = f"max_epochs of the source {name} is reached at example {position:,}"
    if mode == "drop":
        if end <= source.stream.end:
            return left
        position = source.stream.end
        reached = f"max_epochs leaves no source after example {position:,}"
    fitting = plan.length.steps_within(examples_seen, position)
    works: list[str] = []
    if step + fitting:
        if mode == "stop":
            return fitting
        works += [f"steps={step + fitting}", "mixture_exhausted=stop"]
    if end <= source.stream.end:
        works.append("mixture_exhausted=drop")
    nearest = any_of([*works, "a larger max_epochs"])
    raise UserError(f"dataset_path: {reached}, and the run has {end:,}. Nearest that work: {nearest}.")


def nothing_left(plan: BatchPlan, *, step: int, examples_seen: int) -> str:
    """Why a run with no steps left has none."""
    if plan.length.steps_left(step, examples_seen):
        return "its data end there"
    stated = plan.length.stated_steps
    return "its epochs are over" if stated is None else f"steps={stated} asks for no more"


def _exhausted(source: Any, end: int) -> dict[str, int]:
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
    before = source.epochs(first)
    after = source.epochs(end)
    table: list[dict[str, Any]] = []
    for name, each in source.named().items():
        epochs = after[name] - before[name]
        table.append(
            {
                "name": name,
                "examples": len(each),
                "target_tokens": each.num_target_tokens,
                "rows": round(epochs * len(each)),
                "token_share": epochs * each.num_target_tokens,
                "epochs": after[name],
            }
        )
    total = sum(row["token_share"] for row in table) or 1
    for row in table:
        row["token_share"] /= total
    return table


def mixture_sentences(config: DataConfig, source: Any, first: int, end: int) -> list[str]:
    """A `mixture_table` for people, with the sources that the run leaves out, or the one that ends it."""
    sentences = [
        f"source {row['name']}: {row['examples']:,} examples, {row['target_tokens']:,} target tokens; {row['rows']:,} "
        f"rows to be read, {row['token_share']:.4%} of the tokens; {rounded_text(row['epochs'])} epochs in the "
        "whole run"
        for row in mixture_table(source, first, end)
    ]
    stops = config.mixture_exhausted == "stop"
    for name, position in _exhausted(source, NO_END if stops else end).items():
        then = f"the run ends with example {end:,}" if stops else "the others go on"
        sentences.append(f"source {name} reaches its max_epochs at example {position:,}: {then}")
        if stops:
            break
    return sentences


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
    positions = np.array([end, last], float)
    at_end, planned = (decay(config, positions, last, np) * warm_up(config, positions, last, np)).tolist()
    if at_end <= planned:
        return []
    return [
        f"the run ends after {steps:,} of steps={plan.steps}, for which its learning rate is scheduled: the rate is "
        f"then still about {at_end:.1%} of its peak, not {planned:.1%}. A new run with steps={steps} completes its "
        "schedule."
    ]
