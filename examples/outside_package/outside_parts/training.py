"""An objective and a hook."""

import jax.numpy as jnp

from maxtext_lite.config import Config
from maxtext_lite.training.custom_loss import CustomLoss
from maxtext_lite.training.hooks import Hook


def confident(config: Config) -> CustomLoss:
    """The negative log-likelihood plus a hundredth of its square, so that unlikely targets weigh more."""

    def loss(predictions, rows):
        nll = predictions.nll()
        return jnp.sum(rows["weights"] * (nll + 0.01 * nll**2)), jnp.sum(rows["weights"])

    return CustomLoss(loss, config.vocab_size, config.base_emb_dim)


class Tally(Hook):
    """Counts the targets of a start, in metrics.jsonl and in a last line."""

    def __init__(self):
        self.targets = 0

    def after_step(self, step, record, state):
        """The step's targets are counted once it is recorded, so that a record has those of the steps before."""
        self.targets += record["target_tokens"]

    def entries(self, step):
        """An entry of each step's record."""
        return {"targets_before": self.targets}

    def saved(self):
        """The run's last line."""
        return f"outside_parts: {self.targets:,} targets in this start"
