"""The mesh: the devices of the run, arranged along six named axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxtext_lite.batching.topology import MESH_AXES, mesh_key
from maxtext_lite.config import UserError


def make_mesh(ici: Mapping[str, int], dcn: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (default: all), with axis sizes `ici[axis] * dcn[axis]`.

    Every axis is Auto: the compiler propagates shardings from the parameters and the batch.

    Args:
      ici: size of each axis of MESH_AXES within a slice (fast links).
      dcn: size of each axis across slices (slow links); all 1 for one slice.
    Raises:
      ValueError: the sizes do not multiply to the number of devices.
      UserError: the devices are TPU slices whose number is not the product of the `dcn` sizes.
    """
    grid = device_grid(ici, dcn, jax.devices() if devices is None else devices)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def device_grid(ici: Mapping[str, int], dcn: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """The devices as an array with a dim for each axis, `dcn` outside `ici`.

    If the number of slices (TPU slices; GPU hosts or NVLink domains) is the product of the `dcn` sizes, jax arranges
    each by its links. Otherwise devices are split into that many equal parts in the order of slice, process and number.
    """
    devices = list(devices)
    ici_shape = [ici[axis] for axis in MESH_AXES]
    dcn_shape = [dcn[axis] for axis in MESH_AXES]
    num_parts = int(np.prod(dcn_shape))
    if int(np.prod(ici_shape)) * num_parts != len(devices):
        raise ValueError(f"a mesh of {dict(ici)} x {dict(dcn)} does not cover {len(devices)} devices")
    slices = {device.slice_index for device in devices if getattr(device, "slice_index", None) is not None}
    if devices[0].platform == "tpu" and num_parts != max(len(slices), 1):
        stated = " x ".join(f"{mesh_key('dcn', axis)}={dcn[axis]}" for axis in MESH_AXES if dcn[axis] > 1)
        stated = stated or "dcn_data_parallelism=1, as all dcn axes are,"
        there = max(len(slices), 1)
        raise UserError(
            f"{stated} asks for {num_parts} TPU slices, but there are {there}. "
            f"Nearest that works: dcn_data_parallelism={there} alone."
        )
    if num_parts == 1:
        return mesh_utils.create_device_mesh(ici_shape, devices, allow_split_physical_axes=True)
    if num_parts == len(slices):
        return mesh_utils.create_hybrid_device_mesh(ici_shape, dcn_shape, devices, allow_split_physical_axes=True)
    devices.sort(key=lambda device: (getattr(device, "slice_index", None) or 0, device.process_index, device.id))
    parts = np.asarray(devices).reshape(dcn_shape + ici_shape)
    rank = len(MESH_AXES)
    order = [dim for axis in range(rank) for dim in (axis, axis + rank)]
    return parts.transpose(order).reshape([i * d for i, d in zip(ici_shape, dcn_shape, strict=True)])
