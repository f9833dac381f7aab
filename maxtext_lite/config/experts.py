"""Experts: the kernel of their matmuls on a platform, and how tokens come to their devices. Imports no jax."""

import math
from fractions import Fraction
from typing import Literal

from maxtext_lite.config.kernels import TOKAMAX_VERSIONS, Accelerator

GroupedMatmul = Literal["ragged_dot", "blocks", "tokamax", "megablox"]
"""jax's own (a kernel on TPUs; elsewhere a dense matmul of every row by every expert), a loop over blocks of rows in
plain jax (any platform), tokamax's kernels (NVIDIA's Hopper GPUs), Pallas's (TPUs)."""


def grouped_matmul_kernel(accelerator: Accelerator, dtype: str) -> GroupedMatmul:
    """The grouped matmul that suits these devices.

    Args:
      dtype: of activations; tokamax's kernels know two bytes, and have both directions on compute capability 9.0 only.
    """
    if accelerator.platform != "gpu":
        return "megablox" if accelerator.platform == "tpu" else "ragged_dot"
    suits = dtype != "float32" and accelerator.compute_capability == "9.0"
    return "tokamax" if suits and accelerator.tokamax in TOKAMAX_VERSIONS else "blocks"


ROOM = Fraction(5, 4)
"""Rows that a round of an exchange has room for, in rows of evenly chosen experts."""


def exchanged_rows(
    *, num_tokens: int, num_per_token: int, num_experts: int, num_shards: int, element_bytes: int
) -> int | None:
    """Rows of one round of a dropless exchange between two devices; None where gathering all tokens moves less.

    Of a device's num_tokens tokens of width D, (n - 1) x num_tokens come and go if they are gathered and their float32
    sums scattered: element_bytes + 4 bytes an element. Exchanged, each choice of an expert is a row; a round has `ROOM`
    for each device's share of them, both ways in element_bytes; devices go on until the longest queue is empty, which
    takes a round if choices are even, and never more rows than gathering has by more than a round.

    Args:
      num_tokens: of one device.
      num_per_token, num_experts: J and E.
      num_shards: n, devices along the expert axis; it divides num_experts.
    """
    most = num_tokens * min(num_per_token, num_experts // num_shards)  # of one device for one other
    rows = math.ceil(ROOM * num_tokens * num_per_token / num_shards)
    rows = min(most, -(-rows // 128) * 128 if rows > 128 else rows)  # in whole tiles
    moves_less = 2 * rows * element_bytes < num_tokens * (element_bytes + 4)
    return rows if num_shards > 1 and moves_less else None
