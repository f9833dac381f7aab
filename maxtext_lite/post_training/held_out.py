"""Evaluation by responses to held-out prompts: mean reward, accuracy and pass@k."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from maxtext_lite.config.phases import phases
from maxtext_lite.post_training.advantages import mean_of
from maxtext_lite.post_training.prompts import Prompt
from maxtext_lite.post_training.rewards import Scores
from maxtext_lite.post_training.rl_run import RLRun, shared
from maxtext_lite.post_training.rollout import HELD_OUT, Request
from maxtext_lite.training.state import TrainState


class HeldOutResponses:
    """Responses to a run's held-out prompts, or to the first `eval_steps` batches of them; see `loop.Evaluation`.

    They are sampled and judged in chunks of as many pairs as a micro-batch has: `reward_timeout_seconds` and
    `hang_timeout` then limit the same amount of work as in training. A chunk may end between the responses to one
    prompt, so a call of a reward function that fails is repeated for each response alone.

    Args:
      say: takes messages about reward functions.
    """

    before_first_step = True

    def __init__(self, rl: RLRun, say: Callable[[str], None]):
        self._rl = rl
        self._say = say

    def evaluate(
        self, state: TrainState, step: int, stops: Callable[[], bool]
    ) -> tuple[dict[str, float | int], str] | None:
        """Mean reward, accuracy and pass@k of new responses."""
        rl = self._rl
        each = self._rl.config.eval_num_generations
        pairs = self._pairs()
        per_chunk = rl.batch.pairs_per_micro_batch
        rl.update(rl.run.decoder.joined(state.params, state.frozen), step)
        phases.advance()
        scores = list[Scores]()
        tokens = list[int]()
        for first in range(0, len(pairs), per_chunk):
            if stops():
                return None
            prompts, requests = zip(*pairs[first : first + per_chunk], strict=True)
            sampled = rl.sample(prompts, requests, rl.eval_sampling)
            scores.append(shared(rl.judge(sampled, 1)))
            for message in scores[-1].messages:
                self._say(f"reward: {message}")
            tokens += [len(response.token_ids) for response in sampled.responses]
            phases.advance()
        found = held_out_record(Scores.joined(scores), tokens, each)
        return found, held_out_text(found)

    def _pairs(self) -> list[tuple[Prompt, Request]]:
        """Each prompt with each of its requests; one prompt's are adjacent."""
        rl = self._rl
        config = self._rl.config
        source = self._rl.eval_prompts
        assert source is not None
        count = len(source)
        if config.eval_steps != -1:
            count = min(count, config.eval_steps * rl.batch.prompts_per_batch)
        return [
            (prompt, Request(prompt.token_ids, (HELD_OUT, prompt.number, generation)))
            for prompt in map(source.__getitem__, range(count))
            for generation in range(config.eval_num_generations)
        ]


def pass_at_k(num_responses: int, num_correct: int, k: int) -> float:
    """The probability that at least one of k responses, drawn without replacement, is correct.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1: an unbiased estimate of pass@k.
    """
    assert 1 <= k <= num_responses
    return 1.0 - math.comb(num_responses - num_correct, k) / math.comb(num_responses, k)


def held_out_record(scores: Scores, tokens: Sequence[int], num_generations: int) -> dict[str, float | int]:
    """The entries of an evaluation's record.

    A response is correct if the first reward function gives it at least 1. `eval_accuracy` is the share of correct
    responses; with several per prompt there is `eval_pass_at_k` for k = 2, 4, ... and for all of them. Responses that
    it gives no reward are excluded; pass@k also excludes prompts with fewer than k rewarded ones.

    Args:
      scores: of the responses, adjacent for one prompt.
      tokens: the length of each response.
    """
    first = next(iter(scores.by_name.values()))
    groups = first.reshape(-1, num_generations)
    judged = [group[~np.isnan(group)] for group in groups]
    ks = [2**power for power in range(1, num_generations.bit_length())]
    if num_generations > 1 and num_generations not in ks:
        ks.append(num_generations)
    return {
        "eval_reward": mean_of(scores.total),
        "eval_accuracy": mean_of(np.concatenate(judged) >= 1),
        **{
            f"eval_pass_at_{k}": mean_of(
                [pass_at_k(len(group), int(np.sum(group >= 1)), k) for group in judged if len(group) >= k]
            )
            for k in ks
        },
        "eval_prompts": len(groups),
        "eval_response_tokens": float(np.mean(tokens)),
        "eval_unscored_fraction": 1 - float(np.mean(scores.is_scored)),
        "eval_reward_errors": scores.errors,
    }


def held_out_text(record: Mapping[str, float | int]) -> str:
    """An evaluation's record as a line of the terminal."""
    passes = "".join(
        f", pass@{name.removeprefix('eval_pass_at_')} {value:.1%}"
        for name, value in record.items()
        if name.startswith("eval_pass_at_")
    )
    unscored = record["eval_unscored_fraction"]
    if unscored == 1:
        return f"no response to the {record['eval_prompts']:,} held-out prompts could be scored"
    return (
        f"held-out accuracy {record['eval_accuracy']:.1%}{passes}, reward {record['eval_reward']:.3f}, over "
        f"{record['eval_prompts']:,} prompts" + (f", {unscored:.1%} of the responses unscored" if unscored else "")
    )
