"""GRPO and GSPO: responses whose advantage is above 0 are to become likelier, the others less likely.

An example is one row: a prompt with one response. Sources: Shao et al. 2024, arXiv:2402.03300, equations 3 and 4 (GRPO
and its estimate of the KL divergence); Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7 (GSPO: one ratio for a
response); Yu et al. 2025, arXiv:2503.14476, section 3 (DAPO: a clip range of its own above, and the mean over tokens);
Liu et al. 2025, arXiv:2503.20783, section 3 (Dr. GRPO: sums over tokens, divided by a constant); Yao et al. 2025, Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training (truncated importance sampling: a weight for each
token, where what sampled has other probabilities than the trainer).
"""

# pyright: reportUnknownMemberType=false
# jax declares some of its functions in part.

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from maxtext_lite.config import NumericsConfig
from maxtext_lite.models import Decoder
from maxtext_lite.training.arrays import Metrics, Rows
from maxtext_lite.training.loss import LossSums
from maxtext_lite.training.objective import OneRowExamples
from maxtext_lite.training.outputs import Outputs, auxiliary_metrics, target_tokens, zero_sums

ADVANTAGES = "advantages"
OLD = "old_log_probabilities"
REFERENCE = "reference_log_probabilities"

ROLLOUT = "rollout_log_probabilities"

KL = "kl"
CLIP_LOW, CLIP_HIGH = "clip_fraction_low", "clip_fraction_high"
TOKEN_NLL = "token_nll"
POLICY_METRICS = (KL, CLIP_LOW, CLIP_HIGH, TOKEN_NLL)
"""Means over all response tokens of a step, whatever the aggregation of the loss: the estimate k3 of the KL divergence
to the reference, where there is one; the tokens whose ratio is clipped from below, which happens where the advantage is
negative, and from above, where it is positive; minus the log-probability, which estimates the entropy where the policy
itself has drawn the tokens."""

MISMATCH, ROLLOUT_KL, ROLLOUT_TRUNCATED = "rollout_mismatch", "rollout_kl", "rollout_truncated"
ROLLOUT_METRICS = (MISMATCH, ROLLOUT_KL, ROLLOUT_TRUNCATED)
"""Such means where the log-probabilities of what sampled are compared: the absolute difference to those of the trainer
with the same parameters; the estimate k3 of the KL divergence of what sampled from the trainer; the share of tokens
whose importance weight is cut off at the cap, where there is one."""

_TOKENS = "token_share"  # what POLICY_METRICS' sums are divided by


