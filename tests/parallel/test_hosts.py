"""One host's answers; several processes are tested through whole runs."""

import jax

from maxtext_lite.parallel import exchange, make_any_host, make_mesh
from maxtext_lite.parallel.mesh import MESH_AXES


def test_one_host_exchanges_with_itself():
    assert exchange({"a": [1, None, "é"]}) == [{"a": [1, None, "é"]}]


def test_a_flag_is_raised_where_any_host_raises_it():
    any_host = make_any_host(
        make_mesh(dict.fromkeys(MESH_AXES, 1) | {"data": 4, "tensor": 2}, dict.fromkeys(MESH_AXES, 1))
    )
    assert not bool(any_host(False))
    raised = any_host(True)
    assert bool(raised)
    assert raised.sharding.is_fully_replicated
    assert jax.device_count() == 8
