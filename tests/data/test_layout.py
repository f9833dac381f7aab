"""Which host reads which rows, and that they are handed out as read, for simulated hosts."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext_lite.data.layout import row_layout

T = 4


def layout_of(*, hosts, readers=None, filled=13, slots=16, accumulation=2, spec="fsdp", shape=(8, 1), order=None):
    devices = np.array(jax.devices())[: np.prod(shape)]
    devices = devices if order is None else devices[list(order)]
    mesh = Mesh(devices.reshape(shape), ("fsdp", "tensor"))
    per_host = devices.size // hosts
    return row_layout(
        (accumulation, slots, T),
        NamedSharding(mesh, PartitionSpec(None, spec, None)),
        filled_slots=filled,
        loading_hosts=range(hosts if readers is None else readers),
        host_of=lambda device: device.id // per_host,
    )


def all_hosts_loaded(layout, whole):
    """The load array of all hosts together: each fills only its own rows."""
    parts = []
    for host, slots in enumerate(layout.slots_of_host):
        parts.append(np.asarray(layout.to_devices(host, {"tokens": whole[:, slots]})["tokens"]))
    assert (sum((part != 0).astype(int) for part in parts) <= 1).all()
    return jax.device_put(sum(parts), layout.load_sharding)


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_hosts_read_straight_into_the_slots_of_their_devices(hosts):
    layout = layout_of(hosts=hosts)
    assert layout.load_positions is None
    width = 16 // hosts
    assert [slots.tolist() for slots in layout.slots_of_host] == [
        list(range(host * width, (host + 1) * width)) for host in range(hosts)
    ]


def test_hosts_with_the_same_rows_share_them():
    """Rows over 2, tensor over 4: every row is on two of the four hosts. 13 rows: 4, 3, 3 and 3."""
    layout = layout_of(hosts=4, shape=(2, 4))
    assert [len(slots) for slots in layout.slots_of_host] == [4, 3, 3, 3]
    assert np.concatenate(layout.slots_of_host).tolist() == list(range(13))


CASES = [
    {"hosts": hosts, "readers": readers, "shape": shape, "filled": filled, "order": order}
    for hosts, readers, shape, filled, order in itertools.product(
        (2, 4, 8), (1, 2, 4), ((8, 1), (2, 4)), (1, 13, 16), (None, (0, 4, 1, 5, 2, 6, 3, 7))
    )
    if readers <= hosts
]


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_rows_are_handed_out_as_they_were_read(case):
    layout = layout_of(**case)
    if layout.load_positions is None:
        return
    filled = case["filled"]
    everything = np.concatenate(layout.slots_of_host)
    assert sorted(everything) == list(range(filled))  # each row once
    shares = [len(slots) for slots in layout.slots_of_host]
    assert max(shares[: case["readers"]]) - min(shares[: case["readers"]]) <= 1
    assert not any(shares[case["readers"] :])
    whole = np.zeros((2, 16, T), np.int32)
    whole[:, :filled] = np.arange(1, 2 * filled * T + 1).reshape(2, filled, T)
    handed_out = layout.hand_out({"tokens": all_hosts_loaded(layout, whole)})["tokens"]
    np.testing.assert_array_equal(np.asarray(handed_out), whole)
    assert handed_out.sharding.is_equivalent_to(layout.sharding, 3)


def test_unread_slots_are_never_handed_out():
    """Whatever is in the slots of hosts that do not read, or beyond a reader's share."""
    layout = layout_of(hosts=4, readers=2, filled=5)
    whole = np.zeros((2, 16, T), np.int32)
    whole[:, :5] = 7
    loaded = np.asarray(all_hosts_loaded(layout, whole)).copy()
    loaded[loaded == 0] = -999
    handed_out = layout.hand_out({"tokens": jax.device_put(loaded, layout.load_sharding)})["tokens"]
    np.testing.assert_array_equal(np.asarray(handed_out), whole)


def test_evaluation_batches_are_laid_out_the_same_way():
    devices = np.array(jax.devices()).reshape(8, 1)
    layout = row_layout(
        (8, T),
        NamedSharding(Mesh(devices, ("fsdp", "tensor")), PartitionSpec("fsdp", None)),
        filled_slots=6,
        loading_hosts=(0,),
        host_of=lambda device: device.id // 4,
    )
    assert [slots.tolist() for slots in layout.slots_of_host] == [[0, 1, 2, 3, 4, 5], []]
    whole = np.arange(1, 25).reshape(6, T)
    loaded = layout.to_devices(0, {"tokens": whole})["tokens"]
    handed_out = layout.hand_out({"tokens": loaded})["tokens"]
    np.testing.assert_array_equal(np.asarray(handed_out)[:6], whole)
    assert not np.asarray(handed_out)[6:].any()
