"""tokamax's ops stand where this project looks for them, and take the blocks that it gives them."""

import jax
import jax.numpy as jnp
import pytest

from maxtext_lite.models.tokamax_ops import flash_attention, ragged_dot, with_blocks
from maxtext_lite.parallel import MESH_AXES, make_mesh
from tests.gpu import absent_gpu

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of jax, in tokamax


def test_ops_take_blocks_beside_their_own(monkeypatch):
    pytest.importorskip("tokamax", reason="tokamax is not installed")
    ones = dict.fromkeys(MESH_AXES, 1)
    with absent_gpu(monkeypatch, make_mesh(ones, ones, jax.devices()[:1])):
        (attention, mask), dot = flash_attention(), ragged_dot()
        q = jnp.zeros((1, 256, 2, 64), jnp.bfloat16)
        seen = mask(k_start=jnp.zeros((1, 1, 256), jnp.int32), is_causal=True)
        bound = attention.bind(q, q, q, mask=seen, return_residuals=True)
        own, wider = bound.heuristics_config, with_blocks(attention, bound, {"block_kv": 256}).config
        assert own.block_kv != 256
        assert (wider.block_kv, wider.block_q) == (256, own.block_q)
        x, w, size = jnp.zeros((256, 128), jnp.bfloat16), jnp.zeros((2, 128, 128), jnp.bfloat16), jnp.array([128, 128])
        dims = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
        bound = dot.bind(x, w, group_sizes=size, ragged_dot_dimension_numbers=dims)
        assert with_blocks(dot, bound, {"block_m": 128}).config.block_m == 128 != bound.heuristics_config.block_m
