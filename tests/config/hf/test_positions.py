"""Rotation, windows and layers without rotation by hand, each in both directions."""

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.config.hf.fields import Fields
from maxtext_lite.config.hf.positions import LayerTypes, RopeByLayerType, RopeFields, WithoutRotation

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def read(part, **fields):
    found = Fields(fields)
    keys = part.read(found)
    assert found.problems == []
    assert found.unknown("x") == []
    return keys


def problems(part, **fields):
    found = Fields(fields)
    part.read(found)
    return found.problems


@pytest.mark.parametrize(("style", "fields", "pattern", "window"), [
    ("window", {"sliding_window": 5}, "local", 5),
    ("window", {"sliding_window": None}, "global", 0),
    ("window", {}, "local", 9),
    ("switched", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
     "global,global,local,local", 5),
    ("switched", {"use_sliding_window": False, "sliding_window": 5}, "global", 0),
    ("switched", {"sliding_window": 5, "use_sliding_window": True, "layer_types": [LOCAL, GLOBAL] * 2},
     "local,global", 5),
    ("switched window", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, "local", 5),
    ("alternating", {}, "local,global", 9),
    ("sixth", {"sliding_window_pattern": 3}, "local,local,global", 9),
    ("sixth", {"layer_types": [LOCAL] * 4}, "local", 9),
])  # fmt: skip
def test_layers_with_a_window(style, fields, pattern, window):
    part = LayerTypes(style, 9)
    found = Fields({"num_hidden_layers": 4, **fields})
    assert part.read(found) == {"layer_pattern": pattern, "sliding_window_size": window}
    config = load_config(None, [f"layer_pattern={pattern}", f"sliding_window_size={window}"])
    again = part.read(Fields({"num_hidden_layers": 4, **part.write(config)}))
    assert again == {"layer_pattern": pattern, "sliding_window_size": window}


def test_layers_that_are_not_rotated():
    part = WithoutRotation()
    assert part.read(Fields({"num_hidden_layers": 4, "no_rope_layer_interval": 2})) == {
        "layer_pattern": "global,nope"
    }  # fmt: skip
    stated = part.read(Fields({"num_hidden_layers": 4, "no_rope_layers": [0, 1, 1, 1]}))
    assert stated == {"layer_pattern": "nope,global,global,global"}
    config = load_config(None, ["layer_pattern=global,nope"])
    assert part.write(config)["no_rope_layers"] == [1, 0, 1, 0]
    assert problems(part, num_hidden_layers=4, no_rope_layers=[1])


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, (10000.0, {})),
    ({"rope_theta": 5e5}, (5e5, {})),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, (5e5, {})),
    ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
     (5e5, {"rope_type": "linear", "factor": 2.0})),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64},
     (10000.0, {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64})),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 64,
      "original_max_position_embeddings": 32},
     (10000.0, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32})),
])  # fmt: skip
def test_rotary_positions(fields, expected):
    keys = RopeFields(10000.0).read(Fields(fields))
    assert (keys["rope_max_timescale"], keys["rope_scaling"], keys["partial_rotary_factor"]) == (*expected, 1.0)


def test_a_share_of_the_head_is_rotated_where_the_family_does_so():
    assert read(RopeFields(1e4, partial=True), partial_rotary_factor=0.75)["partial_rotary_factor"] == 0.75
    inside = {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_type": "default"}}
    assert read(RopeFields(1e4, partial=True), **inside)["partial_rotary_factor"] == 0.5
    assert problems(RopeFields(1e4), partial_rotary_factor=0.75)
    written = RopeFields(1e4, partial=True).write(load_config(None, ["partial_rotary_factor=0.5"]))
    assert written["rope_parameters"]["partial_rotary_factor"] == 0.5


def test_the_scaling_of_local_layers_cannot_be_said():
    part = RopeByLayerType()
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0}
    assert problems(part, rope_parameters={"full_attention": scaled}) == []
    assert problems(part, rope_parameters={"full_attention": {}, "sliding_attention": scaled})
    assert problems(part, rope_parameters={"rope_theta": 1.0})
