"""The rows of a run whose mixture may change: a closed form over its mixtures and the positions at which they begin.

A run needs to remember nothing but that list and the number of examples seen; how far each source has been read
follows.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.mixture_rule import MixtureRule, position_of, rule_of
from maxtext_lite.data.order import FILE_ORDER

_SALT_BYTES = 8


@dataclasses.dataclass(frozen=True)
class SourcePart:
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
    parts: tuple[SourcePart, ...]

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Mixture:
        """The mixture in a checkpoint's JSON."""
        parts = tuple(SourcePart(**part) for part in entries["parts"])
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


def history_of(parts: Sequence[SourcePart]) -> History:
    """The history of a run that begins with these parts."""
    return (Mixture(0, 0, tuple(sorted(parts, key=lambda part: part.fingerprint))),)


def continued(history: History, parts: Sequence[SourcePart], *, examples_seen: int, tokens_seen: int) -> History:
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
class Stretch:
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


class RowStream:
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
        self.stretches: list[Stretch] = []
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
    live: Sequence[SourcePart], start: int, end: int | None, given: Mapping[str, int]
) -> tuple[Stretch, SourcePart | None]:
    """The rows from `start` that these sources give, and the source whose limit ends them before `end`, if any."""
    rule = rule_of([Fraction(part.row_weight) for part in live])
    before = tuple(given.get(part.fingerprint, 0) for part in live)
    ended: SourcePart | None = None
    for number, (part, rows) in enumerate(zip(live, before, strict=True)):
        if part.most_rows is None:
            continue
        stop = start + position_of(rule, number, max(part.most_rows - rows, 0))
        if end is None or stop < end:
            end, ended = stop, part
    return Stretch(start, end, tuple(part.fingerprint for part in live), rule, before), ended
