"""Experts: the kernel of their matmuls on a platform, and the exchange of tokens between devices. Imports no jax."""

import math
from fractions import Fraction
from typing import Literal

from maxtext_lite.config.kernels import TOKAMAX_VERSIONS, Accelerator

GroupedMatmul = Literal["ragged_dot", "blocks", "tokamax", "megablox"]
"""jax's own (a kernel on TPUs; elsewhere a dense matmul of every row with every expert), a loop over blocks of rows in
plain jax (any platform), tokamax (NVIDIA Hopper GPUs), Pallas (TPUs)."""


def grouped_matmul_kernel(accelerator: Accelerator, dtype: str) -> GroupedMatmul:
    """The grouped matmul for these devices.

    Args:
      dtype: of activations; tokamax needs two bytes, and has both passes on compute capability 9.0 only.
    """
    if accelerator.platform != "gpu":
        return "megablox" if accelerator.platform == "tpu" else "ragged_dot"
    suits = dtype != "float32" and accelerator.compute_capability == "9.0"
    return "tokamax" if suits and accelerator.tokamax in TOKAMAX_VERSIONS else "blocks"


ROOM = Fraction(5, 4)
"""Capacity of one round of an exchange, relative to the rows of evenly chosen experts."""


def exchanged_rows(
    *, num_tokens: int, num_per_token: int, num_experts: int, num_shards: int, element_bytes: int
) -> int | None:
    """Rows that two devices exchange in one dropless round; None where gathering all tokens moves fewer bytes.

    Gathering moves (n - 1) x num_tokens tokens of width D to each device and scatters their float32 sums back:
    element_bytes + 4 bytes per element. An exchange moves one row for each choice of an expert, both ways in
    element_bytes; a round has room for `ROOM` times each device's even share. Rounds go on until the longest queue is
    empty: one round if the choices are even, and at most one round more than the rows of gathering.

    Args:
      num_tokens: of one device.
      num_per_token, num_experts: J and E.
      num_shards: n, devices along the expert axis, a divisor of num_experts.
    """
    most = num_tokens * min(num_per_token, num_experts // num_shards)  # from one device to one other
    rows = math.ceil(ROOM * num_tokens * num_per_token / num_shards)
    rows = min(most, -(-rows // 128) * 128 if rows > 128 else rows)  # in whole tiles
    moves_less = 2 * rows * element_bytes < num_tokens * (element_bytes + 4)
    return rows if num_shards > 1 and moves_less else None
