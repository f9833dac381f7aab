"""Every line of every table in both directions."""

import dataclasses

import numpy as np
import pytest

from maxtext_lite.config import Mla
from maxtext_lite.config.hf.families import FAMILIES
from maxtext_lite.config.weights import ExpertSizes, ModelShape, stacks_of
from maxtext_lite.hf.tables import TABLES

PLAIN = ModelShape(
    vocab_size=11, emb_dim=6, num_query_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=5, num_layers=2, num_positions=7,
    norm="layer_norm", norm_placement="both", mlp_bias=True, attention_bias="all", qk_norm="head", sinks=True,
)  # fmt: skip
EXPERTS = ExpertSizes(3, 2, 4, shared_dim=8, biased=True, with_bias=True)
LATENT = dataclasses.replace(PLAIN, latent=Mla(5, 3, 2, 4, 3), experts=EXPERTS, num_layers=3, num_dense_layers=1)
MODELS = (PLAIN, dataclasses.replace(PLAIN, qk_norm="all_heads"), dataclasses.replace(PLAIN, experts=EXPERTS))
ONE_BY_ONE = (dataclasses.replace(PLAIN, num_kv_heads=4),)
OTHERS = {
    "qwen2_moe": (PLAIN, dataclasses.replace(PLAIN, experts=dataclasses.replace(EXPERTS, shared_gate=True))),
    "phimoe": (dataclasses.replace(PLAIN, experts=EXPERTS, logits_bias=True),),
    "gpt_neox": ONE_BY_ONE, "phi": (dataclasses.replace(PLAIN, logits_bias=True),),
    "apertus": (dataclasses.replace(PLAIN, xielu=True),),
    **dict.fromkeys(("cohere", "stablelm"), (dataclasses.replace(PLAIN, qk_norm="each_head", rotary_dim=4),)),
}  # fmt: skip
LATENT_MODELS = (LATENT, dataclasses.replace(LATENT, latent=Mla(0, 3, 2, 4, 3)))
SIZES = LATENT.sizes


def test_every_family_has_a_table():
    assert TABLES.keys() == FAMILIES.keys()


def laid(line, in_layers, models):
    """The line in each model that has its parameters, with their weights."""
    for model in models:
        for stack, (_, weights) in stacks_of(model).items():
            if bool(stack) == in_layers and weights.keys() >= {*line.ours}:
                held = [weights[path] for path in line.ours]
                if (name := line.laid(held)) is not None:
                    yield name, held, model.sizes


@pytest.mark.parametrize("kind", TABLES)
def test_what_is_imported_is_exported(kind):
    table, models = TABLES[kind], LATENT_MODELS if kind.startswith("deepseek") else OTHERS.get(kind, MODELS)
    for line in (*table.root, *table.layer):
        found = list(laid(line, line in table.layer, models))
        assert found, line
        for name, weights, sizes in found:
            tensor = np.arange(np.prod(name.their_shape(sizes))).reshape(name.their_shape(sizes))
            ours = [name.to_ours(tensor, part, sizes) for part in range(len(name.ours))]
            for part, (x, weight) in enumerate(zip(ours, weights, strict=True)):
                assert x.shape == name.our_shape(part, sizes) == weight.sizes[name.per_expert :], name
            assert sum(x.size for x in ours) == tensor.size, name
            np.testing.assert_array_equal(name.to_theirs(ours, sizes), tensor)
