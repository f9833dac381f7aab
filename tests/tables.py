"""Tables of expected values beside the tests."""

from pathlib import Path
from typing import Any

import yaml


def read_table(name: str) -> Any:
    """The content of a YAML file below tests/."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return yaml.load(text, yaml.CSafeLoader)


def arithmetic(text: str, names: dict[str, Any]) -> Any:
    """The value of an expression that a table has, in which these names stand for numbers."""
    return eval(text, {"__builtins__": {}}, names)
