"""Quantized checkpoints as plain tensors, dequantized as they are read.

A weight is stored as several tensors: numbers of a few bits, and scales of blocks of them. Here it is one tensor, with
the name, shape and dtype that it has in a plain checkpoint. Only the stretch that a device needs is made, a million
numbers at a time; memory around it is never touched, and so takes no space. Products are computed in float32 and
rounded as transformers and the formats' own libraries round them, which need torch (724 MB) and make whole layers.

Source: Rouhani et al. 2023, arXiv:2310.10537 (MXFP4); DeepSeek-AI 2024, arXiv:2412.19437, section 3.3 (blocks of
float8); Dettmers et al. 2023, arXiv:2305.14314, section 3 (NF4).
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.hf.config_json import FIELD, quantization_of, stored_dtype, weight_groups
from maxtext_lite.hf.fields import TABLE, JsonObject
from maxtext_lite.hf.names import INPUTS_FIRST
from maxtext_lite.hf.safetensors import DTYPES, Box, SafetensorsDir, Shape, Stored, mapped

_AT_ONCE = 2**20  # numbers: a handful of copies is then small beside any model's largest tensor
_OF_ACTIVATIONS = tuple(TABLE["of_activations"].split())
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class _Packed(NamedTuple):
    """A plain tensor made of several stored ones.

    Attributes:
      like: the largest of the stored ones.
      piece: makes a box of it, in float32 or the format that this is rounded to.
    """

    like: Stored
    shape: Shape
    piece: Callable[[Box], np.ndarray]


def _transposed(packed: _Packed) -> _Packed:
    return _Packed(packed.like, packed.shape[::-1], lambda box: packed.piece(box[::-1]).T)


_Size = Annotated[int, Field(ge=1, lt=2**31)]


class _FourBits(BaseModel, strict=True, frozen=True):
    """bitsandbytes' description of a 4-bit weight; with a nested_blocksize its scales are quantized as well."""

    shape: Annotated[list[_Size], Field(min_length=1)]
    blocksize: _Size
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    nested_blocksize: _Size | None = None
    nested_offset: float = 0.0


