"""The mesh covers the devices, tensor neighbours adjacent, slices apart."""

import dataclasses

import numpy as np
import pytest
from jax.sharding import AxisType

from maxtext_lite.config import UserError
from maxtext_lite.parallel import MESH_AXES, make_mesh
from maxtext_lite.parallel.mesh import device_grid


def sizes_of(**sizes):
    return {axis: sizes.get(axis, 1) for axis in MESH_AXES}


@pytest.mark.fast
def test_axes_are_auto_and_slices_are_the_outer_part_of_an_axis():
    mesh = make_mesh(sizes_of(data=2, tensor=2), sizes_of(data=2))
    assert dict(mesh.shape) == sizes_of(data=4, tensor=2)
    assert set(mesh.axis_types) == {AxisType.Auto}
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(4, 2)
    # The first slice holds devices 0-3: the first half of `data`.
    assert sorted(ids[:2].ravel()) == [0, 1, 2, 3]


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


CORNERS = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
TPU_SLICES = [
    FakeDevice(4 * s + n, "tpu", "TPU v5 lite", s, s, CORNERS[n])
    for s in (0, 1)
    for n in range(4)
]
GPU_HOSTS = [
    FakeDevice(2 * h + n, "gpu", "NVIDIA H100", h, h) for h in range(4) for n in (0, 1)
]


def slices_along(grid, axis):
    """The slice indices along an axis, from each place of the other axes."""
    slices = np.vectorize(lambda device: device.slice_index)(grid)
    rows = np.moveaxis(slices, MESH_AXES.index(axis), -1).reshape(
        -1, grid.shape[MESH_AXES.index(axis)]
    )
    return {tuple(row) for row in rows.tolist()}


@pytest.mark.parametrize("axis", ["fsdp", "stage"])
def test_tpu_slices_are_split_along_the_dcn_axis_only(axis):
    grid = device_grid(
        sizes_of(fsdp=2, tensor=2), sizes_of(**{axis: 2}), list(reversed(TPU_SLICES))
    )
    assert grid.size == 8
    assert slices_along(grid, axis) == ({(0, 0, 1, 1)} if axis == "fsdp" else {(0, 1)})
    assert slices_along(grid, "tensor") == {(0, 0), (1, 1)}


@pytest.mark.parametrize(
    ("ici", "dcn", "named"),
    [
        ({"data": 8}, {}, "dcn_data_parallelism=1"),
        ({"data": 2}, {"stage": 4}, "dcn_pipeline_parallelism=4"),
    ],
)
def test_another_number_of_tpu_slices_than_the_dcn_axes_say_is_refused(ici, dcn, named):
    with pytest.raises(
        UserError, match=f"{named}.*Nearest that works: dcn_data_parallelism=2"
    ):
        device_grid(sizes_of(**ici), sizes_of(**dcn), TPU_SLICES)


@pytest.mark.parametrize(
    ("ici", "dcn", "found"),
    [
        ({"fsdp": 4}, {"data": 2}, {(0, 0, 1, 1), (2, 2, 3, 3)}),
        ({"fsdp": 8}, {}, {(0, 0, 1, 1, 2, 2, 3, 3)}),
    ],
)
def test_hosts_with_gpus_may_be_more_than_the_dcn_parts_and_neighbours_share_one(
    ici, dcn, found
):
    assert (
        slices_along(device_grid(sizes_of(**ici), sizes_of(**dcn), GPU_HOSTS), "fsdp")
        == found
    )
