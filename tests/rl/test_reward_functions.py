"""The shipped reward functions, by hand; math-verify where it is installed."""

from fractions import Fraction

import pytest

from maxtext_lite.rl.reward_functions import exact_answer, format_of, number_in, numeric_answer, shipped


@pytest.mark.parametrize(("text", "number"), [
    ("42", 42),
    ("so 12 + 30 is 42.", 42),
    ("12-5=7, 12-5", 5),  # a minus between numbers takes away
    ("(3)-4", 4),
    ("x = -5", -5),
    ("x=−5", -5),  # the sign that texts are set with
    ("+5", 5),
    ("$1,234.50 in all", Fraction(2469, 2)),
    ("-$3", -3),
    ("$-3", -3),
    ("it is 12,345,678", 12345678),
    ("1,2,3", 3),  # no groups of three digits
    ("12,34", 34),
    ("1,2345", 2345),
    (".5", Fraction(1, 2)),
    ("0.10", Fraction(1, 10)),
    ("about 50% of them", 50),
    ("3/4", Fraction(3, 4)),
    ("-3 / 4 cups", Fraction(-3, 4)),
    ("1,000/2.5", 400),
    ("$3 1/2$ cups.", Fraction(7, 2)),
    ("-3 1/2", Fraction(-7, 2)),
    ("12,000 1/2", Fraction(24001, 2)),
    ("#### 1,000 1/2", Fraction(2001, 2)),
    ("12,34 1/2", Fraction(1, 2)),  # no groups of three digits
    ("3 2/1", 2),  # no mixed number
    ("1/2 1/2", Fraction(1, 2)),
    ("3.5 1/2", Fraction(1, 2)),
    (r"\frac{1}{3}", Fraction(1, 3)),
    (r"-\dfrac{10}{4}", Fraction(-5, 2)),
    (r"\frac12", Fraction(1, 2)),
    (r"-2\tfrac12", Fraction(-5, 2)),
    (r"2\frac{1}{2}", Fraction(5, 2)),
    (r"1,000\frac12", Fraction(2001, 2)),
    (r"x=\frac{-1}{2}", Fraction(-1, 2)),
    (r"\frac{3}{-4}", Fraction(-3, 4)),
    (r"\frac{\frac12}{3}", Fraction(1, 6)),
    (r"$\frac{1,000}{8}$", 125),
    (r"\frac{\pi}{2}", None),
    (r"\frac{\sqrt{3}}{2}", None),
    (r"-\frac{3}{-4}", None),
    (r"1.5\frac12", None),
    (r"\frac{1}{0}", None),
    ("1e-05", Fraction(1, 100000)),
    ("-1.5E3", -1500),
    ("1e+16", 10**16),
    ("2e99999999", None),
    ("5eggs", 5),
    ("no number", None),
    ("", None),
    ("5/0", None),
    ("7 " + "1" * 5000, None),  # which Python does not read as an integer
    ("First 3.\n#### 42 of 100", 42),
    ("#### 1\n#### 2", 2),
    ("I say 7 ####", None),
    (r"It is \boxed{42}, not 7", 42),
    (r"\boxed{1} \boxed{x = \frac{1}{2}} 9", Fraction(1, 2)),
    (r"\boxed{\text{none}} 9", None),
    (r"\boxed{\$1{,}000\%", 1000),  # cut off
    (r"\boxed{3} #### 4", 4),
])  # fmt: skip
def test_the_number_that_a_text_ends_up_with(text, number):
    assert number_in(text) == number


def test_a_number_is_compared_exactly():
    responses = ["the answer is 0.3", "3/10", "0.30000000000000004", "#### 0.30 or 7", ""]
    assert numeric_answer(responses, ["0.3"] * 5) == [1, 1, 0, 1, 0]
    assert numeric_answer(["1000", "1000", "none"], ["$1,000", "no number", "7"]) == [1, None, 0]
    assert numeric_answer(["1"], [None]) == [None]


def test_an_answer_is_compared_without_the_spaces_around_it():
    assert exact_answer([" 42\n", "42.", "4 2", "42", ""], ["42", "42", "42", " 42 ", "42"]) == [1, 0, 0, 1, 0]
    assert exact_answer(["1", "[1]"], [None, [1]]) == [None, None]


def test_a_whole_response_matches_the_format():
    match = format_of("<think>.*</think>[0-9]+")
    assert match(["<think>a\nb</think>5", "<think></think>55"]) == [1, 1]
    assert match(["<think>a</think>5 ", "x<think></think>5"]) == [0, 0]
    assert shipped("format", pattern="a+")(["aa", "aab"]) == [1, 0]


def test_names_lead_to_functions():
    assert shipped("exact_answer", pattern="") is exact_answer
    assert shipped("numeric_answer", pattern="") is numeric_answer
    with pytest.raises(KeyError):
        shipped("other", pattern="")


def test_math_verify_compares_expressions():
    pytest.importorskip("math_verify")
    judge = shipped("math_verify", pattern="")
    responses = [r"so \boxed{0.5}", r"it is $\frac{2}{4}$", "1/3", r"$x+1$", r"$1+x$"]
    answers = [r"\frac{1}{2}", "1/2", "1/2", "$1 + x$", "x"]
    assert judge(responses, answers) == [1, 1, 0, 1, 0]
    assert judge(["1"], [None]) == [None]
