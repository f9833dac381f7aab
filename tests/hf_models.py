"""Tiny random models of transformers, saved as its version 5 saves them, or with the config.json that hubs have."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tests.hf_variants import TINY, VARIANTS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = TINY["models"]
"""For each name the class of transformers, without Config or ForCausalLM, and what is not usual about it."""


@functools.cache
def model(name: str) -> Any:
    """A model all of whose parameters are random, biases and norms included."""
    kind, more = (MODELS | VARIANTS)[name]
    config_class = getattr(transformers, f"{kind}Config")
    sizes = (
        {
            "vocab_size": 96,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if kind == "GPT2"
        else _SIZES
    )
    sizes = sizes | {"num_hidden_layers": 2} if name in VARIANTS else sizes
    config = config_class(**{**sizes, **more})
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    values = torch.Generator().manual_seed(0)
    for path, parameter in [*made.named_parameters(), *made.named_buffers()]:
        if not path.endswith(("inv_freq", "embed_scale", ".beta", ".eps")):
            width = 0.3 if parameter.ndim < 2 else 0.15
            parameter.data.add_(width * torch.randn(parameter.shape, generator=values))
    return made


def save(name: str, directory: Path, *, old: bool = False, **changed: Any) -> Path:
    """Saves a model; with `old`, its config.json says things as transformers 4 did."""
    model(name).save_pretrained(directory)
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    if old:
        fields = _old(fields)
    path.write_text(json.dumps(fields | changed))
    return directory


SINCE_5 = ("laguna",)
"""Families that version 4 did not have: their rotation has one form."""


def _old(fields: dict[str, Any]) -> dict[str, Any]:
    fields["torch_dtype"] = fields.pop("dtype")
    if fields["model_type"] in SINCE_5:
        return fields
    rope = fields.pop("rope_parameters", None)
    types = (
        fields.pop("layer_types", None)
        if fields["model_type"] in ("gemma2", "gemma3_text", "qwen2")
        else None
    )
    if fields["model_type"] == "olmo3":
        rope = rope["full_attention"]
    if fields["model_type"] == "gpt_neox":
        fields["rotary_emb_base"], fields["rotary_pct"] = (
            rope["rope_theta"],
            rope["partial_rotary_factor"],
        )
        return fields
    if fields["model_type"] == "gemma3_text":
        del fields["_sliding_window_pattern"]
        assert types == ["sliding_attention", "full_attention", "sliding_attention"]
        fields["sliding_window_pattern"] = 2
        fields["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if fields["model_type"] == "gemma4_text":  # the hub's, with the usual rotation
        heads = list(fields.pop("per_layer_config").values())[-1]
        fields["global_head_dim"] = heads["head_dim"]
        fields["num_global_key_value_heads"] = heads.get("num_key_value_heads")
        return fields
    if fields["model_type"] == "gemma2":
        fields["hidden_act"] = "gelu"  # the checkpoints of version 4 have both
    if (
        rope is None or "rope_theta" not in rope
    ):  # Mellum's default, which has no old form
        return fields
    fields["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        fields["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    # Llama 3 and Gemma 3 came with the new word; what is older says type.
    word = "type" if fields["model_type"] in ("phi3", "deepseek_v3") else "rope_type"
    fields["rope_scaling"] = None if kind == "default" else {word: kind, **rope}
    return fields


def logits(made: Any, tokens: list[int]) -> np.ndarray:
    """The logits [T, V] of one sequence by itself."""
    with torch.no_grad():
        return made(torch.tensor([tokens])).logits[0].numpy()


VOCABULARY = 300
CHAT = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}"


def save_with_tokenizer(directory: Path) -> Path:
    """Saves a tiny llama with a tokenizer of bytes and a few words, a begin-of-text and a chat template."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(
        ["to be or not to be that is the question of the king and the queen"] * 8,
        trainer,
    )
    words.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 0)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = CHAT
    fast.save_pretrained(directory)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory
