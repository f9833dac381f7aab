"""Routing and experts, with and without a capacity, equal sums over all experts in float64, gradients included."""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.models import BALANCE, EXPERT_COUNTS, ROUTER_Z, ExpertShape
from maxtext_lite.models.experts import (
    ExpertWeights,
    Router,
    dropless,
    expert_capacity,
    route,
    with_capacity,
)
from tests.models import exact

B, T, D, F, E, J = 3, 10, 6, 5, 8, 3
SHAPE = ExpertShape(num_experts=E, num_per_token=J, mlp_dim=F)
RNG = np.random.default_rng(0)


def normal(*sizes):
    return RNG.normal(size=sizes).astype(np.float32)


X, G, ROUTER = normal(B, T, D), normal(B, T, D), normal(D, E)
WEIGHTS = ExpertWeights(normal(E, D, F), normal(E, D, F), normal(E, F, D))
BIASED = ExpertWeights(
    *(5 * weight for weight in WEIGHTS[:3]), normal(E, F), normal(E, F), normal(E, D)
)
REAL = (
    np.arange(T)[None] < np.array([T, 7, 0])[:, None]
)  # a whole example, a ragged one and an empty slot
BIAS = np.array([0.3, -0.4, 0.0, 0.2, 0.1, -0.1, 0.5, 0.0], np.float32)

DEEPSEEK = dataclasses.replace(
    SHAPE, score="sigmoid", scaling=2.5, biased=True, num_groups=4, groups_per_token=2
)
GPT_OSS = dataclasses.replace(SHAPE, activation="clamped_silu", with_bias=True)
LLAMA4 = dataclasses.replace(
    SHAPE, score="sigmoid", normalised=False, on_input=True, num_per_token=1
)
VARIANTS = {
    "Mixtral, Qwen3": dataclasses.replace(SHAPE, matmul="blocks"),
    "DeepSeek-V2": dataclasses.replace(
        SHAPE, normalised=False, num_groups=4, groups_per_token=2
    ),
    "Phi-3.5": dataclasses.replace(
        SHAPE, score="sparsemixer", normalised=False, num_per_token=2
    ),
    "gpt-oss": GPT_OSS,
    "DeepSeek-V3, capacity 3/5": dataclasses.replace(
        DEEPSEEK, capacity_factor=Fraction(3, 5)
    ),
    "gpt-oss, capacity 1": dataclasses.replace(GPT_OSS, capacity_factor=Fraction(1)),
    "on the input, capacity 1": dataclasses.replace(
        LLAMA4, capacity_factor=Fraction(1)
    ),
}


def run(x, router, weights, shape, bias):
    routing = route(x, Router(router, bias), jnp.asarray(REAL), shape)
    if shape.capacity_factor is None:
        y = dropless(x, routing.expert_BTJ, routing.share_BTJ, weights, shape)
        return y, jnp.zeros(B), routing.aux
    return *with_capacity(x, routing, weights, shape), routing.aux


def taken_in_time(expert, shape):
    """Of each choice, whether its expert still had a slot: an example's tokens come one after another."""
    kept = np.ones(expert.shape, bool)
    if shape.capacity_factor is None:
        return kept
    for b, tokens in enumerate(REAL.sum(1)):
        slots = math.ceil(tokens * shape.num_per_token * shape.capacity_factor / E)
        taken = np.zeros(E, int)
        for t in range(tokens):
            kept[b, t] = taken[expert[b, t]] < slots
            taken[expert[b, t]] += 1
    return kept


