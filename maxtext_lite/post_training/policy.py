"""GRPO and GSPO: the loss makes responses with a positive advantage likelier, and the others less likely.

An example is one row: a prompt with one response. Sources: Shao et al. 2024, arXiv:2402.03300, equations 3 and 4 (GRPO
and its estimate of the KL divergence); Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7 (GSPO: one ratio per
response); Yu et al. 2025, arXiv:2503.14476, section 3 (DAPO: a separate upper clip range, and the mean over tokens);
Liu et al. 2025, arXiv:2503.20783, section 3 (Dr. GRPO: sums over tokens divided by a constant); Yao et al. 2025, Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training (truncated importance sampling: a weight per token
where the sampler's probabilities differ from the trainer's).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from maxtext_lite.config import NumericsConfig
from maxtext_lite.training.arrays import Metrics, Rows
from maxtext_lite.training.loss import LossSums, Outputs, auxiliary_metrics, target_tokens
from maxtext_lite.training.objective import OneRowExamples

ADVANTAGES = "advantages"
OLD = "old_log_probabilities"
REFERENCE = "reference_log_probabilities"
ROLLOUT = "rollout_log_probabilities"

KL = "kl"
CLIP_LOW = "clip_fraction_low"
CLIP_HIGH = "clip_fraction_high"
TOKEN_NLL = "token_nll"
POLICY_METRICS = (KL, CLIP_LOW, CLIP_HIGH, TOKEN_NLL)
"""Means over all response tokens of a step, whatever the loss's aggregation. These are the estimate k3 of the KL
divergence to the reference, if there is one; the share of tokens whose ratio is clipped from below, with a negative
advantage, and from above, with a positive one; and minus the log-probability, which estimates the entropy if the policy
itself drew the tokens."""

MISMATCH = "rollout_mismatch"
ROLLOUT_KL = "rollout_kl"
ROLLOUT_TRUNCATED = "rollout_truncated"
ROLLOUT_METRICS = (MISMATCH, ROLLOUT_KL, ROLLOUT_TRUNCATED)
"""The same means for the sampler's log-probabilities. These are their absolute difference from the trainer's with the
same parameters; the estimate k3 of the KL divergence between sampler and trainer; the share of tokens whose importance
weight is truncated at the cap, if there is one."""

_TOKENS = "token_share"  # divides the sums of POLICY_METRICS


@dataclasses.dataclass(frozen=True)
class Policy(OneRowExamples):
    """The objective of reinforcement learning; see `objective.Objective`.

    Rows have the fields of pre-training, with weight 1 for targets in the response, and float32 arrays [..., B, T]:
    `advantages` at every token of a row and, at the targets, `old_log_probabilities` unless `on_policy`,
    `reference_log_probabilities` if `beta` is not 0, and `rollout_log_probabilities` if it `compares`.

    Attributes:
      algo: grpo: each token has its own ratio to the policy that drew it; gspo: a response has one, their geometric
        mean.
      epsilon_low, epsilon_high: ratios are clipped to 1 - epsilon_low and 1 + epsilon_high.
      beta: weight of the KL divergence to the reference.
      aggregation: seq_mean_token_mean: mean over responses of the mean over their tokens; token_mean: mean over all
        tokens; seq_mean_token_sum_norm: mean over responses of the sum over tokens divided by `max_response_tokens`.
      temperature: divides the logits; the policy is their softmax.
      on_policy: the responses were drawn with the parameters being trained: ratios are 1.
      compares: the sampler's probabilities may differ from the trainer's with the same parameters.
      correction_cap: each token's loss, without the KL divergence, is multiplied by the ratio of the trainer's to the
        sampler's probability, at most by this cap; None: it is not.
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
        """Target tokens, or responses, which are rows with a target."""
        return "target_tokens" if self.aggregation == "token_mean" else "responses"

    def expected(self, num_pairs: int) -> int:
        """The largest possible count of a step of this many pairs, before they are drawn; exact if responses count."""
        return num_pairs * self.max_response_tokens if self.aggregation == "token_mean" else num_pairs

    def counts(self, rows: Rows) -> dict[str, Array]:
        """Target tokens, and responses."""
        tokens = target_tokens(rows)
        return {"target_tokens": tokens, "responses": (tokens > 0).astype(jnp.int32)}

    @property
    def own_sums(self) -> tuple[str, ...]:
        """The names of the sums of metrics, and of what divides them."""
        of_rollout = ROLLOUT_METRICS if self.correction_cap is not None else (MISMATCH, ROLLOUT_KL)
        of_policy = (name for name in POLICY_METRICS if self.beta or name != KL)
        return (*of_policy, *(of_rollout if self.compares else ()), _TOKENS)

    def token_losses(self, log_probability_BT: Array, rows: Rows) -> tuple[Array, dict[str, Array]]:
        """Each token's differentiable loss [B, T], and the values [B, T] whose means are POLICY_METRICS. All are 0
        without a target."""
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
        # -min(ratio A, clip(ratio) A). A ratio that does not count may be infinite, and 0 times infinity is NaN.
        counts_BT = (advantage_BT != 0) & ~is_low_BT & ~is_high_BT
        clipped_BT = jnp.exp(jnp.where(counts_BT, log_ratio_BT, 0))
        clipped_BT = jnp.where(is_low_BT, 1 - self.epsilon_low, clipped_BT)
        clipped_BT = jnp.where(is_high_BT, 1 + self.epsilon_high, clipped_BT)
        loss_BT = -advantage_BT * clipped_BT

        found = {CLIP_LOW: is_low_BT, CLIP_HIGH: is_high_BT, TOKEN_NLL: -log_probability_BT * is_target_BT}
        if self.compares:
            log_weight_BT = jnp.where(is_target_BT, old_BT - rows[ROLLOUT], 0)
            found[MISMATCH] = jnp.abs(log_weight_BT)
            found[ROLLOUT_KL] = jnp.expm1(log_weight_BT) - log_weight_BT
            if self.correction_cap is not None:
                weight_BT = jnp.exp(log_weight_BT)
                found[ROLLOUT_TRUNCATED] = weight_BT > self.correction_cap
                loss_BT *= jnp.minimum(weight_BT, self.correction_cap)
        if self.beta:
            to_reference_BT = jnp.where(is_target_BT, rows[REFERENCE] - log_probability_BT, 0)
            found[KL] = jnp.expm1(to_reference_BT) - to_reference_BT
            loss_BT += self.beta * found[KL]
        return loss_BT, found

    def loss(self, outputs: Outputs, rows: Rows, factor: Array) -> tuple[Array, LossSums]:
        """The policy's loss with the experts', and the sums of losses and metrics."""
        losses_BT, *weights = self._weights(rows, factor)
        loss_BT, found = self.token_losses(-outputs.nll(rows["targets"], self.temperature), rows)
        loss = jnp.sum(losses_BT * loss_BT)
        more, sums = outputs.auxiliary_loss(*weights)
        found[_TOKENS] = rows["weights"] > 0
        sums |= {name: factor * jnp.sum(found[name], dtype=jnp.float32) for name in self.own_sums}
        return loss + more, LossSums(loss, jnp.zeros_like(loss), sums)

    def _weights(self, rows: Rows, factor: Array) -> tuple[Array, Array, Array]:
        """The weights of tokens' losses, [B, T], and of the experts' losses for tokens [B, T] and rows [B]. The latter
        add up to 1 over a step: a response counts once where responses are counted, otherwise by its tokens."""
        is_target_BT = rows["weights"] > 0
        counted = self.counts(rows)
        if self.divisor == "target_tokens":
            weight_BT = factor * is_target_BT
            return weight_BT, weight_BT, factor * counted["target_tokens"]
        alike_BT = factor * is_target_BT / _at_least_one(is_target_BT)
        is_mean = self.aggregation == "seq_mean_token_mean"
        losses_BT = alike_BT if is_mean else factor * is_target_BT / self.max_response_tokens
        return losses_BT, alike_BT, factor * counted["responses"]

    def metrics(self, aux: dict[str, Array], count: Array, config: NumericsConfig) -> Metrics:
        """The POLICY_METRICS and ROLLOUT_METRICS that apply, NaN without a target; with experts AUXILIARY_METRICS."""
        del count
        share = aux[_TOKENS]
        of_experts = dict(aux)
        means: Metrics = {}
        for name in self.own_sums:
            total = of_experts.pop(name)
            if name != _TOKENS:
                means[name] = jnp.where(share > 0, total / share, jnp.nan)
        return means | auxiliary_metrics(of_experts, config)


def _at_least_one(is_target_BT: Array) -> Array:
    """The number of targets of each row, [B, 1], and at least 1."""
    return jnp.maximum(jnp.sum(is_target_BT, axis=1, keepdims=True), 1)
