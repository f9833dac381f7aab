"""pass@k against counting all subsets, and the record of an evaluation."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from maxtext_lite.rl import held_out
from maxtext_lite.rl.held_out import HELD_OUT, HeldOutResponses, held_out_record, held_out_text, pass_at_k
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


@pytest.mark.parametrize("at_once", [4, 5, 100])
def test_prompts_are_sampled_and_judged_in_chunks_of_a_micro_batch_with_the_record_of_one(at_once, monkeypatch):
    """Neither the time-out of a call of a reward function nor the watchdog meets more work than in training."""
    did, said = [], []
    monkeypatch.setattr(held_out.watchdog, "advance", lambda: did.append("advance"))
    prompts = [SimpleNamespace(number=number, token_ids=[number]) for number in (3, 5, 8, 9)]

    def sample(prompts, requests, sampling):
        assert [request.token_ids for request in requests] == [prompt.token_ids for prompt in prompts]
        did.append([request.key for request in requests])
        lengths = [prompt.number + request.key[2] for prompt, request in zip(prompts, requests, strict=True)]
        return SimpleNamespace(prompts=prompts, responses=[SimpleNamespace(token_ids=[0] * n) for n in lengths])

    def judge(sampled, unit):
        assert unit == 1  # a chunk may end between the responses to one prompt
        rewards = np.array([len(response.token_ids) / 10 for response in sampled.responses])
        return Scores(rewards, {"exact_answer": rewards}, 1, ["one has none"])

    rl = SimpleNamespace(
        config=SimpleNamespace(eval_steps=-1, eval_num_generations=3),
        run=SimpleNamespace(eval_source=prompts, decoder=SimpleNamespace(joined=lambda params, frozen: params)),
        batch=SimpleNamespace(pairs_per_micro_batch=at_once, prompts_per_batch=2),
        engine=SimpleNamespace(update=lambda params, step: did.append((params, step))),
        sample=sample, judge=judge, eval_sampling=None,
    )  # fmt: skip
    state = SimpleNamespace(params="params", frozen=None)
    record, text = HeldOutResponses(rl, said.append).of(state, 7, lambda: did.append("between"))

    keys = [(HELD_OUT, number, generation) for number in (3, 5, 8, 9) for generation in range(3)]
    chunks = [keys[first : first + at_once] for first in range(0, 12, at_once)]
    assert did == [("params", 7), *(each for chunk in chunks for each in ("between", chunk, "advance"))]
    lengths = [number + generation for _, number, generation in keys]
    whole = Scores(np.array(lengths) / 10, {"exact_answer": np.array(lengths) / 10}, len(chunks), [])
    assert record == held_out_record(whole, lengths, 3)
    assert text == held_out_text(record)
    assert said == ["reward: one has none"] * len(chunks)