@dataclasses.dataclass(frozen=True)
class Policy(OneRowExamples):
    """The objective of reinforcement learning; see `objective.Objective`.

    Rows have, beside those of pre-training with weight 1 where a target belongs to the response, float32 arrays
    [..., B, T] of `advantages`, at every token of a row, and, at the targets, of `old_log_probabilities` unless it is
    `on_policy`, of `reference_log_probabilities` where `beta` is not 0, and of `rollout_log_probabilities` where it
    `compares`.

    Attributes:
      algo: grpo: each token has its ratio to the policy that has drawn it; gspo: a response has one, their geometric
        mean.
      epsilon_low, epsilon_high: beyond 1 - epsilon_low and 1 + epsilon_high a ratio is clipped.
      beta: weight of the KL divergence to the reference.
      aggregation: seq_mean_token_mean: mean over responses of the mean over their tokens; token_mean: over all tokens;
        seq_mean_token_sum_norm: mean over responses of the sum over tokens divided by `max_response_tokens`.
      temperature: the policy is the softmax of the logits divided by it.
      on_policy: the parameters that have drawn the responses are those that are trained: ratios are 1.
      compares: what sampled may have had other probabilities than the trainer finds with those parameters.
      correction_cap: the loss of a token but for the KL divergence is multiplied by the ratio of the two, and by this
        where it is more; None: it is not.
    """

    algo: Literal["grpo", "gspo"]
    epsilon_low: float
    epsilon_high: float
    beta: float
    aggregation: Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]
    temperature: float
    max_response_tokens: int
    on_policy: bool
    compares: bool = False
    correction_cap: float | None = None

    @property
    def divisor(self) -> str:
        """Target tokens, or responses: rows with a target."""
        return "target_tokens" if self.aggregation == "token_mean" else "responses"

    def expected(self, num_pairs: int) -> int:
        """The most that a step of this many pairs counts, known before they are drawn; exact where responses count."""
        return num_pairs * self.max_response_tokens if self.aggregation == "token_mean" else num_pairs

    def counts(self, rows: Rows) -> dict[str, jax.Array]:
        """Target tokens, and responses."""
        tokens = target_tokens(rows)
        return {"target_tokens": tokens, "responses": (tokens > 0).astype(jnp.int32)}

    def zeros(self, decoder: Decoder, zero: jax.Array) -> LossSums:
        """Before the first micro-batch."""
        return zero_sums(decoder, zero, *self._names())

    def _names(self) -> tuple[str, ...]:
        of_rollout = ROLLOUT_METRICS if self.correction_cap is not None else (MISMATCH, ROLLOUT_KL)
        of_policy = (name for name in POLICY_METRICS if self.beta or name != KL)
        return (*of_policy, *(of_rollout if self.compares else ()), _TOKENS)

    def token_losses(self, log_probability_BT: jax.Array, rows: Rows) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of each token [B, T], to be differentiated, and what POLICY_METRICS are means of, [B, T]; all 0
        where there is no target."""
        is_target_BT = rows["weights"] > 0
        advantage_BT = jnp.where(is_target_BT, rows[ADVANTAGES], 0)
        old_BT = jax.lax.stop_gradient(log_probability_BT) if self.on_policy else rows[OLD]
        log_ratio_BT = jnp.where(is_target_BT, log_probability_BT - old_BT, 0)
        if self.algo == "gspo":
            mean_B1 = jnp.sum(log_ratio_BT, axis=1, keepdims=True) / _at_least_one(is_target_BT)
            log_ratio_BT = jnp.broadcast_to(mean_B1, log_ratio_BT.shape)

        ratio_BT = jax.lax.stop_gradient(jnp.exp(log_ratio_BT))
        is_low_BT = (ratio_BT < 1 - self.epsilon_low) & (advantage_BT < 0)
        is_high_BT = (ratio_BT > 1 + self.epsilon_high) & (advantage_BT > 0)
        # -min(ratio A, clip(ratio) A). A ratio that does not count may be infinite, and 0 times that no number.
        counts_BT = (advantage_BT != 0) & ~is_low_BT & ~is_high_BT
        clipped_BT = jnp.where(is_low_BT, 1 - self.epsilon_low, jnp.exp(jnp.where(counts_BT, log_ratio_BT, 0)))
        clipped_BT = jnp.where(is_high_BT, 1 + self.epsilon_high, clipped_BT)
        loss_BT = -advantage_BT * clipped_BT

        found = {CLIP_LOW: is_low_BT, CLIP_HIGH: is_high_BT, TOKEN_NLL: -log_probability_BT * is_target_BT}
        if self.compares:
            log_weight_BT = jnp.where(is_target_BT, old_BT - rows[ROLLOUT], 0)
            found[MISMATCH], found[ROLLOUT_KL] = jnp.abs(log_weight_BT), jnp.expm1(log_weight_BT) - log_weight_BT
            if self.correction_cap is not None:
                weight_BT = jnp.exp(log_weight_BT)
                found[ROLLOUT_TRUNCATED] = weight_BT > self.correction_cap
                loss_BT *= jnp.minimum(weight_BT, self.correction_cap)
        if self.beta:
            to_reference_BT = jnp.where(is_target_BT, rows[REFERENCE] - log_probability_BT, 0)
            found[KL] = jnp.expm1(to_reference_BT) - to_reference_BT
            loss_BT += self.beta * found[KL]
        return loss_BT, found

    def loss(self, outputs: Outputs, rows: Rows, factor: jax.Array) -> tuple[jax.Array, LossSums]:
        """The policy's loss, and the sums of losses and metrics."""
        losses_BT, *weights = self._weights(rows, factor)
        loss_BT, found = self.token_losses(-outputs.nll(rows["targets"], self.temperature), rows)
        loss = jnp.sum(losses_BT * loss_BT)
        more, sums = outputs.auxiliary_loss(*weights)
        found[_TOKENS] = rows["weights"] > 0
        sums |= {name: factor * jnp.sum(found[name], dtype=jnp.float32) for name in self._names()}
        return loss + more, LossSums(loss, jnp.zeros_like(loss), sums)

    def _weights(self, rows: Rows, factor: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What tokens' losses are multiplied by, [B, T]; and of experts' losses the weights of tokens [B, T] and of
        rows [B], which over a step add up to 1: a response weighs as a response where responses are counted, and as its
        tokens where they are."""
        is_target_BT = rows["weights"] > 0
        counted = self.counts(rows)
        if self.divisor == "target_tokens":
            weight_BT = factor * is_target_BT
            return weight_BT, weight_BT, factor * counted["target_tokens"]
        alike_BT = factor * is_target_BT / _at_least_one(is_target_BT)
        is_mean = self.aggregation == "seq_mean_token_mean"
        losses_BT = alike_BT if is_mean else factor * is_target_BT / self.max_response_tokens
        return losses_BT, alike_BT, factor * counted["responses"]

    def metrics(self, aux: dict[str, jax.Array], count: jax.Array, config: NumericsConfig) -> Metrics:
        """POLICY_METRICS as far as there are any and, with experts, AUXILIARY_METRICS."""
        del count
        own = self._names()
        share = aux[_TOKENS]
        means = {name: aux[name] / jnp.where(share > 0, share, 1) for name in own if name != _TOKENS}
        return {**means, **auxiliary_metrics({name: x for name, x in aux.items() if name not in own}, config)}


def _at_least_one(is_target_BT: jax.Array) -> jax.Array:
    """Targets of each row, [B, 1], or 1."""
    return jnp.maximum(jnp.sum(is_target_BT, axis=1, keepdims=True), 1)
