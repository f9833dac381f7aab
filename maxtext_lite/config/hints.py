"""Guesses at what the user meant: another key, key=value in another notation, another file."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from maxtext_lite.config.errors import did_you_mean, value_text
from maxtext_lite.config.json_file import is_there, user_path

_ELSEWHERE = {
    "adam_beta1": "adam_b1",
    "adam_beta2": "adam_b2",
    "batch_size": "per_device_batch_size",
    "beta1": "adam_b1",
    "beta2": "adam_b2",
    "block_size": "max_target_length",
    "clip_grad": "gradient_clipping_threshold",
    "context_length": "max_target_length",
    "d_model": "base_emb_dim",
    "data": "dataset_path",
    "data_path": "dataset_path",
    "dataset": "dataset_path",
    "datasets": "dataset_path",
    "epochs": "num_epochs",
    "eval_dataset": "eval_dataset_path",
    "eval_steps_interval": "eval_interval",
    "grad_accum": "gradient_accumulation_steps",
    "grad_clip": "gradient_clipping_threshold",
    "gradient_accumulation": "gradient_accumulation_steps",
    "hidden_size": "base_emb_dim",
    "intermediate_size": "base_mlp_dim",
    "iters": "steps",
    "kv_lora_rank": "mla",
    "learning_rate_scheduler": "learning_rate_schedule",
    "log_interval": "log_period",
    "logging_steps": "log_period",
    "lr": "learning_rate",
    "lr_schedule": "learning_rate_schedule",
    "lr_decay_style": "learning_rate_schedule",
    "lr_scheduler": "learning_rate_schedule",
    "lr_scheduler_type": "learning_rate_schedule",
    "lr_type": "learning_rate_schedule",
    "max_grad_norm": "gradient_clipping_threshold",
    "max_iters": "steps",
    "max_length": "max_target_length",
    "max_seq_len": "max_target_length",
    "max_seq_length": "max_target_length",
    "max_steps": "steps",
    "mixture": "dataset_path",
    "model": "model_name",
    "n_embd": "base_emb_dim",
    "n_head": "base_num_query_heads",
    "n_heads": "base_num_query_heads",
    "n_layer": "base_num_decoder_layers",
    "n_layers": "base_num_decoder_layers",
    "n_routed_experts": "num_experts",
    "name": "run_name",
    "num_attention_heads": "base_num_query_heads",
    "num_heads": "base_num_query_heads",
    "num_hidden_layers": "base_num_decoder_layers",
    "num_key_value_heads": "base_num_kv_heads",
    "num_kv_heads": "base_num_kv_heads",
    "num_layers": "base_num_decoder_layers",
    "num_local_experts": "num_experts",
    "num_train_epochs": "num_epochs",
    "num_warmup_steps": "warmup_steps",
    "output_dir": "base_output_directory",
    "per_device_train_batch_size": "per_device_batch_size",
    "q_lora_rank": "mla",
    "qk_nope_head_dim": "mla",
    "qk_rope_head_dim": "mla",
    "save_interval": "checkpoint_period",
    "save_steps": "checkpoint_period",
    "seq_len": "max_target_length",
    "seq_length": "max_target_length",
    "sequence_length": "max_target_length",
    "tie_embeddings": "logits_via_embedding",
    "tie_word_embeddings": "logits_via_embedding",
    "tokenizer": "tokenizer_path",
    "v_head_dim": "mla",
    "warmup": "warmup_steps",
    "warmup_ratio": "warmup_steps",
    "warmup_steps_fraction": "warmup_steps",
    "wd": "weight_decay",
}
"""Names of keys in other frameworks, where they are not similar to ours."""

_WORDS = re.compile(r"-{0,2}([A-Za-z][\w-]*)[\s:=]*(\S*)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIX = re.compile(r"\.[a-z]+\d?$")


def _key_meant(name: str, known: Collection[str]) -> str | None:
    """The key that a name certainly means: the same but for case and dashes, or its name in another framework."""
    plain = name.lower().replace("-", "_")
    key = plain if plain in known else _ELSEWHERE.get(plain)
    return key if key in known else None


def key_hint(name: str, known: Collection[str]) -> str:
    """The clause ` Did you mean 'x'?` about an unknown key; empty where no key is similar."""
    meant = _key_meant(name, known)
    return f" Did you mean '{meant}'?" if meant else did_you_mean(name, known)


def override_meant(words: Sequence[str], known: Collection[str]) -> str:
    """`steps=5` for words such as `--steps=5`, `steps:5`, `--steps 5` and `steps 5`; "" where no key is meant."""
    found = _WORDS.match(" ".join(words[:3]))
    key = found and _key_meant(found[1], known)
    if not found or not key:
        return ""
    is_value = found[2] and "=" not in found[2] and not found[2].startswith("--")
    return f"{key}={found[2] if is_value else 'VALUE'}"


def override_hint(words: Sequence[str], known: Collection[str]) -> str:
    """The clause ` Did you mean 'steps=5'?`, or empty text."""
    meant = override_meant(words, known)
    return f" Did you mean '{value_text(meant)}'?" if meant else ""


def missing_file(name: str, namer: str, shipped: Sequence[str], directory: Path = Path()) -> str:
    """The problem with a missing config file, and which one may be meant.

    Args:
      namer: the file whose `base` it is; "": it was named on the command line.
      directory: of the namer, from which the name is looked up.
    """
    named_by = f" (base of {namer})" if namer else ""
    beside = sorted((directory / user_path(name)).parent.glob("*.y*ml"))
    files = [str(Path(name).parent / file.name) for file in beside]
    same = [file for file in files if Path(file).stem == Path(name).stem]
    hint = did_you_mean(name, same) or did_you_mean(name, [*files, *shipped])
    return f"no config file '{value_text(name)}'{named_by}.{hint}"


def no_directory(path: str, key: str) -> str:
    """The refusal of a path that does not exist, and what may be meant; "" if it is empty, exists or is in a bucket."""
    place = user_path(path)
    if not path or "://" in path or is_there(place):
        return ""
    beside = [each.name for each in place.parent.glob("*") if each.is_dir()]
    hint = hub_hint(path) or did_you_mean(place.name, beside)
    return f"{key}={value_text(path)}: there is no directory {value_text(str(place.absolute()))}.{hint}"


def hub_hint(path: str, *options: str) -> str:
    """The clause on how to download what `path` names on the Hugging Face hub; empty where it cannot be an id there.

    Args:
      options: of `hf download`, such as --repo-type dataset.
    """
    place = user_path(path)
    if not _HUB_ID.fullmatch(path) or _FILE_SUFFIX.search(path) or any(place.parent.glob("*/config.yml")):
        return ""
    command = " ".join(["hf download", path, *options, "--local-dir", path])
    return f" If it is on the Hugging Face hub, download it first: {command}"
