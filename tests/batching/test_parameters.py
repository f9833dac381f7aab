"""Parameters against hand counts, the decoder's own and published figures; FLOPs by hand."""

import dataclasses
import math

import jax
import pytest

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
    "Phi": ["normalization=layer_norm", "gated_mlp=false", "mlp_bias=true", "attention_bias=all", "logits_bias=true",
            "parallel_block=one_norm", "qk_norm=head"],
    "Command R+": ["normalization=layer_norm_no_bias", "parallel_block=one_norm", "qk_norm=each_head",
                   "logits_via_embedding=true", "logits_bias=true"],
    "Apertus": ["gated_mlp=false", "mlp_activation=xielu", "qk_norm=head"],
    "OLMo": ["normalization=layer_norm_plain", "clip_qkv=8"],
    "DeepSeek V2 Lite": ["base_num_kv_heads=8", "mla={q_lora_rank: 0, kv_lora_rank: 12, qk_nope_head_dim: 8, "
                         "qk_rope_head_dim: 8, v_head_dim: 8}"],
}  # fmt: skip


def test_adafactors_second_moments_are_counted_by_hand():
    """D 128, F 384, V 320 and nothing else reaches 128: the mlp and the tables have means, the rest all elements."""
    config = load_config()
    attention, mlp = MATRICES // 4 - 3 * 128 * 384, 3 * (128 + 384)
    assert count_factored(config) == 4 * (attention + mlp) + NORMS + 2 * (320 + 128)
    split = {"fsdp": 4, "tensor": 2, "stage": 2}
    part = 2 * (attention // 8 + 3 * (128 // 4 + 384 // 2)) + 5 * 128 + 2 * (320 // 2 + 128 // 4)
    assert count_factored(config, **split) == part


@pytest.mark.parametrize("keys", [
    [], ["lora_rank=4"], ["base_num_query_heads=128", "base_num_kv_heads=2", "head_dim=128"],
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


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_decoder_has_as_many_parameters_on_a_device_as_are_counted(name):
    config = load_config(None, [*EVERYTHING[name], "ici_fsdp_parallelism=1", "lora_rank=3"])
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
    plain = load_config(None, [*EVERYTHING[name], "ici_fsdp_parallelism=1"])
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


# From model cards, papers and the weights' own files: all parameters; for Gemma 3 those of the text model.
PUBLISHED = {
    "apertus-70b": 70_599_864_480, "apertus-8b": 8_053_338_176, "command-r": 34_980_831_232,
    "command-r-plus": 103_810_674_688, "command-r7b": 8_028_033_024, "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224, "deepseek-v3": 671_026_419_200, "ernie4.5-0.3b": 360_748_032,
    "ernie4.5-21b-a3b": 21_825_437_888, "ernie4.5-300b-a47b": 299_484_163_264, "exaone4-1.2b": 1_279_391_488,
    "exaone4-32b": 32_003_216_384, "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896, "gemma2-27b": 27_227_128_320,
    "gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma3-12b": 11_766_034_176, "gemma3-1b": 999_885_952,
    "gemma3-27b": 27_009_346_304, "gemma3-4b": 3_880_263_168, "glm4-32b-0414": 32_566_081_536,
    "glm4-9b": 9_399_951_360, "glm4-9b-0414": 9_400_279_040, "glm4.5": 352_797_829_024, "glm4.5-air": 106_852_251_264,
    "gpt-neox-20b": 20_554_567_680, "gpt-oss-120b": 116_829_156_672, "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808, "gpt2-large": 774_030_080, "gpt2-medium": 354_823_168, "gpt2-xl": 1_557_611_200,
    "granite3.0-1b-a400m": 1_334_628_352, "granite3.0-3b-a800m": 3_298_793_472, "granite3.1-2b": 2_533_531_648,
    "granite3.1-8b": 8_170_848_256, "helium1-preview-2b": 2_172_643_840, "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192, "llama2-7b": 6_738_415_616, "llama3-70b": 70_553_706_496,
    "llama3-8b": 8_030_261_248, "llama3.1-405b": 405_853_388_800, "llama3.1-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248, "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "llama4-maverick": 400_711_848_960, "llama4-scout": 107_769_861_120, "minimax-m2": 228_689_764_864,
    "ministral-8b": 8_019_808_256, "minitron-4b": 4_190_509_056, "minitron-8b": 8_271_699_968,
    "mistral-7b": 7_248_023_552, "mistral-7b-v0.1": 7_241_732_096, "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200, "mistral-small-3.1-24b": 23_572_403_200, "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704, "olmo-1b": 1_176_764_416, "olmo-7b": 6_888_095_744, "olmo2-13b": 13_716_198_400,
    "olmo2-1b": 1_484_916_736, "olmo2-32b": 32_234_279_936, "olmo2-7b": 7_298_617_344, "olmo3-32b": 32_233_522_176,
    "olmo3-7b": 7_298_011_136, "olmoe-1b-7b": 6_919_161_856, "phi1.5": 1_418_270_720, "phi2": 2_779_683_840,
    "phi3-mini": 3_821_079_552, "phi4": 14_659_507_200, "pythia-1.4b": 1_414_647_808, "pythia-12b": 11_846_072_320,
    "pythia-6.9b": 6_857_302_016, "qwen1.5-moe-a2.7b": 14_315_784_192, "qwen2-57b-a14b": 57_408_658_944,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352, "qwen2.5-3b": 3_085_938_688, "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560, "qwen3-30b-a3b": 30_532_122_624, "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "seed-oss-36b": 36_151_104_512,
    "smollm2-1.7b": 1_711_376_384, "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120,
    "smollm3-3b": 3_075_098_624, "stablelm-3b": 2_795_443_200, "stablelm2-1.6b": 1_644_515_328,
    "starcoder2-15b": 15_957_889_024, "starcoder2-3b": 3_030_371_328, "starcoder2-7b": 7_173_923_840,
    "tinyllama-1.1b": 1_100_048_384,
}  # fmt: skip


def test_parameters_of_named_models_are_those_published():
    names = {file.stem for file in packaged_directory("configs").glob("models/*.yml")}
    assert names == set(PUBLISHED)
    configs = {name: load_config(None, [f"model_name={name}"]) for name in names}
    assert {name: count_parameters(config).total for name, config in configs.items()} == PUBLISHED
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
