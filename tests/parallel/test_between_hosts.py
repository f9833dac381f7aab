"""Messages among hosts, simulated by threads joined by a wire; whole runs test real processes."""

import errno

import jax
import numpy as np
import pytest

from maxtext_lite.config.errors import WriteError
from maxtext_lite.parallel import (
    bytes_of_host,
    exchange,
    make_largest_of_hosts,
    on_first_host,
    value_of_host,
)
from maxtext_lite.parallel import (
    hosts as between_hosts,
)
from tests.meshes import mesh_of
from tests.parallel.wire import NUM_HOSTS, joined_hosts


@pytest.fixture
def wire(monkeypatch):
    return joined_hosts(monkeypatch)


def test_one_host_exchanges_with_itself():
    value = {"a": [1, None, "é"]}
    assert exchange(value) == [value]
    assert value_of_host(0, value) == value
    assert bytes_of_host(0, b"abc") == b"abc"


@pytest.mark.fast
def test_every_host_gets_every_value_and_equal_ones_are_not_sent(wire):
    long = "é" * 100_000
    assert (
        wire.on_all(lambda host: exchange([host, None]))
        == [[[number, None] for number in range(3)]] * 3
    )
    assert (
        wire.on_all(lambda host: exchange({"found": long}))
        == [[{"found": long}] * 3] * 3
    )
    assert wire.sent_bytes < 100
    values = ["other", long, long]
    assert wire.on_all(lambda host: exchange(values[host])) == [values] * 3
    assert (
        wire.sent_bytes < 2 * len(long.encode()) * 3 + 5_000
    )  # an é is six letters of JSON


@pytest.mark.parametrize("host", range(NUM_HOSTS))
def test_the_value_of_one_host_is_all_that_is_sent(wire, host):
    value = {"ids": list(range(3000)), "log_probabilities": [-0.1, 1e-300, -7.25]}
    assert (
        wire.on_all(
            lambda number: value_of_host(host, value if number == host else object)
        )
        == [value] * 3
    )
    assert wire.sent_bytes <= 2 * len(str(value))
    assert wire.on_all(lambda number: value_of_host(host, None)) == [None] * 3


def test_all_hosts_have_what_the_first_one_found_and_it_raises_its_own_error(
    wire, monkeypatch
):
    found = wire.on_all(lambda _: on_first_host("there", lambda: [[1, -1e-300], True]))
    assert found == [[[1, -1e-300], True]] * 3

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(between_hosts.jax, "process_index", lambda: 0)
    with pytest.raises(WriteError, match="there cannot be written: No space left"):
        on_first_host("there", full)


def test_bytes_come_as_they_are_in_pieces_of_few_sizes(wire, monkeypatch):
    monkeypatch.setattr(between_hosts, "_FIRST_BYTES", 16)
    monkeypatch.setattr(between_hosts, "_MOST_BYTES", 64)
    content = np.random.default_rng(0).integers(256, size=300, dtype=np.uint8).tobytes()
    for size in (0, 1, 7, 8, 9, 71, 72, 73, 135, 136, 300):
        said = [
            content[:size] if number == 1 else b"not this"
            for number in range(NUM_HOSTS)
        ]
        assert (
            wire.on_all(lambda number, said=said: bytes_of_host(1, said[number]))
            == [content[:size]] * 3
        )
    assert wire.sizes <= {1 << power for power in range(7)}


def test_the_largest_number_of_all_hosts_is_found():
    largest_of_hosts = make_largest_of_hosts(mesh_of(data=4, tensor=2))
    assert int(largest_of_hosts(0)) == 0
    largest = largest_of_hosts(2)
    assert int(largest) == 2
    assert largest.sharding.is_fully_replicated
    assert jax.device_count() == 8
