"""The work of Muon's update is that of the program which libtpu 0.0.50.1 compiled for it: what a step of v5e:2x4 with
optimizer=muon has more than one with adamw."""

import pytest

from maxtext_lite.analysis.step_time import orthogonalized
from maxtext_lite.batching.topology import MeshSizes, resolve_mesh
from maxtext_lite.config import load_config
from tests.tables import read_table

MODEL = [
    "base_emb_dim=256",
    "base_mlp_dim=512",
    "base_num_decoder_layers=4",
    "base_num_query_heads=4",
    "head_dim=32",
    "base_num_kv_heads=2",
    "vocab_size=512",
    "optimizer=muon",
    "ici_fsdp_parallelism=1",
]
ROWS = read_table("batching/muon.yml")
EMBED = ("expert", "context", "fsdp")


def stacks(*words, devices=8):
    config = load_config(None, [*MODEL, *words])
    sizes = resolve_mesh(config, devices)
    assert isinstance(sizes, MeshSizes)
    return list(orthogonalized(config, sizes.total))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["keys"]))
def test_work_and_bytes_are_those_that_were_compiled(row):
    found = stacks(*row["keys"])
    assert sum(2 * each.products for each in found) == pytest.approx(
        row["flops"], rel=row.get("within", 0)
    )

    def over(axes):
        return "data" in axes if row.get("over") == "data" else axes == EMBED

    gathered = sum(
        4 * (2 * each.matrix + each.square) for each in found if over(each.rows)
    )
    reduced = sum(4 * each.reduced for each in found if over(each.columns))
    assert gathered == row.get("gathered", gathered)
    assert reduced == row.get("reduced", reduced)


def test_a_tpu_gathers_once_in_bfloat16():
    found = stacks("ici_fsdp_parallelism=8")
    assert (
        sum(2 * (each.matrix + each.square) for each in found if each.rows == EMBED)
        == 23_592_960
    )


def test_every_expert_is_a_matrix_and_adapters_are_instead_of_what_is_frozen():
    keys = ("num_experts=8", "ici_expert_parallelism=2", "ici_data_parallelism=4")
    experts = [
        each
        for each in stacks(*keys)
        if ("context", "fsdp") in (each.rows, each.columns)
    ]
    per_tensor_axes = 2 * 256**2 * 512 + 256**3
    assert [each.products for each in experts] == [5 * 4 * 8 / 2 * per_tensor_axes] * 3
    (a, b) = stacks("lora_rank=2", "lora_targets=down", devices=1)
    assert a.products == 5 * 4 * (2 * 2**2 * 512 + 2**3)
    assert b.products == 5 * 4 * (2 * 2**2 * 256 + 2**3)
