"""The train step compiled ahead of time, and what can be read from it."""
