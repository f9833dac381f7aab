"""Which rows are to blame: each row has its own loss and gradient."""

import types

import jax
import jax.numpy as jnp
import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import UserError
from maxtext_lite.data import ExampleSource
from maxtext_lite.operations.row_losses import make_row_losses
from maxtext_lite.training.custom_loss import CustomLoss
from tests.training.conftest import norm


class Source(ExampleSource):
    """The rows of the fixture as examples."""

    def __init__(self, rows):
        self.rows, self.fields, self.num_tokens = (
            rows,
            tuple(rows),
            rows["tokens"].shape[1],
        )

    def __len__(self):
        return len(self.rows["tokens"])

    def __getitem__(self, row):
        return {name: values[row] for name, values in self.rows.items()}


def light(predictions, rows):
    return jnp.sum(rows["weights"] * predictions.nll()), jnp.sum(
        rows["weights"] > 0
    ) / 1000


def test_each_row_has_the_loss_and_the_gradient_that_it_has_alone(
    setup, rows, mean_loss
):
    """Of a custom loss whose weight of a step is below 1."""
    weight = 1e-3
    it = setup("data_shuffle_seed=-1", objective=CustomLoss(light, 264, 16))
    plan = make_plan(it.config, num_devices=1, platform="cpu")
    run = types.SimpleNamespace(
        config=it.config,
        mesh=it.mesh,
        parts=it.parts,
        decoder=it.decoder,
        plan=plan,
        source=Source(rows),
        excluded={10: 10},
    )
    state = it.state()
    of_row = jax.jit(
        jax.value_and_grad(lambda params, row: mean_loss(it.decoder, params, row))
    )
    with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
        nothing, *found = make_row_losses(run)(
            state, 7, 4
        )  # row 7 has no target, and row 10 is left out
        assert (nothing.target_tokens, nothing.loss, nothing.grad_norm) == (0, 0, 0)
        tokens = (rows["weights"][8:10] > 0).sum(axis=1)
        for number, row in enumerate(found):
            alone = {name: values[8 + number][None] for name, values in rows.items()}
            loss, gradient = jax.device_get(of_row(state.params, alone))
            assert (row.source, row.row, row.target_tokens) == (
                "",
                8 + number,
                tokens[number],
            )
            assert row.num_counted == pytest.approx(weight * tokens[number], rel=1e-6)
            assert row.documents == rows["segments"][8 + number].max()
            assert row.loss == pytest.approx(loss / weight, rel=1e-5)
            assert row.loss_sum == pytest.approx(loss * tokens[number], rel=1e-5)
            assert row.grad_norm == pytest.approx(
                norm(gradient) * tokens[number] / tokens.sum() / weight, rel=1e-4
            )
    with pytest.raises(UserError, match="enable_diloco"):
        make_row_losses(types.SimpleNamespace(parts=types.SimpleNamespace(local=True)))
