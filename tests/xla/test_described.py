"""Machines that are not there have names; one without a compiler here is refused with what brings it."""

import jax
import jax.extend.backend
import pytest

from maxtext_lite.analysis.described import described, topology_devices
from maxtext_lite.config import UserError
from maxtext_lite.parallel import MESH_AXES, make_mesh
from maxtext_lite.training.compile import as_default_device


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "slices", "found"),
    [
        ("v5p:2x4x4", None, ("v5p", "2x4x4", 1)),
        ("v5e:2x2", 3, ("v5e", "2x2", 3)),
        ("h100:8", None, ("h100", "8", 1)),
    ],
)
def test_a_name_says_device_shape_and_slices(name, slices, found):
    machine = described(name, slices)
    assert (machine.device.name, machine.shape, machine.num_slices) == found


def test_a_slice_of_a_shape_that_there_is_not_is_refused_by_libtpu_in_one_line():
    pytest.importorskip("libtpu", reason="libtpu, of the extra tpu, is not installed")
    with pytest.raises(UserError, match="--topology=v5e:3x3"):
        topology_devices("v5e:3x3")


def test_a_device_that_is_not_there_answers_where_jax_is_asked_for_its_default(
    monkeypatch,
):
    ones, device = dict.fromkeys(MESH_AXES, 1), jax.devices()[3]
    mesh = make_mesh(ones, ones, [device])
    before = jax.extend.backend.get_default_device()
    with as_default_device(mesh):
        assert jax.extend.backend.get_default_device() == before
    monkeypatch.setattr(jax, "devices", lambda: [before])
    with as_default_device(mesh):
        assert jax.extend.backend.get_default_device() == device
    assert jax.extend.backend.get_default_device() == before
