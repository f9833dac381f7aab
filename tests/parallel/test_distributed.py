"""The runtime is given threads enough for the devices it simulates."""

import os

import jax
import pytest

from maxtext_lite.parallel import start_devices


@pytest.mark.parametrize(("flags", "before", "threads"), [
    ("--xla_force_host_platform_device_count=4", None, "8"),
    ("--xla_other=1 --xla_force_host_platform_device_count=8", None, "16"),
    ("--xla_force_host_platform_device_count=4", "32", "32"),  # the user's own choice stands
    ("", None, None),
])  # fmt: skip
def test_simulated_devices_get_two_threads_each(flags, before, threads, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("NPROC", raising=False)
    if before:
        monkeypatch.setenv("NPROC", before)
    assert start_devices() == jax.devices()
    assert os.environ.get("NPROC") == threads
