"""The kernel of experts' matmuls on each platform, and the exchange of tokens between devices."""

import pytest

from maxtext_lite.config.experts import exchanged_rows, grouped_matmul_kernel
from maxtext_lite.config.kernels import Accelerator


@pytest.mark.parametrize(("accelerator", "dtype", "kernel"), [
    (Accelerator("cpu", tokamax="0.0.17"), "bfloat16", "ragged_dot"),
    (Accelerator("tpu", tokamax="0.0.17"), "bfloat16", "megablox"),
    (Accelerator("gpu", "9.0", "0.0.17"), "bfloat16", "tokamax"),
    (Accelerator("gpu", "9.0", "0.0.12"), "float16", "tokamax"),
    (Accelerator("gpu", "9.0", "0.0.13"), "float16", "blocks"),  # an untested version
    (Accelerator("gpu", "8.0", "0.0.17"), "float16", "blocks"),
    (Accelerator("gpu", "10.0", "0.0.17"), "bfloat16", "blocks"),
    (Accelerator("gpu", "9.0", "0.0.17"), "float32", "blocks"),
    (Accelerator("gpu", "9.0"), "bfloat16", "blocks"),
])  # fmt: skip
def test_each_platform_has_its_kernel(accelerator, dtype, kernel):
    assert grouped_matmul_kernel(accelerator, dtype) == kernel


def _by_bytes(axis, chosen, element_bytes, num_tokens=4096, num_experts=64):
    """Five quarters of an even share, in whole tiles, if both ways take fewer bytes than tokens and their sums."""
    rows = min(-(-5 * num_tokens * chosen // (4 * axis) // 128) * 128, num_tokens * min(chosen, num_experts // axis))
    exchanged = 2 * (axis - 1) * rows * element_bytes
    gathered = (axis - 1) * num_tokens * (element_bytes + 4)
    return rows if exchanged < gathered else None


@pytest.mark.parametrize(("axis", "chosen", "element_bytes", "rows"), [
    (8, 2, 2, 1280),  # 4096 x 2 / 8 x 5/4
    (8, 8, 2, 5120),
    (4, 8, 2, None),  # ten rows both ways against four tokens and six bytes
    (8, 8, 4, None),
    (2, 1, 2, 2560),
    (64, 64, 2, 4096),  # one expert each: a token comes once, or not at all
    (1, 8, 2, None),
])  # fmt: skip
def test_tokens_are_exchanged_where_that_moves_fewer_bytes(axis, chosen, element_bytes, rows):
    sizes = {"num_tokens": 4096, "num_per_token": chosen, "num_experts": 64, "num_shards": axis}
    assert exchanged_rows(**sizes, element_bytes=element_bytes) == rows
    assert rows == (None if axis == 1 else _by_bytes(axis, chosen, element_bytes))
