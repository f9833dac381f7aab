"""The block sizes of splash attention, and masks that describe a block without materialising it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from maxtext_lite.config.kernels import SPLASH_BLOCK
from maxtext_lite.parallel import CHUNKS_PER_SHARD, context_order


@dataclass(frozen=True)
class MostTokens:
    """The most queries and keys of a block in each of splash's kernels; `at_once` keys are multiplied at a time.

    Attributes:
      head_dim: the largest width of keys or values that these sizes suit.
      dkv, dq: of the two kernels of the backward pass.
      fused: of the kernel for all three gradients; None: it is not used.
    """

    head_dim: float
    forward: tuple[int, int]
    dkv: tuple[int, int]
    dq: tuple[int, int]
    fused: tuple[int, int] | None
    at_once: int = 512


MOST_TOKENS = (
    MostTokens(128, forward=(1024, 512), dkv=(2048, 512), dq=(2048, 512), fused=(1024, 2048)),
    MostTokens(256, forward=(1024, 512), dkv=(1024, 512), dq=(1024, 512), fused=(1024, 1024)),
    MostTokens(float("inf"), forward=(512, 512), dkv=(512, 512), dq=(512, 512), fused=None),
)
"""Blocks by the width of heads; the first that suits is taken.

Those of the forward, dkv and dq kernels of heads of up to 128 are MaxText's for v6e
(benchmarks/maxtext_trillium_model_configs.py at 02df154); for v5e it names the fused kernel
(maxtext_v5e_model_configs.py at 00f6981). There a kernel is given several times its default memory on the chip. These
are the largest of those that compile with the default on v5e, v5p and v6e, in float32 and with a soft cap too.
"""

MOST_PARTS_OF_DQ = 2
"""The fused kernel spares two of seven matmuls, but writes a part of the queries' gradient, as large as the queries,
for each of its blocks of keys, which are added up after it. With four parts (8,192 tokens, heads of 128, v6e) that sum
takes 2.1 ms of the compiler's cycles in a layer of llama3-8b, more than the matmuls; with two (4,096 tokens, v5e)
0.8 ms, less than they. Where there would be more, the gradient has a kernel of its own."""


def block_sizes(
    *, span: int, num_keys: int, head_dim: int, window: int | None = None
) -> splash_attention_kernel.BlockSizes:
    """Sizes that divide `span` tokens.

    Args:
      span: consecutive tokens in a row of a mask, of queries and of keys; a multiple of 128.
      num_keys: keys of all blocks.
      head_dim: the larger width of keys and values.
      window: with one, blocks of keys are small, so that most keys outside it are skipped.
    """
    most = next(each for each in MOST_TOKENS if head_dim <= each.head_dim)

    def block(limit: int, tokens: int = span) -> int:
        sizes = range(SPLASH_BLOCK, min(limit, tokens) + 1, SPLASH_BLOCK)
        return max(size for size in sizes if tokens % size == 0)

    def of_keys(limit: int) -> tuple[int, int]:
        keys = block(limit)
        return keys, block(most.at_once, keys)

    sizes: dict[str, Any] = {"block_q": block(most.forward[0])}
    sizes["block_kv"], sizes["block_kv_compute"] = of_keys(most.forward[1])
    if most.fused and window is None and num_keys // block(most.fused[1]) <= MOST_PARTS_OF_DQ:
        queries, keys = most.fused
        sizes["use_fused_bwd_kernel"] = True
    else:
        queries, keys = most.dkv
        sizes |= {"block_q_dq": block(most.dq[0]), "block_kv_dq": block(most.dq[1])}
    sizes["block_q_dkv"] = block(queries)
    sizes["block_kv_dkv"], sizes["block_kv_dkv_compute"] = of_keys(keys)
    return splash_attention_kernel.BlockSizes(**sizes)


# ---- Masks ----------------------------------------------------------------------------------------------------------
# jax reads each block of a mask several times, only to know whether any and whether all of it are True: at 32,768
# tokens that is 11 seconds of comparisons. Here a block is two numbers with these answers.


def _some_and_all(some: bool, every: bool) -> np.ndarray:
    return np.array([[some, some and every]])


def _within(queries: np.ndarray, keys: np.ndarray, window: int | None) -> np.ndarray:
    """Whether some and whether all keys are no later than their query and fewer than `window` before it, [1, 2].

    Queries and keys each follow each other.
    """
    assert all(tokens[-1] - tokens[0] == len(tokens) - 1 for tokens in (queries, keys))
    nearest, farthest = queries[0] - keys[-1], queries[-1] - keys[0]
    some, every = farthest >= 0, nearest >= 0
    if window is not None:
        some, every = some and nearest < window, every and farthest < window
    return _some_and_all(bool(some), bool(every))


class CausalMask(splash_attention_mask.CausalMask):
    """jax's, whose blocks are two numbers.

    Args:
      shards: of the context axis, as which queries and keys are arranged (`context_order`).
    """

    def __init__(self, shape: tuple[int, int], shards: int = 1):
        super().__init__(shape)
        self._positions = _arranged(self, shards)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Whether some and whether all of a block are True, [1, 2]; queries and keys are slices within a chunk."""
        return _within(self.q_sequence[index[0]], self._positions[index[1]], None)


class LocalMask(splash_attention_mask.LocalMask):
    """jax's, of the last `window` tokens including the query's own; its blocks are two numbers. As `CausalMask`."""

    def __init__(self, shape: tuple[int, int], window: int, shards: int = 1):
        super().__init__(shape, (window - 1, 0), offset=0)
        self._window, self._positions = window, _arranged(self, shards)

    def __getitem__(self, index: Any) -> np.ndarray:
        """As `CausalMask`."""
        return _within(self.q_sequence[index[0]], self._positions[index[1]], self._window)


def _arranged(mask: Any, shards: int) -> np.ndarray:
    """Has a mask look at the positions of arranged queries and keys; returns them."""
    num_tokens = mask.shape[0]
    if shards == 1:
        return np.arange(num_tokens)
    plain, chunk = mask.mask_function, num_tokens // (CHUNKS_PER_SHARD * shards)

    def mask_function(position_Q: Any, place_S: Any) -> Any:
        """Inside the kernel: `context_order` in arithmetic, as it has no table to look a place up in."""
        shard, late = place_S // (2 * chunk), place_S // chunk % 2
        chunk_S = shard + late * (2 * shards - 1 - 2 * shard)
        return plain(position_Q, chunk_S * chunk + place_S % chunk)

    mask.mask_function = mask_function
    mask.q_sequence = context_order(num_tokens, shards).astype(mask.q_sequence.dtype)
    return mask.q_sequence


class FullMask(splash_attention_mask.FullMask):
    """jax's full mask, with blocks as two numbers."""

    def __getitem__(self, index: Any) -> np.ndarray:
        """As `CausalMask`."""
        return _some_and_all(True, True)
