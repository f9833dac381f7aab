"""Blocks of splash attention, and masks that answer for them in two numbers."""

import copy

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as jax_masks,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask_info as mask_info,
)

from maxtext_lite.kernels.splash import (
    MOST_TOKENS,
    CausalMask,
    FullMask,
    LocalMask,
    block_sizes,
)
from maxtext_lite.parallel import context_order

T = 1536


def on_shards(mask, shards):
    """jax's own mask of tokens arranged over context shards, by a table of their positions."""
    mask, order = copy.copy(mask), context_order(T, shards).astype(np.int32)
    plain = mask.mask_function
    mask.q_sequence, mask.mask_function = (
        order,
        lambda positions, places: plain(positions, order[places]),
    )
    return mask


@pytest.mark.parametrize(
    ("window", "shards"),
    [(None, 3), (257, 1), (257, 3), ("full", 1)],
)
@pytest.mark.fast
def test_masks_tell_the_kernel_what_those_of_jax_tell_it(window, shards):
    """Also of tokens that are arranged over context shards, and where blocks of queries and keys are not alike."""
    if window == "full":
        own, theirs = FullMask((T, T)), jax_masks.FullMask((T, T))
    elif window is None:
        own, theirs = CausalMask((T, T), shards), jax_masks.CausalMask((T, T))
    else:
        own, theirs = (
            LocalMask((T, T), window, shards),
            jax_masks.LocalMask((T, T), (window - 1, 0), offset=0),
        )
    if shards > 1:
        theirs = on_shards(theirs, shards)
        pairs = np.arange(0, T, 7)[:, None], np.arange(T)[None]
        np.testing.assert_array_equal(
            own.mask_function(*pairs), theirs.mask_function(*pairs)
        )
    for process in (mask_info.process_mask, mask_info.process_mask_dkv):
        for blocks in ((128, 256), (256, 128)):
            found, want = (
                process(
                    jax_masks.MultiHeadMask([mask] * 2), blocks, q_seq_shards=shards
                )[0]
                for mask in (own, theirs)
            )
            for field, ours, reference in zip(want._fields, found, want, strict=True):
                np.testing.assert_array_equal(ours, reference, err_msg=field)


@pytest.mark.parametrize("head_dim", [64, 256, 512])
@pytest.mark.parametrize("window", [None, 100])
def test_blocks_divide_every_length_and_are_no_larger_than_the_table_says(
    head_dim, window
):
    most = MOST_TOKENS[[64, 256, 512].index(head_dim)]
    for span in range(128, 12_800, 384):
        sizes = block_sizes(
            span=span, num_keys=2 * span, head_dim=head_dim, window=window
        )
        backward = most.fused if sizes.use_fused_bwd_kernel else most.dkv
        found = [
            (sizes.block_q, sizes.block_kv, most.forward),
            (sizes.block_q_dkv, sizes.block_kv_dkv, backward),
        ]
        if not sizes.use_fused_bwd_kernel:
            found.append((sizes.block_q_dq, sizes.block_kv_dq, most.dq))
        for queries, keys, limit in found:
            assert span % queries == span % keys == queries % 128 == keys % 128 == 0
            assert queries <= limit[0]
            assert keys <= limit[1]
        assert (
            sizes.block_kv % sizes.block_kv_compute
            == sizes.block_kv_dkv % sizes.block_kv_dkv_compute
            == 0
        )
