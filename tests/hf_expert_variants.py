"""More tiny models of transformers, with experts: which layers have them, how they are chosen, and Llama 4."""

from typing import Any

_HEAD = {"head_dim": 8}
_SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
_QWEN = {**_SMALL, "num_experts": 4, "shared_expert_intermediate_size": 20}
_GLM = {**_HEAD, **_SMALL, "n_routed_experts": 4, "n_shared_experts": 2}
_GRANITE = {"num_local_experts": 4, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
            "attention_multiplier": 0.3}  # fmt: skip
_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12}
_LLAMA4 = {**_HEAD, "num_local_experts": 4, "intermediate_size": 12, "intermediate_size_mlp": 40,
           "attention_chunk_size": 6, "floor_scale": 3, "attn_scale": 0.5}  # fmt: skip

EXPERT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe-irregular": ("Qwen2Moe", {**_QWEN, "num_hidden_layers": 3, "mlp_only_layers": [1],
                                         "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 5}),
    "glm4_moe": ("Glm4Moe", {**_GLM, "use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1,
                             "routed_scaling_factor": 1.5}),
    "minimax_m2": ("MiniMaxM2", {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2,
                                 "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                     "partial_rotary_factor": 0.5}}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {**_ERNIE, "num_hidden_layers": 3, "moe_layer_interval": 2}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.4}),
    "granitemoe": ("GraniteMoe", {**_GRANITE, "tie_word_embeddings": True}),
    "deepseek_v3-dense": ("DeepseekV3", {
        **_SMALL, "n_routed_experts": 4, "first_k_dense_replace": 2, "num_key_value_heads": 4, "q_lora_rank": 16,
        "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_group": 2,
        "topk_group": 1}),
    "dots1": ("Dots1", {**_GLM, "num_hidden_layers": 3, "first_k_dense_replace": 1, "norm_topk_prob": True,
                        "routed_scaling_factor": 2.5}),
    "solar_open": ("SolarOpen", {**_GLM, "n_shared_experts": 1, "routed_scaling_factor": 1.5}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {**_HEAD, "num_experts": 4, "moe_topk": 2}),
    "granitemoeshared": ("GraniteMoeShared", {**_GRANITE, "shared_intermediate_size": 20}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "short_mscale": 1.2,
        "long_factor": [2.0, 3.0, 4.0, 5.0], "long_mscale": 1.2, "original_max_position_embeddings": 8,
    }}),
    "llama4-interleaved": ("Llama4Text", {
        **_LLAMA4, "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2,
        "num_experts_per_tok": 1}),
    "llama4-irregular": ("Llama4Text", {**_LLAMA4, "num_hidden_layers": 3, "moe_layers": [0, 2],
                                        "num_experts_per_tok": 2,
                                        "no_rope_layers": [1, 0, 1], "use_qk_norm": False,
                                        "attn_temperature_tuning": False, "attention_bias": True}),
}  # fmt: skip
"""For each name the class of transformers and what is not usual about it, as in `hf_models.MODELS`."""
