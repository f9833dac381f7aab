"""A capacity's slots are counted exactly, and what an example's choices become has its names for remat."""

import dataclasses
import math
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_lite.models.capacity import expert_capacity, with_capacity
from maxtext_lite.models.moe import ExpertShape, ExpertWeights, Routing

F = 5


def test_capacity_is_rounded_up_exactly():
    """0.07 x 300 / 7 is 3 exactly, which binary fractions do not say."""
    shape = ExpertShape(num_experts=7, num_per_token=1, mlp_dim=F, capacity_factor=Fraction("0.07"))
    want = [math.ceil(Fraction(7, 100) * tokens / 7) for tokens in range(301)]
    np.testing.assert_array_equal(expert_capacity(shape, 300), want)
    ample = dataclasses.replace(shape, capacity_factor=Fraction(100))
    np.testing.assert_array_equal(expert_capacity(ample, 4), [0, 1, 2, 3, 4])  # a token goes to an expert once


def test_rows_inner_results_and_what_comes_back_are_named():
    """Two examples of 6 tokens, four experts with three slots each: by hand of these sizes, and no others."""
    B, T, D, E, J = 2, 6, 3, 4, 2
    shape = ExpertShape(E, J, F, capacity_factor=Fraction(1))
    weights = ExpertWeights(jnp.ones((E, D, F)), jnp.ones((E, D, F)), jnp.ones((E, F, D)))
    routing = Routing(jnp.zeros((B, T, J), jnp.int32), jnp.ones((B, T, J)), {})
    text = str(jax.make_jaxpr(lambda x: with_capacity(x, routing, weights, shape)[0])(jnp.ones((B, T, D))))
    named = {name: sizes for sizes, name in re.findall(r"f32\[([\d,]+)\] = name\[name=(\w+)", text)}
    slots = f"{E},{B},{T * J // E}"
    assert named == {"expert_rows": f"{slots},{D}", "mlpwi_0": f"{slots},{F}", "mlpwi_1": f"{slots},{F}",
                     "mlpwo": f"{B},{T},{J},{D}"}  # fmt: skip
