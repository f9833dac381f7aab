"""The files that go with a model beside its weights: config.json, tokenizer and chat template."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from maxtext_lite.config.hf_config import CARRIED, read_fields


def carry_files(source: Path, destination: Path, *, but: Iterable[str] = ()) -> list[str]:
    """Copies those of CARRIED that `source` has, `but` some; returns their names."""
    names = [name for name in CARRIED if name not in set(but) and (source / name).is_file()]
    destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, destination / name)
    return names


def stop_ids_of(directory: Path) -> list[int]:
    """The tokens after which a text ends, by generation_config.json and config.json."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file():
            value: Any = read_fields(directory / name).get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
    return list(dict.fromkeys(ids))
