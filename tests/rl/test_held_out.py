"""pass@k against counting all subsets, and the record of an evaluation."""

import itertools

import numpy as np
import pytest

from maxtext_lite.rl.held_out import held_out_record, held_out_text, pass_at_k
from maxtext_lite.rl.rewards import Scores


@pytest.mark.parametrize("num_correct", range(6))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(num_correct):
    correct = [place < num_correct for place in range(5)]
    for k in range(1, 6):
        subsets = list(itertools.combinations(correct, k))
        assert pass_at_k(5, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def scores(first, second):
    first, second = np.array(first, float), np.array(second, float)
    return Scores(first + second, {"exact_answer": first, "format": second}, 2, ())


def test_the_first_function_says_what_is_correct():
    record = held_out_record(scores([1, 0, 0, 1], [1, 1, 0, 0]), [3, 1, 1, 3], 1)
    assert record == {
        "eval_reward": 1.0, "eval_accuracy": 0.5, "eval_prompts": 4, "eval_response_tokens": 2.0,
        "eval_reward_errors": 2,
    }  # fmt: skip
    assert held_out_text(record) == "held-out accuracy 50.0%, reward 1.000, over 4 prompts"


def test_with_several_responses_there_is_pass_at_k_for_powers_of_two_and_all():
    record = held_out_record(scores([1, 0, 0, 0, 0, 0], [0] * 6), [1] * 6, 3)
    assert record["eval_accuracy"] == pytest.approx(1 / 6)
    assert record["eval_pass_at_2"] == pytest.approx((2 / 3 + 0) / 2)
    assert record["eval_pass_at_3"] == 0.5
    assert [name for name in record if "pass" in name] == ["eval_pass_at_2", "eval_pass_at_3"]
    assert "pass@2 33.3%, pass@3 50.0%" in held_out_text(record)
