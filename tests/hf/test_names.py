"""How tensors lie and which lines of a table are meant, by hand; and every line of every table in both directions."""

import dataclasses

import numpy as np
import pytest

from maxtext_lite.config import Mla, UserError
from maxtext_lite.config.hf.families import FAMILIES
from maxtext_lite.config.weights import ExpertSizes, ModelShape, stacks_of
from maxtext_lite.hf.entries import entries_of, flat
from maxtext_lite.hf.names import Name, Table
from maxtext_lite.hf.tables import TABLES

PLAIN = ModelShape(
    vocab_size=11, emb_dim=6, num_query_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=5, num_layers=2, num_positions=7,
    norm="layer_norm", norm_placement="both", mlp_bias=True, attention_bias="all", qk_norm="head", sinks=True,
)  # fmt: skip
EXPERTS = ExpertSizes(3, 2, 4, shared_dim=8, biased=True, with_bias=True)
LATENT = dataclasses.replace(PLAIN, latent=Mla(5, 3, 2, 4, 3), experts=EXPERTS, num_layers=3, num_dense_layers=1)
MODELS = (PLAIN, dataclasses.replace(PLAIN, qk_norm="all_heads"), dataclasses.replace(PLAIN, experts=EXPERTS))
OTHERS = {
    "qwen2_moe": (PLAIN, dataclasses.replace(PLAIN, experts=dataclasses.replace(EXPERTS, shared_gate=True))),
    "phimoe": (dataclasses.replace(PLAIN, experts=EXPERTS, logits_bias=True),),
    "gpt_neox": (dataclasses.replace(PLAIN, num_kv_heads=4),),
    "phi": (dataclasses.replace(PLAIN, logits_bias=True),),
    "apertus": (dataclasses.replace(PLAIN, xielu=True),),
    **dict.fromkeys(("cohere", "stablelm"), (dataclasses.replace(PLAIN, qk_norm="each_head", rotary_dim=4),)),
}  # fmt: skip
LATENT_MODELS = (LATENT, dataclasses.replace(LATENT, latent=Mla(0, 3, 2, 4, 3)))
SIZES = LATENT.sizes
QUERY = PLAIN.weight("D N H", "embed heads head_dim")
KEY = PLAIN.weight("D K H", "embed kv_heads head_dim")
EXPERT = LATENT.weight("E D I", "experts expert_embed mlp")


@pytest.mark.parametrize(("line", "weights", "shape", "part", "ours", "theirs"), [
    # A linear layer is transposed and cut into heads; a pattern says what is otherwise.
    (Name(("q",), "q"), [QUERY], (24, 6), 0, (2, 3, 1), (3 * 6 + 1, 2)),
    (Name(("q",), "q", "D (N H)"), [QUERY], (6, 24), 0, (2, 3, 1), (2, 3 * 6 + 1)),
    # The output of heads is transposed; tables and vectors are not.
    (Name(("o",), "o"), [PLAIN.weight("N H D", "heads head_dim embed")], (6, 24), 0, (3, 1, 2), (2, 3 * 6 + 1)),
    (Name(("x",), "x"), [PLAIN.weight("V D", "vocab embed")], (11, 6), 0, (7, 2), (7, 2)),
    (Name(("x",), "x"), [PLAIN.weight("N H", "heads head_dim", "zeros")], (24,), 0, (2, 1), (2 * 6 + 1,)),
    # Parts stand one after another, or take turns.
    (Name(("q", "k", "v"), "qkv", parts=("N", "K", "K")), [QUERY, KEY, KEY], (48, 6), 0, (5, 3, 2), (3 * 6 + 2, 5)),
    (Name(("q", "k", "v"), "qkv", parts=("N", "K", "K")), [QUERY, KEY, KEY], (48, 6), 1, (5, 1, 2), (5 * 6 + 2, 5)),
    (Name(("q", "k", "v"), "qkv", parts=("N", "K", "K")), [QUERY, KEY, KEY], (48, 6), 2, (5, 1, 2), (7 * 6 + 2, 5)),
    (Name(("g", "u"), "gu", "E D (I Z)", ("1", "1")), [EXPERT, EXPERT], (3, 6, 8), 1, (2, 4, 3), (2, 4, 7)),
    # Of experts with a tensor each, one of them; of experts that share one, all.
    (Name(("up",), "{expert}.up"), [EXPERT], (4, 6), 0, (5, 3), (3, 5)),
    (Name(("up",), "up", "E D I"), [EXPERT], (3, 6, 4), 0, (2, 5, 3), (2, 5, 3)),
    # Pairs become halves behind the dims that are not rotated.
    (Name(("kv",), "kv", pairs="C"), [LATENT.weight("D C", "embed latent")], (7, 6), 0, (0, 4), (5, 0)),
])  # fmt: skip
def test_a_number_lies_where_the_line_says(line, weights, shape, part, ours, theirs):
    name = line.laid(weights)
    assert name.their_shape(SIZES) == shape
    tensor = np.arange(np.prod(shape)).reshape(shape)
    assert name.to_ours(tensor, part, SIZES)[ours] == tensor[theirs]


