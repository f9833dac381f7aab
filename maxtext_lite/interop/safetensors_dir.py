"""Safetensors files: tensors as views of the file, and files written one tensor at a time.

The format is a length, a JSON header with each tensor's dtype, shape and place, and the tensors' bytes; nothing in it
can run. Tensors are mapped, not read: only what is looked at comes into memory, and it leaves with the view.
Source: https://huggingface.co/docs/safetensors
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from maxtext_lite.config import UserError

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
"""The number formats that are read and written."""

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_LONGEST_HEADER = 100_000_000
_FILE_BYTES = 5_000_000_000


class Stored(NamedTuple):
    """Where a tensor lies.

    Attributes:
      dtype: as the file names it.
      offset: bytes before it in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsDir:
    """The tensors of a directory: of the files in its index, or of model.safetensors, or of all its files.

    Attributes:
      tensors: where each lies, by name.
    Raises:
      UserError: a file is missing, cut off or not in the format, or a tensor stands in two files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, Stored] = {}
        for file in _files(directory):
            for name, stored in _header(file).items():
                if name in self.tensors:
                    raise UserError(f"{directory}: {name} stands in {self.tensors[name].file.name} and in {file.name}.")
                self.tensors[name] = stored

    def view(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of its file, which is let go of with the last reference to the view."""
        file, dtype, shape, offset = self.tensors[name]
        if not math.prod(shape):
            return np.zeros(shape, DTYPES[dtype])
        return np.memmap(file, DTYPES[dtype], "r", offset, shape).view(np.ndarray)


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} is not an index of safetensors files ({error!r}).") from None
        outside = [name for name in named if name != Path(name).name]
        if outside:
            raise UserError(f"{index} names {outside[0]}, which is not a file of the directory.")
        missing = [name for name in named if not (directory / name).is_file()]
        if missing:
            raise UserError(f"{directory} lacks {', '.join(missing)}, which {_INDEX} names.")
        return [directory / name for name in named]
    whole = directory / _WHOLE
    return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))


def _header(file: Path) -> dict[str, Stored]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(_LONGEST_HEADER, size - 8):
            raise UserError(f"{file} is not a safetensors file, or is cut off.")
        text = opened.read(length)
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        found = {
            name: (str(entry["dtype"]), tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a safetensors file ({error!r}).") from None
    tensors = {}
    for name, (dtype, shape, start, end) in found.items():
        if dtype in DTYPES and end - start != math.prod(shape) * DTYPES[dtype].itemsize:
            raise UserError(f"{file}: {name} has {end - start} bytes, which are not {dtype} of shape {list(shape)}.")
        if start < 0 or 8 + length + end > size:
            raise UserError(f"{file} is cut off: {name} ends after it.")
        tensors[name] = Stored(file, dtype, shape, 8 + length + start)
    return tensors


class Tensor(NamedTuple):
    """A tensor to write.

    Attributes:
      make: gives it when its turn comes, in any number format.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """What it takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(directory: Path, tensors: Iterable[Tensor], *, file_bytes: int = _FILE_BYTES) -> None:
    """Writes tensors one by one, into files of about `file_bytes` with an index where one file does not do."""
    files: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(other.num_bytes for other in files[-1]) + tensor.num_bytes > file_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        write_file(directory / _WHOLE, files[0])
        return
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for name, part in zip(names, files, strict=True):
        write_file(directory / name, part)
    total = sum(tensor.num_bytes for part in files for tensor in part)
    weight_map = {tensor.name: name for name, part in zip(names, files, strict=True) for tensor in part}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(file: Path, tensors: list[Tensor]) -> None:
    """Writes tensors one by one into a file, which has its name only once it is whole."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        header[tensor.name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    unfinished = file.with_name(f".{file.name}.unfinished")
    with unfinished.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            value = np.asarray(tensor.make(), tensor.dtype, order="C")
            assert value.shape == tensor.shape, (tensor.name, value.shape, tensor.shape)
            opened.write(value.reshape(-1).view(np.uint8).data)
    unfinished.replace(file)
