"""Machines that are not there have names; what is no machine, or has no compiler here, is refused in one line."""

import importlib.util

import jax
import jax.extend.backend
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.parallel import MESH_AXES, make_mesh
from maxtext_lite.xla.described import NAMES, as_default_device, assumed_of, described, topology_devices


@pytest.mark.parametrize(("name", "slices", "found"), [
    ("v5e:4x4", None, ("v5e", "4x4", 1)),
    ("v5p:2x4x4", None, ("v5p", "2x4x4", 1)),
    ("2*v5e:2x2", None, ("v5e", "2x2", 2)),
    ("2*v5e:2x2", 2, ("v5e", "2x2", 2)),
    ("v5e:2x2", 3, ("v5e", "2x2", 3)),
    ("7x:2x2x1", None, ("7x", "2x2x1", 1)),
    ("h100:8", None, ("h100", "8", 1)),
])  # fmt: skip
def test_a_name_says_device_shape_and_slices(name, slices, found):
    machine = described(name, slices)
    assert (machine.device.name, machine.shape, machine.num_slices) == found


@pytest.mark.parametrize(("name", "slices", "message"), [
    ("v5e", None, "--topology=v5e is not of the form v5e:4x4, 2*v5e:2x2 (slices) or h100:8."),
    ("v5e:4x", None, "--topology=v5e:4x is not of the form v5e:4x4, 2*v5e:2x2 (slices) or h100:8."),
    ("v5d:4x4", None, "--topology=v5d:4x4 names no device that can be compiled for here. Did you mean 'v5p'? "
                      "There are: v4, v5e, v5p, v6e, 7x, h100, h200."),
    ("a100-80:8", None, "--topology=a100-80:8 names no device that can be compiled for here."),
    ("0*v5e:2x2", None, "--topology=0*v5e:2x2 has no devices: every size must be at least 1."),
    ("v5e:0x4", None, "--topology=v5e:0x4 has no devices: every size must be at least 1."),
    ("2*v5e:2x2", 3, "--topology=2*v5e:2x2 and --slices=3 contradict each other; give one of them."),
    ("h100:2x4", None, "--topology=h100:2x4: GPUs are those of one host, by their number. Nearest that works: h100:8."),
    ("h100:8", 2, "--topology=h100:8: GPUs are those of one host, by their number. Nearest that works: h100:8."),
])  # fmt: skip
def test_what_is_no_machine_is_refused(name, slices, message):
    with pytest.raises(UserError) as error:
        described(name, slices)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(("name", "library", "extra"), [
    ("v5e:2x4", "libtpu", "pip install 'maxtext-lite[tpu]'"), ("h100:8", "jax's CUDA plugin", "maxtext-lite[cuda13]"),
])  # fmt: skip
def test_a_library_that_is_missing_is_named_with_what_brings_it(name, library, extra, monkeypatch):
    found = importlib.util.find_spec
    hidden = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else found(name))
    with pytest.raises(UserError) as error:
        topology_devices(name)
    assert str(error.value).startswith(f"--topology={name} needs {library}, which is not installed; the extra ")
    assert extra in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_described_by_itself(name):
    assert described(f"{name}:4").device.name == name


def test_a_slice_of_a_shape_that_there_is_not_is_refused_by_libtpu_in_one_line():
    pytest.importorskip("libtpu", reason="libtpu, of the extra tpu, is not installed")
    with pytest.raises(UserError, match=r"^--topology=v5e:3x3 cannot be compiled for here: .*not divisible"):
        topology_devices("v5e:3x3")


def test_a_device_that_is_not_there_answers_where_jax_is_asked_for_its_default(monkeypatch):
    ones, device = dict.fromkeys(MESH_AXES, 1), jax.devices()[3]
    mesh = make_mesh(ones, ones, [device])
    before = jax.extend.backend.get_default_device()
    with as_default_device(mesh):
        assert jax.extend.backend.get_default_device() == before
    monkeypatch.setattr(jax, "devices", lambda: [before])
    with as_default_device(mesh):
        assert jax.extend.backend.get_default_device() == device
    assert jax.extend.backend.get_default_device() == before


def test_what_is_assumed_is_said_of_gpus():
    assert any("cuBLAS" in words for words in assumed_of("h100:8"))
    assert assumed_of("v5e:4x4") == ()
