"""The files that go with a model beside its weights: config.json, tokenizer and chat template."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.hf.config import CARRIED
from maxtext_lite.config.hf.fields import is_whole
from maxtext_lite.config.json_file import check_file, is_there, read_object


def carry_files(source: Path, destination: Path, *, but: Iterable[str] = ()) -> list[str]:
    """Copies those of CARRIED that `source` has, `but` some; returns their names.

    Raises:
      UserError: one of them is not a file.
    """
    names = [name for name in CARRIED if name not in set(but) and is_there(source / name)]
    for name in names:
        check_file(source / name)
    destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, destination / name)
    return names


def stop_ids_of(directory: Path) -> list[int]:
    """The tokens after which a text ends, by generation_config.json and config.json.

    Raises:
      UserError: one of the two is not a JSON object, or its eos_token_id is not a token or a list of tokens.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if is_there(directory / name):
            value: Any = read_object(directory / name).get("eos_token_id")
            stated = value if isinstance(value, list) else [] if value is None else [value]
            if not all(is_whole(each, 0) for each in stated):
                raise UserError(
                    f"{directory / name}: eos_token_id={value_text(value)} is not a token's number, or a list of them."
                )
            ids += stated
    return list(dict.fromkeys(ids))
