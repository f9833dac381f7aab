"""The mesh covers the devices, tensor neighbours adjacent, slices apart."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from maxtext_lite.parallel import MESH_AXES, make_mesh


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
