"""Parameters against hand counts, the decoder's own and published figures; FLOPs by hand."""

import dataclasses
import math

import jax
import pytest

from maxtext_lite.analysis.optimizer_state import count_factored
from maxtext_lite.analysis.program import bytes_per_device
from maxtext_lite.batching.parameters import (
    active_parameters,
    count_parameters,
    flops_per_example,
)
from maxtext_lite.config import load_config, packaged_directory
from maxtext_lite.models import Decoder
from maxtext_lite.parallel.mesh import partition_spec
from maxtext_lite.parallel.pipeline import Pipeline
from maxtext_lite.training.optimizer import make_optimizer
from maxtext_lite.training.state import StepContext, abstract_state, decoder_shape
from tests.batching.test_memory import NAMES
from tests.meshes import mesh_of
from tests.tables import arithmetic, read_table

TABLE = read_table("batching/parameters.yml")
SMALL = [
    "vocab_size=320",
    "base_emb_dim=4",
    "base_num_query_heads=2",
    "base_num_kv_heads=1",
    "head_dim=6",
    "base_mlp_dim=5",
    "base_num_decoder_layers=2",
]


@pytest.mark.fast
@pytest.mark.parametrize("row", TABLE["counted"], ids=str)
def test_parameters_are_as_counted_by_hand(row):
    count = count_parameters(load_config(None, row["keys"]), **row.get("mesh", {}))
    assert {kind: getattr(count, kind) for kind in row["count"]} == {
        kind: arithmetic(text, NAMES) for kind, text in row["count"].items()
    }


@pytest.mark.fast
@pytest.mark.parametrize("row", TABLE["flops"], ids=str)
def test_flops_are_as_counted_by_hand(row):
    config = load_config(None, [*SMALL, *row["keys"]])
    assert flops_per_example(config, 7) == pytest.approx(
        arithmetic(row["flops"], NAMES), rel=1e-12
    )
    if "active" in row:
        assert active_parameters(config) == arithmetic(row["active"], NAMES)
    if "total" in row:
        assert count_parameters(config).total == arithmetic(row["total"], NAMES)


@pytest.mark.parametrize(
    "keys",
    [
        ["lora_rank=4"],
        [
            "num_experts=128",
            "num_experts_per_tok=2",
            "base_moe_mlp_dim=128",
            "expert_bias=true",
            "shared_experts=1",
        ],
    ],
    ids=str,
)
def test_adafactors_state_on_a_device_is_as_counted(keys):
    """Except for its counts, and the single zero that Optax keeps in place of an unneeded tensor."""
    config = load_config(None, [*keys, "optimizer=adafactor"])
    sizes = {"fsdp": 2, "tensor": 2, "stage": 2}
    mesh = mesh_of(**sizes)
    decoder = Decoder(decoder_shape(config), Pipeline(2, 2, 2))
    optimizer = make_optimizer(config, decoder.trained(decoder.axes))
    state = abstract_state(StepContext(decoder, optimizer, mesh, config)).opt_state
    leaves = [
        leaf for leaf in jax.tree.leaves(state) if leaf.ndim and leaf.shape[-1] > 1
    ]
    assert 4 * count_factored(config, **sizes) == sum(map(bytes_per_device, leaves))


@pytest.mark.parametrize("name", TABLE["decoders"])
def test_the_decoder_has_as_many_parameters_on_a_device_as_are_counted(name):
    config = load_config(
        None, [*TABLE["decoders"][name], "ici_fsdp_parallelism=1", "lora_rank=3"]
    )
    decoder = Decoder(decoder_shape(config))
    sizes = {"fsdp": 2, "tensor": 4, "stage": 2, "expert": 4}

    def counted(part):
        """Elements of a part of the parameters, in all and on a device."""
        leaves = jax.tree.leaves(part(decoder.abstract_params))
        axes = jax.tree.leaves(
            part(decoder.axes), is_leaf=lambda node: isinstance(node, tuple)
        )
        on_one = sum(
            here(leaf, names) for leaf, names in zip(leaves, axes, strict=True)
        )
        return sum(math.prod(leaf.shape) for leaf in leaves), on_one

    def here(leaf, names):
        parts = [
            entry if isinstance(entry, tuple) else (entry,)
            for entry in partition_spec(names)
        ]
        return math.prod(leaf.shape) // math.prod(
            sizes.get(axis, 1) for part in parts for axis in part
        )

    counts = count_parameters(config), count_parameters(config, **sizes)
    assert counted(decoder.frozen) == tuple(count.total for count in counts)
    assert counted(decoder.trained) == tuple(count.adapters for count in counts)
    plain = load_config(None, [*TABLE["decoders"][name], "ici_fsdp_parallelism=1"])
    assert count_parameters(plain) == dataclasses.replace(counts[0], adapters=0)


def test_parameters_of_named_models_are_those_published():
    names = {file.stem for file in packaged_directory("configs").glob("models/*.yml")}
    assert names == set(TABLE["published"])
    configs = {name: load_config(None, [f"model_name={name}"]) for name in names}
    assert {
        name: count_parameters(config).total for name, config in configs.items()
    } == TABLE["published"]
    assert {config.dtype for config in configs.values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22),
        ("deepseek-v2", 21),
        ("deepseek-v3", 37),
        ("olmoe-1b-7b", 1.3),
        ("qwen1.5-moe-a2.7b", 2.7),
        ("qwen2-57b-a14b", 14.2),
        ("ernie4.5-300b-a47b", 47.5),
        ("llama4-scout", 17.2),
        ("llama4-maverick", 17.2),
    ],
)
def test_active_parameters_are_those_published(name, billions):
    assert active_parameters(
        load_config(None, [f"model_name={name}"])
    ) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "gflops", "within"),
    [
        ("deepseek-v2", 155, 0.005),
        ("deepseek-v3", 250, 0.005),
        ("llama3.1-405b", 2448, 0.011),
    ],
)
def test_flops_per_token_are_those_published(name, gflops, within):
    """At 4,096 tokens. Source: Zhao et al. 2025, arXiv:2505.09343, table 2."""
    flops = flops_per_example(load_config(None, [f"model_name={name}"]), 4096) / 4096
    assert flops / 1e9 == pytest.approx(gflops, rel=within)
