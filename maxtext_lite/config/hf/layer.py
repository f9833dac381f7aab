"""The keys that a directory of parameters decides: the layer between a model's file and what the user states."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxtext_lite.config.bucket import local_copy
from maxtext_lite.config.errors import Refusal, UserError, value_text
from maxtext_lite.config.hf.adapter import CONFIG, adapter_of, missing_base
from maxtext_lite.config.hf.config import field_names, has_hf_weights, hf_directory, model_keys, stored_dtype
from maxtext_lite.config.hf.config import tokenizer_keys as tokenizer_keys_of
from maxtext_lite.config.hf.fields import Keys, same_architecture
from maxtext_lite.config.json_file import read_object

TOKENIZER_KEYS = ("tokenizer_type", "tokenizer_path")


def directory_origin(path: str) -> str | None:
    """The config.json of `load_parameters_path`, as messages call it; None if there is none."""
    directory = hf_directory(path) if path else None
    return None if directory is None else str(directory / "config.json")


def directory_values(
    path: str, stated: Mapping[str, tuple[object, str]], max_target_length: object
) -> tuple[dict[str, Any], list[Refusal]]:
    """The keys that come with a Hugging Face directory, an imported model, or a run that began with one.

    Args:
      stated: the keys that the user's files, command line or model_name state, with where.
      max_target_length: its value if the user does not state it.
    Returns:
      All keys of the architecture; `dtype`, if the weights are stored in bfloat16; and the tokenizer, unless one is
      stated. Also a refusal for each stated key that contradicts the architecture.
    """
    directory = hf_directory(path)
    assert directory is not None, path
    origin = str(directory / "config.json")
    try:
        has_hf_weights(path)
        adapter = adapter_of(path)
        fields = read_object(directory / "config.json")
        keys = model_keys(fields, origin)
    except UserError as error:
        return {}, [Refusal("load_parameters_path", problem) for problem in error.problems]
    refusals = [
        Refusal(
            key,
            f"{key}={value_text(stated[key][0])} ({stated[key][1]}) contradicts {origin}, which has "
            f"{value_text(keys[key])}. Remove it; load_parameters_path decides the architecture.",
        )
        for key in keys
        if key in stated and not _agrees(key, stated[key][0], keys)
    ]
    values = dict(keys)
    if adapter:
        adapter = adapter.as_stated(stated["lora_rank"][0] if "lora_rank" in stated else None)
        values |= adapter.keys
        refusals += [
            Refusal(
                key,
                f"{key}={value_text(stated[key][0])} ({stated[key][1]}) contradicts {adapter.directory / CONFIG}, by "
                f"which it is {value_text(value)}. Remove it; to train something else, merge the adapter: "
                f"convert import {adapter.directory} OUT.",
            )
            for key, value in adapter.keys.items()
            if key in stated and _plain(stated[key][0]) != _plain(value)
        ]
    if stored_dtype(fields) == "bfloat16":
        values["dtype"] = "bfloat16"
    rows = keys["trainable_position_size"]
    if rows and isinstance(max_target_length, int) and rows < max_target_length:
        values["max_target_length"] = rows
    if not any(key in stated for key in TOKENIZER_KEYS):
        values |= tokenizer_values(path, stated)
        if "tokenizer_type" not in values and (directory / "vocab.json").is_file():
            refusals.append(
                Refusal(
                    "tokenizer_path",
                    f"{directory} has a vocab.json, but no tokenizer.json. Save the tokenizer as that, or state "
                    "tokenizer_type and tokenizer_path.",
                )
            )
    return values, refusals


def missing_base_refusals(path: str) -> list[Refusal]:
    """The refusals of an adapter whose base model is not there; none for everything else."""
    if not path or missing_base(path) is None:
        return []
    try:
        adapter_of(path)
    except UserError as error:
        return [Refusal("load_parameters_path", problem) for problem in error.problems]
    return []


def tokenizer_values(path: str, stated: Mapping[str, object]) -> dict[str, str]:
    """The tokenizer of an adapter, of the model that it came with, or of a run from scratch; {} if one is stated."""
    if any(key in stated for key in TOKENIZER_KEYS):
        return {}
    adapter = adapter_of(path)
    if adapter and (own := tokenizer_keys_of(adapter.directory)):
        return own
    return tokenizer_keys_of(hf_directory(path) or local_copy(path, "load_parameters_path") / "hf")


def in_its_fields(path: str, refusals: list[Refusal], origins: Mapping[str, str]) -> list[Refusal]:
    """The refusals; those of keys that a directory decides name its config.json and the fields there.

    Args:
      origins: where each key's value comes from.
    """
    origin = directory_origin(path)
    if origin is None or not any(origins.get(refusal.key) == origin for refusal in refusals):
        return refusals
    names = field_names(read_object(Path(origin)))
    words = re.compile(rf"\b({'|'.join(names)})\b")

    def worded(text: object) -> object:
        return words.sub(lambda found: names[found[0]], text) if isinstance(text, str) else text

    return [
        dataclasses.replace(
            refusal, message=f"{origin}: {worded(refusal.message)}", nearest=tuple(map(worded, refusal.nearest))
        )
        if origins.get(refusal.key) == origin
        else refusal
        for refusal in refusals
    ]


def _plain(value: object) -> object:
    """A LoRA key's value, with targets in sorted order."""
    return sorted(name.strip() for name in value.split(",")) if isinstance(value, str) else value


def _agrees(key: str, value: object, keys: Keys) -> bool:
    if key == "initializer_range" or value == keys[key]:  # no parameter is initialised
        return True
    if value is None and keys[key] == {}:  # two ways to state none
        return True
    number = (int, float)
    if type(value) is not type(keys[key]) and not (isinstance(value, number) and isinstance(keys[key], number)):
        return False
    return not same_architecture(keys, {**keys, key: value})
