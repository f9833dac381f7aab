"""Hosts simulated by threads, joined by a wire in place of `multihost_utils`."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from maxtext_lite.parallel import hosts as between_hosts

NUM_HOSTS = 3


class Wire:
    """Joins `NUM_HOSTS` threads, and counts what each of them sends."""

    def __init__(self):
        self.host, self.barrier = (
            threading.local(),
            threading.Barrier(NUM_HOSTS, timeout=60),
        )
        self.said, self.sent_bytes, self.sizes = [None] * NUM_HOSTS, 0, set()

    def joined(self, array):
        self.said[self.host.number] = array
        self.barrier.wait()
        said = np.stack(self.said)  # fails where hosts bring arrays of several shapes
        if self.barrier.wait() == 0:
            self.sent_bytes += array.nbytes
            self.sizes.add(array.nbytes)
        return said

    def process_allgather(self, array):
        return self.joined(array)

    def broadcast_one_to_all(self, array, is_source):
        return self.joined(array if is_source else np.zeros_like(array)).sum(
            axis=0, dtype=array.dtype
        )

    def on_all(self, work):
        """The result of `work(host)` on each host."""

        def on(number):
            self.host.number = number
            return work(number)

        self.sent_bytes = 0
        with ThreadPoolExecutor(NUM_HOSTS) as pool:
            return list(pool.map(on, range(NUM_HOSTS)))


def joined_hosts(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """A wire that stands in for `multihost_utils`; a thread of `on_all` is the process of its number."""
    made = Wire()
    monkeypatch.setattr(between_hosts.jax, "process_count", lambda: NUM_HOSTS)
    monkeypatch.setattr(between_hosts.jax, "process_index", lambda: made.host.number)
    monkeypatch.setattr(between_hosts, "multihost_utils", made)
    return made
