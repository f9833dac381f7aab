"""The held-out fraction counts as written; only existing ids are valid."""

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.examples import check_id, num_held_out


@pytest.mark.parametrize(("fraction", "count", "held_out"), [
    (0.29, 100, 29), (0.001, 100, 1), (0.5, 3, 1), (0.0, 100, 0), (0.07, 100, 7), (0.99, 2, 1),
])  # fmt: skip
def test_the_fraction_is_taken_as_it_was_written_and_holds_out_at_least_one(fraction, count, held_out):
    assert num_held_out(fraction, count, "lines") == held_out


def test_something_is_left_to_train_on():
    with pytest.raises(UserError, match=r"eval_fraction=0\.1 holds out 1 of 1 lines and leaves none to train on"):
        num_held_out(0.1, 1, "lines")


def test_an_id_outside_is_refused():
    check_id(0, 1)
    for number in (-1, 1):
        with pytest.raises(IndexError, match=f"prompt {number} of 1"):
            check_id(number, 1, "prompt")
