"""A custom loss is refused if it is not a sum over rows; next-token prediction as a custom loss gives the same step."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.parallel import Pipeline
from maxtext_lite.training import train
from maxtext_lite.training.custom_loss import WEIGHT, CustomLoss, custom_loss
from tests.training.conftest import TINY


def next_token(predictions, rows):
    return jnp.sum(rows["weights"] * predictions.nll()), jnp.sum(rows["weights"] > 0)


def of_logits(predictions, rows):
    log_probability = jax.nn.log_softmax(predictions.logits())
    nll = -jnp.take_along_axis(log_probability, rows["targets"][..., None], -1)[..., 0]
    assert predictions.hidden().shape[-1] == 16
    assert log_probability.shape[-1] == 264
    return jnp.sum(rows["weights"] * nll), jnp.sum(rows["weights"] > 0)


ABOUT = {"fields": ("tokens", "targets", "segments", "positions", "weights", "price"), "vocab_size": 264, "emb_dim": 16}
REFUSED = {
    "a mean": (lambda p, rows: (jnp.mean(p.nll() * rows["weights"]), jnp.sum(rows["weights"])), "the sum of 4 rows"),
    "a maximum over rows": (
        lambda p, rows: (jnp.max(p.nll() * rows["weights"]), jnp.sum(rows["weights"])), "It must be a sum over rows"),
    "rows between them": (
        lambda p, rows: (jnp.sum(p.hidden()[:1] * p.hidden()), jnp.sum(rows["weights"])), "It must be a sum over rows"),
    "a constant weight": (lambda p, rows: (jnp.sum(p.nll() * rows["weights"]), jnp.float32(4)), "the weight of 4 rows"),
    "padding counted": (lambda p, rows: (jnp.sum(p.nll()), jnp.sum(rows["weights"])), "with 4 empty rows beside them"),
    "empty rows weighed": (
        lambda p, rows: (jnp.sum(p.nll() * rows["weights"]), 1.0 * rows["weights"].size), "with 4 empty rows"),
    "a weight of the model": (
        lambda p, rows: (jnp.sum(p.nll() * rows["weights"]), jnp.sum(rows["weights"] * p.nll())), "the weight changes"),
    "no weight": (lambda p, rows: jnp.sum(p.nll() * rows["weights"]), r"not the pair \(sum, weight\)"),
    "an array": (lambda p, rows: (p.nll() * rows["weights"], jnp.sum(rows["weights"])), r"of shape \(4, 16\)"),
    "not a number": (lambda p, rows: (jnp.sum(p.nll()) * jnp.nan, jnp.sum(rows["weights"])), "random rows is nan"),
    "nothing weighs": (lambda p, rows: (jnp.sum(p.nll() * rows["weights"]), jnp.float32(0)), "must be above 0"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.fast
def test_what_is_no_sum_over_rows_is_refused(why):
    function, message = REFUSED[why]
    with pytest.raises(UserError, match=message) as caught:
        custom_loss(function, **ABOUT, z_loss_multiplier=0.0)
    assert str(caught.value).startswith("objective: ")


def test_a_z_loss_of_the_config_is_refused_and_sums_are_taken():
    with pytest.raises(UserError, match=r"z_loss_multiplier=0.001 .* Nearest that works: z_loss_multiplier=0"):
        custom_loss(next_token, **ABOUT, z_loss_multiplier=1e-3)
    taken = custom_loss(
        lambda p, rows: (jnp.sum(rows["price"]), jnp.sum(rows["price"])), **ABOUT, z_loss_multiplier=0.0
    )
    assert isinstance(taken, CustomLoss)


EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=8", "load_balance_loss_weight=0.5",
           "router_z_loss_multiplier=0.05")  # fmt: skip
SPLITS = {
    "one device, experts": (next_token, EXPERTS, (1, 16), {}, None),
    "1f1b": (next_token, (), (2, 8), {"data": 2}, Pipeline(2, 2, 1, "1f1b")),
    "logits on context 2, tensor 2": (of_logits, (), (2, 8), {"context": 2, "tensor": 2}, None),
}


@pytest.mark.parametrize("split", SPLITS)
def test_the_next_token_s_loss_written_out_is_the_next_token_s_step(split, setup, rows, agrees):
    function, keys, batch, mesh, pipeline = SPLITS[split]
    keys = ("optimizer=sgd", "gradient_clipping_threshold=0", *keys)
    whole = {**rows, "weights": np.ceil(rows["weights"])}  # all targets of a row weigh alike, as auxiliary losses do
    it, own = (
        setup(*keys, **mesh, pipeline=pipeline, objective=each) for each in (None, CustomLoss(function, 264, 16))
    )
    want, got = (each.gradients(each.state().params, each.batch(whole, *batch)) for each in (it, own))
    agrees(got.gradients, want.gradients)
    np.testing.assert_allclose([got.loss, *got.aux.values()], [want.loss, *want.aux.values()], rtol=1e-5)
    assert got.num_counted == want.target_tokens == got.target_tokens
    assert got.num_counted.dtype == np.float32


def half(predictions, rows):
    return jnp.sum(rows["weights"] * predictions.nll()), 0.5 * jnp.sum(rows["weights"] > 0)


@pytest.mark.parametrize("keys", [(), ("enable_diloco=true", "diloco_sync_period=2")], ids=["", "DiLoCo"])
def test_a_run_counts_weights_in_part_and_evaluates_by_the_loss(keys, tmp_path):
    """Half the weight is twice the loss, in steps and evaluations, and with local updates too."""

    def records(name, **own):
        config = load_config(None, [*TINY, *keys, "dataset_type=synthetic", "steps=2", "warmup_steps=1",
                                    "eval_interval=2", "eval_steps=1", "ici_fsdp_parallelism=1", "learning_rate=1e-3",
                                    "ici_data_parallelism=8", "enable_checkpointing=false", "optimizer=sgd",
                                    f"run_name={name}", "gradient_clipping_threshold=0",
                                    f"base_output_directory={tmp_path}"])  # fmt: skip
        directory = train(config, **own).run_directory
        return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]

    want, got = records("config"), records("own", objective=half)
    assert got[0]["loss"] == pytest.approx(2 * want[0]["loss"], rel=1e-5)
    assert got[0][WEIGHT] == want[0]["target_tokens"] / 2
    assert got[2]["eval_loss"] == pytest.approx(2 * want[2]["eval_loss"], rel=1e-3)
    assert got[2]["eval_loss_weight"] == got[2]["eval_target_tokens"] / 2


def test_pairs_have_an_objective_of_their_own(tmp_path):
    config = load_config(None, [*TINY, "dataset_type=dpo", f"base_output_directory={tmp_path}"])
    with pytest.raises(UserError, match="dataset_type=dpo is about pairs"):
        train(config, objective=next_token)


def test_examples_of_a_program_cannot_be_balanced(tmp_path):
    config = load_config(None, [*TINY, "balance_attention=true", f"base_output_directory={tmp_path}"])
    with pytest.raises(UserError, match=r"^balance_attention=true has no effect with source, whose documents"):
        train(config, source=[{}])
    assert not list(tmp_path.iterdir())
