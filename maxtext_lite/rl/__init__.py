"""Reinforcement learning: prompts are answered, answers judged, and the policy moved to what was judged better."""
