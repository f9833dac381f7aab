"""The safetensors files of a Hugging Face directory, by its index or by their names."""

from pathlib import Path
from typing import Any, cast

from maxtext_lite.config.errors import UserError, value_text
from maxtext_lite.config.json_file import check_file, is_there, read_object

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
"""The index of several files, and the name of a single file."""
STATED = "transformers_weights"
"""The field of config.json that names one of the two; transformers then reads no other."""


def weight_files(root: Path) -> list[Path]:
    """The files with a directory's weights: those of its index, or model.safetensors, or every .safetensors file.

    Raises:
      UserError: the index is damaged or names a missing file, one of the files is not a file, or which files count is
        not clear.
    """
    if names := weight_map(root):
        files = _indexed(root, names)
    else:
        files = [root / WHOLE] if is_there(root / WHOLE) else sorted(root.glob("*.safetensors"))
    for file in files:
        check_file(file)
    return files


def weight_map(root: Path) -> dict[str, str]:
    """The file of each tensor by a directory's index; {} if it has none, or another file counts.

    Raises:
      UserError: the index is damaged, or it is not clear whether it counts.
    """
    stated = read_object(root / "config.json").get(STATED) if is_there(root / "config.json") else None
    if stated not in (None, INDEX, WHOLE):
        raise UserError(
            f"{root / 'config.json'}: {STATED}={value_text(stated)} is not read: it must be {WHOLE} or {INDEX}. Rename "
            "the file."
        )
    if not is_there(root / INDEX) or stated == WHOLE:
        return {}
    names = _read_index(root)
    if stated is None and is_there(root / WHOLE) and WHOLE not in names.values():
        raise UserError(
            f"{root} has {WHOLE}, which transformers reads, and {INDEX}, which names other files. Remove what is out "
            f"of date, or name one of the two as {STATED} in config.json."
        )
    return names


def _read_index(root: Path) -> dict[str, str]:
    found = read_object(root / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise UserError(f"{root / INDEX} is not an index of safetensors files: it has no weight_map.")
    names = cast("dict[str, Any]", found)
    for tensor, name in names.items():
        if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
            raise UserError(
                f"{root / INDEX} names {value_text(name)} for {value_text(tensor)}, which is not a file of the "
                "directory."
            )
    return names


def _indexed(root: Path, names: dict[str, str]) -> list[Path]:
    named = sorted(set(names.values()))
    missing = [name for name in named if not is_there(root / name)]
    if missing:
        raise UserError(f"{root} lacks {', '.join(map(value_text, missing[:10]))}, which {INDEX} names.")
    return [root / name for name in named]
