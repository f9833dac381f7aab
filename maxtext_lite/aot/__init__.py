"""The train step compiled ahead of time, and its analysis."""