FAST = "DeepSeek-V3, capacity 3/5"


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=[pytest.mark.fast] * (name == FAST))
        for name, shape in VARIANTS.items()
    ],
)
def test_outputs_statistics_and_gradients_equal_those_by_hand(shape):
    bias = BIAS if shape.biased else None
    weights = BIASED if shape.with_bias else WEIGHTS
    # Logits so near to each other that sparsemixer has more than one expert left.
    router = ROUTER[:, :1] + 0.02 * ROUTER if shape.score == "sparsemixer" else ROUTER

    @jax.jit
    def ours(x, router, weights):
        def total(x, router, weights):
            y, *rest = run(x, router, weights, shape, bias)
            return jnp.sum(y * G), (y, *rest)

        gradients, found = jax.grad(total, (0, 1, 2), has_aux=True)(x, router, weights)
        return gradients, *found

    with jax.default_matmul_precision("highest"):
        (dx, drouter, dweights), y, dropped, aux = ours(X, router, weights)
    expert, share, by_logits, score, logits = exact.routing(
        X, router, shape, 0.0 if bias is None else bias
    )
    kept = taken_in_time(expert, shape) & REAL[..., None]
    how = {"activation": shape.activation, "on_input": shape.on_input}
    want, want_dx, dshare, *want_dweights = exact.experts(
        X, expert, share * kept, weights.arrays(), G, **how
    )
    dlogits = np.einsum("BTJ,BTJE->BTE", dshare * kept, by_logits)
    want_dx += dlogits @ np.float64(router).T
    want_drouter = np.einsum("BTD,BTE->DE", np.float64(X), dlogits)
    largest = [
        np.abs(array).max() for array in (want, want_dx, want_drouter, *want_dweights)
    ]
    assert min(largest) > 1e-3
    found = y, dx, drouter, *dweights.arrays()
    for got, right, most in zip(
        found, (want, want_dx, want_drouter, *want_dweights), largest, strict=True
    ):
        assert_allclose(got, right, atol=2e-5 * most)

    tokens = np.maximum(REAL.sum(1), 1)
    choices = shape.num_per_token * tokens
    assert_allclose(dropped, (REAL[..., None] & ~kept).sum((1, 2)) / choices, atol=1e-6)
    assert (np.max(dropped) > 0.05) == (
        shape.capacity_factor is not None
    )  # else the loop would show nothing
    softmax_z = np.log(np.exp(logits).sum(-1)) ** 2 * REAL
    assert_allclose(aux[ROUTER_Z], softmax_z, rtol=1e-5)
    by_score = exact.routing(X, router, shape)[
        0
    ]  # the balance is judged without the bias
    counts, judged = (
        ((chosen[..., None] == np.arange(E)) & REAL[..., None, None]).sum((1, 2))
        for chosen in (expert, by_score)
    )
    probability = (score / score.sum(-1, keepdims=True) * REAL[..., None]).sum(
        1
    ) / tokens[:, None]
    assert_allclose(
        aux[BALANCE], E * (judged / choices[:, None] * probability).sum(-1), rtol=1e-5
    )
    assert (EXPERT_COUNTS in aux) == shape.biased
    if shape.biased:
        assert_array_equal(aux[EXPERT_COUNTS], counts)


def test_the_load_of_the_step_before_stands_in_for_an_examples_own_choices():
    """A constant, by hand: the loss is a sum over tokens, and its gradient leaves the load alone."""
    shape = dataclasses.replace(SHAPE, keeps_load=True)
    load = normal(E)

    def total(load, x):
        aux = route(x, Router(ROUTER, load_E=load), jnp.asarray(REAL), shape).aux
        return jnp.sum(aux[BALANCE]), aux

    (dload, dx), aux = jax.grad(total, (0, 1), has_aux=True)(load, X)
    expert, *_, score, _ = exact.routing(X, ROUTER, shape)
    tokens = np.maximum(REAL.sum(1), 1)
    probability = (score * REAL[..., None]).sum(1) / tokens[:, None]
    assert_allclose(aux[BALANCE], ((1 + load) * probability).sum(-1), rtol=1e-5)
    counts = ((expert[..., None] == np.arange(E)) & REAL[..., None, None]).sum((1, 2))
    assert_array_equal(aux[EXPERT_COUNTS], counts)
    assert not np.any(dload)
    assert np.any(dx)


def test_capacity_is_rounded_up_exactly():
    """0.07 x 300 / 7 is 3 exactly, which binary fractions do not say."""
    shape = ExpertShape(
        num_experts=7, num_per_token=1, mlp_dim=F, capacity_factor=Fraction("0.07")
    )
    want = [math.ceil(Fraction(7, 100) * tokens / 7) for tokens in range(301)]
    assert_array_equal(expert_capacity(shape, 300), want)
    ample = dataclasses.replace(shape, capacity_factor=Fraction(100))
    assert_array_equal(
        expert_capacity(ample, 4), [0, 1, 2, 3, 4]
    )  # a token goes to an expert once
