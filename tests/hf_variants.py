"""More tiny models of transformers, of families that need one term of the decoder each."""

from typing import Any

from tests.hf_expert_variants import EXPERT_VARIANTS

_HEAD = {"head_dim": 8}
_LISTED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


def _rope(**entries: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **entries}}


def _long(pairs: int) -> dict[str, Any]:
    """Factors that differ, of documents up to 10 tokens and of longer ones."""
    return _rope(
        rope_type="longrope", original_max_position_embeddings=10, short_factor=[1 + 0.1 * i for i in range(pairs)],
        long_factor=[2 + 0.5 * i for i in range(pairs)],
    )  # fmt: skip


_YARN = _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=4)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", _HEAD),
    "ministral": ("Ministral", {**_HEAD, **_LISTED}),
    "ministral3": ("Ministral3", {**_HEAD, "rope_parameters": {
        **_YARN["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}}),
    "olmo-clipped": ("Olmo", {"clip_qkv": 0.4}),
    "olmo3": ("Olmo3", {**_LISTED, "rope_parameters": {
        "full_attention": {**_YARN["rope_parameters"], "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                            "logits_scaling": 3.0, "attention_bias": True, "mlp_bias": True}),
    "glm": ("Glm", {**_HEAD, **_rope(partial_rotary_factor=0.5)}),
    "glm4-unbiased": ("Glm4", {**_HEAD, **_rope(partial_rotary_factor=0.75), "attention_bias": False}),
    "cohere-normed": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.3, "attention_bias": True}),
    "cohere2": ("Cohere2", {**_LISTED, "head_dim": 4, "logit_scale": 0.0625}),
    "phi": ("Phi", {"qk_layernorm": True, **_rope(partial_rotary_factor=0.5)}),
    "phi3-longrope": ("Phi3", {"original_max_position_embeddings": 10, "max_position_embeddings": 64, **_long(4)}),
    "llama-longrope": ("Llama", _long(4)),
    "starcoder2": ("Starcoder2", {"sliding_window": 5}),
    "stablelm-parallel": ("StableLm", {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True,
                                       **_rope(partial_rotary_factor=0.25)}),
    "gpt_neox": ("GPTNeoX", _rope(partial_rotary_factor=0.25)),
    "nemotron": ("Nemotron", _rope(partial_rotary_factor=0.5)),
    "ernie4_5": ("Ernie4_5", {**_HEAD, "use_bias": True}),
    "seed_oss": ("SeedOss", {**_HEAD, "attention_out_bias": True}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {**_HEAD, **_rope(rope_type="dynamic", factor=1.0, alpha=50.0)}),
    "exaone4": ("Exaone4", _LISTED),
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", _YARN),
    "helium": ("Helium", _HEAD),
    "smollm3-sliding": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [0, 1]}),
    **EXPERT_VARIANTS,
    "gpt2-inverse": ("GPT2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}),
}  # fmt: skip
"""For each name the class of transformers and what is not usual about it, as in `hf_models.MODELS`."""
