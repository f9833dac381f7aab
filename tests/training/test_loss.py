"""The tiled cross-entropy, its hand-made gradient and the forward pass's outputs, against float64 by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from maxtext_lite.models.layers import OutputHead
from maxtext_lite.training.loss import Readout, cross_entropy, token_losses

B, T, D, V = 3, 12, 8, 20
Z = 0.01


def inputs():
    """Hidden states, head, targets, weights and the logits' bias."""
    rng = np.random.default_rng(0)
    x, head = rng.normal(size=(B, T, D)), rng.normal(size=(D, V))
    return (
        x,
        head,
        rng.integers(0, V, (B, T)),
        rng.choice([0.0, 0.5, 1.0], (B, T)),
        rng.normal(size=V),
    )


def narrow(*arrays):
    return [
        np.asarray(a, np.float32 if a.dtype == np.float64 else np.int32) for a in arrays
    ]


def by_hand(how, *, biased):
    """Nll of each token, the two weighted sums, and the gradients of hidden states, head and bias, in float64."""
    x, head, target, weight, bias = inputs()
    logits = how.multiplier * (x @ head + (bias if biased else 0))
    slope = np.ones_like(logits)
    if how.soft_cap:
        capped = how.soft_cap * np.tanh(logits / how.soft_cap)
        logits, slope = capped, 1 - (capped / how.soft_cap) ** 2
    logits = logits / how.temperature
    log_partition = np.log(np.exp(logits).sum(-1))
    nll = log_partition - np.take_along_axis(logits, target[..., None], -1)[..., 0]
    probability = np.exp(logits - log_partition[..., None])
    towards = (
        probability * (1 + 2 * how.z_loss_multiplier * log_partition[..., None])
        - np.eye(V)[target]
    )
    dproduct = how.multiplier * slope / how.temperature * weight[..., None] * towards
    gradients = (
        dproduct @ head.T,
        np.einsum("btd,btv->dv", x, dproduct),
        dproduct.sum((0, 1)),
    )
    return nll, ((weight * nll).sum(), (weight * log_partition**2).sum()), gradients


@pytest.mark.fast
@pytest.mark.parametrize(
    ("how", "biased"),
    [
        (Readout(3, z_loss_multiplier=Z), False),
        (Readout(3, 2.0, 0.6, z_loss_multiplier=Z, multiplier=0.3), True),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_by_hand(how, biased):
    *arrays, bias = narrow(*inputs())

    def loss(x, head, bias):
        return cross_entropy(
            x, OutputHead(head, bias if biased else None), *arrays[2:], how
        )

    @jax.jit
    def everything(*trained):
        found = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*trained)
        x, head, bias = trained
        nll = token_losses(
            x, OutputHead(head, bias if biased else None), arrays[2], how
        )
        return found, loss(*trained)[0], nll

    with jax.default_matmul_precision("highest"):
        ((found, sums), gradients), forward_only, nll = everything(*arrays[:2], bias)
    want_nll, want_sums, want_gradients = by_hand(how, biased=biased)
    assert_allclose(nll, want_nll, rtol=2e-5, atol=1e-5)
    assert_allclose(sums[:2], want_sums, rtol=1e-6)
    total = want_sums[0] + how.z_loss_multiplier * want_sums[1]
    assert_allclose([found, forward_only], total, rtol=1e-6)
    for got, want in zip(gradients[: 2 + biased], want_gradients, strict=False):
        assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_all_logits_never_exist_at_once():
    """At V = 4096 the [B, T, V] float32 logits are 64 MB; in 16 tiles, value and gradient need a few tiles of it."""
    sizes = (
        jax.ShapeDtypeStruct((8, 512, 32), jnp.float32),
        jax.ShapeDtypeStruct((32, 4096), jnp.float32),
    )
    rows = (
        jax.ShapeDtypeStruct((8, 512), jnp.int32),
        jax.ShapeDtypeStruct((8, 512), jnp.float32),
    )

    def temporaries(num_tiles):
        def loss(x, head, *arrays):
            return cross_entropy(x, OutputHead(head), *arrays, Readout(num_tiles))[0]

        return (
            jax.jit(jax.grad(loss, (0, 1)))
            .lower(*sizes, *rows)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    assert temporaries(1) >= 8 * 512 * 4096 * 4
    assert temporaries(16) < 8 * 512 * 4096 * 4 / 3
