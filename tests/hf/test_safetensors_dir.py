"""Files are those of the safetensors library, in both directions; what is broken is named."""

import itertools
import json
import time

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from maxtext_lite.config import UserError
from maxtext_lite.hf.safetensors import (
    SafetensorsDir,
    Tensor,
    aligned_empty,
    is_finite,
    write_safetensors,
)

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.linspace(-2, 2, 6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "half": np.array([1.5, -0.25], np.float16),
    "scalar": np.array(3.0, np.float64),
    "none": np.zeros((0, 4), np.float32),
}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert (x.dtype, x.shape) == (other[name].dtype, other[name].shape)
        np.testing.assert_array_equal(x, other[name])


def read(directory):
    files = SafetensorsDir(directory)
    return {name: files.view(name) for name in files.tensors}


def write(directory, **how):
    tensors = [
        Tensor(name, x.shape, x.dtype, lambda x=x: x.astype(np.float64))
        for name, x in TENSORS.items()
    ]
    write_safetensors(directory, tensors, **how)


@pytest.mark.fast
def test_the_library_reads_what_is_written_and_what_it_wrote_is_read(tmp_path):
    write(tmp_path)  # each tensor is cast as its turn comes
    (file,) = tmp_path.iterdir()
    (tmp_path / "another").touch()
    assert file.name == "model.safetensors"
    assert file.stat().st_mode == (tmp_path / "another").stat().st_mode
    assert_same(safetensors.numpy.load_file(tmp_path / "model.safetensors"), TENSORS)
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}
    safetensors.numpy.save_file(
        TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    assert_same(read(tmp_path), TENSORS)
    with pytest.raises(ValueError, match="read-only"):
        read(tmp_path)["a"][0] = 1


def test_several_files_have_an_index(tmp_path):
    write(tmp_path, file_bytes=50)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in TENSORS.values())
    assert index["weight_map"]["a"] == "model-00001-of-00002.safetensors"
    assert index["weight_map"]["b.weight"] == "model-00002-of-00002.safetensors"
    (tmp_path / "consolidated.safetensors").write_bytes(
        b"of no index: another copy of the model"
    )
    assert_same(read(tmp_path), TENSORS)


def whole_file(header, num_bytes):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def test_many_small_tensors_take_time_in_proportion(tmp_path):
    tensors = [Tensor(f"x{n}", (), np.dtype("f4"), lambda: 0) for n in range(4000)]
    started = time.process_time()
    write_safetensors(tmp_path, tensors)
    assert time.process_time() - started < 2
    assert len(SafetensorsDir(tmp_path).tensors) == 4000


def entry(start, end):
    return {"dtype": "F32", "shape": [4], "data_offsets": [start, end]}


CONTENT = safetensors.numpy.save(TENSORS)
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BROKEN = {
    "cut off": {WHOLE: CONTENT[:-4]},
    "deep": {WHOLE: whole_file(b'{"a":' * 200_000, 0)},
    "long header": {WHOLE: (2**40).to_bytes(8, "little") + CONTENT[8:]},
    "wrong size": {WHOLE: CONTENT.replace(b'"shape":[3,4]', b'"shape":[3,5]')},
    "gap": {WHOLE: whole_file({"a": entry(0, 16), "b": entry(20, 36)}, 36)},
    "overlap": {WHOLE: whole_file({"a": entry(0, 16), "b": entry(8, 24)}, 24)},
    "pointer, git lfs pull": {
        WHOLE: b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 134\n"
    },
    "missing file, model-1.safetensors": {
        INDEX: b'{"weight_map": {"a": "model-1.safetensors"}}'
    },
    "elsewhere, ../x.safetensors": {
        WHOLE: CONTENT,
        INDEX: b'{"weight_map": {"a": "../x.safetensors"}}',
    },
    "no index, index.json": {WHOLE: CONTENT, INDEX: b"[]"},
    "twice, two.safetensors": {"one.safetensors": CONTENT, "two.safetensors": CONTENT},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_named(kind, tmp_path):
    for name, content in BROKEN[kind].items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refusal:
        SafetensorsDir(tmp_path)
    assert (kind.partition(", ")[2] or f"{WHOLE} is not a safetensors file") in str(
        refusal.value
    )


def test_what_is_aligned_is_not_copied_to_a_cpu_and_survives_donation():
    x = aligned_empty((3, 70_001), np.dtype(np.float32))
    x[...] = 1
    on_device = jax.device_put(x, jax.devices()[0])
    assert on_device.unsafe_buffer_pointer() == x.ctypes.data
    assert (
        np.asarray(jax.jit(lambda y: 2 * y, donate_argnums=0)(on_device)) == 2
    ).all()
    assert (x == 1).all()


def test_a_number_that_is_none_is_found_wherever_it_stands():
    x = np.zeros((3, 70_000), ml_dtypes.bfloat16)
    x[0, :3] = [-0.0, ml_dtypes.finfo(x.dtype).max, ml_dtypes.finfo(x.dtype).tiny / 2]
    assert is_finite(x)
    for place, value in itertools.product(
        (0, 65_535, 65_536, x.size - 1), (np.nan, -np.inf)
    ):
        damaged = x.copy()
        damaged.reshape(-1)[place] = value
        assert not is_finite(damaged)
