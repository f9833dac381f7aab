"""A custom loss is refused if it is not a sum over rows; runs and evaluations count what it counts.

Its steps, however they are split: tests/invariance/test_matrix.py.
"""

import jax.numpy as jnp
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.training import train
from maxtext_lite.training.custom_loss import WEIGHT, CustomLoss, custom_loss
from tests.conftest import use_one_device
from tests.run_directories import lines_of
from tests.training.conftest import TINY


def next_token(predictions, rows):
    return jnp.sum(rows["weights"] * predictions.nll()), jnp.sum(rows["weights"] > 0)


ABOUT = {
    "fields": ("tokens", "targets", "segments", "positions", "weights", "price"),
    "vocab_size": 264,
    "emb_dim": 16,
}


def nll(predictions, rows):
    return jnp.sum(predictions.nll() * rows["weights"])


def weight(predictions, rows):
    return jnp.sum(rows["weights"])


REFUSED = {  # a loss, and what it is divided by
    "a mean": (lambda p, rows: jnp.mean(p.nll() * rows["weights"]), weight),
    "rows between them": (lambda p, _: jnp.sum(p.hidden()[:1] * p.hidden()), weight),
    "a constant weight": (nll, lambda *_: jnp.float32(4)),
    "padding counted": (lambda p, _: jnp.sum(p.nll()), weight),
    "empty rows weighed": (nll, lambda _, rows: 1.0 * rows["weights"].size),
    "a weight of the model": (nll, nll),
    "an array": (lambda p, rows: p.nll() * rows["weights"], weight),
    "not a number": (lambda p, _: jnp.sum(p.nll()) * jnp.nan, weight),
    "nothing weighs": (nll, lambda *_: jnp.float32(0)),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.fast
def test_what_is_no_sum_over_rows_is_refused(why):
    parts = REFUSED[why]
    with pytest.raises(UserError, match=r"^objective: "):
        custom_loss(
            lambda *given: tuple(part(*given) for part in parts),
            **ABOUT,
            z_loss_multiplier=0.0,
        )


def test_a_loss_without_a_weight_is_refused():
    with pytest.raises(UserError, match=r"^objective: "):
        custom_loss(nll, **ABOUT, z_loss_multiplier=0.0)


def test_a_z_loss_of_the_config_is_refused_and_sums_are_taken():
    with pytest.raises(UserError, match=r"z_loss_multiplier=0\.001"):
        custom_loss(next_token, **ABOUT, z_loss_multiplier=1e-3)
    taken = custom_loss(
        lambda p, rows: (jnp.sum(rows["price"]), jnp.sum(rows["price"])),
        **ABOUT,
        z_loss_multiplier=0.0,
    )
    assert isinstance(taken, CustomLoss)


def in_thousandths(predictions, rows):
    """The loss of pre-training with weights so small that those of a whole step are less than 1."""
    weights = rows["weights"]
    return jnp.sum(weights * predictions.nll()), 1e-3 * jnp.sum(weights > 0)


def test_a_run_counts_weights_in_part_and_evaluates_by_the_loss(tmp_path, monkeypatch):
    """A thousandth of the weight is a thousand times the loss, in steps and evaluations, with local updates too."""
    common = [
        *TINY,
        "dataset_type=synthetic",
        "steps=1",
        "global_batch_size=8",
        "gradient_accumulation_steps=1",
        "per_device_batch_size=-1",
        "eval_interval=1",
        "eval_steps=1",
        "enable_checkpointing=false",
        "optimizer=sgd",
        "learning_rate=0",
        "warmup_steps=0",
        f"base_output_directory={tmp_path}",
    ]

    def records(name, *keys, **own):
        config = load_config(None, [*common, f"run_name={name}", *keys])
        return lines_of(train(config, **own).run_directory)

    replicas = (
        "enable_diloco=true",
        "ici_data_parallelism=2",
        "ici_fsdp_parallelism=4",
    )
    found = {"replicas": records("replicas", *replicas, objective=in_thousandths)}
    use_one_device(monkeypatch)
    step, evaluation = records("config")
    found["own"] = records("own", objective=in_thousandths)
    norm = found["own"][0]["grad_norm"]  # with replicas, the mean of their own norms
    assert norm == pytest.approx(1000 * step["grad_norm"], rel=1e-4)
    for got, scored in found.values():
        assert got["loss"] == pytest.approx(1000 * step["loss"], rel=1e-5)
        assert got[WEIGHT] == pytest.approx(step["target_tokens"] / 1000)
        assert got[WEIGHT] < 1
        assert scored["eval_loss"] == pytest.approx(
            1000 * evaluation["eval_loss"], rel=1e-5
        )
        assert scored["eval_loss_weight"] == pytest.approx(
            evaluation["eval_target_tokens"] / 1000
        )


def test_pairs_have_an_objective_of_their_own(tmp_path):
    config = load_config(
        None, [*TINY, "dataset_type=dpo", f"base_output_directory={tmp_path}"]
    )
    with pytest.raises(UserError, match="dataset_type=dpo"):
        train(config, objective=next_token)


def test_examples_of_a_program_cannot_be_balanced(tmp_path):
    config = load_config(
        None, [*TINY, "balance_attention=true", f"base_output_directory={tmp_path}"]
    )
    with pytest.raises(UserError, match=r"^balance_attention=true"):
        train(config, source=[{}])
    assert not list(tmp_path.iterdir())
