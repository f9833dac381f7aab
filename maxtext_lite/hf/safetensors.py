"""Safetensors files: tensors as views of the file, and files of a few gigabytes written by the library.

The safetensors library opens a file and refuses one that is not in the format: a header that is invalid or too long,
and tensors that overlap, leave gaps, do not match their shapes or end after the file. NumPy then maps the bytes at the
header's offsets, because the library cannot give part of a tensor at the cost of that part. Measured with version 0.8
on a tensor of 256 MiB in bfloat16, in 8 slices that are each copied once: its mapped slices take 0.35 to 0.44 s of CPU
and keep every touched page of the file in memory until it is closed (320 MiB at the peak); its pread backend reads the
whole tensor for each slice (2.1 to 2.6 s, 288 MiB). A view takes 0.06 to 0.13 s, and a slice of rows 66 MiB.
Source: https://huggingface.co/docs/safetensors
"""

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import check_file, is_there, path_below, read_object
from maxtext_lite.config.whole_file import replacing
from maxtext_lite.hf.fields import WEIGHTS_FIELD, JsonObject

INDEX = "model.safetensors.index.json"
"""The index of several files."""
WHOLE = "model.safetensors"
"""The name of a single file."""

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The number formats that are read and written."""

_PACKED: Mapping[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
# The formats of quantized weights, beside DTYPES.

Shape = tuple[int, ...]

Box = tuple[slice, ...]
"""A range of each dim of a tensor."""

FILE_BYTES = 2_000_000_000  # of a file, whose tensors are in memory while it is written
_LFS = b"version https://git-lfs"


def weight_files(root: Path) -> list[Path]:
    """The files with a directory's weights: its index's, or model.safetensors, or every .safetensors file.

    Raises:
      UserError: the index is damaged or names a missing file, one of the files is not a file, or which files count is
        not clear.
    """
    names = sorted(set(weight_map(root).values()))
    missing = [value_text(name) for name in names if not is_there(root / name)]
    if missing:
        raise UserError(f"{root} lacks {', '.join(missing[:10])}, which {INDEX} names.")
    if not names and is_there(root / WHOLE):
        names = [WHOLE]
    files = [root / name for name in names] or sorted(root.glob("*.safetensors"))
    for file in files:
        check_file(file)
    return files


def weight_map(root: Path) -> dict[str, str]:
    """The file of each tensor by a directory's index; {} if it has none, or another file counts.

    Raises:
      UserError: the index is damaged, or it is not clear whether it counts.
    """
    stated = read_object(root / "config.json").get(WEIGHTS_FIELD) if is_there(root / "config.json") else None
    if stated not in (None, INDEX, WHOLE):
        where = f"{root / 'config.json'}: {WEIGHTS_FIELD}={value_text(stated)}"
        raise UserError(f"{where} is not read: it must be {WHOLE} or {INDEX}. Rename the file.")
    if not is_there(root / INDEX) or stated == WHOLE:
        return {}
    names = read_object(root / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UserError(f"{root / INDEX} is not an index of safetensors files: it has no weight_map.")
    for name in names.values():
        path_below(root, name, root / INDEX)
    if stated is None and is_there(root / WHOLE) and WHOLE not in names.values():
        raise UserError(
            f"{root} has {WHOLE}, which transformers reads, and {INDEX}, which names other files. Remove one, or name "
            f"the other as {WEIGHTS_FIELD} in config.json."
        )
    return names


class Stored(NamedTuple):
    """A tensor's place in a file.

    Attributes:
      dtype: in the file's words.
      offset: bytes before it in the file.
    """

    file: Path
    dtype: str
    shape: Shape
    offset: int


class SafetensorsDir:
    """The tensors of a directory: of the files in its index, or of model.safetensors, or of all its files.

    Attributes:
      tensors: each one's place, by name.
    Raises:
      UserError: a file is missing, cut off or not in the format, or a tensor is in two files, or in another one than
        the index says.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, Stored] = {}
        for file in weight_files(directory):
            for name, stored in stored_in(file).items():
                if name in self.tensors:
                    first = self.tensors[name].file.name
                    raise UserError(f"{directory}: {value_text(name)} is in {first} and in {file.name}.")
                self.tensors[name] = stored
        for name, file_name in weight_map(directory).items():
            if name not in self.tensors or self.tensors[name].file != directory / file_name:
                wrong = f"{value_text(name)} is not in {value_text(file_name)}"
                raise UserError(f"{directory / INDEX} is wrong: {wrong}.")

    def rename(self, names: Mapping[str, str]) -> None:
        """Renames the tensors in `names` and drops the others."""
        self.tensors = {new: self.tensors[name] for name, new in names.items()}

    def view(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of its file, which closes with the last reference to the view."""
        return mapped(self.tensors[name])

    def part(self, name: str, box: Callable[[], Box]) -> np.ndarray:
        """The tensor, with valid numbers at least in `box`, a range of each dim; here in all of it."""
        del box
        return self.view(name)


def mapped(stored: Stored) -> np.ndarray:
    """A stored tensor as a read-only view of its file.

    Raises:
      UserError: its number format is not read.
    """
    file, name, shape, offset = stored
    dtype = DTYPES.get(name, _PACKED.get(name))
    if dtype is None:
        raise UserError(f"{file} has a tensor in {value_text(name)}, which is not read.")
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    return np.memmap(file, dtype, "r", offset, shape).view(np.ndarray)


def stored_in(file: Path) -> dict[str, Stored]:
    """The places of a file's tensors, by name.

    Raises:
      UserError: it is not in the format.
    """
    check_format(file)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        entries: JsonObject = json.loads(opened.read(length))
    entries.pop("__metadata__", None)
    return {
        name: Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def check_format(file: Path) -> tuple[list[str], dict[str, str]]:
    """The names of a file's tensors, and its metadata, once the library has checked the file.

    Raises:
      UserError: it is not in the format.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            return opened.keys(), opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        with file.open("rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                raise UserError(f"{file} is a pointer of Git LFS, not the file. `git lfs pull` fetches it.") from None
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(f"{file} is not a safetensors file, or is damaged or cut off ({value_text(reason)}).") from None


class Tensor(NamedTuple):
    """A tensor to write.

    Attributes:
      make: returns it when its turn comes, in any number format.
    """

    name: str
    shape: Shape
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(directory: Path, tensors: Iterable[Tensor], *, file_bytes: int = FILE_BYTES) -> None:
    """Writes tensors one by one, into one file, or into files of about `file_bytes` with an index."""
    files: list[list[Tensor]] = [[]]
    num_bytes = 0  # of the last file
    for tensor in tensors:
        if files[-1] and num_bytes + tensor.num_bytes > file_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(tensor)
        num_bytes += tensor.num_bytes
    if len(files) == 1:
        write_file(directory / WHOLE, files[0])
        return
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for name, part in zip(names, files, strict=True):
        write_file(directory / name, part)
    total = sum(tensor.num_bytes for part in files for tensor in part)
    weight_map = {tensor.name: name for name, part in zip(names, files, strict=True) for tensor in part}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(file: Path, tensors: list[Tensor], **about: str) -> None:
    """Writes tensors into a file, which gets its name only when it is complete; `about` is metadata."""
    made = {tensor.name: np.asarray(tensor.make(), tensor.dtype, order="C") for tensor in tensors}
    with replacing(file) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        try:
            save_file(made, partial, {"format": "pt", **about})
            partial.chmod(mode)  # save_file makes a file that only its owner may read
        except SafetensorError as error:  # of the file system: "I/O error: No space left on device (os error 28)"
            found = re.search(r"os error (\d+)", str(error))
            number = int(found[1]) if found else errno.EIO
            raise OSError(number, os.strerror(number), str(partial)) from None


_ALIGNED_TO = 64  # bytes, as XLA aligns the arrays of a CPU
_COLUMNS = 32  # copied at once: few enough that a transposed array's cache lines are used before they are evicted


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """np.empty aligned for jax on a CPU to use the memory without a copy: write to it before jax has it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    whole = np.empty(num_bytes + _ALIGNED_TO, np.uint8)
    start = -whole.ctypes.data % _ALIGNED_TO
    return whole[start : start + num_bytes].view(dtype).reshape(shape)


def assign(into: np.ndarray, source: np.ndarray) -> None:
    """`into[...] = source` in NumPy's own formats; ten times faster if the source is transposed."""
    order = sorted(range(into.ndim), key=lambda axis: -into.strides[axis])
    into = into.transpose(order)
    source = source.transpose(order)
    if source.ndim < 2 or source.strides[-1] == source.itemsize:
        into[...] = source
        return
    for start in range(0, source.shape[-1], _COLUMNS):
        into[..., start : start + _COLUMNS] = source[..., start : start + _COLUMNS]


def as_bits(x: np.ndarray) -> np.ndarray:
    """A bfloat16 array as uint16, which NumPy copies several times faster; any other array unchanged."""
    return x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x


def assign_cast(into: np.ndarray, tensor: np.ndarray, source: np.ndarray) -> None:
    """`into[...] = source`, where `source` is a rearranged `as_bits(tensor)`, cast from the tensor's format."""
    if tensor.dtype != ml_dtypes.bfloat16:
        assign(into, source)
    elif into.dtype == ml_dtypes.bfloat16:
        assign(as_bits(into), source)
    elif into.dtype == np.float32:  # a bfloat16 is its upper half
        bits = into.view(np.uint32)
        assign(bits, source)
        bits <<= 16
    else:
        into[...] = source.view(ml_dtypes.bfloat16)


_EXPONENTS = {2: 0x7C00, 4: 0x7F800000, 8: 0x7FF0000000000000}  # all of these bits set: infinite or NaN
_AT_ONCE = 2**16  # numbers, which stay in the cache for the second pass over them


def is_finite(x: np.ndarray) -> bool:
    """Whether a contiguous array of floats has no NaN and no infinity.

    Takes 0.12 s of CPU for a GB of any format; np.isfinite takes 0.7 s in bfloat16, and copying the GB 0.2 s.
    """
    bits = x.reshape(-1).view(np.dtype(f"u{x.itemsize}"))
    mask = bits.dtype.type(0x7F80 if x.dtype == ml_dtypes.bfloat16 else _EXPONENTS[x.itemsize])
    pieces = (bits[start : start + _AT_ONCE] for start in range(0, bits.size, _AT_ONCE))
    return all((piece & mask).max() != mask for piece in pieces)
