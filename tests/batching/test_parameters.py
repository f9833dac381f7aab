"""Parameters against hand counts, the decoder's own and published figures; FLOPs by hand."""

import dataclasses
import math
from pathlib import Path

import jax
import pytest
import yaml

from maxtext_lite.aot.program import bytes_per_device
from maxtext_lite.batching.parameters import (
    active_parameters,
    count_factored,
    count_parameters,
    flops_per_example,
)
from maxtext_lite.config import load_config, packaged_directory
from maxtext_lite.models import Decoder
from maxtext_lite.parallel import MESH_AXES, Pipeline, make_mesh
from maxtext_lite.parallel.axes import partition_spec
from maxtext_lite.training.optimizer import make_optimizer
from maxtext_lite.training.state import StepParts, abstract_state, decoder_shape

TABLE = yaml.safe_load((Path(__file__).parent / "parameters.yml").read_text(encoding="utf-8"))
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
    # Shared experts and the router lie over fsdp and expert, experts over fsdp alone.
    assert part.matrices == 2 * (attention // 16 + 2 * one // 16 + 8 * one // 4 // 4 + 8 * 128 // 8)
    split = count_parameters(load_config(None, keys), context=2, expert=2)
    assert split.matrices == 4 * ((attention + 2 * one + 8 * 128) // 4 + 8 * one // 2 // 2)


@pytest.mark.parametrize("keys", [
    ["lora_rank=4"], ["base_num_query_heads=128", "base_num_kv_heads=2", "head_dim=128"],
    ["num_experts=128", "num_experts_per_tok=2", "base_moe_mlp_dim=128", "expert_bias=true", "shared_experts=1"],
], ids=str)  # fmt: skip
def test_adafactors_state_on_a_device_is_as_counted(keys):
    """Except for its counts, and the single zero that Optax keeps in place of an unneeded tensor."""
    config = load_config(None, [*keys, "optimizer=adafactor"])
    sizes = {"fsdp": 2, "tensor": 2, "stage": 2}
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | sizes, dict.fromkeys(MESH_AXES, 1), jax.devices())
    decoder = Decoder(decoder_shape(config), Pipeline(2, 2, 2))
    optimizer = make_optimizer(config, decoder.trained(decoder.axes))
    state = abstract_state(StepParts(decoder, optimizer, mesh, config)).opt_state
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim and leaf.shape[-1] > 1]
    assert 4 * count_factored(config, **sizes) == sum(map(bytes_per_device, leaves))


@pytest.mark.parametrize("name", TABLE["decoders"])
def test_the_decoder_has_as_many_parameters_on_a_device_as_are_counted(name):
    config = load_config(None, [*TABLE["decoders"][name], "ici_fsdp_parallelism=1", "lora_rank=3"])
    decoder = Decoder(decoder_shape(config))
    sizes = {"fsdp": 2, "tensor": 4, "stage": 2, "expert": 4}

    def counted(part):
        """Elements of a part of the parameters, in all and on a device."""
        leaves = jax.tree.leaves(part(decoder.abstract_params))
        axes = jax.tree.leaves(part(decoder.axes), is_leaf=lambda node: isinstance(node, tuple))
        on_one = sum(here(leaf, names) for leaf, names in zip(leaves, axes, strict=True))
        return sum(math.prod(leaf.shape) for leaf in leaves), on_one

    def here(leaf, names):
        parts = [entry if isinstance(entry, tuple) else (entry,) for entry in partition_spec(names)]
        return math.prod(leaf.shape) // math.prod(sizes.get(axis, 1) for part in parts for axis in part)

    counts = count_parameters(config), count_parameters(config, **sizes)
    assert counted(decoder.frozen) == tuple(count.total for count in counts)
    assert counted(decoder.trained) == tuple(count.adapters for count in counts)
    plain = load_config(None, [*TABLE["decoders"][name], "ici_fsdp_parallelism=1"])
    assert count_parameters(plain) == dataclasses.replace(counts[0], adapters=0)


def test_adapters_are_counted_by_hand():
    """Of rank 2 beside D 128 x N 8 x H 16 and F 384 x D 128 in each of 4 layers."""
    config = load_config(None, ["lora_rank=2", "lora_targets=query,down"])
    assert count_parameters(config).adapters == 4 * 2 * ((128 + 8 * 16) + (384 + 128))
    # Over fsdp and tensor: of the query 128 / 2 and 8 * 16 / 4, of down 384 / 4 and 128 / 2; and over 2 stages.
    assert count_parameters(config, fsdp=2, tensor=4, stage=2).adapters == 2 * 2 * (64 + 32 + 96 + 64)


