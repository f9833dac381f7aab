"""Which host reads which rows, and that they are handed out as read, for simulated hosts."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext_lite.data.feed import row_layout

T = 4


def layout_of(
    hosts,
    *,
    readers=None,
    filled=13,
    shape=(8, 1),
    order=range(8),
    spec=(None, "fsdp", None),
):
    mesh = Mesh(np.array(jax.devices())[list(order)].reshape(shape), ("fsdp", "tensor"))
    return row_layout(
        (2, 16, T) if len(spec) == 3 else (16, T),
        NamedSharding(mesh, PartitionSpec(*spec)),
        filled_slots=filled,
        loading_hosts=range(hosts if readers is None else readers),
        host_of=lambda device: device.id // (8 // hosts),
    )


def handed_out(layout, whole, unread=0):
    """What all devices have once each host has loaded its rows, onto its own devices; elsewhere stands `unread`."""
    parts = []
    for host, slots in enumerate(layout.slots_of_host):
        loaded = layout.to_devices(host, {"tokens": whole[..., slots, :]})["tokens"]
        per_host = 8 // len(layout.slots_of_host)
        for shard in loaded.addressable_shards:
            assert (
                shard.device.id // per_host == host or not np.asarray(shard.data).any()
            )
        parts.append(np.asarray(loaded))
    assert (sum((part != 0).astype(int) for part in parts) <= 1).all()
    loaded = sum(parts)
    loaded = np.where(loaded == 0, unread, loaded)
    return layout.reshard({"tokens": jax.device_put(loaded, layout.load_sharding)})[
        "tokens"
    ]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("hosts", "readers", "shape", "filled", "order"),
    [
        (2, 1, (8, 1), 13, range(8)),
        (4, 4, (2, 4), 13, range(8)),
        (2, 2, (2, 4), 13, (0, 4, 1, 5, 2, 6, 3, 7)),
    ],
)
@pytest.mark.parametrize(
    "spec", [(None, "fsdp", None), ("fsdp", None)], ids=["training", "evaluation"]
)
def test_rows_are_handed_out_as_they_were_read(
    hosts, readers, shape, filled, order, spec
):
    """Whatever is in the slots of hosts that do not read, or beyond a reader's share."""
    layout = layout_of(
        hosts, readers=readers, shape=shape, filled=filled, order=order, spec=spec
    )
    assert layout.load_positions is not None
    assert sorted(np.concatenate(layout.slots_of_host)) == list(
        range(filled)
    )  # each row once
    shares = [len(slots) for slots in layout.slots_of_host]
    assert max(shares[:readers]) - min(shares[:readers]) <= 1
    assert not any(shares[readers:])
    whole = np.zeros((*(2,) * (len(spec) - 2), 16, T), np.int32)
    whole[..., :filled, :] = np.arange(1, whole[..., :filled, :].size + 1).reshape(
        whole[..., :filled, :].shape
    )
    found = handed_out(layout, whole, unread=-999)
    np.testing.assert_array_equal(np.asarray(found), whole)
    assert found.sharding.is_equivalent_to(layout.sharding, whole.ndim)
