"""From rewards to a batch: advantages, rows, lines and records, and those of an evaluation, by hand."""

import itertools
import json
import statistics

import numpy as np
import pytest
from numpy.testing import assert_allclose

from maxtext_lite.config.records import record_text
from maxtext_lite.post_training.pairs import (
    Chunk,
    Sampled,
    batch_record,
    equal_groups_fraction,
    group_advantages,
    mean_deviation,
    responses_hash,
)
from maxtext_lite.post_training.prompts import Prompt
from maxtext_lite.post_training.rewards import Scores
from maxtext_lite.post_training.rollout import Response
from maxtext_lite.post_training.rollout_steps import (
    held_out_record,
    held_out_text,
    pass_at_k,
)


def test_advantages_are_rewards_less_their_groups_mean_over_its_sample_deviation():
    rewards = np.random.default_rng(0).normal(100, 3, 5 * 8)
    want = []
    for group in rewards.reshape(5, 8).tolist():
        mean = statistics.fmean(group)
        deviation = statistics.stdev(group)
        want += [(reward - mean) / (deviation + 1e-4) for reward in group]
    assert_allclose(group_advantages(rewards, 8, "group"), want, rtol=1e-6)


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


@pytest.mark.parametrize("scale", ["group", "none"])
def test_unscored_responses_have_no_part_in_the_advantages_of_the_others(scale):
    nan = np.nan
    rewards = np.array([1, nan, 4, 2, nan, nan, nan, 3.0, nan, nan, nan, nan])
    found = group_advantages(rewards, 4, scale)
    scored = group_advantages(np.array([1, 4, 2.0]), 3, scale)
    assert_allclose(found[[0, 2, 3]], scored, rtol=1e-6)
    assert not found[[1, 4, 5, 6, 7, 8, 9, 10, 11]].any()
    assert equal_groups_fraction(rewards, 4) == 2 / 3
    deviation = statistics.stdev([1, 4, 2])
    assert mean_deviation(rewards, 4) == pytest.approx(deviation)
    assert np.isnan(mean_deviation(np.full(4, nan), 4))


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


NONE_FAILED = np.zeros(4, bool)


def chunk():
    total = np.array([1.0, 0.0, 0.5, 0.5])
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    scores = Scores(total, {"m:a": total, "b": np.arange(4.0)}, NONE_FAILED, 3, ["no"])
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
    assert_allclose(rows["rollout_log_probabilities"][0], sampled, rtol=1e-6)
    assert "rollout_log_probabilities" not in chunk().rows(5, 8)


def test_an_unscored_response_has_no_target_and_no_part_in_the_means():
    """Of the second response, which fails, and the third, which no function scores."""
    pairs = chunk()
    total = np.array([1.0, np.nan, np.nan, 0.5])
    of_name = {"m:a": np.array([1.0, 0.25, np.nan, np.nan]), "b": total}
    scores = Scores(total, of_name, np.array([False, True, False, False]), 1, ["no"])
    pairs = Chunk.judged(
        pairs.sampled, scores, num_generations=2, scale_rewards="group"
    )
    rows = pairs.rows(4, 8)
    assert rows["weights"].sum(axis=2).tolist() == [[2, 0, 0, 1]]
    assert (rows["segments"] > 0).any(axis=2).all()
    assert not rows["advantages"].any()
    record = batch_record([pairs])
    assert record["reward"] == 0.75
    assert (record["rewards/a"], record["rewards/b"]) == (0.625, 0.75)
    assert record["unscored_fraction"] == 0.5
    assert record["equal_reward_groups"] == 1
    assert np.isnan(record["reward_std"])
    assert record["rollout_token_nll"] == pytest.approx(2.3 / 3)
    line = json.loads(record_text(pairs.lines(1)[1]))
    assert (line["reward"], line["advantage"]) == (None, 0)
    assert line["rewards"] == {"a": 0.25, "b": None}


def test_the_record_of_a_batch_whatever_its_chunks():
    whole, twice = batch_record([chunk()]), batch_record([chunk(), chunk()])
    assert whole == {
        "reward": 0.5,
        "reward_std": pytest.approx(np.sqrt(0.5) / 2),  # of (1, 0) over n - 1, and 0
        "rewards/a": 0.5,
        "rewards/b": 1.5,
        "unscored_fraction": 0.0,
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
    by_name = {"exact_answer": first, "format": second}
    scores = Scores(first + second, by_name, NONE_FAILED, 2, [])
    assert held_out_record(scores, [3, 1, 1, 3], 1) == {
        "eval_reward": 1.0,
        "eval_accuracy": 0.5,
        "eval_prompts": 4,
        "eval_response_tokens": 2.0,
        "eval_unscored_fraction": 0.0,
        "eval_reward_errors": 2,
    }


def test_an_evaluation_leaves_out_what_was_not_scored():
    """Two prompts with three responses each; one of them has a single scored response, which is right."""
    total = np.array([1.0, 0, np.nan, np.nan, 1.0, np.nan])
    scores = Scores(total, {"exact_answer": total}, np.isnan(total), 3, [])
    found = held_out_record(scores, [1] * 6, 3)
    assert found["eval_reward"] == found["eval_accuracy"] == 2 / 3
    assert found["eval_pass_at_2"] == 1.0
    assert np.isnan(found["eval_pass_at_3"])
    assert found["eval_unscored_fraction"] == 0.5
    nothing = Scores(
        total * np.nan, {"exact_answer": total * np.nan}, np.ones(6, bool), 6, []
    )
    assert "no response" in held_out_text(held_out_record(nothing, [1] * 6, 3))
