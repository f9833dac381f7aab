"""Models that differ from Llama in every way there is, on meshes of eight devices: the gradients of one device."""

import math

import jax
import numpy as np
import pytest

from maxtext_lite.parallel import Pipeline

COMMON = ("optimizer=sgd", "gradient_clipping_threshold=0", "base_num_query_heads=8", "initializer_range=0.2")
MODELS = {
    "Gemma-like": (
        "normalization=rms_norm_plus_one", "norm_placement=both", "mlp_activation=gelu_tanh", "qk_norm=head",
        "layer_pattern=local,nope,global", "sliding_window_size=5", "attn_logits_soft_cap=2", "final_logits_soft_cap=3",
        "query_pre_attn_scalar=7", "rope_local_max_timescale=100", "scale_embeddings=true", "base_num_decoder_layers=6",
        "rope_scaling={rope_type: linear, factor: 2}", "logits_via_embedding=true", "base_num_kv_heads=4",
    ),
    "GPT-2-like": (
        "normalization=layer_norm", "gated_mlp=false", "mlp_bias=true", "attention_bias=all", "mlp_activation=gelu",
        "trainable_position_size=32", "base_num_kv_heads=8", "base_num_decoder_layers=4", "qk_norm=all_heads",
    ),
    "Cohere-like": (
        "normalization=layer_norm_no_bias", "parallel_block=one_norm", "qk_norm=each_head", "logits_multiplier=0.3",
        "logits_bias=true", "residual_multiplier=0.7", "embedding_multiplier=3", "clip_qkv=0.9", "mlp_activation=relu",
        "position_temperature={scale: 0.5, floor_scale: 3, layers: nope}", "layer_pattern=local,nope",
        "sliding_window_size=5", "base_num_kv_heads=4", "base_num_decoder_layers=4", "final_logits_soft_cap=3",
    ),
    "Apertus-like": (
        "mlp_activation=xielu", "gated_mlp=false", "qk_norm=head_after_rope", "normalization=layer_norm_plus_one",
        "parallel_block=two_norms", "base_num_kv_heads=8", "base_num_decoder_layers=4", "head_dim=8",
        "rope_scaling={rope_type: longrope, factor: 2, original_max_position_embeddings: 4, "
        "short_factor: [1, 1, 2, 2], long_factor: [2, 3, 4, 5]}",
    ),
    "gpt-oss-like": (
        "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=8", "expert_bias=true", "attention_bias=all",
        "attention_sinks=true", "mlp_activation=clamped_silu", "base_num_kv_heads=4", "layer_pattern=local,chunked",
        "sliding_window_size=3", "norm_placement=post", "base_num_decoder_layers=4", "mlp_pattern=dense,moe",
        "shared_experts=1", "base_shared_mlp_dim=4", "shared_expert_gate=true", "chunk_attn_window_size=5",
        "apply_router_weight_on_input=true", "qk_norm=l2_after_rope",
    ),
    "DeepSeek-like": (
        "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=8", "shared_experts=1", "routed_bias=true",
        "routed_score_func=sigmoid", "first_num_dense_layers=1", "base_num_decoder_layers=5", "base_num_kv_heads=8",
        "mla={q_lora_rank: 12, kv_lora_rank: 8, qk_nope_head_dim: 4, qk_rope_head_dim: 4, v_head_dim: 6}", "head_dim=8",
    ),
}  # fmt: skip
CASES = [
    ("Gemma-like", {"fsdp": 2, "tensor": 2, "context": 2}, None),
    ("Gemma-like", {"stage": 2, "tensor": 4}, Pipeline(2, 2, schedule="1f1b")),
    ("GPT-2-like", {"stage": 2, "fsdp": 2, "context": 2}, Pipeline(2, 2, 2)),
    ("Cohere-like", {"stage": 2, "tensor": 2, "data": 2}, Pipeline(2, 2, schedule="1f1b")),
    ("Apertus-like", {"stage": 2, "fsdp": 2, "context": 2}, Pipeline(2, 2, 2)),
    ("gpt-oss-like", {"expert": 2, "tensor": 2, "context": 2}, None),
    ("gpt-oss-like", {"stage": 2, "expert": 2, "data": 2}, Pipeline(2, 2, schedule="1f1b")),
    ("DeepSeek-like", {"stage": 2, "fsdp": 2, "expert": 2}, Pipeline(2, 2, 2)),
    ("DeepSeek-like", {"stage": 4, "context": 2}, Pipeline(4, 4, schedule="1f1b")),
]


def _noisy(params):
    """Norms, biases and sinks away from where they start: every parameter must matter."""
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), params)


@pytest.fixture(scope="module")
def on_one_device(setup, rows):
    """For a model, its parameters and the step of all rows at once."""
    found = {}

    def of(name):
        if name not in found:
            it = setup(*COMMON, *MODELS[name])
            params = _noisy(it.initial.params)
            found[name] = params, it.gradients(params, it.batch(rows, 1, 16))
        return found[name]

    return of


@pytest.mark.parametrize(("name", "mesh", "pipeline"), CASES, ids=lambda value: str(value))
def test_the_step_is_that_of_one_device(name, mesh, pipeline, setup, rows, agrees, on_one_device):
    params, want = on_one_device(name)
    it = setup(*COMMON, *MODELS[name], **mesh, pipeline=pipeline)
    like = it.state().params
    params = jax.tree.map(lambda x, leaf: jax.device_put(np.reshape(x, leaf.shape), leaf.sharding), params, like)
    slots = max(8, math.prod(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert", "stage")))
    got = it.gradients(params, it.batch(rows, 2, slots))
    agrees(jax.tree.map(lambda g, like: np.reshape(g, like.shape), got.gradients, want.gradients), want.gradients)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    for part, value in want.aux.items():
        np.testing.assert_allclose(got.aux[part], value, rtol=1e-5, err_msg=part)
    np.testing.assert_array_equal(got.expert_counts, want.expert_counts)
    for path, gradient in jax.tree_util.tree_leaves_with_path(want.gradients):  # each has one to compare
        name = jax.tree_util.keystr(path)
        assert (np.abs(gradient).max() > 0) == ("router_bias" not in name), name
