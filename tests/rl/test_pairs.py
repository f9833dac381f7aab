"""From rewards to a batch: advantages, rows, lines and records, and those of an evaluation, by hand."""

import itertools
import statistics

import numpy as np
import pytest

from maxtext_lite.data import Prompt
from maxtext_lite.rl.advantages import equal_groups_fraction, group_advantages
from maxtext_lite.rl.held_out import held_out_record, pass_at_k
from maxtext_lite.rl.pairs import Chunk, Sampled, batch_record, responses_hash
from maxtext_lite.rl.rewards import Scores
from maxtext_lite.rl.rollout import Response


def test_advantages_are_rewards_less_their_groups_mean_over_its_sample_deviation():
    rewards = np.random.default_rng(0).normal(100, 3, 5 * 8)
    want = []
    for group in rewards.reshape(5, 8).tolist():
        mean = statistics.fmean(group)
        deviation = statistics.stdev(group)
        want += [(reward - mean) / (deviation + 1e-4) for reward in group]
    np.testing.assert_allclose(group_advantages(rewards, 8, "group"), want, rtol=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize("scale", ["group", "none"])
def test_equal_rewards_have_no_advantage_and_the_largest_a_finite_one(scale):
    rewards = np.full(6, 0.1)
    assert np.any(rewards[:3] - rewards[:3].mean()), "their mean is rounded"
    assert not np.any(group_advantages(rewards, 3, scale))
    assert equal_groups_fraction(rewards, 3) == 1
    found = group_advantages(np.array([1e18, -1e18, 1e18, -1e18]), 4, scale)
    assert np.isfinite(np.square(found)).all()
    assert (np.sign(found) == [1, -1, 1, -1]).all()


PROMPTS = (
    Prompt(5, "2+3=", (50, 43, 51, 61), {"answer": "5"}),
    Prompt(9, "1=", (49, 61), {"answer": "1"}),
)
RESPONSES = (
    Response([53, 256], [-0.1, -0.2], True),
    Response([54], [-1.0], False),
    Response([49, 49, 256], [-0.5, -0.5, -0.5], True),
    Response([256], [-2.0], True),
)


def chunk():
    total = np.array([1.0, 0.0, 0.5, 0.5])
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    scores = Scores(total, {"m:a": total, "b": np.arange(4.0)}, 3, ("a said no",))
    return Chunk.judged(
        Sampled(prompts, RESPONSES, "wxyz"),
        scores,
        num_generations=2,
        scale_rewards="none",
    )


def test_a_row_is_the_prompt_and_the_response_and_only_the_response_has_weight():
    rows = chunk().rows(5, 8, compares=True)
    assert {name: x.shape for name, x in rows.items()} == dict.fromkeys(rows, (1, 5, 8))
    assert rows["tokens"][0, 0].tolist() == [50, 43, 51, 61, 53, 0, 0, 0]
    assert rows["targets"][0, 0].tolist() == [43, 51, 61, 53, 256, 0, 0, 0]
    assert rows["weights"][0, 0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert rows["positions"][0, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert rows["advantages"][0, :, 0].tolist() == [0.5, -0.5, 0, 0, 0]
    assert rows["weights"].sum() == 7
    assert all(not x[0, 4].any() for x in rows.values())  # no pair
    sampled = np.zeros((5, 8))
    sampled[0, 3:5], sampled[1, 3], sampled[2, 1:4], sampled[3, 1] = (
        (-0.1, -0.2),
        -1,
        -0.5,
        -2,
    )
    np.testing.assert_allclose(rows["rollout_log_probabilities"][0], sampled, rtol=1e-6)
    assert "rollout_log_probabilities" not in chunk().rows(5, 8)


def test_the_record_of_a_batch_whatever_its_chunks():
    whole, twice = batch_record([chunk()]), batch_record([chunk(), chunk()])
    assert whole == {
        "reward": 0.5,
        "reward_std": pytest.approx(np.sqrt(0.5) / 2),  # of (1, 0) over n - 1, and 0
        "rewards/a": 0.5,
        "rewards/b": 1.5,
        "equal_reward_groups": 0.5,
        "reward_errors": 3,
        "response_tokens": 7 / 4,
        "rollout_token_nll": pytest.approx(4.8 / 7),
        "truncated_responses": 0.25,
        "responses_hash": responses_hash(RESPONSES),
    }
    assert twice["reward_errors"] == 6
    assert twice["rollout_token_nll"] == pytest.approx(whole["rollout_token_nll"])


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response():
    for num_correct, k in itertools.product(range(6), range(1, 6)):
        subsets = list(
            itertools.combinations([place < num_correct for place in range(5)], k)
        )
        assert pass_at_k(5, num_correct, k) == pytest.approx(
            sum(map(any, subsets)) / len(subsets)
        )


def test_an_evaluation_counts_as_correct_what_the_first_function_does():
    first, second = np.array([1.0, 0, 0, 1]), np.array([1.0, 1, 0, 0])
    scores = Scores(first + second, {"exact_answer": first, "format": second}, 2, ())
    assert held_out_record(scores, [3, 1, 1, 3], 1) == {
        "eval_reward": 1.0,
        "eval_accuracy": 0.5,
        "eval_prompts": 4,
        "eval_response_tokens": 2.0,
        "eval_reward_errors": 2,
    }
