"""Ways to arrange 1, 2, 4 and 8 devices along the six axes, dense and with experts: the gradients of one device."""

import functools
import itertools
import math
import os

import jax
import numpy as np
import pytest

from maxtext_lite.parallel import MESH_AXES, Pipeline
from tests.invariance.conftest import CUSTOM

# Every axis may be 8: heads, experts, widths, layers and tokens that it divides.
MODEL = (
    "optimizer=sgd", "gradient_clipping_threshold=0", "z_loss_multiplier=1e-3", "base_num_query_heads=8",
    "base_num_kv_heads=8", "head_dim=2", "base_num_decoder_layers=8",
)  # fmt: skip
CUSTOM_MODEL = ("optimizer=sgd", "gradient_clipping_threshold=0", "base_num_query_heads=8", "base_num_kv_heads=8",
                "head_dim=2")  # fmt: skip
EXPERTS = (
    "num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=8", "shared_experts=1", "initializer_range=0.2",
    "load_balance_loss_weight=0.5", "router_z_loss_multiplier=0.05", "routed_bias=true",
)  # fmt: skip


def factorizations(num_devices):
    """All sizes of the six axes whose product is `num_devices`, a power of two."""
    powers = range(num_devices.bit_length())
    for exponents in itertools.product(powers, repeat=len(MESH_AXES)):
        if 2 ** sum(exponents) == num_devices:
            yield {axis: 2**power for axis, power in zip(MESH_AXES, exponents, strict=True) if power}


SMALL = [mesh for number in (1, 2, 4) for mesh in factorizations(number)]
LARGE = list(factorizations(8))
ALL = [*SMALL, *LARGE]
MESHES = ALL if os.environ.get("EVERY_MESH") else ALL[3::12]
"""All 84, which takes minutes, where the environment variable EVERY_MESH is set; a few of them otherwise."""


def test_there_are_as_many_as_there_should_be():
    assert (len(SMALL), len(LARGE)) == (1 + 6 + 21, 56)
    assert {axis for mesh in MESHES for axis in mesh} == set(MESH_AXES)


@pytest.fixture(scope="module")
def on_one_device(setup, rows):
    """For a model, the step of all rows at once."""

    @functools.cache
    def of(keys, objective=None):
        it = setup(*keys, objective=objective)
        return it.gradients(it.initial.params, it.batch(rows, 1, 16))

    return of


@pytest.mark.parametrize("number", range(len(MESHES)), ids=lambda number: str(MESHES[number] or "one device"))
@pytest.mark.fast
def test_the_step_is_that_of_one_device(number, setup, rows, agrees, on_one_device):
    """Experts wherever their axis is, and every other time; one or two micro-batches and both schedules in turn."""
    mesh = MESHES[number]
    keys = (*MODEL, *EXPERTS) if "expert" in mesh or number % 2 else MODEL
    want = on_one_device(keys)
    pipeline = None
    if "stage" in mesh:
        stages = mesh["stage"]
        pipeline = Pipeline(stages, stages, *((1, "1f1b") if number % 3 else (8 // stages // 2 or 1, "gpipe")))
    it = setup(*keys, **mesh, pipeline=pipeline)
    accumulation = 1 + number % 2
    shards = math.prod(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert", "stage"))
    slots = max(16 // accumulation, shards)
    got = it.gradients(it.state().params, it.batch(rows, accumulation, slots))
    agrees(jax.tree.map(lambda g, like: np.reshape(g, like.shape), got.gradients, want.gradients), want.gradients)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    np.testing.assert_allclose(got.z_loss, want.z_loss, rtol=1e-5)
    assert sorted(got.aux) == sorted(want.aux)
    for name, value in want.aux.items():
        np.testing.assert_allclose(got.aux[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_array_equal(got.expert_counts, want.expert_counts)
    assert (got.target_tokens, got.examples) == (want.target_tokens, want.examples)


@pytest.mark.parametrize("number", range(len(MESHES)), ids=lambda number: str(MESHES[number] or "one device"))
def test_a_custom_loss_is_that_of_one_device(number, setup, rows, agrees, on_one_device):
    """As few layers as stages, and the other way round: accumulated and by 1f1b where the test above is not."""
    mesh = MESHES[number]
    stages = mesh.get("stage", 1)
    keys = (*CUSTOM_MODEL, f"base_num_decoder_layers={max(stages, 2)}")
    want = on_one_device(keys, CUSTOM)
    pipeline = Pipeline(stages, stages, 1, "gpipe" if number % 3 else "1f1b") if "stage" in mesh else None
    it = setup(*keys, **mesh, pipeline=pipeline, objective=CUSTOM)
    shards = math.prod(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert", "stage"))
    batch = (1, 16) if number % 2 else (4, max(4, shards))
    got = it.gradients(it.state().params, it.batch(rows, *batch))
    agrees(jax.tree.map(lambda g, like: np.reshape(g, like.shape), got.gradients, want.gradients), want.gradients)
    np.testing.assert_allclose([got.loss, got.num_counted], [want.loss, want.num_counted], rtol=1e-5)
    assert got.num_counted == np.float32(rows["weights"].sum())


def test_splits_leave_a_step_in_eight_bits_alone(setup, rows, on_one_device):
    """To far less than eight bits themselves do to the gradients, which scales of a device's own would do again.

    Not to next to nothing: a matmul of fewer rows, or of a part, has other last bits of float32 on some CPUs (of rows
    alone, on one without AVX-512), which put a few numbers on the other side of a border of rounding, and what follows
    from them. That a projection's scales are the same however it is split: tests/models.
    """

    def apart(gradients, others):
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True)
        squares = [(np.sum(np.square(np.reshape(a, b.shape) - b)), np.sum(np.square(b))) for a, b in pairs]
        return math.sqrt(sum(difference for difference, _ in squares) / sum(square for _, square in squares))

    keys = (*MODEL, "quantization=int8")
    want = on_one_device(keys)
    rounding = apart(want.gradients, on_one_device(MODEL).gradients)
    assert 0.004 < rounding < 0.02  # 1 / 127 is 0.008
    splits = (((4, 4), {}, None), ((2, 8), {"data": 2}, Pipeline(2, 2, 1, "1f1b")),
              ((1, 16), {"fsdp": 2, "tensor": 2, "context": 2}, None))  # fmt: skip
    for batch, mesh, pipeline in splits:
        it = setup(*keys, **mesh, pipeline=pipeline)
        got = it.gradients(it.state().params, it.batch(rows, *batch))
        assert apart(got.gradients, want.gradients) < rounding / 5
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
        assert got.target_tokens == want.target_tokens
