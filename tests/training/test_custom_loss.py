"""A custom loss is refused if it is not a sum over rows; runs and evaluations count what it counts.

Its steps, however they are split: tests/invariance/test_matrix.py.
"""

import math

import jax.numpy as jnp
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.training import train
from maxtext_lite.training.custom_loss import WEIGHT, custom_loss
from tests.training.conftest import TINY, lines_of


def next_token(predictions, rows):
    return jnp.sum(rows["weights"] * predictions.nll()), jnp.sum(rows["weights"] > 0)


ABOUT = {
    "fields": ("tokens", "targets", "segments", "positions", "weights", "price"),
    "vocab_size": 264,
    "emb_dim": 16,
}
REFUSED = {
    "a mean": lambda p, rows: (
        jnp.mean(p.nll() * rows["weights"]),
        jnp.sum(rows["weights"]),
    ),
    "rows between them": lambda p, rows: (
        jnp.sum(p.hidden()[:1] * p.hidden()),
        jnp.sum(rows["weights"]),
    ),
    "empty rows weighed": lambda p, rows: (
        jnp.sum(p.nll() * rows["weights"]),
        1.0 * rows["weights"].size,
    ),
    "a weight of the model": lambda p, rows: (
        jnp.sum(p.nll() * rows["weights"]),
        jnp.sum(rows["weights"] * p.nll()),
    ),
    "not a number": lambda p, rows: (
        jnp.sum(p.nll()) * jnp.nan,
        jnp.sum(rows["weights"]),
    ),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.fast
def test_what_is_no_sum_over_rows_is_refused(why):
    with pytest.raises(UserError, match=r"^objective: "):
        custom_loss(REFUSED[why], **ABOUT, z_loss_multiplier=0.0)


def test_a_z_loss_of_the_config_is_refused_and_sums_are_taken():
    with pytest.raises(UserError, match=r"z_loss_multiplier=0\.001"):
        custom_loss(next_token, **ABOUT, z_loss_multiplier=1e-3)


def half(predictions, rows):
    return jnp.sum(rows["weights"] * predictions.nll()), 0.5 * jnp.sum(
        rows["weights"] > 0
    )


def test_a_run_counts_weights_in_part_and_evaluates_by_the_loss(tmp_path):
    """Half the weight is twice the loss, which at first is that of a model that knows nothing of 264 tokens."""
    keys = "dataset_type=synthetic steps=2 eval_interval=2 eval_steps=1 enable_checkpointing=false optimizer=sgd"
    words = [*TINY, *keys.split(), f"base_output_directory={tmp_path}"]
    result = train(load_config(None, words), objective=half)
    first, _, evaluation = lines_of(result.run_directory)
    assert first[WEIGHT] == first["target_tokens"] / 2
    assert first["loss"] == pytest.approx(2 * math.log(264), rel=0.02)
    assert evaluation["eval_loss_weight"] == evaluation["eval_target_tokens"] / 2
    assert evaluation["eval_loss"] == pytest.approx(2 * math.log(264), rel=0.02)


def test_examples_of_a_program_cannot_be_balanced(tmp_path):
    config = load_config(
        None, [*TINY, "balance_attention=true", f"base_output_directory={tmp_path}"]
    )
    with pytest.raises(UserError, match=r"^balance_attention=true"):
        train(config, source=[{}])
    assert not list(tmp_path.iterdir())
