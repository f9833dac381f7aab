"""Quantized tensors become the numbers that their formats define, whatever part of them is asked for.

The expected values are found in float64 from what was packed. That they are those of the libraries
of compressed-tensors and bitsandbytes, bit by bit, has been tried on checkpoints which those have written.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from numpy.testing import assert_array_equal

from maxtext_lite.config import UserError
from maxtext_lite.hf import dequantized
from maxtext_lite.hf.dequantized import DequantizedDir
from maxtext_lite.hf.model_directory import hf_config
from tests.hf.test_importing import load
from tests.hf_models import save

RNG = np.random.default_rng(0)
E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16
OUT, IN = 48, 80
QUANT_STATE = "weight.quant_state.bitsandbytes__nf4"
NF4 = np.concatenate(
    [-(np.linspace(1, 0.1, 7) ** 1.3), [0.0], np.linspace(0.08, 1, 8) ** 1.3]
).astype(np.float32)


def directory(path, quantization, tensors, **fields):
    path.mkdir(parents=True, exist_ok=True)
    about = {"model_type": "llama", "quantization_config": quantization} | fields
    (path / "config.json").write_text(json.dumps(about))
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return DequantizedDir(path, about)


def expected(exact, *rounded):
    """Float64 numbers rounded to one format after another; products of float32 come first."""
    for dtype in (np.float32, *rounded):
        exact = exact.astype(dtype)
    return exact.astype(BF16)


def blocks(scales, height, width):
    return np.repeat(np.repeat(scales.astype(np.float64), height, 0), width, 1)[
        :OUT, :IN
    ]


def fp8(block):
    """Blocks of which the last ones of 48 x 80 may be cut off; one is that of the whole tensor."""
    grid = (-(-OUT // block[0]), -(-IN // block[1]))
    weight = RNG.uniform(-400, 400, (OUT, IN)).astype(E4M3)
    scales = RNG.uniform(1e-4, 1e-2, grid).astype(np.float32)
    tensors = {
        "weight": weight,
        "weight_scale_inv": scales.reshape(() if scales.size == 1 else grid),
        "activation_scale": np.ones((), np.float32),  # is left out
    }
    about = {
        "quant_method": "fp8",
        "weight_block_size": None if scales.size == 1 else block,
    }
    return about, tensors, expected(weight.astype(np.float64) * blocks(scales, *block))


def float8_rows():
    _, tensors, wanted = fp8([1, IN])
    tensors["weight_scale"] = tensors.pop("weight_scale_inv")
    return {"quant_method": "fbgemm_fp8"}, tensors, wanted


def groups(stored, **weights):
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
    }


def integers(width):
    """8 bits, `width` columns a scale."""
    weight = RNG.integers(-128, 128, (OUT, IN)).astype(np.int8)
    scales = RNG.uniform(1e-3, 1e-2, (OUT, IN // width)).astype(BF16)
    zeros = RNG.integers(-128, 128, scales.shape).astype(np.int8)
    tensors = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    counted = weight.astype(np.float64) - blocks(zeros, 1, width)
    wanted = expected(counted * blocks(scales, 1, width), BF16)
    return groups("int-quantized", symmetric=False), tensors, wanted


def packed_bits(numbers, bits):
    """int32 words of each row, from the lowest bit on."""
    each = (numbers[..., None] >> np.arange(bits)) & 1
    row = each.reshape(len(numbers), -1).astype(np.uint8)
    row = np.pad(row, ((0, 0), (0, -row.shape[1] % 32)))
    return np.packbits(row, axis=1, bitorder="little").view(np.int32)


def packed(bits, group, *, symmetric=True, ordered=False):
    numbers = RNG.integers(0, 2**bits, (OUT, IN))
    scales = RNG.uniform(1e-3, 1e-1, (OUT, IN // group)).astype(BF16)
    zeros = RNG.integers(0, 2**bits, scales.shape)
    tensors = {
        "weight_packed": packed_bits(numbers, bits),
        "weight_scale": scales,
        "weight_shape": np.array([OUT, IN]),
    }
    zero = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(
            packed_bits(zeros.T, bits).T
        )
    of_group = np.arange(IN) // group
    if ordered:
        of_group = RNG.permutation(of_group)
        tensors["weight_g_idx"] = of_group.astype(np.int32)
    exact = (numbers - zero[:, of_group]) * scales.astype(np.float64)[:, of_group]
    return (
        groups("pack-quantized", num_bits=bits, symmetric=symmetric),
        tensors,
        expected(exact, BF16),
    )


def four_bits(*, nested):
    """Blocks of 64 numbers, row after row; an odd row begins within a byte."""
    shape = (OUT - 1, IN + 1)
    numbers = RNG.integers(0, 16, np.prod(shape))
    even = np.append(numbers, 0)
    count = -(-len(numbers) // 64)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape}
    scales = RNG.uniform(0.5, 2, count).astype(np.float32)
    tensors = {
        "weight": ((even[::2] << 4) | even[1::2]).astype(np.uint8)[:, None],
        "weight.quant_map": NF4,
        "weight.absmax": scales,
    }
    if nested:
        codes = RNG.integers(0, 256, count).astype(np.uint8)
        levels = np.linspace(-1, 1, 256).astype(np.float32)
        of_codes = RNG.uniform(0.5, 1, -(-count // 32)).astype(np.float32)
        state |= {
            "nested_blocksize": 32,
            "nested_dtype": "float32",
            "nested_offset": 1.25,
        }
        tensors |= {
            "weight.absmax": codes,
            "weight.nested_absmax": of_codes,
            "weight.nested_quant_map": levels,
        }
        scales = levels[codes] * np.repeat(of_codes, 32)[:count] + np.float32(1.25)
    tensors[QUANT_STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    of_each = np.repeat(scales.astype(np.float64), 64)[: len(numbers)]
    values = NF4.astype(np.float64)[numbers] * of_each
    about = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return about, tensors, expected(values.reshape(shape))


def int8_rows():
    weight = RNG.integers(-127, 128, (OUT, IN)).astype(np.int8)
    rows = RNG.uniform(1, 2, OUT).astype(np.float32)
    scale = (rows * np.float32(7.874015718698502e-3)).astype(np.float64)
    about = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return about, {"weight": weight, "SCB": rows}, expected(weight * scale[:, None])


CASES = {
    "fp8": lambda: fp8([32, 32]),
    "fp8-tensor": lambda: fp8([OUT, IN]),
    "fbgemm_fp8": float8_rows,
    "int8-group-asymmetric": lambda: integers(20),
    "int4-group": lambda: packed(4, 16),
    "int4-group-asymmetric-ordered": lambda: packed(
        4, 20, symmetric=False, ordered=True
    ),
    "nf4": lambda: four_bits(nested=False),
    "nf4-nested": lambda: four_bits(nested=True),
    "bnb-int8": int8_rows,
}


def assert_holds(files, name, wanted, *box):
    """One tensor of these values, as a whole and in a part of it."""
    assert list(files.tensors) == [name]
    stored = files.tensors[name]
    assert (stored.dtype, stored.shape) == ("BF16", wanted.shape)
    assert (wanted != 0).any()
    assert_array_equal(files.view(name), wanted)
    assert_array_equal(files.part(name, lambda: box)[box], wanted[box])


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_is_what_its_format_says(name, tmp_path, monkeypatch):
    monkeypatch.setattr(dequantized, "_AT_ONCE", 500)  # several pieces
    about, tensors, wanted = CASES[name]()
    stored = {f"x.{key}": value for key, value in tensors.items()}
    files = directory(tmp_path, about, stored)
    assert_holds(files, "x.weight", wanted, slice(7, 31), slice(5, 50))


def test_blocks_of_mxfp4_are_four_bits_times_a_power_of_two(tmp_path):
    halves = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = RNG.integers(0, 16, (3, 20, 2, 32)).astype(np.uint8)
    powers = RNG.integers(90, 140, (3, 20, 2)).astype(np.uint8)
    values = np.append(halves, -halves)[codes] * 2.0 ** (powers[..., None] - 127.0)
    wanted = values.reshape(3, 20, 64).swapaxes(1, 2).astype(BF16)
    tensors = {
        "experts.down_proj_blocks": codes[..., ::2] | codes[..., 1::2] << 4,
        "experts.down_proj_scales": powers,
    }
    about = {"quant_method": "mxfp4"}
    files = directory(tmp_path, about, tensors, model_type="gpt_oss")
    box = slice(1, 3), slice(40, 50), slice(3, 9)
    assert_holds(files, "experts.down_proj", wanted, *box)


def test_a_quantized_directory_is_loaded_as_the_plain_one_of_its_numbers(tmp_path):
    plain, quantized = save("llama", tmp_path / "plain"), tmp_path / "int8"
    tensors, numbers = {}, {}
    for name, x in safetensors.numpy.load_file(plain / "model.safetensors").items():
        tensors[name] = numbers[name] = x.astype(BF16)
        if "_proj" in name:
            scales = (0.5 ** RNG.integers(7, 11, (len(x), 1))).astype(BF16)
            tensors[name] = RNG.integers(-128, 128, x.shape).astype(np.int8)
            tensors[f"{name}_scale"] = scales
            numbers[name] = tensors[name].astype(BF16) * scales
    safetensors.numpy.save_file(numbers, plain / "model.safetensors")
    fields = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    directory(quantized, groups("int-quantized"), tensors, **fields)
    config = hf_config(quantized)
    assert (config.dtype, config.weight_dtype) == ("bfloat16", "bfloat16")
    mesh = {"fsdp": 2, "tensor": 2, "data": 2}
    jax.tree.map(assert_array_equal, load(plain)[1], load(quantized, **mesh)[1])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("int4-group", {"weight_scale": None}),
        ("int4-group", {"weight_shape": np.array([OUT, IN + 8])}),
        ("int4-group-asymmetric-ordered", {"weight_g_idx": np.full(IN, 9, np.int32)}),
        ("nf4", {"weight.absmax": np.ones(3, np.float32)}),
        ("nf4", {QUANT_STATE: np.frombuffer(b'{"blocksize": 64}', np.uint8)}),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(name, change, tmp_path):
    about, tensors, _ = CASES[name]()
    changed = {
        f"x.{key}": value
        for key, value in (tensors | change).items()
        if value is not None
    }
    with pytest.raises(UserError, match=r"config\.json: quantization_config"):
        directory(tmp_path, about, changed)
