"""What a bench ran on, in one line for docs/performance.md."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import jax

from maxtext_lite.training.run_files import environment


def machine() -> str:
    """Cores and CPU or accelerator, versions, the date, and the load of the machine over the last minute."""
    versions = environment()["packages"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("jax", "jaxlib", "flax", "optax"))
    devices = jax.devices()
    if devices[0].platform == "cpu":
        hardware = f"{len(devices)} simulated on {os.cpu_count()} cores of {_cpu()}" if len(devices) > 1 else _cpu()
    else:
        hardware = devices[0].device_kind
    load, _, _ = os.getloadavg()
    return (
        f"{len(devices)} x {hardware}, {os.cpu_count()} cores, load {load:.1f}; {packages}, "
        f"Python {platform.python_version()}; {datetime.now(UTC):%Y-%m-%d}"
    )


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    facts = dict(
        (part.strip() for part in line.split(":", 1))
        for line in (info.read_text(encoding="utf-8").splitlines() if info.exists() else [])
        if ":" in line
    )
    family = f" (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else ""
    widest = "AMX" if "amx_tile" in facts.get("flags", "") else "AVX-512" if "avx512f" in facts.get("flags", "") else ""
    return f"{facts.get('model name', platform.machine())}{family}{', ' if widest else ''}{widest}"
