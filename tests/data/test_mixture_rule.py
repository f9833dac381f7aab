import heapq
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from maxtext_lite.data.mixture_rule import (
    LONGEST_PERIOD,
    PeriodicRule,
    TreeRule,
    position_of,
    rule_of,
)

ROWS = 50_000
_RANDOM = random.Random(16)
FIBONACCI = [1, 1]
while len(FIBONACCI) < 30:
    FIBONACCI.append(sum(FIBONACCI[-2:]))

PERIODIC = {
    "one": [1],
    "thirds": ["1/3", "1/3", "1/3"],
    "five": [5, 3, 1, 1, 7],
    "35 sources": [_RANDOM.randint(1, 1800) for _ in range(35)],
    "the longest period": [LONGEST_PERIOD - 1, 1],
}
TREES = {
    "extreme": [1e-6, 1 - 1e-6],
    "irrational": [math.pi, math.e, math.sqrt(2)],
    "Huffman's worst": [1.0000001 * number for number in FIBONACCI],
    "100 sources": [_RANDOM.paretovariate(0.3) for _ in range(100)],
}
WEIGHTS = {
    name: [Fraction(str(w)) for w in weights]
    for name, weights in (PERIODIC | TREES).items()
}


def bound_of_tree(weights):
    """The maximum of half the sum of w / W over the nodes from a leaf of Huffman's tree up to below its root."""
    heap = [
        (weight, number, [(weight, Fraction(0))])
        for number, weight in enumerate(weights)
    ]
    order = len(heap)
    heapq.heapify(heap)
    while len(heap) > 1:
        merged, total = [], Fraction(0)
        for weight, _, leaves in (heapq.heappop(heap), heapq.heappop(heap)):
            merged += [(leaf, passed + 1 / weight) for leaf, passed in leaves]
            total += weight
        order += 1
        heapq.heappush(heap, (total, order, merged))
    return max(leaf * passed / 2 for leaf, passed in heap[0][2])


def worst_difference(rule, weights, rows=ROWS):
    """By counting: the largest difference of a source's rows from n x share over all n <= rows, to 1e-9."""
    sources, ranks = rule.rows_at(np.arange(rows))
    worst, total = 0.0, 0
    for source, weight in enumerate(weights):
        places = np.flatnonzero(sources == source)
        numbers = np.arange(len(places))
        np.testing.assert_array_equal(ranks[places], numbers)
        # A difference is largest just before or just after one of the source's rows, or at the end.
        share = float(weight / sum(weights))
        worst = max(worst, rows * share - len(places))
        if len(places):
            worst = max(
                worst,
                np.max(places * share - numbers),
                np.max(numbers + 1 - (places + 1) * share),
            )
        total += len(places)
    assert total == rows
    return worst - 1e-9


@pytest.mark.parametrize("name", PERIODIC)
def test_tijdemans_rule_is_within_its_bound_of_n_times_the_weight_after_every_row(name):
    weights = WEIGHTS[name]
    rule = rule_of(weights)
    assert isinstance(rule, PeriodicRule)
    k = len(weights)
    assert worst_difference(rule, weights) <= (
        0 if k == 1 else 1 - Fraction(1, 2 * k - 2)
    )


@pytest.mark.parametrize("name", TREES)
def test_the_trees_rule_is_within_its_bound_of_n_times_the_weight_after_every_row(name):
    weights = WEIGHTS[name]
    rule = rule_of(weights)
    assert isinstance(rule, TreeRule)
    assert (
        worst_difference(rule, weights) <= bound_of_tree(weights) < Fraction(168, 100)
    )
    assert len(weights) != 2 or bound_of_tree(weights) == Fraction(1, 2)


@pytest.mark.parametrize("name", ["five", "irrational", "100 sources"])
def test_rows_are_found_by_position_and_positions_by_row_whatever_the_scale_of_the_weights(
    name,
):
    rule = rule_of(WEIGHTS[name])
    sources, ranks = rule.rows_at(np.arange(5000))
    shuffled = np.random.default_rng(0).permutation(5000)
    other = rule_of([weight * Fraction(7, 3) for weight in WEIGHTS[name]])
    for found, expected in zip(
        other.rows_at(shuffled), (sources[shuffled], ranks[shuffled]), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    for n in (0, 1, 17, 4999):
        assert (
            rule.counts(n)
            == np.bincount(sources[:n], minlength=len(WEIGHTS[name])).tolist()
        )
        assert position_of(rule, int(sources[n]), int(ranks[n])) == n


@pytest.mark.fast
def test_a_mixture_by_hand():
    """7 : 3 in tenths. Source 1 may give a row once it is owed half of one: from rows 2, 5 and 9 on, as 0.3 n is
    0.6, 1.5 and 2.7 there. At row 5 source 0 is owed half of one too, and is first."""
    sources, _ = rule_of([Fraction(7), Fraction(3)]).rows_at(np.arange(10))
    assert sources.tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
