"""The special tokens that the files beside a tokenizer.json name, as transformers reads them."""

from pathlib import Path
from typing import Any, NamedTuple

from maxtext_lite.config.json_file import is_there, read_object

CONFIG_FILE = "tokenizer_config.json"
_MAP_FILE = "special_tokens_map.json"


class Stated(NamedTuple):
    """What a file says of a special token: its `text`, which the caller checks; None: there is none."""

    text: Any
    file: Path


def special_tokens(directory: Path) -> dict[str, Stated]:
    """The special tokens by name, such as eos_token.

    special_tokens_map.json overrides tokenizer_config.json, and is ignored if that has added_tokens_decoder: it then
    comes from a version of transformers that only writes it for older ones.

    Raises:
      UserError: a file cannot be read.
    """
    found: dict[str, Stated] = {}
    for file in (directory / CONFIG_FILE, directory / _MAP_FILE):
        fields = read_object(file) if is_there(file) else {}
        named = {name: value for name, value in fields.items() if name.endswith("_token")}
        for more in (fields.get("extra_special_tokens"), fields.get("model_specific_special_tokens")):
            named |= more if isinstance(more, dict) else {}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
        found |= {name: Stated(text, file) for name, text in texts.items()}
        if "added_tokens_decoder" in fields:
            break
    return found
