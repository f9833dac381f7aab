"""A mesh covers all devices or is refused; hosts have equally many."""

import itertools
import math

import pytest

from maxtext_lite.batching.topology import (
    MeshSizes,
    resolve_mesh,
)
from maxtext_lite.config import load_config

BASE = load_config()


@pytest.mark.parametrize("num_devices", [1, 6, 8])
def test_a_mesh_covers_the_devices_exactly_or_is_refused(num_devices):
    for data, fsdp, tensor in itertools.product([-1, 1, 2, 3], repeat=3):
        keys = {
            "ici_data_parallelism": data,
            "ici_fsdp_parallelism": fsdp,
            "ici_tensor_parallelism": tensor,
        }
        mesh = resolve_mesh(BASE.model_copy(update=keys), num_devices)
        stated = math.prod(size for size in (data, fsdp, tensor) if size > 0)
        open_axes = (data, fsdp, tensor).count(-1)
        legal = (open_axes == 1 and num_devices % stated == 0) or (
            open_axes == 0 and stated == num_devices
        )
        assert isinstance(mesh, MeshSizes) == legal
        assert not legal or math.prod(mesh.total.values()) == num_devices
