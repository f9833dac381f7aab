"""A family of Hugging Face models, and the parts that most families share."""

from dataclasses import dataclass

from maxtext_lite.config.hf.parts import Activation, Bias, Defaulted, Fixed, Only, OrNull, Part, Rename


@dataclass(frozen=True)
class Family:
    """A model_type.

    Attributes:
      architecture: its class in transformers.
      parts: the fields of config.json and their meaning; a later part wins.
    """

    architecture: str
    parts: tuple[Part, ...]


SIZES = Rename(
    vocab_size="vocab_size", hidden_size="base_emb_dim", intermediate_size="base_mlp_dim",
    num_hidden_layers="base_num_decoder_layers",
)  # fmt: skip
RANGE = Defaulted("initializer_range", "initializer_range", 0.02)
BIASES = Bias("attention_bias", "all")
SILU = Activation("hidden_act", "silu")
EXPERTS_PER_TOKEN = Rename(num_experts_per_tok="num_experts_per_tok")
EXPERT_WIDTH = Rename(moe_intermediate_size="base_moe_mlp_dim")
CLIP = OrNull("clip_qkv", "clip_qkv", 0.0)
NORMED_HEADS = Fixed(qk_norm="head")
CAUSAL = Only("is_causal", True)
"""Of every family: with false, transformers lets each token see the later ones too."""


def ties(default: bool) -> Part:
    """Whether the output projection is the embedding table."""
    return Defaulted("tie_word_embeddings", "logits_via_embedding", default)


def family(
    architecture: str, *parts: Part, epsilon: float = 1e-6, tied: bool = False, epsilon_name: str = "rms_norm_eps"
) -> Family:
    """A family with the usual sizes; `epsilon` and `tied` apply if config.json does not state them."""
    of_norms = Defaulted(epsilon_name, "normalization_layer_epsilon", epsilon)
    return Family(architecture, (SIZES, RANGE, of_norms, ties(tied), *parts))
