import itertools
import math

import pytest

from maxtext_lite.batching.topology import (
    MESH_AXES,
    MESH_KEYS,
    MeshSizes,
    Topology,
    mesh_key,
    resolve_mesh,
    stated_axes,
    topology_violations,
)
from maxtext_lite.config import load_config
from maxtext_lite.config.violation import Violation

BASE = load_config()


def mesh_of(num_devices, **axes):
    return resolve_mesh(BASE.model_copy(update=axes), num_devices)


def test_the_axes_have_their_order_and_keys():
    assert MESH_AXES == ("stage", "data", "fsdp", "expert", "context", "tensor")
    assert mesh_key("ici", "stage") == "ici_pipeline_parallelism"
    assert mesh_key("dcn", "tensor") == "dcn_tensor_parallelism"
    assert len(set(MESH_KEYS)) == 12


def test_minus_one_takes_the_remaining_devices():
    mesh = mesh_of(16, ici_tensor_parallelism=2, dcn_data_parallelism=2)
    assert isinstance(mesh, MeshSizes)
    assert list(mesh.total.items()) == [
        ("stage", 1), ("data", 2), ("fsdp", 4), ("expert", 1), ("context", 1), ("tensor", 2)]  # fmt: skip
    assert mesh.ici["data"] == 1
    assert mesh.dcn["data"] == 2
    slices = mesh_of(16, ici_fsdp_parallelism=4, dcn_data_parallelism=-1)
    assert isinstance(slices, MeshSizes)
    assert slices.dcn["data"] == 4


@pytest.mark.parametrize("num_devices", [1, 6, 8, 64])
def test_a_mesh_covers_the_devices_exactly_or_is_refused(num_devices):
    for data, fsdp, tensor in itertools.product([-1, 1, 2, 3], repeat=3):
        mesh = mesh_of(num_devices, ici_data_parallelism=data, ici_fsdp_parallelism=fsdp,
                       ici_tensor_parallelism=tensor)  # fmt: skip
        stated = math.prod(size for size in (data, fsdp, tensor) if size > 0)
        open_axes = (data, fsdp, tensor).count(-1)
        legal = (open_axes == 1 and num_devices % stated == 0) or (open_axes == 0 and stated == num_devices)
        assert isinstance(mesh, MeshSizes) == legal
        if isinstance(mesh, MeshSizes):
            assert math.prod(mesh.total.values()) == num_devices


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"ici_data_parallelism": -1}, "ici_data_parallelism=-1 and ici_fsdp_parallelism=-1: one ici key may be -1."),
        ({"dcn_data_parallelism": -1}, "ici_fsdp_parallelism=-1 and dcn_data_parallelism=-1: the number of slices is "
                                       "then open, so one of them may be -1."),
        ({"ici_tensor_parallelism": 3}, "ici_tensor_parallelism=3 does not divide the 8 devices, so "
                                        "ici_fsdp_parallelism=-1 is not a whole number."),
        ({"ici_fsdp_parallelism": 2}, "ici_fsdp_parallelism=2 = 2 devices, but there are 8."),
        ({"ici_fsdp_parallelism": 1}, "ici_fsdp_parallelism=1, as all mesh axes are, covers 1 device, but there are "
                                      "8."),
        ({"ici_fsdp_parallelism": 3, "dcn_data_parallelism": 4},
         "ici_fsdp_parallelism=3 x dcn_data_parallelism=4 = 12 devices, but there are 8."),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_is_refused(axes, message):
    problem = mesh_of(8, **axes)
    assert isinstance(problem, Violation)
    assert problem.message == message


def test_hosts_have_equally_many_devices():
    assert topology_violations(Topology(8, 4)) == []
    (problem,) = topology_violations(Topology(8, 3))
    assert problem.message == "num_hosts=3 does not divide num_devices=8: every host has equally many devices."
    below, above = problem.nearest[0]()
    assert (below[0], above[0]) == ({"num_hosts": 2}, {"num_hosts": 4})
    assert [problem.key for problem in topology_violations(Topology(0, 0))] == ["num_devices", "num_hosts"]


def test_stated_axes_count_open_ones_as_one():
    assert stated_axes(BASE.model_copy(update={"ici_tensor_parallelism": 4})).total["tensor"] == 4
    assert stated_axes(BASE).total["fsdp"] == 1
