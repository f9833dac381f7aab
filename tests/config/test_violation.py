from fractions import Fraction

import pytest

from maxtext_lite.config.violation import Violation, divisors, divisors_of, multiples, one_of


@pytest.mark.parametrize("whole", [1, 2, 12, 17, 36, 4096])
def test_divisors_are_all_divisors(whole):
    assert divisors(whole) == tuple(number for number in range(1, whole + 1) if whole % number == 0)


def test_divisors_of_what_is_larger_than_any_key_are_found_in_bounded_work():
    largest = 2**31 - 2
    assert divisors(largest)[-2:] == (largest // 2, largest)
    huge = 2 * 10**30
    assert divisors(huge)[:3] == (1, 2, 4)
    assert divisors(huge)[-1] == huge
    assert all(huge % number == 0 for number in divisors(huge))


def sides(near):
    return [list(side) for side in near()]


def test_values_come_from_the_nearest_on():
    assert sides(one_of("k", [8, 1, 4, 2], 3)) == [[{"k": 2}, {"k": 1}], [{"k": 4}, {"k": 8}]]
    assert sides(one_of("k", [3], 3)) == [[], []]
    assert sides(divisors_of("k", 6, 2)) == [[{"k": 1}], [{"k": 3}, {"k": 6}]]


@pytest.mark.parametrize("value", [1, 2, 5, 13, 300])
def test_the_nearest_on_either_side_of_a_value_come_first(value):
    numbers = [1, 2, 3, 6, 7, 42]
    below = [{"k": number} for number in numbers if number < value]
    above = [{"k": number} for number in numbers if number > value]
    assert sides(one_of("k", reversed(numbers), value)) == [below[::-1], above]


def test_a_fraction_has_divisors_that_are_fractions():
    below, above = sides(divisors_of("k", 4, Fraction(3)))
    assert [type(change["k"]) for change in (*below, *above)] == [Fraction] * 3


def test_multiples_are_positive_and_leave_the_value_out():
    below, above = sides(multiples("k", Fraction(1, 8), Fraction(3, 10)))
    assert below == [{"k": Fraction(1, 4)}, {"k": Fraction(1, 8)}]
    assert above[0] == {"k": Fraction(3, 8)}
    below, above = sides(multiples("k", 2, 4))
    assert (below[0], above[0]) == ({"k": 2}, {"k": 6})
    assert sides(multiples("k", 5, 2))[0] == []
    assert sides(multiples("k", 3, 10**18, offset=1))[1][0] == {"k": 10**18 + 3}  # floats would give another number


def test_a_violation_is_the_same_for_another_value():
    assert Violation("k", "k=3 is odd.").name == Violation("k", "k=5 is odd.").name
    assert Violation("k", "k=3 is odd.").name != Violation("k", "k=3 is 3.", rule="three").name
