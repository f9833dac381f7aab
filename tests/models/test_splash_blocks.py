"""Blocks of splash attention, and masks that answer for them in two numbers."""

import copy

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as jax_masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info

from maxtext_lite.models.splash_blocks import MOST_TOKENS, CausalMask, FullMask, LocalMask, block_sizes
from maxtext_lite.parallel import context_order

T = 3072
MASKS = {
    "causal": (lambda shards: CausalMask((T, T), shards), jax_masks.CausalMask((T, T))),
    **{f"last {window}": (lambda shards, window=window: LocalMask((T, T), window, shards),
                          jax_masks.LocalMask((T, T), (window - 1, 0), offset=0))
       for window in (1, 100, 257, 512, 1300)},
    "full": (lambda shards: FullMask((T, T)), jax_masks.FullMask((T, T))),
}  # fmt: skip


def on_shards(mask, shards):
    """jax's own mask of tokens arranged over context shards, by a table of their positions."""
    mask, order = copy.copy(mask), context_order(T, shards).astype(np.int32)
    plain = mask.mask_function
    mask.q_sequence, mask.mask_function = order, lambda positions, places: plain(positions, order[places])
    return mask


@pytest.mark.parametrize(("name", "shards"), [*((name, 1) for name in MASKS), ("causal", 3), ("last 257", 3)])
def test_masks_tell_the_kernel_what_those_of_jax_tell_it(name, shards):
    """Also of tokens that are arranged over context shards, and where blocks of queries and keys are not alike."""
    make, theirs = MASKS[name]
    own, theirs = make(shards), on_shards(theirs, shards) if shards > 1 else theirs
    for process in (mask_info.process_mask, mask_info.process_mask_dkv):
        for blocks in ((128, 256), (512, 128), (512, 512)):
            found, want = (
                process(jax_masks.MultiHeadMask([mask] * 2), blocks, q_seq_shards=shards)[0] for mask in (own, theirs)
            )
            for field, ours, reference in zip(want._fields, found, want, strict=True):
                np.testing.assert_array_equal(ours, reference, err_msg=field)


@pytest.mark.parametrize("name", ["causal", "last 257"])
@pytest.mark.parametrize("shards", [2, 3])
def test_inside_the_kernel_a_mask_knows_the_positions_of_arranged_keys(name, shards):
    make, theirs = MASKS[name]
    pairs = np.arange(0, T, 7)[:, None], np.arange(T)[None]
    np.testing.assert_array_equal(make(shards).mask_function(*pairs), on_shards(theirs, shards).mask_function(*pairs))


def test_a_block_is_two_numbers():
    """At 131,072 tokens jax's own are 17 billion comparisons a pass."""
    block = CausalMask((131_072, 131_072))[slice(1024, 2048), slice(1024, 1536)]
    np.testing.assert_array_equal(block, [[True, False]])


@pytest.mark.parametrize("head_dim", [64, 256, 512])
@pytest.mark.parametrize("window", [None, 100])
def test_blocks_divide_every_length_and_are_no_larger_than_the_table_says(head_dim, window):
    most = MOST_TOKENS[[64, 256, 512].index(head_dim)]
    for span in range(128, 12_800, 128):
        sizes = block_sizes(span=span, num_keys=2 * span, head_dim=head_dim, window=window)
        queries = [sizes.block_q, sizes.block_q_dkv]
        keys = [sizes.block_kv, sizes.block_kv_dkv]
        limits = [most.forward, most.fused if sizes.use_fused_bwd_kernel else most.dkv]
        if not sizes.use_fused_bwd_kernel:
            queries, keys, limits = [*queries, sizes.block_q_dq], [*keys, sizes.block_kv_dq], [*limits, most.dq]
        assert all(span % size == 0 and size % 128 == 0 for size in (*queries, *keys))
        assert sizes.block_kv % sizes.block_kv_compute == sizes.block_kv_dkv % sizes.block_kv_dkv_compute == 0
        assert all(q <= limit[0] and k <= limit[1] for q, k, limit in zip(queries, keys, limits, strict=True))


def test_one_kernel_finds_all_gradients_while_its_parts_of_dq_are_few():
    lengths = (128, 4096, 8192, 9216, 32_768)
    fused = {
        head_dim: [block_sizes(span=T, num_keys=T, head_dim=head_dim).use_fused_bwd_kernel for T in lengths]
        for head_dim in (128, 256, 512)
    }
    assert fused == {128: [True] * 2 + [False] * 3, 256: [True] + [False] * 4, 512: [False] * 5}
    assert not block_sizes(span=4096, num_keys=4096, head_dim=128, window=1024).use_fused_bwd_kernel
    assert not block_sizes(span=4096, num_keys=32_768, head_dim=128).use_fused_bwd_kernel  # a context shard's chunks
    assert not block_sizes(span=61 * 128, num_keys=61 * 128, head_dim=128).use_fused_bwd_kernel  # blocks of 128
