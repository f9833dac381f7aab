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


@pytest.mark.parametrize("part", [
    LayerTypes("window", 9), LayerTypes("window", 0), LayerTypes("alternating", 9), LayerTypes("switched", 9),
    LayerTypes("fourth", 9, rotated="alone"), WithoutRotation(),
])  # fmt: skip
def test_only_null_is_no_window(part):
    fields = {"num_hidden_layers": 4, "use_sliding_window": True}
    assert part.read(Fields({**fields, "sliding_window": None}))["sliding_window_size"] == 0
    assert problems(part, **fields, sliding_window=0) == [
        "sliding_window=0 lets no token see even itself. Nearest that works: null, for no window."
    ]


def test_a_window_that_is_switched_off_may_have_any_width():
    for part in (LayerTypes("switched", 9), WithoutRotation()):
        assert problems(part, num_hidden_layers=4, use_sliding_window=False, sliding_window=0) == []


def test_layers_that_are_not_rotated():
    part = WithoutRotation()
    assert part.read(Fields({"num_hidden_layers": 4, "no_rope_layer_interval": 2})) == {
        "layer_pattern": "global,nope", "sliding_window_size": 0
    }  # fmt: skip
    stated = part.read(Fields({"num_hidden_layers": 4, "no_rope_layers": [0, 1, 1, 1]}))
    assert stated == {"layer_pattern": "nope,global,global,global", "sliding_window_size": 0}
    config = load_config(None, ["layer_pattern=global,nope"])
    assert part.write(config)["no_rope_layers"] == [1, 0, 1, 0]
    assert problems(part, num_hidden_layers=4, no_rope_layers=[1])
    window = {"use_sliding_window": True, "sliding_window": 9}
    every_second = {"num_hidden_layers": 4, "no_rope_layer_interval": 2}
    assert part.read(Fields({**every_second, **window}))["layer_pattern"] == "global,local_nope"
    listed = {"layer_types": [LOCAL, LOCAL, GLOBAL, GLOBAL]}
    assert part.read(Fields({**every_second, **window, **listed}))["layer_pattern"] == "local,local_nope,global,nope"
    (refusal,) = problems(part, **every_second, **listed, sliding_window=9, use_sliding_window=False)
    assert refusal.startswith("layer_types=sliding_attention needs a sliding_window that is switched on.")
    every_layer = {"layer_types": [GLOBAL] * 4, "use_sliding_window": False}
    assert part.read(Fields({**every_second, **window, **every_layer})) == {
        "layer_pattern": "global,nope", "sliding_window_size": 0
    }  # fmt: skip


def test_layers_that_are_rotated_where_they_have_a_window():
    part = LayerTypes("fourth", 9, rotated="alone")
    assert part.read(Fields({"num_hidden_layers": 8})) == {
        "layer_pattern": "local,local,local,nope", "sliding_window_size": 9
    }  # fmt: skip
    assert part.read(Fields({"num_hidden_layers": 4, "sliding_window": None}))["layer_pattern"] == "global"
    stated = {"num_hidden_layers": 2, "layer_types": [GLOBAL, GLOBAL]}
    assert part.read(Fields(stated)) == {"layer_pattern": "nope", "sliding_window_size": 0}
    for keys in (
        ["layer_pattern=nope"],
        ["layer_pattern=global"],
        ["layer_pattern=local,nope", "sliding_window_size=9"],
    ):
        config = load_config(None, keys)
        again = part.read(Fields({"num_hidden_layers": 4, **part.write(config)}))
        assert again == {"layer_pattern": config.layer_pattern, "sliding_window_size": config.sliding_window_size}


def test_layers_that_are_never_rotated_without_a_window():
    part = LayerTypes("fourth", 9, rotated="never")
    (refusal,) = problems(part, num_hidden_layers=4, sliding_window=None)
    assert refusal.startswith("sliding_window=null is a model that transformers does not run. State one even if")
    for pattern, again in (("local,local,local,nope", "local,local,local,nope"), ("nope", "nope"), ("global", "nope")):
        window = 9 * pattern.startswith("local")
        config = load_config(None, [f"layer_pattern={pattern}", f"sliding_window_size={window}"])
        keys = part.read(Fields({"num_hidden_layers": 4, **part.write(config)}))
        assert keys == {"layer_pattern": again, "sliding_window_size": window}


@pytest.mark.parametrize(
    ("fields", "factor", "original"),
    [
        ({"max_position_embeddings": 64, "original_max_position_embeddings": 16}, 4.0, 16),
        ({"max_position_embeddings": 64}, 64 / 20, 20),  # what the family takes where the field is not there
        ({"max_position_embeddings": 8}, 1.0, 20),
    ],
)
def test_longrope_and_its_older_names(fields, factor, original):
    part = RopeFields(1e4, partial=1.0, original=20, types={"su": "longrope"})
    lists = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    keys = part.read(Fields({**fields, "rope_scaling": {"type": "su", **lists}}))
    assert keys["rope_scaling"] == {
        "rope_type": "longrope", "factor": factor, "original_max_position_embeddings": original, **lists
    }  # fmt: skip
    written = part.write(load_config(None, ["head_dim=4", f"rope_scaling={keys['rope_scaling']}".replace("'", "")]))
    assert written["original_max_position_embeddings"] == original
    assert part.read(Fields({"max_position_embeddings": 7, **written})) == keys


def test_an_alpha_of_hunyuan_is_a_fixed_base():
    part = RopeFields(1e4, alpha=True)
    keys = part.read(Fields({"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32}}))
    assert keys["rope_scaling"] == {"rope_type": "ntk", "factor": 50.0}
    assert part.read(Fields(part.write(load_config(None, ["rope_scaling={rope_type: ntk, factor: 50.0}"])))) == keys


def test_an_alpha_of_another_family_is_refused():
    """transformers reads it in Hunyuan alone; elsewhere the rotation follows the length."""
    fields = Fields({"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}, "max_position_embeddings": 64})
    RopeFields(1e4).read(fields)
    (problem,) = fields.problems
    assert problem.startswith("rope_scaling=")
    assert problem.endswith("has alpha, which is not known of rope_type dynamic.")


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


def test_longrope_of_global_layers_is_written_where_it_is_read():
    lists = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    scaling = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 8, **lists}
    written = RopeByLayerType().write(load_config(None, ["head_dim=4", f"rope_scaling={scaling}".replace("'", "")]))
    assert read(RopeByLayerType(), **written)["rope_scaling"] == scaling


def test_the_scaling_of_local_layers_cannot_be_said():
    part = RopeByLayerType()
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0}
    assert problems(part, rope_parameters={"full_attention": scaled}) == []
    assert problems(part, rope_parameters={"full_attention": {}, "sliding_attention": scaled})
    assert problems(part, rope_parameters={"rope_theta": 1.0})
