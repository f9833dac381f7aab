"""Branches see whole batches of the same examples; the critical batch is where their loss begins to suffer."""

import math
from fractions import Fraction

import pytest

from maxtext_lite.analysis.branches import (
    branch_sizes,
    compared_examples,
    critical_batch,
)
from maxtext_lite.config import UserError


def sizes(*factors, **run):
    return branch_sizes([Fraction(factor) for factor in factors], **run)


def test_every_branch_sees_the_same_examples_in_micro_batches_that_are_no_larger():
    found = sizes("4", "1", "0.5", "1.5", batch=24, accumulation=3, steps=12)
    assert [each.batch for each in found] == [12, 24, 36, 96]
    assert [each.steps for each in found] == [24, 12, 8, 3]
    assert [each.accumulation for each in found] == [
        2,
        3,
        6,
        12,
    ]  # micro-batches of 6, 8, 6 and 8 examples
    assert compared_examples(found) == 96  # a step of the largest; a quarter is 72
    assert compared_examples(found[:2]) == 72


@pytest.mark.parametrize(
    ("factors", "nearest"),
    [
        (("1", "3"), r"2\.5 \(40\) or 4 \(64\)"),
        (("1", "0.3"), r"0\.25 \(4\) or 0\.3125 \(5\)"),
        (("1", "40"), r"20 \(320\)"),
        (("0.5", "2"), "1 "),
    ],
)
def test_factors_without_whole_batches_are_refused(factors, nearest):
    with pytest.raises(UserError, match=rf"--factors.*Nearest that works?: {nearest}"):
        sizes(*factors, batch=16, accumulation=1, steps=20)


def test_the_critical_batch_is_where_the_loss_exceeds_the_best_by_1_percent():
    assert critical_batch({8: 2.0, 16: 2.0, 32: 2.01, 64: 2.05}) == pytest.approx(
        32 * 2**0.25
    )  # 2.02, a quarter up
    assert critical_batch({8: 2.1, 16: 2.0, 32: 2.04}) == pytest.approx(
        16 * math.sqrt(2)
    )  # 8 is worse, and smaller
    assert critical_batch({8: 2.0, 16: 2.0, 32: 2.019}) is None
    assert critical_batch({8: 2.2, 16: 2.1, 32: 2.0}) is None
