"""The safetensors files of a Hugging Face directory, by its index or by their names."""

from pathlib import Path
from typing import Any, cast

from maxtext_lite.config.errors import UserError, value_text
from maxtext_lite.config.json_file import check_file, is_there, read_object

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
"""The index of several files, and the name of a single file."""


def weight_files(root: Path) -> list[Path]:
    """The files with a directory's weights: those of its index, or model.safetensors, or every .safetensors file.

    Raises:
      UserError: the index is damaged or names a missing file, or one of the files is not a file.
    """
    if is_there(root / INDEX):
        files = _indexed(root)
    else:
        files = [root / WHOLE] if is_there(root / WHOLE) else sorted(root.glob("*.safetensors"))
    for file in files:
        check_file(file)
    return files


def weight_map(root: Path) -> dict[str, str]:
    """The file of each tensor by a directory's index; {} if it has none.

    Raises:
      UserError: the index is damaged.
    """
    if not is_there(root / INDEX):
        return {}
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


def _indexed(root: Path) -> list[Path]:
    named = sorted(set(weight_map(root).values()))
    missing = [name for name in named if not is_there(root / name)]
    if missing:
        raise UserError(f"{root} lacks {', '.join(map(value_text, missing[:10]))}, which {INDEX} names.")
    return [root / name for name in named]
