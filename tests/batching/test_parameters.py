"""Parameters against hand counts, the decoder's own, and what was published; FLOPs by hand."""

import math

import jax
import pytest

from maxtext_lite.batching.parameters import active_parameters, count_parameters, flops_per_example
from maxtext_lite.config import load_config
from maxtext_lite.models import Decoder
from maxtext_lite.parallel.axes import partition_spec
from maxtext_lite.training.state import decoder_shape

# V 320, D 128, N 8, K 4, H 16, F 384, L 4, by hand: tables 2VD, attention 2DNH + 2DKH, mlp 3DF, norms (2L + 1)D.
TABLES = 2 * 320 * 128
MATRICES = 4 * (2 * 128 * 8 * 16 + 2 * 128 * 4 * 16 + 3 * 128 * 384)
NORMS = 9 * 128
ALL = TABLES + MATRICES + NORMS


def test_parameters_are_counted_by_hand():
    count = count_parameters(load_config())
    assert (count.matrices, count.tables, count.norms, count.total) == (MATRICES, TABLES, NORMS, ALL)
    assert count_parameters(load_config(None, ["logits_via_embedding=true"])).tables == TABLES // 2
    assert count_parameters(load_config(), fsdp=4, tensor=2, stage=2).total == TABLES // 8 + MATRICES // 16 + 5 * 128


def test_experts_are_counted_by_hand_and_split_over_their_axis_too():
    """8 experts of 3 D 64, 2 shared ones, a router of 8 D and a bias of 8 in each of 4 layers, in place of the mlp."""
    keys = ["num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=64", "shared_experts=2", "routed_bias=true"]
    attention = 2 * 128 * 8 * 16 + 2 * 128 * 4 * 16
    one = 3 * 128 * 64
    count = count_parameters(load_config(None, keys))
    assert count.matrices == 4 * (attention + 10 * one + 8 * 128)
    assert count.norms == NORMS + 4 * 8
    part = count_parameters(load_config(None, keys), fsdp=2, tensor=2, stage=2, expert=4)
    assert part.matrices == 2 * (attention // 4 + (2 * one + 8 * one // 4) // 4 + 8 * 128 // 2)


EVERYTHING = {
    "Llama": [],
    "GPT-2": ["normalization=layer_norm", "gated_mlp=false", "mlp_bias=true", "attention_bias=all",
              "trainable_position_size=256", "mlp_activation=gelu_tanh", "base_num_kv_heads=8"],
    "OLMo 2": ["norm_placement=post", "qk_norm=all_heads"],
    "Gemma 3": ["norm_placement=both", "qk_norm=head", "normalization=rms_norm_plus_one",
                "layer_pattern=local,local,global", "sliding_window_size=16", "logits_via_embedding=true"],
    "gpt-oss": ["num_experts=8", "num_experts_per_tok=2", "expert_bias=true", "attention_bias=all",
                "attention_sinks=true", "mlp_activation=clamped_silu"],
    "DeepSeek": ["num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=64", "shared_experts=2",
                 "routed_bias=true", "first_num_dense_layers=2", "base_num_decoder_layers=4", "base_num_kv_heads=8",
                 "head_dim=24", "mla={q_lora_rank: 20, kv_lora_rank: 12, qk_nope_head_dim: 16, qk_rope_head_dim: 8, "
                 "v_head_dim: 10}"],
    "DeepSeek V2 Lite": ["base_num_kv_heads=8", "mla={q_lora_rank: 0, kv_lora_rank: 12, qk_nope_head_dim: 8, "
                         "qk_rope_head_dim: 8, v_head_dim: 8}"],
}  # fmt: skip


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_decoder_has_as_many_parameters_on_a_device_as_are_counted(name):
    config = load_config(None, [*EVERYTHING[name], "ici_fsdp_parallelism=1"])
    decoder = Decoder(decoder_shape(config))
    sizes = {"fsdp": 2, "tensor": 4, "stage": 2, "expert": 4}
    leaves = jax.tree.leaves(decoder.abstract_params)
    axes = jax.tree.leaves(decoder.axes, is_leaf=lambda node: isinstance(node, tuple))

    def here(leaf, names):
        parts = [entry if isinstance(entry, tuple) else (entry,) for entry in partition_spec(names)]
        return math.prod(leaf.shape) // math.prod(sizes.get(axis, 1) for part in parts for axis in part)

    assert sum(math.prod(leaf.shape) for leaf in leaves) == count_parameters(config).total
    on_one = sum(here(leaf, names) for leaf, names in zip(leaves, axes, strict=True))
    assert on_one == count_parameters(config, **sizes).total


def test_flops_by_hand():
    sizes = {"vocab_size": 320, "base_emb_dim": 4, "base_num_query_heads": 2, "base_num_kv_heads": 1, "head_dim": 6,
             "base_mlp_dim": 5, "base_num_decoder_layers": 2}  # fmt: skip
    keys = [f"{key}={value}" for key, value in sizes.items()]
    # a layer: q 4*12, k and v 4*6 each, out 12*4 = 144; mlp 3*4*5 = 60. Two layers and the head of 4*320.
    # attention: 2 layers x 2 heads x 6 + 6 wide x 6 x 7 / 2 keys
    weights, attention = 2 * (144 + 60) + 4 * 320, 2 * 2 * 12 * 6 * 7 / 2
    assert flops_per_example(load_config(None, keys), 7) == 7 * (6 * weights + attention)
    # Experts in place of the mlp: two of eight and a shared one, of 3*4*7 = 84, and a router of 4*8.
    experts = [*keys, "num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=7", "shared_experts=1"]
    weights = 2 * (144 + 3 * 84 + 32) + 4 * 320
    assert flops_per_example(load_config(None, experts), 7) == 7 * (6 * weights + attention)
    assert active_parameters(load_config(None, experts)) == weights + 4 * 320 + 5 * 4
    # One of the two layers sees 3 tokens: of 7 queries, the first sees 1 key, the second 2, five see 3; by the
    # convention that counts half of a square, 3 * (1 - 3 / 14) on average.
    window = [*keys, "layer_pattern=local,global", "sliding_window_size=3"]
    attention = 2 * 12 * 6 * (7 / 2 + 3 * (1 - 3 / 14))
    assert flops_per_example(load_config(None, window), 7) == pytest.approx(7 * (6 * (2 * 204 + 1280) + attention))
