"""DPO: the model learns to prefer the chosen answer of each pair more than a frozen reference does.

An example is two adjacent rows, one of chosen and one of rejected answers; segments k of the two rows form a pair.
Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7; with label smoothing Mitchell 2023, "A note on DPO with
noisy preferences", equation 3.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext_lite.config import Config, NumericsConfig
from maxtext_lite.data import REFERENCE
from maxtext_lite.models.ops import sums_at
from maxtext_lite.parallel import constrain
from maxtext_lite.training.arrays import Metrics, Rows
from maxtext_lite.training.loss import LossSums, Outputs, auxiliary_metrics, spread_over_targets, target_tokens
from maxtext_lite.training.objective import Reduction

_REWARDS = ("reward_chosen", "reward_rejected", "reward_accuracy")
PREFERENCE_METRICS = (*_REWARDS, "reward_margin")
"""Means over pairs. An answer's reward is beta times its log-probability less the reference's; the margin is the reward
of the chosen answer less that of the rejected one; the accuracy is the share of margins above 0."""


class PairScores(NamedTuple):
    """The scores of examples.

    Attributes:
      log_ratio: log-probability less the reference's, of chosen and rejected answers; float32 [B, 2, T + 1], with
        segment k at index k, 0 where there is none.
      num_pairs: int32 [B].
      target_tokens: of both rows; int32 [B].
    """

    log_ratio: Array
    num_pairs: Array
    target_tokens: Array


def pair_losses(margin: Array, *, beta: float, label_smoothing: float) -> Array:
    """Each pair's loss, from the log-ratio of the chosen answer less that of the rejected one; any shape."""
    right = jax.nn.log_sigmoid(beta * margin)
    wrong = jax.nn.log_sigmoid(-beta * margin)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def segment_sums(x_BT: Array, segment_BT: Array) -> Array:
    """The sum over the tokens of each segment, [B, T + 1] by segment number; padding is segment 0."""
    T = x_BT.shape[1]

    def of_row(x_T: Array, segment_T: Array) -> Array:
        sums_S1: Any = sums_at(x_T[:, None], segment_T, T + 1)
        return sums_S1[:, 0]

    return jax.vmap(of_row)(x_BT, segment_BT)


def _log_ratios(nll_BT: Array, rows: Rows) -> Array:
    """The `PairScores.log_ratio` [B / 2, 2, T + 1] of the rows."""
    ratio_BT = -nll_BT * (rows["weights"] > 0) - rows[REFERENCE]
    ratio_BT = jnp.where(rows["segments"] > 0, ratio_BT, 0)  # padding, which need not be finite
    sums_BS = segment_sums(ratio_BT, rows["segments"])
    num_places = sums_BS.shape[1]
    is_segment_S = jnp.arange(num_places) > 0
    return jnp.where(is_segment_S, sums_BS, 0).reshape(-1, 2, num_places)


def _num_pairs(rows: Rows) -> Array:
    """The number of pairs of each row, int32 [..., B]."""
    return jnp.max(rows["segments"], axis=-1)


