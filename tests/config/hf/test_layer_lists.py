"""Which layers have experts, and which keep to chunks, in the words of each family and back."""

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.config.hf.fields import Fields
from maxtext_lite.config.hf.layer_lists import (
    ChunkedLayers,
    FirstDense,
    InterleavedStep,
    LayerInterval,
    SparseStep,
    layers_with_experts,
)
from tests.config.hf.test_parts import problems


def read(part, **fields):
    """The keys; everything but the number of layers is read, and right."""
    found = Fields(fields)
    keys = part.read(found)
    assert found.problems == []
    assert len(found.unknown("x")) == 1
    return keys


ERNIE = {"start": "moe_layer_start_index", "end": "moe_layer_end_index", "every": "moe_layer_interval"}


def has_experts(part, layers, **fields):
    """For each layer whether it has experts, by the keys that the fields make, and by those they make written again."""
    keys = read(part, num_hidden_layers=layers, **fields)
    stated = [f"{key}={value}" for key, value in keys.items()]
    config = load_config(None, ["num_experts=4", f"base_num_decoder_layers={layers}", *stated])
    found = layers_with_experts(config)
    assert read(part, num_hidden_layers=layers, **part.write(config)) == keys
    return "".join("dm"[has] for has in found), keys["first_num_dense_layers"], keys["mlp_pattern"]


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, ("mmmmm", 0, "moe")),
    ({"decoder_sparse_step": 2}, ("dmdmd", 0, "dense,moe")),
    ({"decoder_sparse_step": 3}, ("ddmdd", 0, "dense,dense,moe")),
    ({"mlp_only_layers": [0, 1]}, ("ddmmm", 2, "moe")),
    ({"mlp_only_layers": [0, 3]}, ("dmmdm", 0, "dense,moe,moe")),
    ({"mlp_only_layers": [1, 9], "decoder_sparse_step": 2}, ("dddmd", 0, "dense,dense,dense,moe")),
])  # fmt: skip
def test_steps_with_exceptions(fields, expected):
    assert has_experts(SparseStep(), 5, **fields) == expected


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, ("dmmmm", 1, "moe")),
    ({"start": 0}, ("mmmmm", 0, "moe")),
    ({"every": 2}, ("dmdmd", 0, "dense,moe")),
    ({"start": 2, "end": 3}, ("ddmmd", 0, "dense,dense,moe,moe")),
    ({"start": 1, "end": 3, "every": 3}, ("ddmdd", 0, "dense,dense,moe")),
])  # fmt: skip
def test_an_interval_of_layers(fields, expected):
    assert has_experts(LayerInterval(), 5, **{ERNIE[name]: value for name, value in fields.items()}) == expected


def test_what_an_interval_cannot_say_is_not_written():
    config = load_config(None, ["num_experts=4", "base_num_decoder_layers=4", "mlp_pattern=moe,dense,moe,moe"])
    written = LayerInterval().write(config)
    assert read(LayerInterval(), num_hidden_layers=4, **written)["mlp_pattern"] != config.mlp_pattern


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, ("mmmm", 0, "moe")),
    ({"interleave_moe_layer_step": 2}, ("dmdm", 0, "dense,moe")),
    ({"moe_layers": [0, 3], "interleave_moe_layer_step": 2}, ("mddm", 0, "moe,dense,dense")),
])  # fmt: skip
def test_interleaved_layers(fields, expected):
    assert has_experts(InterleavedStep(), 4, **fields) == expected


@pytest.mark.parametrize(("part", "fields"), [
    (SparseStep(), {"decoder_sparse_step": 5}),
    (SparseStep(), {"mlp_only_layers": [0, 1, 2, 3]}),
    (InterleavedStep(), {"moe_layers": []}),
    (LayerInterval(), {"moe_layer_start_index": 4}),
    (FirstDense(3), {"first_k_dense_replace": 4}),
])  # fmt: skip
def test_all_layers_may_be_dense(part, fields):
    keys = read(part, num_hidden_layers=4, **fields)
    assert keys["first_num_dense_layers"] >= 4
    written = part.write(load_config(None, ["num_experts=1", "base_num_decoder_layers=4"]))
    assert read(part, num_hidden_layers=4, **written) == keys


@pytest.mark.parametrize(("part", "fields", "message"), [
    (SparseStep(), {"mlp_only_layers": ["1"]}, "mlp_only_layers=1 is not the number of a layer."),
    (SparseStep(), {"decoder_sparse_step": 0}, "decoder_sparse_step=0 is not an integer of at least 1."),
    (ChunkedLayers(), {"no_rope_layers": [1, 2, 1, 0]}, "no_rope_layers=[1, 2, 1, 0] is not a list of 1 or 0"),
    (ChunkedLayers(), {"layer_types": ["chunked_attention"] * 4}, "layer 3 has chunks, but no rotation."),
    (ChunkedLayers(), {"layer_types": ["sliding_attention"] * 4}, "layer_types=sliding_attention cannot be"),
    (ChunkedLayers(), {"attention_chunk_size": None}, "attention_chunk_size is missing."),
])  # fmt: skip
def test_what_is_wrong_is_refused_by_name(part, fields, message):
    assert any(message in problem for problem in problems(part, num_hidden_layers=4, **fields))


@pytest.mark.parametrize(("fields", "pattern", "tuned"), [
    ({}, "chunked,chunked,chunked,nope", True),
    ({"no_rope_layer_interval": 2, "attn_temperature_tuning": False}, "chunked,nope", False),
    ({"no_rope_layers": [0, 1, 1, 1], "attn_temperature_tuning": 4}, "nope,chunked,chunked,chunked", True),
    ({"no_rope_layers": [1] * 4}, "chunked", False),
    ({"layer_types": ["full_attention"] * 4}, "global,global,global,nope", True),
])  # fmt: skip
def test_layers_that_keep_to_chunks(fields, pattern, tuned):
    part = ChunkedLayers()
    keys = read(part, num_hidden_layers=4, attention_chunk_size=6, floor_scale=3, attn_scale=0.5, **fields)
    temperature = {"scale": 0.5, "floor_scale": 3, "offset": 1, "layers": "nope"} if tuned else {}
    chunk = 6 if "chunked" in pattern else 0
    assert keys == {"layer_pattern": pattern, "chunk_attn_window_size": chunk, "position_temperature": temperature}
    stated = [f"layer_pattern={pattern}", f"chunk_attn_window_size={chunk}", "base_num_decoder_layers=4"]
    if tuned:
        stated.append("position_temperature={scale: 0.5, floor_scale: 3, offset: 1, layers: nope}")
    assert read(part, num_hidden_layers=4, **part.write(load_config(None, stated))) == keys
