"""The work of Muon's update is that of the program which libtpu 0.0.50.1 compiled for it: what a step of v5e:2x4 with
optimizer=muon has more than one with adamw."""

import pytest

from maxtext_lite.batching.newton_schulz import orthogonalized
from maxtext_lite.batching.topology import MeshSizes, resolve_mesh
from maxtext_lite.config import load_config

MODEL = ["base_emb_dim=256", "base_mlp_dim=512", "base_num_decoder_layers=4", "base_num_query_heads=4", "head_dim=32",
         "base_num_kv_heads=2", "vocab_size=512", "optimizer=muon", "ici_fsdp_parallelism=1"]  # fmt: skip
EMBED = ("expert", "context", "fsdp")


def stacks(*words, devices=8):
    config = load_config(None, [*MODEL, *words])
    sizes = resolve_mesh(config, devices)
    assert isinstance(sizes, MeshSizes)
    return list(orthogonalized(config, sizes.total))


@pytest.mark.parametrize(("words", "flops", "within"), [
    (["ici_data_parallelism=8"], 11_093_934_080, 0),
    (["ici_fsdp_parallelism=8"], 1_551_892_480, 0),
    (["ici_fsdp_parallelism=4", "ici_data_parallelism=2"], 2_915_041_280, 0),
    (["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"], 1_638_400_000, 0.05),
    (["ici_tensor_parallelism=2", "ici_data_parallelism=4"], 6_325_534_720, 0.05),
])  # fmt: skip
def test_products_are_those_that_were_compiled(words, flops, within):
    assert sum(2 * each.products for each in stacks(*words)) == pytest.approx(flops, rel=within)


def test_a_tpu_gathers_once_in_bfloat16_and_a_gpu_twice_in_float32():
    found = stacks("ici_fsdp_parallelism=8")
    assert sum(2 * (each.matrix + each.square) for each in found if each.rows == EMBED) == 23_592_960
    of_h100 = 78_643_200  # by jax 0.12.0.1's CUDA plugin
    assert sum(4 * (2 * each.matrix + each.square) for each in found if each.rows == EMBED) == of_h100
    assert sum(4 * each.reduced for each in found if each.columns == EMBED) == 3_276_800


@pytest.mark.parametrize(("words", "flops", "gathered"), [  # by jax on simulated CPU devices
    (["ici_fsdp_parallelism=8", "diloco_num_replicas=4"], 6_207_569_920, 314_572_800),
    (["ici_fsdp_parallelism=4", "ici_data_parallelism=2", "diloco_num_replicas=4"], 5_830_082_560, 157_286_400),
    (["ici_fsdp_parallelism=4", "ici_data_parallelism=2", "diloco_num_replicas=-1"], 2_915_041_280, 78_643_200),
])  # fmt: skip
def test_a_device_makes_the_matrices_of_each_of_its_replicas_orthogonal(words, flops, gathered):
    found = stacks("enable_diloco=true", *words)
    assert sum(2 * each.products for each in found) == flops
    assert sum(4 * (2 * each.matrix + each.square) for each in found if each.rows == EMBED) == gathered


@pytest.mark.parametrize(("words", "flops", "gathered", "reduced"), [
    # Layers divide: a device has whole matrices of its own.
    (["ici_data_parallelism=4", "ici_fsdp_parallelism=2"], 1_410_334_720, 0, 0),
    # They do not, but the first dim of each matrix; of `out` only head_dim, so that it is gathered once: not counted.
    (["ici_data_parallelism=8"], 2_432_696_320, 52_953_088 - 4 * 4 * 128 * 256, 7_208_960),
    (["ici_data_parallelism=8", "base_num_decoder_layers=3", "base_num_query_heads=8", "base_num_kv_heads=8"],
     2_139_095_040, 86_507_520, 3_932_160),
])  # fmt: skip
def test_replicas_that_share_the_optimizer_share_its_work(words, flops, gathered, reduced):
    """By jax on simulated CPU devices."""
    found = stacks("shard_optimizer_over_data=true", *words)
    assert sum(2 * each.products for each in found) == pytest.approx(flops, rel=1e-3)
    assert sum(4 * (2 * each.matrix + each.square) for each in found if "data" in each.rows) == gathered
    assert sum(4 * each.reduced for each in found if "data" in each.columns) == reduced


def test_every_expert_is_a_matrix_and_adapters_are_instead_of_what_is_frozen():
    keys = ("num_experts=8", "ici_expert_parallelism=2", "ici_data_parallelism=4")
    experts = [each for each in stacks(*keys) if ("context", "fsdp") in (each.rows, each.columns)]
    of_one = 2 * 256**2 * 512 + 256**3
    assert [each.products for each in experts] == [5 * 4 * 8 / 2 * of_one] * 3
    (a, b) = stacks("lora_rank=2", "lora_targets=down", devices=1)
    assert a.products == 5 * 4 * (2 * 2**2 * 512 + 2**3)
    assert b.products == 5 * 4 * (2 * 2**2 * 256 + 2**3)
