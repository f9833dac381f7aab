"""The mesh: the devices of the run, arranged along six named axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""Names of the mesh axes, slowest first: neighbours in `tensor` are neighbours in the machine."""


def make_mesh(ici: Mapping[str, int], dcn: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (default: all), whose axis sizes are `ici[axis] * dcn[axis]`.

    Every axis is Auto: the compiler propagates shardings from those of the parameters and the batch.

    Args:
      ici: size of each axis of MESH_AXES within a slice (fast links).
      dcn: size of each axis across slices (slow links); all 1 for one slice.
    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    ici_shape = [ici[axis] for axis in MESH_AXES]
    dcn_shape = [dcn[axis] for axis in MESH_AXES]
    num_slices = int(np.prod(dcn_shape))
    if int(np.prod(ici_shape)) * num_slices != len(devices):
        raise ValueError(f"a mesh of {dict(ici)} x {dict(dcn)} does not cover {len(devices)} devices")
    if num_slices == 1:
        grid = mesh_utils.create_device_mesh(ici_shape, devices, allow_split_physical_axes=True)
    else:
        # Devices that do not know their slice (CPU, GPU) are cut by process, or in order within one process.
        if all(getattr(device, "slice_index", None) is not None for device in devices):
            grid = mesh_utils.create_hybrid_device_mesh(ici_shape, dcn_shape, devices, allow_split_physical_axes=True)
        else:
            devices.sort(key=lambda device: (device.process_index, device.id))
            interleaved = np.asarray(devices).reshape(dcn_shape + ici_shape)
            rank = len(MESH_AXES)
            order = [dim for axis in range(rank) for dim in (axis, axis + rank)]
            grid = interleaved.transpose(order).reshape([i * d for i, d in zip(ici_shape, dcn_shape, strict=True)])
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
