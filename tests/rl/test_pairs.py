"""Pairs as rows, as lines and as a record: by hand."""

import numpy as np
import pytest

from maxtext_lite.data import Prompt
from maxtext_lite.rl.pairs import Chunk, Sampled, batch_record, responses_hash
from maxtext_lite.rl.rewards import Scores
from maxtext_lite.rl.rollout import Response

PROMPTS = (Prompt(5, "2+3=", (50, 43, 51, 61), {"answer": "5"}), Prompt(9, "1=", (49, 61), {"answer": "1"}))
RESPONSES = (
    Response([53, 256], [-0.1, -0.2], True),
    Response([54], [-1.0], False),
    Response([49, 49, 256], [-0.5, -0.5, -0.5], True),
    Response([256], [-2.0], True),
)


def chunk(total=(1.0, 0.0, 0.5, 0.5), scale="none"):
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    scores = Scores(np.array(total), {"a": np.array(total), "b": np.arange(4.0)}, 3, ("a said no",))
    return Chunk.judged(Sampled(prompts, RESPONSES, "wxyz"), scores, num_generations=2, scale_rewards=scale)


def test_a_row_is_the_prompt_and_the_response_and_only_the_response_has_weight():
    rows = chunk().rows(5, 8)
    assert {name: x.shape for name, x in rows.items()} == dict.fromkeys(rows, (1, 5, 8))
    assert rows["tokens"][0, 0].tolist() == [50, 43, 51, 61, 53, 0, 0, 0]
    assert rows["targets"][0, 0].tolist() == [43, 51, 61, 53, 256, 0, 0, 0]
    assert rows["weights"][0, 0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert rows["segments"][0, 0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert rows["positions"][0, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert rows["weights"][0, 3].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]  # a response of one token
    assert rows["advantages"][0, :, 0].tolist() == [0.5, -0.5, 0, 0, 0]
    assert rows["weights"].sum() == sum(len(response.token_ids) for response in RESPONSES)
    assert all(not x[0, 4].any() for x in rows.values())  # no pair


def test_rows_have_the_log_probabilities_of_what_sampled_where_they_are_compared():
    rows = chunk().rows(5, 8, compares=True)["rollout_log_probabilities"]
    assert rows.dtype == np.float32
    expected = np.zeros((1, 5, 8))
    expected[0, 0, 3:5], expected[0, 1, 3], expected[0, 2, 1:4], expected[0, 3, 1] = (-0.1, -0.2), -1, -0.5, -2
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    assert "rollout_log_probabilities" not in chunk().rows(5, 8)


def test_a_batch_is_recorded_alike_whatever_its_chunks():
    whole = batch_record([chunk()])
    assert whole["reward"] == 0.5
    assert whole["rewards/b"] == 1.5
    assert whole["reward_std"] == pytest.approx(np.sqrt(0.5) / 2)  # of (1, 0) over n - 1, and 0
    assert whole["equal_reward_groups"] == 0.5
    assert whole["reward_errors"] == 3
    assert whole["response_tokens"] == 7 / 4
    assert whole["truncated_responses"] == 0.25
    twice = batch_record([chunk(), chunk()])
    assert {name: twice[name] for name in ("reward", "reward_std", "response_tokens")} == {
        name: whole[name] for name in ("reward", "reward_std", "response_tokens")
    }
    assert twice["reward_errors"] == 6


def test_the_hash_knows_every_token_and_their_order():
    hashes = {
        responses_hash(RESPONSES),
        responses_hash(RESPONSES[::-1]),
        responses_hash([*RESPONSES[:3], Response([255], [-2.0], True)]),
        responses_hash([Response([53, 256, 54], [0, 0, 0], True)]),
        responses_hash(RESPONSES[:2]),
    }
    assert len(hashes) == 5
    assert responses_hash(RESPONSES) == responses_hash([r._replace(log_probabilities=[]) for r in RESPONSES])


def test_lines_say_what_was_asked_answered_and_thought_of_it():
    first, *_, last = chunk().lines(7)
    assert first == {
        "step": 7, "prompt_number": 5, "prompt": "2+3=", "response": "w", "tokens": 2, "ended": True, "reward": 1.0,
        "rewards": {"a": 1.0, "b": 0.0}, "advantage": 0.5,
    }  # fmt: skip
    assert (last["prompt_number"], last["response"], last["advantage"]) == (9, "z", 0)