@dataclasses.dataclass(frozen=True)
class Preference:
    """The objective of DPO; see `objective.Objective`."""

    beta: float
    label_smoothing: float

    rows_per_example = 2
    divisor = "pairs"
    own_sums = _REWARDS
    reductions: ClassVar[Mapping[str, Reduction]] = dict.fromkeys(PREFERENCE_METRICS, "mean")

    def rows(self, batch: Rows, axes: Sequence[str]) -> Rows:
        """The rows [..., 2 B, T] of examples [..., B, 2 T]. An example's two stay adjacent and on their device."""

        def split(x: Array) -> Array:
            B, length = x.shape[-2:]
            return constrain(x.reshape(*x.shape[:-2], 2 * B, length // 2), axes)

        return {name: split(x) for name, x in batch.items()}

    def counts(self, rows: Rows) -> dict[str, Array]:
        """Target tokens, and pairs, counted at the rows of chosen answers."""
        pairs = _num_pairs(rows)
        is_chosen = jnp.arange(pairs.shape[-1]) % 2 == 0
        return {"target_tokens": target_tokens(rows), "pairs": jnp.where(is_chosen, pairs, 0)}

    def loss(self, outputs: Outputs, rows: Rows, factor: Array) -> tuple[Array, LossSums]:
        """The loss of the pairs, and the sums of their losses and rewards."""
        places = jnp.arange(rows["segments"].shape[1] + 1)
        is_pair = (places <= _num_pairs(rows)[::2, None]) & (places > 0)
        log_ratio = _log_ratios(outputs.nll(rows["targets"]), rows)
        margin = log_ratio[:, 0] - log_ratio[:, 1]
        losses = pair_losses(margin, beta=self.beta, label_smoothing=self.label_smoothing)
        loss = factor * jnp.sum(jnp.where(is_pair, losses, 0))
        # A pair has weight 1, half of it in either row.
        more, sums_of_aux = outputs.auxiliary_loss(*spread_over_targets(0.5 * factor * _num_pairs(rows), rows))
        rewards = self.beta * factor * jnp.sum(log_ratio, axis=(0, 2))
        accuracy = factor * jnp.sum(is_pair & (log_ratio[:, 0] > log_ratio[:, 1]))
        sums_of_aux |= dict(zip(_REWARDS, (*rewards, accuracy), strict=True))
        return loss + more, LossSums(loss, jnp.zeros_like(loss), sums_of_aux)

    def metrics(self, aux: dict[str, Array], count: Array, config: NumericsConfig) -> Metrics:
        """`pairs`, PREFERENCE_METRICS and, with experts, AUXILIARY_METRICS."""
        rewards = {name: aux[name] for name in _REWARDS}
        rest = {name: x for name, x in aux.items() if name not in _REWARDS}
        margin = {"reward_margin": rewards["reward_chosen"] - rewards["reward_rejected"]}
        return {"pairs": count, **rewards, **margin, **auxiliary_metrics(rest, config)}

    def scores(self, outputs: Outputs, rows: Rows) -> PairScores:
        """The log-ratios of the examples' pairs; with a reference of 0, their log-probabilities."""
        nll_BT = outputs.scored_nll(rows["targets"])
        tokens_B = jnp.sum(target_tokens(rows).reshape(-1, 2), axis=1)
        return PairScores(_log_ratios(nll_BT, rows), _num_pairs(rows)[::2], tokens_B)

    def evaluation(self, scores: Sequence[PairScores]) -> dict[str, float | int]:
        """Means over pairs, summed in double precision, and the numbers of pairs and target tokens."""
        ratios = np.concatenate([pairs_of(each) for each in scores]).astype(np.float64)
        margins = ratios[:, 0] - ratios[:, 1]
        losses = pair_losses(jnp.asarray(margins), beta=self.beta, label_smoothing=self.label_smoothing)

        def mean(values: Iterable[float]) -> float:
            return math.fsum(map(float, values)) / max(len(margins), 1)

        return {
            "eval_loss": mean(losses),
            "eval_target_tokens": sum(int(each.target_tokens.sum()) for each in scores),
            "eval_pairs": len(margins),
            "eval_reward_margin": self.beta * mean(margins),
            "eval_reward_accuracy": mean(margins > 0),
        }


def preference(config: Config) -> Preference:
    """The objective of a run with this config."""
    return Preference(config.dpo_beta, config.dpo_label_smoothing)


def against(own: PairScores, reference: PairScores) -> PairScores:
    """Scores whose log-ratios are those to a reference."""
    return own._replace(log_ratio=own.log_ratio - reference.log_ratio)


def pairs_of(scores: PairScores) -> np.ndarray:
    """The log-ratios of the pairs, float32 [pairs, 2], in the order of examples and their segments."""
    places = np.arange(scores.log_ratio.shape[2])
    is_pair = (places > 0) & (places <= np.asarray(scores.num_pairs)[:, None])
    return np.moveaxis(np.asarray(scores.log_ratio), 1, 2)[is_pair]
