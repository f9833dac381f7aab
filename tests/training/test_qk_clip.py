"""QK-clip: the largest logit of each head is exact however a step is split, and heads above the threshold come down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from maxtext_lite.models.attention import Scoring
from maxtext_lite.models.qk_clip import largest_logits
from maxtext_lite.parallel.pipeline import Pipeline

CLIP = "qk_clip_threshold=0.02"
MODELS = {  # the threshold, and the model's keys
    "grouped": (0.025,),
    "each head": (
        0.025,
        "base_num_kv_heads=4",
        "attention_bias=qkv",
        "weight_dtype=bfloat16",
    ),
    "latent": (
        0.015,
        "base_num_kv_heads=4",
        "mla={q_lora_rank: 12, kv_lora_rank: 8, qk_nope_head_dim: 4, qk_rope_head_dim: 4, v_head_dim: 6}",
        "head_dim=8",
    ),
}
EXPERTS = [
    "num_experts=4",
    "num_experts_per_tok=2",
    "base_moe_mlp_dim=8",
    "first_num_dense_layers=1",
    "base_num_decoder_layers=5",
]
SPLITS = {  # the model's keys, accumulation, slots, and how it is split
    "accumulation, data": (("mtp_num_layers=1",), 4, 4, {"data": 2, "fsdp": 2}),
    "empty slots, tensor": ((), 2, 12, {"fsdp": 4, "tensor": 2}),
    "context": (
        ("layer_pattern=local,global", "sliding_window_size=5"),
        1,
        16,
        {"context": 2},
    ),
    "stages": (EXPERTS, 1, 16, {"pipeline": Pipeline(2, 2, 1), "fsdp": 2}),
    "repeats": ((), 1, 16, {"pipeline": Pipeline(2, 2, 2)}),
    "1f1b": ((), 2, 8, {"pipeline": Pipeline(2, 2, 1, "1f1b"), "data": 2}),
}


@pytest.mark.parametrize("window", [None, 7])
def test_the_largest_logit_is_that_of_what_tokens_see(window):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 1100, 4, 8), np.float32)
    k = rng.standard_normal((3, 1100, 2, 8), np.float32)
    segments = np.sort(rng.integers(1, 4, (3, 1100)), axis=1)
    segments[:, -50:] = 0
    found = largest_logits(*map(jnp.asarray, (q, k, segments)), Scoring(window=window))
    distance = np.arange(1100)[:, None] - np.arange(1100)
    seen = (segments[:, :, None] == segments[:, None]) & (segments > 0)[:, :, None]
    seen &= (distance >= 0) & (distance < (window or 1100))
    scores = np.einsum("btnh,bsnh->bnts", q, k.repeat(2, axis=2)) / np.sqrt(8)
    wanted = np.where(seen[:, None], scores, 0).max((-1, -2))
    assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("split", SPLITS)
def test_no_split_changes_the_largest_logits(setup, rows, split):
    keys, accumulation, slots, mesh = SPLITS[split]
    keys = (CLIP, "base_num_decoder_layers=4", *keys)
    it, one = setup(*keys, **mesh), setup(*keys)
    found = it.gradients(it.state().params, it.batch(rows, accumulation, slots))
    wanted = one.gradients(one.state().params, one.batch(rows, 1, 16))
    assert np.all(wanted.largest_logits > 0)
    assert_allclose(found.largest_logits, wanted.largest_logits, rtol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_a_head_above_the_threshold_comes_down_to_it_and_the_others_stay(
    setup, rows, model
):
    """In the first layer, whose input does not change, while the learning rate is 0; bfloat16 to its rounding."""
    threshold, *keys = MODELS[model]
    keys += [f"qk_clip_threshold={threshold}", "base_num_decoder_layers=1"]
    it, largest = setup(*keys), []
    batch = it.batch(rows, 1, 16)
    params = it.initial.params
    for _ in range(2):
        largest.append(it.gradients(params, batch).largest_logits)
        params, *_ = jax.device_get(
            it.optimizer.finish(
                jax.tree.map(np.zeros_like, params),
                it.state().opt_state,
                params,
                np.float32(0),
                None,
                largest[-1],
            )
        )
    before, after = largest
    assert before.min() < threshold < before.max()
    rtol = 1e-2 if "bfloat16" in str(keys) else 1e-5
    assert_allclose(after, np.minimum(before, threshold), rtol=rtol)
