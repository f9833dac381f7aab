"""The start of a process: its devices."""

import os
from typing import Any

import jax

_SIMULATED = "--xla_force_host_platform_device_count="


def start_devices() -> list[Any]:
    """All devices of the run, once the runtime is up. Call it before anything else asks jax for a device.

    A CPU that simulates N devices gets 2 N threads. XLA gives it one for each core or device, every device blocks
    one inside a collective, and work that finds none left stops the run: XLA aborts after 40 seconds.
    """
    for flag in os.environ.get("XLA_FLAGS", "").split():
        if flag.startswith(_SIMULATED):
            os.environ.setdefault("NPROC", str(2 * int(flag.removeprefix(_SIMULATED))))
    return jax.devices()
