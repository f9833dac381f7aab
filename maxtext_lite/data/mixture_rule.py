"""The source of each row of a mixture, by rules that compute any position without earlier ones.

Nothing is drawn or stored. Weights are exact fractions, and rounding happens in integers, so all hosts agree.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np

LONGEST_PERIOD = 2**16
"""Rows of the longest period that is tabulated."""

_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)


def rule_of(weights: Sequence[Fraction]) -> MixtureRule:
    """The rule for these weights of rows; only their ratios matter.

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
        whole = [periods * rows for rows in self.rows.tolist()]
        return [*map(operator.add, whole, begun.tolist())]


@dataclasses.dataclass(frozen=True)
class TreeRule:
    """A Huffman tree over the sources; each node divides its rows in order, as exactly as whole rows allow.

    Of a node's first m rows, floor(m p + 1/2) go left, where p is the left child's share of the node's weight. This
    differs from m p by at most 1/2, and the rows that go right differ as little from m (1 - p). If a node of weight W
    has received m rows, e away from n W, then a child of weight w receives n w to within 1/2 + e w / W. For a source of
    weight w the difference is thus at most half the sum of w / W(v) over the nodes v on its path, including the source
    but not the root.

    Whatever the weights, this is below 1.68 = psi / 2, where psi is the sum of the reciprocal Fibonacci numbers:
    Huffman merges the two lightest nodes, so a node's sibling weighs at least as much as each of the node's own
    children, which were merged earlier; weights along the way up thus grow at least like the Fibonacci numbers 1, 1, 2,
    3, 5, ...

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
    """The mixture's position of a source's row number `rank`, counted from 0."""
    end = rank + 1
    while rule.counts(end)[source] <= rank:
        end *= 2

    def given(rows: int) -> int:
        return rule.counts(rows)[source]

    return bisect.bisect_right(range(end), rank, key=given) - 1


@functools.lru_cache(maxsize=16)
def _periodic(rows: tuple[int, ...]) -> PeriodicRule:
    """One period of the rule: source s gives rows[s] rows.

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
        both = light + heavy
        left_share = round(light / both * 2**64)
        left_shares[node] = min(max(left_share, 1), 2**64 - 1)
        heapq.heappush(heap, (both, len(shares) + root - node, node))
    return TreeRule(children, left_shares)
