"""Pairs of a prompt and a response: their advantages, chunks, rows for a step, and lines in rollouts.jsonl."""

import dataclasses
import hashlib
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from maxtext_lite.data.rows import FIELDS, field_dtype, segments_row
from maxtext_lite.post_training.policy import ADVANTAGES, ROLLOUT
from maxtext_lite.post_training.prompts import Prompt
from maxtext_lite.post_training.rewards import Scores
from maxtext_lite.post_training.rollout import Response

_LEAST_DEVIATION = 1e-4
"""Added to the standard deviation that divides rewards."""


def group_advantages(reward_N: np.ndarray, num_generations: int, scale: Literal["group", "none"]) -> np.ndarray:
    """Advantages of responses, float32 [N]: their rewards less the mean of their group.

    Computed in double precision; exactly 0 in a group whose rewards are all equal, and for a response without a reward,
    which has no part in the mean and the deviation of its group.

    Args:
      reward_N: float64, in consecutive groups of `num_generations` responses to one prompt; NaN without a reward.
      scale: group: divided by the group's sample standard deviation (over n - 1) + 1e-4; none: not divided.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; not divided: Liu et al. 2025, arXiv:2503.20783.
    """
    groups = _groups(reward_N, num_generations)
    is_scored = ~np.isnan(groups)
    scored = is_scored.sum(axis=1, keepdims=True)
    mean = np.nan_to_num(groups).sum(axis=1, keepdims=True) / np.maximum(scored, 1)
    above = np.where(is_scored, groups - mean, 0)
    # The mean of equal numbers may be off by their last bit.
    above[_is_equal(groups)] = 0
    if scale == "group":
        variance = np.square(above).sum(axis=1, keepdims=True) / np.maximum(scored - 1, 1)
        above /= np.sqrt(variance) + _LEAST_DEVIATION
    return above.ravel().astype(np.float32)


def mean_deviation(reward_N: np.ndarray, num_generations: int) -> float:
    """The mean of the groups' standard deviations (over n - 1); NaN if no group has two rewards."""
    groups = _groups(reward_N, num_generations)
    deviations: list[float] = []
    for group in groups:
        scored = group[~np.isnan(group)]
        if len(scored) > 1:
            deviations.append(float(np.std(scored, ddof=1)))
    return mean_of(deviations)


def mean_of(values: Sequence[float] | np.ndarray) -> float:
    """The mean of the numbers that are not NaN; NaN if there are none."""
    found = np.asarray(values, np.float64)
    found = found[~np.isnan(found)]
    return float(np.mean(found)) if found.size else math.nan


def equal_groups_fraction(reward_N: np.ndarray, num_generations: int) -> float:
    """The fraction of groups whose rewards are all equal, or fewer than two: nothing is learned from them."""
    return float(_is_equal(_groups(reward_N, num_generations)).mean())


def _groups(reward_N: np.ndarray, num_generations: int) -> np.ndarray:
    """[groups, num_generations], float64."""
    return reward_N.astype(np.float64).reshape(-1, num_generations)


def _is_equal(groups: np.ndarray) -> np.ndarray:
    """Whether a group has no two different rewards."""
    is_scored = ~np.isnan(groups)
    lowest = np.where(is_scored, groups, np.inf).min(axis=1)
    highest = np.where(is_scored, groups, -np.inf).max(axis=1)
    return lowest >= highest


