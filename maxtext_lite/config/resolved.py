"""A resolved config in readable form: the table on the terminal, and config.yml in the run directory."""

import re
from pathlib import Path

import yaml

from maxtext_lite.config.errors import full_text, value_text, without_secrets
from maxtext_lite.config.load import defaults_of
from maxtext_lite.config.schema import Config, keys_of
from maxtext_lite.config.source_list import SourceList
from maxtext_lite.config.whole_file import write_whole
from maxtext_lite.config.yaml_text import parse_value

_ALWAYS_SHOWN = (
    "run_name", "steps", "per_device_batch_size", "gradient_accumulation_steps", "max_target_length", "model_name",
    "base_emb_dim", "base_num_decoder_layers", "vocab_size", "dtype", "learning_rate", "ici_data_parallelism",
    "ici_fsdp_parallelism", "ici_tensor_parallelism",
)  # fmt: skip
_ADDRESSES = ("rollout_url",)  # the only ones with a name and a password: a path with them is refused


def write_resolved(config: Config, path: str | Path) -> None:
    """Writes every value, with its origin as a comment; `load_config(path)` gives an equal config.

    Passwords and signatures in the address of a server are written as ***.
    """
    lines = ["# Every key of this run and where its value came from. `load_config` of this file gives the same config."]
    if len(config.base_files) > 1:
        lines.append(f"base: {config.base_files[-1]}")
    for heading, section in config.sections:
        lines += ["", f"# ---- {heading} ----"]
        for key in section.model_fields:
            value = getattr(config, key)
            entry = f"{key}: {_yaml_text(without_secrets(value) if key in _ADDRESSES else value)}"
            origin = " ".join(config.origins.get(key, "not loaded from a file").split())
            lines.append(f"{entry:<55} # {origin}")
    write_whole(Path(path), "\n".join(lines) + "\n")


def describe(config: Config) -> str:
    """A table of the most important keys and of those that differ from configs/base.yml, with their origins."""
    base = defaults_of(type(config))
    shown = {*_ALWAYS_SHOWN, *config.shown_keys} - config.unused_keys.keys()
    keys = [key for key in keys_of(type(config)) if key in shown or getattr(config, key) != getattr(base, key)]
    values = [value_text(getattr(config, key)) for key in keys]
    key_width = max(len(key) for key in keys)
    value_width = min(max(len(value) for value in values), 40)
    return "\n".join(
        f"{key:<{key_width}}  {value:<{value_width}}  {config.origins.get(key, '')}".rstrip()
        for key, value in zip(keys, values, strict=True)
    )


def _yaml_text(value: object) -> str:
    """The value as a scalar that YAML 1.2 reads back unchanged."""
    if isinstance(value, SourceList):
        return str(value)
    if not isinstance(value, str):
        return full_text(value)
    if re.fullmatch(r"[A-Za-z_/][\w./-]*", value, flags=re.ASCII) and parse_value(value).value == value:
        return value
    return yaml.dump(value, default_style='"', allow_unicode=True, width=10**9).strip()
