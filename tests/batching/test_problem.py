from fractions import Fraction

import pytest

from maxtext_lite.batching.problem import Problem, divisors, multiples, single_edits


@pytest.mark.parametrize("whole", [1, 2, 12, 17, 36, 4096])
def test_divisors_are_all_divisors(whole):
    assert divisors(whole) == [number for number in range(1, whole + 1) if whole % number == 0]


def test_values_are_tried_from_the_nearest_on():
    below, above = single_edits("k", [1, 2, 4, 8], 3)
    assert below == [{"k": 2}, {"k": 1}]
    assert above == [{"k": 4}, {"k": 8}]
    assert single_edits("k", [3], 3) == ([], [])


def test_multiples_are_positive_and_leave_the_value_out():
    below, above = multiples("k", Fraction(1, 8), Fraction(3, 10))
    assert below == [{"k": Fraction(1, 4)}, {"k": Fraction(1, 8)}]
    assert above[0] == {"k": Fraction(3, 8)}
    below, above = multiples("k", 2, 4)
    assert (below[0], above[0]) == ({"k": 2}, {"k": 6})
    assert multiples("k", 5, 2)[0] == []


def test_a_problem_is_the_same_for_another_value():
    assert Problem("k", "k=3 is odd.").identity == Problem("k", "k=5 is odd.").identity
    assert Problem("k", "k=3 is odd.").identity != Problem("k", "k=3 is 3.", rule="three").identity
