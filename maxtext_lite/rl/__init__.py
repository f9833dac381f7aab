"""Reinforcement learning: the policy's objective, log-probabilities and advantages."""

from maxtext_lite.rl.advantages import equal_groups_fraction, group_advantages
from maxtext_lite.rl.log_probabilities import make_log_probabilities
from maxtext_lite.rl.policy import POLICY_METRICS, Policy

__all__ = ["POLICY_METRICS", "Policy", "equal_groups_fraction", "group_advantages", "make_log_probabilities"]
