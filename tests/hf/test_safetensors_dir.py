"""Files are those of the safetensors library, in both directions; what is broken is named."""

import contextlib
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext_lite.config import UserError
from maxtext_lite.hf.safetensors_dir import SafetensorsDir, Tensor, write_safetensors
from tests.mutations import changed

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.linspace(-2, 2, 6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "half": np.array([1.5, -0.25], np.float16),
    "scalar": np.array(3.0, np.float64),
    "none": np.zeros((0, 4), np.float32),
}


def to_write(tensors):
    return [Tensor(name, x.shape, x.dtype, lambda x=x: x) for name, x in tensors.items()]


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert (x.dtype, x.shape) == (other[name].dtype, other[name].shape)
        np.testing.assert_array_equal(x, other[name])


def read(directory):
    files = SafetensorsDir(directory)
    return {name: files.view(name) for name in files.tensors}


def test_tensors_that_the_library_wrote_are_read(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(read(tmp_path), TENSORS)
    with pytest.raises(ValueError, match="read-only"):
        read(tmp_path)["a"][0] = 1


def test_the_library_reads_what_is_written(tmp_path):
    write_safetensors(tmp_path, to_write(TENSORS))
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same(safetensors.numpy.load_file(tmp_path / "model.safetensors"), TENSORS)
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_several_files_have_an_index(tmp_path):
    write_safetensors(tmp_path, to_write(TENSORS), file_bytes=50)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in TENSORS.values())
    assert index["weight_map"]["a"] == "model-00001-of-00002.safetensors"
    assert index["weight_map"]["b.weight"] == "model-00002-of-00002.safetensors"
    assert_same(read(tmp_path), TENSORS)
    (tmp_path / "consolidated.safetensors").write_bytes(b"of no index: another copy of the model")
    assert_same(read(tmp_path), TENSORS)


def test_a_tensor_is_made_when_its_turn_comes_and_cast(tmp_path):
    alive = []

    def make(name):
        alive.append(name)
        return np.ones(2, np.float64)

    tensors = [Tensor(name, (2,), np.dtype(np.float32), lambda name=name: make(name)) for name in "ab"]
    assert alive == []
    write_safetensors(tmp_path, tensors)
    assert alive == ["a", "b"]
    assert read(tmp_path)["b"].dtype == np.float32


def whole_file(header, num_bytes):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def entry(start, end, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def broken(tmp_path, kind):
    whole, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    safetensors.numpy.save_file(TENSORS, whole)
    content = whole.read_bytes()
    match kind:
        case "cut off":
            whole.write_bytes(content[:-4])
        case "longer":
            whole.write_bytes(content + b"more")
        case "no header":
            whole.write_bytes(b"PK\x03\x04")
        case "empty":
            whole.write_bytes(b"")
        case "pointer":
            whole.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 134\n")
        case "not json":
            whole.write_bytes((10).to_bytes(8, "little") + b"not a JSON")
        case "deep":
            whole.write_bytes(whole_file(b'{"a":' * 200_000, 0))
        case "long header":
            whole.write_bytes((2**40).to_bytes(8, "little") + content[8:])
        case "wrong size":
            whole.write_bytes(content.replace(b'"shape":[3,4]', b'"shape":[3,5]'))
        case "overlap":
            whole.write_bytes(whole_file({"a": entry(0, 16), "b": entry(8, 24)}, 24))
        case "gap":
            whole.write_bytes(whole_file({"a": entry(0, 16), "b": entry(20, 36)}, 36))
        case "huge":
            whole.write_bytes(whole_file({"a": entry(0, 16, [2**62, 8])}, 16))
        case "missing file":
            whole.unlink()
            index.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
        case "elsewhere":
            index.write_text('{"weight_map": {"a": "../x.safetensors"}}')
        case "another":
            index.write_text('{"weight_map": {"a": "model.safetensors", "c": "model.safetensors"}}')
        case "no index":
            index.write_text("[]")
        case "twice":
            whole.rename(tmp_path / "one.safetensors")
            (tmp_path / "two.safetensors").write_bytes(content)
        case "directory":
            whole.unlink()
            whole.mkdir()


_DAMAGED = r"model\.safetensors is not a safetensors file, or is damaged or cut off "


@pytest.mark.parametrize(("kind", "message"), [
    ("cut off", _DAMAGED + r"\(incomplete metadata, file not fully covered\)\."),
    ("longer", _DAMAGED + r"\(incomplete metadata, file not fully covered\)\."),
    ("no header", _DAMAGED + r"\(header too small\)"),
    ("empty", _DAMAGED + r"\(header too small\)"),
    ("pointer", r"model\.safetensors is a pointer of Git LFS, not the file\. `git lfs pull` fetches it\."),
    ("not json", _DAMAGED + r"\(invalid JSON in header"),
    ("deep", _DAMAGED + r"\(invalid JSON in header"),
    ("long header", _DAMAGED + r"\(header too large\)"),
    ("wrong size", _DAMAGED + r"\(invalid shape, data type, or offset for tensor"),
    ("overlap", _DAMAGED + r"\(invalid offset for tensor `b`\)"),
    ("gap", _DAMAGED + r"\(invalid offset for tensor `b`\)"),
    ("huge", _DAMAGED + r"\(overflow"),
    ("missing file", r"lacks model-1\.safetensors, which model\.safetensors\.index\.json names"),
    ("elsewhere", r"names \.\./x\.safetensors for a, which is not a file of the directory"),
    ("another", r"index\.json says that c is in model\.safetensors, which is wrong"),
    ("no index", r"index\.json is not a JSON object"),
    ("twice", r"is in one\.safetensors and in two\.safetensors"),
    ("directory", r"model\.safetensors is a directory, not a file"),
])  # fmt: skip
def test_what_is_broken_is_named(kind, message, tmp_path):
    broken(tmp_path, kind)
    with pytest.raises(UserError, match=message):
        SafetensorsDir(tmp_path)


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed(HEADER), st.just(0) | st.integers(-9, 9) | st.just(2**63), st.just(32) | st.integers(0, 40))
def test_any_file_is_one_or_refused(tmp_path, header, more, num_bytes):
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    (tmp_path / "model.safetensors").write_bytes((len(text) + more).to_bytes(8, "little") + text + b"\1" * num_bytes)
    with contextlib.suppress(UserError):
        stored = SafetensorsDir(tmp_path)
        assert sum(stored.view(name).nbytes for name in stored.tensors) == num_bytes


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed({"metadata": {"total_size": 16}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
def test_any_index_is_one_or_refused(tmp_path, index):
    for name, file in (("a", "1.safetensors"), ("b", "2.safetensors")):
        if not (tmp_path / file).exists():
            safetensors.numpy.save_file({name: TENSORS["a"]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_bytes(json.dumps(index).encode("utf-8", "surrogatepass"))
    with contextlib.suppress(UserError):
        assert set(SafetensorsDir(tmp_path).tensors) <= {"a", "b"}