class DequantizedDir(SafetensorsDir):
    """The plain tensors of a directory with quantized weights.

    Args:
      fields: of its config.json, whose `quantization_config` names the format.
    Raises:
      UserError: as SafetensorsDir, or a weight lacks one of its tensors, or they do not fit each other.
    """

    def __init__(self, directory: Path, fields: JsonObject) -> None:
        super().__init__(directory)
        quantization = quantization_of(fields)
        self._method: str = quantization["quant_method"]
        self._groups = weight_groups(quantization)
        self._blocks = [group.block_structure for group in self._groups if group.block_structure]
        if self._method == "fp8":
            self._blocks = [quantization.get("weight_block_size") or [128, 128]]
        self._where = f"{directory / 'config.json'}: {FIELD} ({self._method})"
        self._stored = dict(self.tensors)
        self._packed: dict[str, _Packed] = {}
        read = {"mxfp4": self._mxfp4, "bitsandbytes": self._bitsandbytes}.get(self._method, self._scaled)
        for name in self._stored:
            read(name)
        if not self._packed:
            raise UserError(f"{self._where}: no tensor there is stored so. If none is quantized, remove {FIELD}.")
        if self._method == "bitsandbytes" and fields.get("model_type") in INPUTS_FIRST:
            self._packed = {name: _transposed(packed) for name, packed in self._packed.items()}
        dtype = stored_dtype(fields)
        word = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}[dtype]
        for name, packed in self._packed.items():
            self.tensors[name] = Stored(packed.like.file, word, packed.shape, 0)
        ignored = [name for name in self.tensors if name.endswith(_OF_ACTIVATIONS)]
        for name in ignored:
            del self.tensors[name]
        scales = f"; {len(ignored)} scales of activations and caches are ignored" if ignored else ""
        print(f"{self._where}: {len(self._packed)} weights are dequantized to {dtype}{scales}", file=sys.stderr)

    def rename(self, names: Mapping[str, str]) -> None:
        super().rename(names)
        self._packed = {new: self._packed[name] for name, new in names.items() if name in self._packed}

    def view(self, name: str) -> np.ndarray:
        """The whole tensor, dequantized if it is quantized."""
        return self.part(name, lambda: tuple(slice(0, size) for size in self.tensors[name].shape))

    def part(self, name: str, box: Callable[[], Box]) -> np.ndarray:
        """The tensor, with valid numbers at least in `box`, a range of each dim."""
        packed = self._packed.get(name)
        if packed is None:
            return super().view(name)
        whole = np.empty(packed.shape, DTYPES[self.tensors[name].dtype])
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for NaN and infinities
            for piece in _pieces(box()):
                whole[piece] = packed.piece(piece)
        return whole

    def _take(self, name: str, suffix: str = "") -> np.ndarray:
        """One of the stored tensors of a quantized one, which is then no tensor of its own."""
        if name + suffix not in self._stored:
            raise UserError(f"{self._where}: {value_text(name)} lacks {value_text(name + suffix)}.")
        self.tensors.pop(name + suffix, None)
        return mapped(self._stored[name + suffix])

    def _refuse(self, name: str, why: str) -> UserError:
        return UserError(f"{self._stored[name].file}: {value_text(name)} {why} ({self._where}).")

    def _mxfp4(self, name: str) -> None:
        """Decodes [E, out, in / 32, 16] bytes of two numbers each, with a power of two for every 32, to [E, in,
        out]."""
        if not name.endswith("_blocks"):
            return
        base = name.removesuffix("_blocks")
        blocks = self._take(base, "_blocks")
        scales = self._take(base, "_scales")

        def piece(box: Box) -> np.ndarray:
            experts, columns, rows = box
            groups = slice(columns.start // 32, _ceil_div(columns.stop, 32))
            values = _FP4[_nibbles(blocks[experts, rows, groups], low_first=True)]
            powers = scales[experts, rows, groups, None].astype(np.int32) - 127
            values = np.ldexp(values, powers)
            values = values.reshape(*values.shape[:2], -1).swapaxes(1, 2)
            start = groups.start * 32
            return values[:, columns.start - start : columns.stop - start]

        experts, rows, groups = scales.shape
        self._packed[base] = _Packed(self._stored[name], (experts, groups * 32, rows), piece)

    def _scaled(self, name: str) -> None:
        """Matrices of float8 or integers with a scale for each block: fp8, fbgemm_fp8, compressed-tensors."""
        is_packed = name.endswith(".weight_packed")
        suffix = "_scale_inv" if self._method == "fp8" else "_scale"
        if not is_packed and not (name.endswith(".weight") and name + suffix in self._stored):
            return
        base = name.removesuffix("_packed")
        scales = self._take(base, suffix)
        numbers = self._take(name)
        shape = numbers.shape
        bits = 0
        if is_packed:
            shape = tuple(self._take(base, "_shape").tolist())
            bits = self._bits_of(name, numbers.shape, shape)
        if scales.ndim != 2:
            scales = scales.reshape(-1, 1)
        zeros = self._zeros(base, bits, shape, scales.shape)
        height, length = self._block(name, shape, scales.shape)
        group_of_column = np.arange(shape[1]) // length
        if base + "_g_idx" in self._stored:
            order = self._take(base, "_g_idx")
            if order.shape != shape[1:] or not 0 <= order.min() <= order.max() < scales.shape[1]:
                raise self._refuse(name, "has a g_idx of another shape or with groups that are not there")
            group_of_column = order

        def piece(box: Box) -> np.ndarray:
            rows, columns = box
            values = _unpacked(numbers[rows], bits, columns) if is_packed else _float32(numbers[rows, columns])
            group_of_row = np.arange(rows.start, rows.stop) // height
            at = np.ix_(group_of_row, group_of_column[columns])
            if zeros is not None:
                values = values - zeros[at]
            product = values * _float32(scales)[at]
            # The library of compressed-tensors multiplies in the scales' format.
            return product.astype(scales.dtype) if self._method == "compressed-tensors" else product

        self._packed[base] = _Packed(self._stored[name], shape, piece)

    def _bits_of(self, name: str, words: Shape, shape: Shape) -> int:
        """The bits of a number: the one of the config's widths that fits words of 32 bits in this shape."""
        widths = {group.num_bits for group in self._groups}
        fitting = [bits for bits in widths if words == (shape[0], _ceil_div(shape[1] * bits, 32))]
        if len(fitting) != 1:
            raise self._refuse(name, f"is {list(words)}, which does not hold {list(shape)} numbers of num_bits")
        return fitting[0]

    def _zeros(self, base: str, bits: int, shape: Shape, grid: Shape) -> np.ndarray | None:
        """Each block's zero point, float32 in the scales' shape; None: there are none."""
        is_symmetric = not self._groups or any(group.symmetric for group in self._groups)
        if is_symmetric and base + "_zero_point" not in self._stored:
            return None
        zeros = self._take(base, "_zero_point")
        if bits and zeros.shape == (_ceil_div(shape[0] * bits, 32), grid[1]):
            return _unpacked(np.ascontiguousarray(zeros.T), bits, slice(0, shape[0])).T
        return _float32(zeros).reshape(grid)

    def _block(self, name: str, shape: Shape, grid: Shape) -> tuple[int, int]:
        """How many rows and columns share a scale."""
        for height, length in self._blocks:  # the last block of a dim may be cut off
            if grid == (_ceil_div(shape[0], height), _ceil_div(shape[1], length)):
                return height, length
        if shape[0] % grid[0] or shape[1] % grid[1]:
            raise self._refuse(name, f"is {list(shape)}, which its scales, {list(grid)}, do not divide into blocks")
        return shape[0] // grid[0], shape[1] // grid[1]

    def _bitsandbytes(self, name: str) -> None:
        """NF4 and FP4 with a scale for every block of numbers, and int8 with one for every row."""
        base, is_state, _ = name.partition(".quant_state.bitsandbytes__")
        if is_state:
            self._four_bits(base, name)
        elif name.endswith(".SCB"):
            weight = name.removesuffix("SCB") + "weight"
            numbers = self._take(weight)
            scales = _float32(self._take(name))[:, None] * np.float32(7.874015718698502e-3)  # 1 / 127

            def piece(box: Box) -> np.ndarray:
                return _float32(numbers[box]) * scales[box[0]]

            self._packed[weight] = _Packed(self._stored[weight], numbers.shape, piece)

    def _four_bits(self, base: str, state_name: str) -> None:
        try:
            state = _FourBits.model_validate_json(self._take(state_name).tobytes())
        except ValidationError as error:
            raise self._refuse(state_name, f"is not a quant_state: {error.errors()[0]['msg']}") from None
        codes = self._take(base, ".quant_map").reshape(-1)
        scales = self._take(base, ".absmax").reshape(-1)
        if state.nested_blocksize:
            block = np.arange(scales.size) // state.nested_blocksize
            of_scales = self._take(base, ".nested_absmax").reshape(-1)
            levels = self._take(base, ".nested_quant_map").reshape(-1)
            scales = levels[scales] * of_scales[block] + np.float32(state.nested_offset)
        packed = self._take(base).reshape(-1).view(np.uint8)
        shape = tuple(state.shape)
        length = state.blocksize
        count = math.prod(shape)
        if packed.size < _ceil_div(count, 2) or scales.size != _ceil_div(count, length):
            raise self._refuse(base, f"has {packed.size} bytes and {scales.size} scales, which {list(shape)} does not")
        row = math.prod(shape[1:])

        def piece(box: Box) -> np.ndarray:
            start = box[0].start * row  # whole rows
            stop = box[0].stop * row
            values = _nibbles(packed[start // 2 : _ceil_div(stop, 2)], low_first=False)
            values = values[start % 2 :][: stop - start]
            product = codes[values] * scales[np.arange(start, stop) // length]
            product = product.astype(np.dtype(state.dtype))
            return product.reshape(-1, *shape[1:])[:, *box[1:]]

        self._packed[base] = _Packed(self._stored[base], shape, piece)


def open_directory(directory: Path, fields: JsonObject) -> SafetensorsDir:
    """The tensors of a Hugging Face directory, dequantized if its config.json says that they are quantized."""
    return DequantizedDir(directory, fields) if quantization_of(fields) else SafetensorsDir(directory)


def _pieces(box: Box) -> Iterator[Box]:
    """A box cut into boxes of at most _AT_ONCE numbers or one row."""
    lengths = [stretch.stop - stretch.start for stretch in box]
    dim = next((dim for dim, length in enumerate(lengths) if length > 1), None)
    if dim is None or math.prod(lengths) <= _AT_ONCE:
        yield box
        return
    step = max(1, _AT_ONCE // max(1, math.prod(lengths[dim + 1 :])))
    for first in range(box[dim].start, box[dim].stop, step):
        part = slice(first, min(first + step, box[dim].stop))
        yield from _pieces((*box[:dim], part, *box[dim + 1 :]))


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _nibbles(packed: np.ndarray, *, low_first: bool) -> np.ndarray:
    """The two numbers of 4 bits in each byte, along the last dim."""
    pair = [packed >> 4, packed & 15]
    if low_first:
        pair.reverse()
    return np.stack(pair, -1).reshape(*packed.shape[:-1], -1)


def _unpacked(words: np.ndarray, bits: int, columns: slice) -> np.ndarray:
    """Unpacks `bits`-bit numbers from words [rows, words], lowest bits first; the least is -2 ** (bits - 1)."""
    first = columns.start * bits // 32
    last = _ceil_div(columns.stop * bits, 32)
    part = np.ascontiguousarray(words[:, first:last], "<i4").view(np.uint8)
    number = np.unpackbits(part, axis=1, bitorder="little")
    number = number[:, columns.start * bits - first * 32 : columns.stop * bits - first * 32]
    weights = np.exp2(np.arange(bits, dtype=np.float32))
    return number.reshape(len(words), -1, bits) @ weights - np.float32(2 ** (bits - 1))


def _float32(x: np.ndarray) -> np.ndarray:
    """Numbers of any format as float32; scales in uint8 are exponents of two, from -127."""
    if x.dtype.itemsize == 1:  # a table is several times faster than a cast
        table = np.arange(256, dtype=np.uint8).view(x.dtype).astype(np.float32)
        if x.dtype == np.uint8:
            table = np.ldexp(np.float32(1), np.arange(256) - 127)
        return table[x.view(np.uint8)]
    return x.astype(np.float32)
