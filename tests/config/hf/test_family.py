"""What most families have."""

from maxtext_lite.config.hf.family import family
from maxtext_lite.config.hf.fields import Fields


def test_a_family_has_the_usual_sizes_and_its_own_defaults():
    sizes = {"vocab_size": 7, "hidden_size": 6, "intermediate_size": 5, "num_hidden_layers": 4}
    fields, keys = Fields(sizes), {}
    for part in family("XForCausalLM", epsilon=1e-3, tied=True).parts:
        keys |= part.read(fields)
    assert fields.problems == fields.unknown("x") == []
    assert keys == {
        "vocab_size": 7, "base_emb_dim": 6, "base_mlp_dim": 5, "base_num_decoder_layers": 4, "initializer_range": 0.02,
        "normalization_layer_epsilon": 1e-3, "logits_via_embedding": True,
    }  # fmt: skip