class Sampled(NamedTuple):
    """Pairs that are not judged yet.

    Attributes:
      texts: the responses as reward functions see them.
      keys: of the requests.
    """

    prompts: Sequence[Prompt]
    responses: Sequence[Response]
    texts: Sequence[str]
    keys: Sequence[tuple[int, ...]] = ()


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Judged pairs; one prompt's are adjacent.

    Attributes:
      advantages: of each pair, float32.
      num_generations: pairs per prompt.
    """

    sampled: Sampled
    scores: Scores
    advantages: np.ndarray
    num_generations: int

    @staticmethod
    def judged(
        sampled: Sampled, scores: Scores, *, num_generations: int, scale_rewards: Literal["group", "none"]
    ) -> "Chunk":
        """The chunk of these pairs, with the advantages of their scores."""
        advantages = group_advantages(scores.total, num_generations, scale_rewards)
        return Chunk(sampled, scores, advantages, num_generations)

    @staticmethod
    def joined(chunks: Sequence["Chunk"]) -> "Chunk":
        """The pairs of all chunks, at least one, in order."""
        parts = zip(*(chunk.sampled for chunk in chunks), strict=True)
        fields: list[Any] = [[x for part in field for x in part] for field in parts]
        sampled = Sampled(*fields)
        scores = Scores.joined([chunk.scores for chunk in chunks])
        advantages = np.concatenate([chunk.advantages for chunk in chunks])
        return Chunk(sampled, scores, advantages, chunks[0].num_generations)

    def part(self, pairs: slice) -> "Chunk":
        """Some of the pairs; the first part also has the messages and the number of errors."""
        fields: list[Any] = [field[pairs] for field in self.sampled]
        sampled = Sampled(*fields)
        return Chunk(sampled, self.scores.part(pairs), self.advantages[pairs], self.num_generations)

    def groups(self) -> list["Chunk"]:
        """The pairs of each prompt."""
        each = self.num_generations
        return [self.part(slice(first, first + each)) for first in range(0, len(self.advantages), each)]

    @property
    def has_different_rewards(self) -> bool:
        """Whether something is learned from one prompt's pairs."""
        return equal_groups_fraction(self.scores.total, self.num_generations) == 0

    def rows(self, num_slots: int, num_tokens: int, *, compares: bool = False) -> dict[str, np.ndarray]:
        """The arrays [1, num_slots, num_tokens] of a micro-batch; slots without a pair are all 0.

        A row is the prompt and the response without its last token; targets are the following tokens, and those of the
        response have weight 1, or 0 if it is unscored: the loss and its divisor then lack it.

        Args:
          compares: with the sampler's log-probabilities.
        """
        names = (*FIELDS, ADVANTAGES, *([ROLLOUT] if compares else []))
        rows = {name: np.zeros((1, num_slots, num_tokens), field_dtype(name)) for name in names}
        for slot, (prompt, response) in enumerate(zip(self.sampled.prompts, self.sampled.responses, strict=True)):
            token_ids = np.array([*prompt.token_ids, *response.token_ids])
            length = len(token_ids) - 1
            first = len(prompt.token_ids) - 1  # of the response's targets
            is_learned = (np.arange(length) >= first) & self.scores.is_scored[slot]
            for name, x in segments_row([(token_ids, is_learned)], num_tokens).items():
                rows[name][0, slot] = x
            rows[ADVANTAGES][0, slot, :length] = self.advantages[slot]
            if compares:
                rows[ROLLOUT][0, slot, first:length] = response.log_probabilities
        return rows

    def lines(self, step: int) -> list[dict[str, object]]:
        """The line of each pair in rollouts.jsonl; NaN means that no reward was given."""
        return [
            {
                "step": step,
                "prompt_number": prompt.number,
                "prompt": prompt.text,
                "response": text,
                "tokens": len(response.token_ids),
                "ended": response.ended,
                "reward": float(self.scores.total[at]),
                "rewards": {
                    short_name(name, self.scores.by_name): float(values[at])
                    for name, values in self.scores.by_name.items()
                },
                "advantage": float(self.advantages[at]),
            }
            for at, (prompt, response, text) in enumerate(zip(*self.sampled[:3], strict=True))
        ]


def batch_record(chunks: Sequence[Chunk]) -> dict[str, float | str]:
    """A batch's entries in metrics.jsonl: means over its pairs, however it is split into chunks.

    `reward` is the weighted sum of the reward functions, `rewards/NAME` each by itself, over the responses that have
    one; `unscored_fraction` is the share of those that have none; `reward_std` is the mean over prompts of the standard
    deviation (ddof 1) of rewards; `equal_reward_groups` is the share of prompts whose responses do not have two
    different rewards, from which nothing is learned; `rollout_token_nll` is `token_nll` by the sampler's
    log-probabilities; `responses_hash` is a hash of the tokens in order.
    """
    responses = [response for chunk in chunks for response in chunk.sampled.responses]
    scores = Scores.joined([chunk.scores for chunk in chunks])
    num_generations = chunks[0].num_generations
    lengths = [len(response.token_ids) for response in responses]
    scored = [response for response, is_scored in zip(responses, scores.is_scored, strict=True) if is_scored]
    nll = -sum(math.fsum(response.log_probabilities) for response in scored)
    return {
        "reward": mean_of(scores.total),
        "reward_std": mean_deviation(scores.total, num_generations),
        **{f"rewards/{short_name(name, scores.by_name)}": mean_of(values) for name, values in scores.by_name.items()},
        "unscored_fraction": 1 - float(np.mean(scores.is_scored)),
        "equal_reward_groups": equal_groups_fraction(scores.total, num_generations),
        "reward_errors": scores.errors,
        "response_tokens": float(np.mean(lengths)),
        "rollout_token_nll": nll / sum(len(response.token_ids) for response in scored) if scored else math.nan,
        "truncated_responses": float(np.mean([not response.ended for response in responses])),
        "responses_hash": responses_hash(responses),
    }


def short_name(name: str, names: Collection[str]) -> str:
    """A reward function's name without its module, unless another has the same."""
    short = name.rpartition(":")[2]
    return name if sum(other.rpartition(":")[2] == short for other in names) > 1 else short


def responses_hash(responses: Sequence[Response]) -> str:
    """A hash of the responses' tokens in order: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for response in responses:
        digest.update(np.array([len(response.token_ids), *response.token_ids], "<i4").tobytes())
    return digest.hexdigest()[:16]
