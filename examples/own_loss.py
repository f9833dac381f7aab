"""Your own loss: the focal loss, in which a token counts less the better the model predicts it.

    python examples/own_loss.py steps=100 gradient_accumulation_steps=4

Source: Lin et al. 2017, arXiv:1708.02002, equation 4.
"""

import sys

import jax.numpy as jnp

from maxtext_lite import load_config
from maxtext_lite.training import Predictions, train

GAMMA = 2.0


def focal_loss(predictions: Predictions, rows: dict) -> tuple:
    """The sum over target tokens and their weight, never a mean, so the batch can be split in any way."""
    nll_BT, weight_BT = predictions.nll(), rows["weights"]
    return jnp.sum(weight_BT * (1 - jnp.exp(-nll_BT)) ** GAMMA * nll_BT), jnp.sum(weight_BT)


if __name__ == "__main__":
    train(load_config(None, ["run_name=own_loss", *sys.argv[1:]]), objective=focal_loss)