def test_a_line_is_about_experts_or_it_is_not():
    assert Name(("up",), "up").laid([EXPERT]) is None
    assert Name(("up",), "{expert}.up").laid([QUERY]) is None


def laid(line, in_layers, models):
    """The line in each model that has its parameters, with their weights."""
    for model in models:
        for stack, (_, weights) in stacks_of(model).items():
            if bool(stack) == in_layers and weights.keys() >= {*line.ours}:
                held = [weights[path] for path in line.ours]
                if (name := line.laid(held)) is not None:
                    yield name, held, model.sizes


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_imported_is_exported(kind):
    table, models = TABLES[kind], LATENT_MODELS if kind.startswith("deepseek") else OTHERS.get(kind, MODELS)
    for line in (*table.root, *table.layer):
        found = list(laid(line, line in table.layer, models))
        assert found, line
        for name, weights, sizes in found:
            tensor = np.arange(np.prod(name.their_shape(sizes))).reshape(name.their_shape(sizes))
            ours = [name.to_ours(tensor, part, sizes) for part in range(len(name.ours))]
            for x, weight in zip(ours, weights, strict=True):
                assert x.shape == weight.sizes[name.per_expert :], name
            assert sum(x.size for x in ours) == tensor.size, name
            np.testing.assert_array_equal(name.to_theirs(ours, sizes), tensor)


MODEL = ModelShape(
    vocab_size=5, emb_dim=4, num_query_heads=2, num_kv_heads=2, head_dim=2, mlp_dim=6, num_layers=3,
    experts=ExpertSizes(2, 1, 3), num_dense_layers=1,
)  # fmt: skip
TABLE = Table("m.", (Name(("final_norm/scale",), "m.norm"),), (
    Name(("mlp/up",), "m.{layer}.up"),
    Name(("mlp/up",), "m.{layer}.{expert}.up"),
    Name(("mlp_norm/scale",), "m.{layer}.scale"),
))  # fmt: skip
SHAPES = {
    "final_norm/scale": (4,), "dense_layers/mlp_norm/scale": (1, 4), "dense_layers/mlp/up": (1, 4, 6),
    "layers/mlp_norm/scale": (2, 4), "layers/mlp/up": (2, 2, 4, 3),
}  # fmt: skip


def test_a_line_is_that_of_the_layers_kind_and_layers_count_on_from_the_dense_ones():
    entries = {entry.paths: entry for entry in entries_of(TABLE, SHAPES, MODEL, "there")}
    assert entries.keys() == {(path,) for path in SHAPES}
    dense, experts = entries["dense_layers/mlp/up",], entries["layers/mlp/up",]
    assert [name for name, _, _ in dense.tensor_names()] == ["m.0.up"]
    assert list(experts.tensor_names()) == [
        ("m.1.0.up", 0, 0), ("m.1.1.up", 0, 1), ("m.2.0.up", 1, 0), ("m.2.1.up", 1, 1)
    ]  # fmt: skip
    model = dataclasses.replace(MODEL, experts=None, num_layers=6, num_dense_layers=0)
    of_stages = {"layers/mlp_norm/scale": (3, 2, 4), "layers/mlp/up": (3, 2, 4, 6)}
    entries = entries_of(TABLE, of_stages, model, "there")
    assert {entry.layer_dims for entry in entries} == {(3, 2)}
    assert [name for name, _, _ in entries[0].tensor_names()] == [f"m.{layer}.up" for layer in range(6)]


def test_shapes_that_differ_and_parameters_without_a_name_are_refused():
    shapes = SHAPES | {"layers/mlp/up": (2, 2, 4, 5), "layers/attention/sinks": (2, 4)}
    with pytest.raises(UserError) as refusal:
        entries_of(TABLE, shapes, MODEL, "there")
    sizes, sinks = refusal.value.problems
    assert "layers/mlp/up is (2, 2, 4, 3) there and (2, 2, 4, 5) here" in sizes
    assert "layers/attention/sinks" in sinks
    assert flat({"a": {"b": np.zeros(1)}, "c": np.zeros(2)}).keys() == {"a/b", "c"}
