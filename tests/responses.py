"""Rows of reinforcement learning: prompts with ragged responses, advantages, log-probabilities of other policies."""

import dataclasses

import jax
import numpy as np

from maxtext_lite.parallel import sharding
from maxtext_lite.post_training.policy import Policy
from maxtext_lite.training.step import TRAIN_BATCH_AXES

PAIRS, TOKENS, LONGEST = 8, 16, 10
"""Rows, tokens of a row, and tokens of a response at most."""

GRPO = Policy(
    algo="grpo",
    epsilon_low=0.2,
    epsilon_high=0.3,
    beta=0.1,
    aggregation="seq_mean_token_mean",
    temperature=0.7,
    max_response_tokens=LONGEST,
    on_policy=False,
)


def variant(**changes):
    return dataclasses.replace(GRPO, **changes)


def rows():
    """[8, 16] each; responses of 1 to 10 tokens, and an advantage of 0 among those of either sign."""
    rng = np.random.default_rng(5)
    found = {
        name: np.zeros((PAIRS, TOKENS), np.int32)
        for name in ("tokens", "targets", "segments", "positions")
    }
    names = (
        "weights",
        "advantages",
        "old_log_probabilities",
        "reference_log_probabilities",
    )
    found |= {name: np.zeros((PAIRS, TOKENS), np.float32) for name in names}
    for pair, response_tokens in enumerate((3, LONGEST, 1, 7, 5, 2, 9, 4)):
        prompt_tokens = int(rng.integers(2, TOKENS - response_tokens))
        used = prompt_tokens + response_tokens
        ids = rng.integers(0, 264, used)
        found["tokens"][pair, : used - 1], found["targets"][pair, : used - 1] = (
            ids[:-1],
            ids[1:],
        )
        found["segments"][pair, : used - 1], found["positions"][pair, : used - 1] = (
            1,
            np.arange(used - 1),
        )
        response = slice(prompt_tokens - 1, used - 1)
        found["weights"][pair, response] = 1
        found["advantages"][pair] = (0.8, -1.2, 0.5, 0, 0.6, 1.5, -0.9, 0.3)[pair]
        for name in names[2:]:
            found[name][pair, response] = -np.log(264) + 0.4 * rng.normal(
                size=response_tokens
            )
    near = found["old_log_probabilities"] + 0.4 * np.random.default_rng(6).normal(
        size=(PAIRS, TOKENS)
    )
    found["rollout_log_probabilities"] = np.where(found["weights"] > 0, near, 0).astype(
        np.float32
    )
    return found


def chunks_of(batch, mesh, *, micro, slots):
    """The rows as chunks of `micro` pairs, each [1, slots, T] on the mesh; slots without a pair are zeros."""
    found = []
    for first in range(0, PAIRS, micro):
        chunk = {}
        for name, array in batch.items():
            full = np.zeros((1, slots, array.shape[1]), array.dtype)
            full[0, :micro] = array[first : first + micro]
            chunk[name] = jax.device_put(full, sharding(mesh, TRAIN_BATCH_AXES))
        found.append(chunk)
    return found
