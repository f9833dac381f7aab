"""The machine that every test sees: eight simulated CPU devices, set before anything imports jax."""

import gc
import hashlib
import os
import platform
from pathlib import Path

SIMULATED_DEVICES = 8

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The same collectives and buffers; only the last step, to machine code, tries less hard. Each option halves the time of
# compiling. The second leaves out MLIR on the way there; a version of XLA that does not know it takes no notice.
QUICK_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true",
)
_devices = f"--xla_force_host_platform_device_count={SIMULATED_DEVICES}"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), _devices, *QUICK_COMPILATION]).strip()
# XLA gives the simulated devices one thread each. Steps dispatched ahead take some of them, the others then wait in a
# collective for a device that no thread is left to run, and XLA aborts after 40 seconds. Twice as many threads suffice.
os.environ.setdefault("NPROC", str(2 * SIMULATED_DEVICES))

# Tracing makes many objects and few cycles: looking for those after every 700 costs time, more as a process grows.
gc.set_threshold(50_000, 20, 100)

# Torch, the independent route, shares the cores with the other test processes.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _cpu() -> str:
    """What decides whether machine code compiled here runs: a cache carried to a lesser CPU must not be read there."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return hashlib.sha256(f"{platform.platform()} {platform.processor()} {flags}".encode()).hexdigest()[:12]


# Most of the suite's time is compilation, and much of it is the same every time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache" / _cpu()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
