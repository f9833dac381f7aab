"""The mesh covers the devices, tensor neighbours adjacent, slices apart."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from maxtext_lite.config import UserError
from maxtext_lite.parallel import MESH_AXES, make_mesh
from maxtext_lite.parallel.mesh import device_grid


def _sizes(**sizes):
    return {axis: sizes.get(axis, 1) for axis in MESH_AXES}


def test_axes_are_auto_and_sized_as_asked():
    mesh = make_mesh(_sizes(data=2, tensor=4), _sizes())
    assert dict(mesh.shape) == _sizes(data=2, tensor=4)
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_slices_are_the_outer_part_of_an_axis():
    mesh = make_mesh(_sizes(data=2, tensor=2), _sizes(data=2))
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(4, 2)
    # The first slice holds devices 0-3: the first half of `data`.
    assert sorted(ids[:2].ravel()) == [0, 1, 2, 3]
    assert sorted(ids[2:].ravel()) == [4, 5, 6, 7]


def test_a_mesh_that_does_not_cover_the_devices_is_refused():
    with pytest.raises(ValueError, match="does not cover 8 devices"):
        make_mesh(_sizes(data=3), _sizes(), jax.devices())


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """The attributes of a device that its place in the mesh depends on."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int | None
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0


def _tpu_slices(num_slices):
    """Slices of 2 x 2 chips, all on one host."""
    corners = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    return [FakeDevice(4 * s + n, "tpu", "TPU v5 lite", s, s, corners[n]) for s in range(num_slices) for n in range(4)]


def _gpu_hosts(num_hosts):
    return [FakeDevice(2 * h + n, "gpu", "NVIDIA H100", h, h) for h in range(num_hosts) for n in range(2)]


def _slices_along(grid, axis):
    """The slice indices along an axis, from each place of the other axes."""
    slices = np.vectorize(lambda device: device.slice_index)(grid)
    rows = np.moveaxis(slices, MESH_AXES.index(axis), -1).reshape(-1, grid.shape[MESH_AXES.index(axis)])
    return {tuple(row) for row in rows.tolist()}


@pytest.mark.parametrize("axis", ["data", "fsdp", "stage"])
def test_tpu_slices_are_split_along_the_dcn_axis_only(axis):
    grid = device_grid(_sizes(fsdp=2, tensor=2), _sizes(**{axis: 2}), list(reversed(_tpu_slices(2))))
    assert grid.size == 8
    assert _slices_along(grid, axis) == ({(0, 0, 1, 1)} if axis == "fsdp" else {(0, 1)})
    assert _slices_along(grid, "tensor") == {(0, 0), (1, 1)}


@pytest.mark.parametrize(("ici", "dcn", "message"), [
    ({"data": 8}, {}, "dcn_data_parallelism=1, as all dcn axes are, asks for 1 TPU slices, but there are 2. "),
    ({"data": 2}, {"stage": 4}, "dcn_pipeline_parallelism=4 asks for 4 TPU slices, but there are 2. "),
])  # fmt: skip
def test_another_number_of_tpu_slices_than_the_dcn_axes_say_is_refused(ici, dcn, message):
    with pytest.raises(UserError) as raised:
        device_grid(_sizes(**ici), _sizes(**dcn), _tpu_slices(2))
    assert str(raised.value) == message + "Nearest that works: dcn_data_parallelism=2 alone."


def test_hosts_with_gpus_may_be_more_than_the_dcn_parts_and_neighbours_share_one():
    devices = _gpu_hosts(4)
    grid = device_grid(_sizes(fsdp=4), _sizes(data=2), devices)
    assert _slices_along(grid, "fsdp") == {(0, 0, 1, 1), (2, 2, 3, 3)}
    each = device_grid(_sizes(fsdp=2), _sizes(data=4), devices)
    assert _slices_along(each, "fsdp") == {(0, 0), (1, 1), (2, 2), (3, 3)}
    alone = device_grid(_sizes(fsdp=8), _sizes(), devices)
    assert _slices_along(alone, "fsdp") == {(0, 0, 1, 1, 2, 2, 3, 3)}
