"""Quantized checkpoints as plain tensors, dequantized as they are read.

A weight is stored as several tensors: numbers of a few bits, and scales of blocks of them. Here it is one tensor, with
the name, shape and dtype that it has in a plain checkpoint. Only the stretch that a device needs is made, a million
numbers at a time; memory around it is never touched, and so takes no space. Products are computed in float32 and
rounded as transformers and the formats' own libraries round them.

Source: Rouhani et al. 2023, arXiv:2310.10537 (MXFP4); DeepSeek-AI 2024, arXiv:2412.19437, section 3.3 (blocks of
float8); Dettmers et al. 2023, arXiv:2305.14314, section 3 (NF4).
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, Field, ValidationError

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.hf.config_json import FIELD, quantization_of, stored_dtype, weight_groups
from maxtext_lite.hf.fields import JsonObject
from maxtext_lite.hf.names import INPUTS_FIRST
from maxtext_lite.hf.safetensors import DTYPES, Box, SafetensorsDir, Stored, mapped

_AT_ONCE = 2**20  # numbers: a handful of copies is then small beside any model's largest tensor
_OF_ACTIVATIONS = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".output_scale",
    ".output_zero_point", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point",
    ".weight_format",
)  # fmt: skip
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclasses.dataclass(frozen=True)
class _Packed:
    """A plain tensor made of several stored ones.

    Attributes:
      like: the largest of the stored ones.
      piece: makes a box of it, in float32 or the format that this is rounded to.
    """

    like: Stored
    shape: tuple[int, ...]
    piece: Callable[[Box], np.ndarray]


def _turned(packed: _Packed) -> _Packed:
    return _Packed(packed.like, packed.shape[::-1], lambda box: packed.piece(box[::-1]).T)


_Size = Annotated[int, Field(ge=1, lt=2**31)]


class _FourBits(BaseModel, strict=True, frozen=True):
    """What bitsandbytes says of a weight of four bits; with a nested_blocksize its scales are quantized as well."""

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
        self._quantization = quantization_of(fields)
        method = self._quantization["quant_method"]
        stored = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}[stored_dtype(fields)]
        self._where = f"{directory / 'config.json'}: {FIELD} ({method})"
        self._stored = dict(self.tensors)
        self._packed: dict[str, _Packed] = {}
        read = {"mxfp4": self._mxfp4, "bitsandbytes": self._bitsandbytes}.get(method, self._scaled)
        for name in self._stored:
            read(name)
        if method == "bitsandbytes" and fields.get("model_type") in INPUTS_FIRST:  # turned before it is quantized
            self._packed = {name: _turned(packed) for name, packed in self._packed.items()}
        if not self._packed:
            raise UserError(f"{self._where}: no tensor there is stored so. If none is quantized, remove {FIELD}.")
        for name, packed in self._packed.items():
            self.tensors[name] = Stored(packed.like.file, stored, packed.shape, 0)
        left_out = [name for name in self.tensors if name.endswith(_OF_ACTIVATIONS)]
        for name in left_out:
            del self.tensors[name]
        scales = f"; {len(left_out)} scales of activations and caches are left out" if left_out else ""
        dtype = DTYPES[stored]
        print(f"{self._where}: {len(self._packed)} weights are dequantized to {dtype}{scales}", file=sys.stderr)

    def rename(self, names: Mapping[str, str]) -> None:
        """See SafetensorsDir."""
        super().rename(names)
        self._packed = {new: self._packed[name] for name, new in names.items() if name in self._packed}

    def view(self, name: str) -> np.ndarray:
        """The whole tensor, dequantized if it is quantized."""
        return self.part(name, lambda: tuple(slice(0, size) for size in self.tensors[name].shape))

    def part(self, name: str, box: Callable[[], Box]) -> np.ndarray:
        """The tensor, with valid numbers at least in `box`, a stretch of each dim."""
        packed = self._packed.get(name)
        if packed is None:
            return super().view(name)
        whole = np.empty(packed.shape, DTYPES[self.tensors[name].dtype])
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for NaN and infinities
            for piece in _pieces(box()):
                whole[piece] = packed.piece(piece)
        return whole

    def _take(self, name: str, suffix: str) -> np.ndarray:
        """One of the stored tensors of a quantized one, which is then no tensor of its own."""
        if name + suffix not in self._stored:
            raise UserError(f"{self._where}: {value_text(name)} lacks {value_text(name + suffix)}.")
        self.tensors.pop(name + suffix, None)
        return mapped(self._stored[name + suffix])

    def _refuse(self, name: str, why: str) -> UserError:
        return UserError(f"{self._stored[name].file}: {value_text(name)} {why} ({self._where}).")

    def _mxfp4(self, name: str) -> None:
        """[E, out, in / 32, 16] bytes of two numbers each, with a power of two for every 32, as [E, in, out]."""
        if not name.endswith("_blocks"):
            return
        base = name.removesuffix("_blocks")
        blocks, scales = self._take(base, "_blocks"), self._take(base, "_scales")
        if blocks.dtype != np.uint8 or scales.dtype != np.uint8 or blocks.shape != (*scales.shape[:3], 16):
            raise self._refuse(name, f"is {list(blocks.shape)}, and its scales {list(scales.shape)}")

        def piece(box: Box) -> np.ndarray:
            experts, columns, rows = box
            groups = slice(columns.start // 32, -(-columns.stop // 32))
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
        method = self._quantization["quant_method"]
        packed = name.endswith(".weight_packed") and method == "compressed-tensors"
        base = name.removesuffix("_packed") if packed else name
        scale_name = "_scale_inv" if method == "fp8" else "_scale"
        if not packed and not (name.endswith(".weight") and name + scale_name in self._stored):
            return
        scales = self._take(base, scale_name)
        bits = self._take(base, "_packed" if packed else "")
        kinds = (np.int8, np.int32) if method == "compressed-tensors" else ()
        if bits.dtype.name not in ("float8_e4m3fn", "float8_e5m2", *(np.dtype(kind).name for kind in kinds)):
            raise self._refuse(name, f"is in {bits.dtype}")
        shape = self._shape(base) if packed else bits.shape
        if len(shape) != 2 or not all(shape):
            raise self._refuse(name, f"is {list(shape)}, where a quantized matrix has 2 dims")
        width = self._bits_of(name, bits, shape) if packed else 8
        zeros = self._zeros(name, base, width if packed else 0, shape, scales)
        order = self._take(base, "_g_idx") if base + "_g_idx" in self._stored else None
        scales = scales.reshape(scales.shape if scales.ndim == 2 else (-1, 1))
        height, length = self._block(name, shape, scales.shape)
        column_group = np.arange(shape[1]) // length if order is None or scales.shape[1] == 1 else order
        if not (
            column_group.shape == shape[1:]
            and column_group.dtype.kind == "i"
            and 0 <= column_group.min() <= column_group.max() < scales.shape[1]
        ):
            raise self._refuse(name, "has a g_idx of another shape or with groups that are not there")

        def piece(box: Box) -> np.ndarray:
            rows, columns = box
            values = _unpacked(bits[rows], width, columns) if packed else _float32(bits[rows, columns])
            at = np.ix_(np.arange(rows.start, rows.stop) // height, column_group[columns])
            if zeros is not None:
                values = values - zeros[at]
            # The library of compressed-tensors multiplies in the scales' format.
            product = values * _float32(scales)[at]
            return product.astype(scales.dtype) if method == "compressed-tensors" else product

        self._packed[base] = _Packed(self._stored[name], shape, piece)

    def _shape(self, base: str) -> tuple[int, ...]:
        """A packed matrix's shape, which is stored beside it; () if it is no list of sizes."""
        sizes = self._take(base, "_shape")
        return tuple(sizes.tolist()) if sizes.ndim == 1 and sizes.dtype.kind == "i" and sizes.min(initial=1) > 0 else ()

    def _bits_of(self, name: str, packed: np.ndarray, shape: tuple[int, ...]) -> int:
        """The bits of a number: the one of the config's widths that fits words of 32 bits in this shape."""
        widths = {group.num_bits for group in weight_groups(self._quantization)}
        fitting = [bits for bits in widths if packed.shape == (shape[0], -(-shape[1] * bits // 32))]
        if len(fitting) != 1:
            raise self._refuse(name, f"is {list(packed.shape)}, which does not hold {list(shape)} numbers of num_bits")
        return fitting[0]

    def _zeros(self, name: str, base: str, bits: int, shape: tuple[int, ...], scales: np.ndarray) -> np.ndarray | None:
        """Each block's zero point, float32 in the scales' shape; None: there are none."""
        if base + "_zero_point" not in self._stored:
            groups = weight_groups(self._quantization)
            if groups and not any(group.symmetric for group in groups):
                raise self._refuse(name, "lacks its weight_zero_point, though symmetric=false")
            return None
        zeros = self._take(base, "_zero_point")
        columns = scales.shape[-1] if scales.ndim == 2 else 1
        if bits and zeros.dtype == np.int32 and zeros.shape == (-(-shape[0] * bits // 32), columns):
            return _unpacked(np.ascontiguousarray(zeros.T), bits, slice(0, shape[0])).T
        if zeros.size != scales.size:
            raise self._refuse(name, f"has zero points {list(zeros.shape)}, and scales {list(scales.shape)}")
        return _float32(zeros).reshape(-1, columns)

    def _block(self, name: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int]:
        """How many rows and columns share a scale."""
        groups = weight_groups(self._quantization)
        stated = [group.block_structure for group in groups if group.block_structure]
        if self._quantization["quant_method"] == "fp8":
            stated = [self._quantization.get("weight_block_size") or [128, 128]]
        for block in stated:  # the last block of a dim may be cut off
            if grid == tuple(-(-size // length) for size, length in zip(shape, block, strict=True)):
                return block[0], block[1]
        if not all(scales and size % scales == 0 for size, scales in zip(shape, grid, strict=True)):
            raise self._refuse(name, f"is {list(shape)}, which its scales, {list(grid)}, do not divide into blocks")
        return shape[0] // grid[0], shape[1] // grid[1]

    def _bitsandbytes(self, name: str) -> None:
        """NF4 and FP4 with a scale for every block of numbers, and int8 with one for every row."""
        base, found, kind = name.partition(".quant_state.bitsandbytes__")
        if found:
            self._four_bits(base, kind, name)
        elif name.endswith(".SCB"):
            weight = name.removesuffix("SCB") + "weight"
            rows, bits = self._take(name, ""), self._take(weight, "")
            if bits.dtype != np.int8 or bits.ndim != 2 or rows.shape != bits.shape[:1]:
                raise self._refuse(weight, f"is {list(bits.shape)} in {bits.dtype}, with a SCB of {list(rows.shape)}")
            scales = _float32(rows)[:, None] * np.float32(7.874015718698502e-3)  # 1 / 127

            def piece(box: Box) -> np.ndarray:
                return _float32(bits[box]) * scales[box[0]]

            self._packed[weight] = _Packed(self._stored[weight], bits.shape, piece)

    def _four_bits(self, base: str, kind: str, state_name: str) -> None:
        try:
            state = _FourBits.model_validate_json(self._take(state_name, "").tobytes())
        except ValidationError as error:
            detail = error.errors()[0]
            where = ".".join(map(str, detail["loc"])) or "all of it"
            raise self._refuse(state_name, f"is not a quant_state: {where}: {detail['msg']}") from None
        codes, scales = self._take(base, ".quant_map").reshape(-1), self._take(base, ".absmax").reshape(-1)
        if state.nested_blocksize:
            of_scales, levels = (self._take(base, f".nested_{name}").reshape(-1) for name in ("absmax", "quant_map"))
            blocks = -(-scales.size // state.nested_blocksize)
            if scales.dtype != np.uint8 or levels.size != 256 or of_scales.size != blocks:
                given = f"{of_scales.size} nested scales and {levels.size} levels"
                raise self._refuse(base, f"has {given}, not {blocks} and 256, or an absmax in {scales.dtype}")
            block = np.arange(scales.size) // state.nested_blocksize
            scales = levels[scales] * of_scales[block] + np.float32(state.nested_offset)
        packed = self._take(base, "").reshape(-1).view(np.uint8)
        shape, length = tuple(state.shape), state.blocksize
        count = math.prod(shape)
        if kind not in ("nf4", "fp4") or codes.size != 16 or -(-count // 2) > packed.size:
            raise self._refuse(base, f"has {packed.size} bytes, too few for {list(shape)} numbers of {kind}")
        if scales.size != -(-count // length):
            raise self._refuse(base, f"has {scales.size} scales, not one for every {length} of {list(shape)} numbers")
        row = math.prod(shape[1:])

        def piece(box: Box) -> np.ndarray:
            start, stop = box[0].start * row, box[0].stop * row  # whole rows
            values = _nibbles(packed[start // 2 : -(-stop // 2)], low_first=False)[start % 2 :][: stop - start]
            product = codes[values] * scales[np.arange(start, stop) // length]
            return product.astype(jnp.dtype(state.dtype)).reshape(-1, *shape[1:])[:, *box[1:]]

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
    start, stop, _ = box[dim].indices(sys.maxsize)
    step = max(1, _AT_ONCE // max(1, math.prod(lengths[dim + 1 :])))
    for first in range(start, stop, step):
        yield from _pieces((*box[:dim], slice(first, min(first + step, stop)), *box[dim + 1 :]))


def _nibbles(packed: np.ndarray, *, low_first: bool) -> np.ndarray:
    """The two numbers of 4 bits in each byte, along the last dim."""
    low, high = packed & 15, packed >> 4
    return np.stack([low, high] if low_first else [high, low], -1).reshape(*packed.shape[:-1], -1)


def _unpacked(words: np.ndarray, bits: int, columns: slice) -> np.ndarray:
    """Numbers of `bits` bits from words [rows, words], from the lowest bit on; the least number is -2 ** (bits - 1)."""
    first = columns.start * bits // 32
    part = np.ascontiguousarray(words[:, first : -(-columns.stop * bits // 32)], "<i4").view(np.uint8)
    start = columns.start * bits - first * 32
    number = np.unpackbits(part, axis=1, bitorder="little")[:, start : start + (columns.stop - columns.start) * bits]
    weights = np.exp2(np.arange(bits, dtype=np.float32))
    return number.reshape(len(words), -1, bits) @ weights - np.float32(2 ** (bits - 1))


def _float32(x: np.ndarray) -> np.ndarray:
    """Numbers of any format as float32; scales in uint8 are exponents of two, from -127."""
    if x.dtype.itemsize == 1:  # a table is several times faster than a cast
        every = np.arange(256, dtype=np.uint8)
        powers = x.dtype == np.uint8
        table = np.ldexp(np.float32(1), every.astype(np.int32) - 127) if powers else every.view(x.dtype)
        return table.astype(np.float32)[x.view(np.uint8)]
    return x.astype(np.float32)
