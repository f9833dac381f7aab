"""Reinforcement learning: rollouts, rewards, advantages, and the policy's loss."""
