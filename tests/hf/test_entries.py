"""A table laid over a tree: which lines are meant, in which layers, and what is missing."""

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.hf.entries import entries_of, flat
from maxtext_lite.hf.names import Name, Table

SIZES = {"D": 4, "F": 6, "I": 3, "E": 2}
TABLE = Table("m.", (Name(("norm",), "m.norm", "D -> D"),), (
    Name(("mlp/up",), "m.{layer}.up", "F D -> D F"),
    Name(("mlp/up",), "m.{layer}.{expert}.up", "I D -> D I"),
    Name(("scale",), "m.{layer}.scale", "D -> D"),
))  # fmt: skip
SHAPES = {
    "norm": (4,), "dense_layers/scale": (1, 4), "dense_layers/mlp/up": (1, 4, 6),
    "layers/scale": (2, 4), "layers/mlp/up": (2, 2, 4, 3),
}  # fmt: skip


def test_a_line_is_that_of_the_rank_and_layers_count_on_from_the_dense_ones():
    entries = {entry.paths: entry for entry in entries_of(TABLE, SHAPES, SIZES, "there")}
    assert entries.keys() == {(path,) for path in SHAPES}
    dense, experts = entries["dense_layers/mlp/up",], entries["layers/mlp/up",]
    assert [name for name, _, _ in dense.tensor_names()] == ["m.0.up"]
    assert list(experts.tensor_names()) == [
        ("m.1.0.up", 0, 0), ("m.1.1.up", 0, 1), ("m.2.0.up", 1, 0), ("m.2.1.up", 1, 1)
    ]  # fmt: skip


def test_layers_of_a_pipeline_have_two_dims():
    shapes = {"layers/scale": (3, 2, 4), "layers/mlp/up": (3, 2, 4, 6)}
    entries = entries_of(TABLE, shapes, SIZES, "there")
    assert {entry.layer_dims for entry in entries} == {(3, 2)}
    assert [name for name, _, _ in entries[0].tensor_names()] == [f"m.{layer}.up" for layer in range(6)]


def test_shapes_that_differ_and_parameters_without_a_name_are_refused():
    with pytest.raises(UserError) as refusal:
        entries_of(TABLE, SHAPES | {"layers/mlp/up": (2, 2, 4, 5), "layers/sinks": (2, 4)}, SIZES, "there")
    assert refusal.value.problems == (
        "there: parameter layers/mlp/up is (2, 2, 4, 3) there and (2, 2, 4, 5) here.",
        "there: its family has no tensor for parameter layers/sinks.",
    )


def test_a_tree_is_named_by_its_paths():
    assert flat({"a": {"b": np.zeros(1)}, "c": np.zeros(2)}).keys() == {"a/b", "c"}
