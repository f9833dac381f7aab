"""Text from a model, token by token, and what a model thinks of given text."""
