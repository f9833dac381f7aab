"""Reinforcement learning: responses are sampled, rewarded and learned from."""
