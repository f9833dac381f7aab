"""Text from a model, token by token, and a model's likelihoods of given text."""
