import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtext_lite.config.errors import Refusal, UserError, WrongKind, did_you_mean, nearest_clause, number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (16, "16"), (Fraction(16), "16"), (16.0, "16"), (Fraction(1, 4), "0.25"), (Fraction(-3, 8), "-0.375"),
        (Fraction(1, 3), "1/3"), (Fraction(1, 4096), "0.000244140625"), (Fraction(5, 12), "5/12"), (1e-8, "1e-08"),
        (0.003, "0.003"), (Fraction(0), "0"), (-1, "-1"),
    ],
)  # fmt: skip
def test_numbers_are_shown_as_a_config_holds_them(value, text):
    assert number_text(value) == text


@given(st.fractions())
def test_the_text_of_a_fraction_is_exact(value):
    assert Fraction(number_text(value)) == value


def test_the_clause_of_values_that_work():
    assert nearest_clause([]) == ""
    assert nearest_clause([2]) == " Nearest that works: 2."
    assert nearest_clause([2, 4]) == " Nearest that work: 2 or 4."
    assert nearest_clause([2, 2]) == " Nearest that works: 2."
    assert nearest_clause([True, "x=1"]) == " Nearest that work: true or x=1."
    assert str(Refusal("a", "a=3 is odd.", (2, 4))) == "a=3 is odd. Nearest that work: 2 or 4."


def test_only_near_names_are_proposed():
    assert did_you_mean("stps", ["steps", "seed"]) == " Did you mean 'steps'?"
    assert did_you_mean("zzz", ["steps", "seed"]) == ""


def test_a_user_error_holds_all_problems_and_pickles():
    error = UserError(["one.", "two."])
    assert error.problems == ("one.", "two.")
    assert str(error) == "one.\ntwo."
    assert pickle.loads(pickle.dumps(error)).problems == error.problems
    assert UserError("one.").problems == ("one.",)


def test_a_wrong_kind_says_what_would_be_right():
    assert WrongKind("must be at least 1.", [1]).nearest == (1,)
