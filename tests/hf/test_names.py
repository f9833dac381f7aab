"""Which lines of a table are meant and in which layers; that these lie right, test_importing.py and
invariance/test_families.py show with a model of every family."""

import dataclasses

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.hf.families import FAMILIES
from maxtext_lite.config.weights import ExpertSizes, ModelShape
from maxtext_lite.hf.entries import entries_of, flat
from maxtext_lite.hf.names import Name, Table
from maxtext_lite.hf.tables import TABLES
from tests.hf_models import MODELS, transformers
from tests.hf_variants import VARIANTS


def test_every_family_has_a_table_and_a_model_that_is_compared_with_transformers():
    kinds = {
        getattr(transformers, f"{kind}Config").model_type
        for kind, _ in (MODELS | VARIANTS).values()
    }
    assert kinds == TABLES.keys() == FAMILIES.keys()


MODEL = ModelShape(
    vocab_size=5,
    emb_dim=4,
    num_query_heads=2,
    num_kv_heads=2,
    head_dim=2,
    mlp_dim=6,
    num_layers=3,
    experts=ExpertSizes(2, 1, 3),
    num_dense_layers=1,
)
TABLE = Table(
    "m.",
    (Name(("final_norm/scale",), "m.norm"),),
    (
        Name(("mlp/up",), "m.{layer}.up"),
        Name(("mlp/up",), "m.{layer}.{expert}.up"),
        Name(("mlp_norm/scale",), "m.{layer}.scale"),
    ),
)
SHAPES = {
    "final_norm/scale": (4,),
    "dense_layers/mlp_norm/scale": (1, 4),
    "dense_layers/mlp/up": (1, 4, 6),
    "layers/mlp_norm/scale": (2, 4),
    "layers/mlp/up": (2, 2, 4, 3),
}


@pytest.mark.fast
def test_a_line_is_that_of_the_layers_kind_and_layers_count_on_from_the_dense_ones():
    entries = {
        entry.paths: entry for entry in entries_of(TABLE, SHAPES, MODEL, "there")
    }
    assert entries.keys() == {(path,) for path in SHAPES}
    dense, experts = entries["dense_layers/mlp/up",], entries["layers/mlp/up",]
    assert [name for name, _, _ in dense.tensor_names()] == ["m.0.up"]
    assert list(experts.tensor_names()) == [
        ("m.1.0.up", 0, 0),
        ("m.1.1.up", 0, 1),
        ("m.2.0.up", 1, 0),
        ("m.2.1.up", 1, 1),
    ]
    model = dataclasses.replace(MODEL, experts=None, num_layers=6, num_dense_layers=0)
    of_stages = {"layers/mlp_norm/scale": (3, 2, 4), "layers/mlp/up": (3, 2, 4, 6)}
    entries = entries_of(TABLE, of_stages, model, "there")
    assert {entry.layer_dims for entry in entries} == {(3, 2)}
    assert [name for name, _, _ in entries[0].tensor_names()] == [
        f"m.{layer}.up" for layer in range(6)
    ]


def test_shapes_that_differ_and_parameters_without_a_name_are_refused():
    shapes = SHAPES | {"layers/mlp/up": (2, 2, 4, 5), "layers/attention/sinks": (2, 4)}
    with pytest.raises(UserError) as refusal:
        entries_of(TABLE, shapes, MODEL, "there")
    sizes, sinks = refusal.value.problems
    assert "layers/mlp/up is (2, 2, 4, 3) there and (2, 2, 4, 5) here" in sizes
    assert "layers/attention/sinks" in sinks
    assert flat({"a": {"b": np.zeros(1)}, "c": np.zeros(2)}).keys() == {"a/b", "c"}