def test_flops_by_hand():
    sizes = {"vocab_size": 320, "base_emb_dim": 4, "base_num_query_heads": 2, "base_num_kv_heads": 1, "head_dim": 6,
             "base_mlp_dim": 5, "base_num_decoder_layers": 2}  # fmt: skip
    keys = [f"{key}={value}" for key, value in sizes.items()]
    # a layer: q 4*12, k and v 4*6 each, out 12*4 = 144; mlp 3*4*5 = 60. Two layers and the head of 4*320.
    # attention: 2 layers x 2 heads x 6 + 6 wide x 6 x 7 / 2 keys
    weights, attention = 2 * (144 + 60) + 4 * 320, 2 * 2 * 12 * 6 * 7 / 2
    assert flops_per_example(load_config(None, keys), 7) == 7 * (6 * weights + attention)
    # With LoRA every weight but the adapters, here of rank 3 beside the query's 4*12, has no gradient of its own.
    adapted = [*keys, "lora_rank=3", "lora_targets=query"]
    adapters = 2 * 3 * (4 + 12)
    assert flops_per_example(load_config(None, adapted), 7) == 7 * (4 * weights + 6 * adapters + attention)
    # Experts in place of the mlp: two of eight and a shared one, of 3*4*7 = 84, and a router of 4*8.
    experts = [*keys, "num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=7", "shared_experts=1"]
    weights = 2 * (144 + 3 * 84 + 32) + 4 * 320
    assert flops_per_example(load_config(None, experts), 7) == 7 * (6 * weights + attention)
    assert active_parameters(load_config(None, experts)) == weights + 4 * 320 + 5 * 4
    # Every second layer has them, with a shared one of 9 and its gate; the other the mlp of 60.
    mixed = [*experts, "mlp_pattern=dense,moe", "base_shared_mlp_dim=9", "shared_expert_gate=true"]
    met = 2 * 144 + 60 + 2 * 84 + 3 * 4 * 9 + 4 + 32 + 4 * 320
    assert flops_per_example(load_config(None, mixed), 7) == 7 * (6 * met + attention)
    assert count_parameters(load_config(None, mixed)).total == met + 6 * 84 + 4 * 320 + 5 * 4
    # One of the two layers sees 3 tokens: of 7 queries, the first sees 1 key, the second 2, five see 3; by the
    # convention that counts half of a square, 3 * (1 - 3 / 14) on average.
    # Of 7 tokens in chunks of 3, half of the squares 3, 3 and 1.
    chunks = [*keys, "layer_pattern=chunked,nope", "chunk_attn_window_size=3"]
    attention = 2 * 12 * 6 * (7 / 2 + (9 + 9 + 1) / 14)
    assert flops_per_example(load_config(None, chunks), 7) == pytest.approx(7 * (6 * (2 * 204 + 1280) + attention))
    window = [*keys, "layer_pattern=local,global", "sliding_window_size=3"]
    attention = 2 * 12 * 6 * (7 / 2 + 3 * (1 - 3 / 14))
    assert flops_per_example(load_config(None, window), 7) == pytest.approx(7 * (6 * (2 * 204 + 1280) + attention))


def test_parameters_of_named_models_are_those_published():
    names = {file.stem for file in packaged_directory("configs").glob("models/*.yml")}
    assert names == set(TABLE["published"])
    configs = {name: load_config(None, [f"model_name={name}"]) for name in names}
    assert {name: count_parameters(config).total for name, config in configs.items()} == TABLE["published"]
    assert {config.dtype for config in configs.values()} == {"bfloat16"}


@pytest.mark.parametrize(("name", "billions"), [
    ("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22),
    ("deepseek-v2", 21), ("deepseek-v3", 37), ("olmoe-1b-7b", 1.3), ("qwen1.5-moe-a2.7b", 2.7),
    ("qwen2-57b-a14b", 14.2), ("ernie4.5-300b-a47b", 47.5), ("llama4-scout", 17.2), ("llama4-maverick", 17.2),
])  # fmt: skip
def test_active_parameters_are_those_published(name, billions):
    assert active_parameters(load_config(None, [f"model_name={name}"])) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(("name", "gflops", "within"), [
    ("deepseek-v2", 155, 0.005), ("deepseek-v3", 250, 0.005), ("llama3.1-405b", 2448, 0.011),
])  # fmt: skip
def test_flops_per_token_are_those_published(name, gflops, within):
    """At 4,096 tokens. Source: Zhao et al. 2025, arXiv:2505.09343, table 2."""
    flops = flops_per_example(load_config(None, [f"model_name={name}"]), 4096) / 4096
    assert flops / 1e9 == pytest.approx(gflops, rel=within)
