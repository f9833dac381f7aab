"""The machine that every test sees, eight simulated CPU devices, set before jax is imported; and which tests run."""

import gc
import hashlib
import os
import platform
import signal
import sys
import threading
from pathlib import Path

import pytest

SIMULATED_DEVICES = int(
    os.environ.get("SIMULATED_DEVICES", "8")
)  # tests need 8; the golden record also has runs on 1

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The same collectives and buffers; only the last step, to machine code, tries less hard. The first and the last option
# halve the time of compiling, the two between take a quarter of the rest: no module is split for threads to share, and
# LLVM leaves out its slow passes. The last leaves out MLIR on the way; a version that does not know it takes no notice.
QUICK_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true",
)
_devices = f"--xla_force_host_platform_device_count={SIMULATED_DEVICES}"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), _devices, *QUICK_COMPILATION]
).strip()
# XLA gives the simulated devices one thread each. Steps dispatched ahead take some of them, the others then wait in a
# collective for a device that no thread is left to run, and XLA aborts after 40 seconds. Twice as many threads suffice.
os.environ.setdefault("NPROC", str(2 * SIMULATED_DEVICES))

# A shell ignores SIGINT for what it starts in the background, and all that it starts inherits that.
for number in (signal.SIGINT, signal.SIGTERM):
    if (
        signal.getsignal(number) == signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()
    ):
        signal.signal(
            number,
            signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
        )

# Compiled source is kept even where the shell says otherwise: without it, a third of the time that a process takes to
# import the library without jax goes into compiling it, and tests start many such processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Nobody reads in which line of Python an operation of a compiled program began: to write it down takes a twentieth.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# Tracing makes many objects and few cycles: looking for those after every 700 costs time, more as a process grows.
gc.set_threshold(50_000, 20, 100)

# Torch, the independent route, shares the cores with the other test processes: threads of its own that wait for each
# other's turn take four times as long. What the first process sets, those that it starts inherit.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _cpu() -> str:
    """What decides whether machine code compiled here runs: a cache carried to a lesser CPU must not be read there."""
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines()
        if Path("/proc/cpuinfo").exists()
        else []
    )
    flags = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return hashlib.sha256(
        f"{platform.platform()} {platform.processor()} {flags}".encode()
    ).hexdigest()[:12]


# Most of the suite's time is compilation, and much of it is the same every time.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).parent.parent / ".jax_cache" / _cpu()),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# ---- The order of the tests, and which of them `--fast` runs ------------------------------------------------------

TESTS = Path(__file__).parent

# Files stay together on a worker, in this order: those that train and compile for long first, those that take a second
# last, so that all workers end at about the same time. (`--no-loadscope-reorder`: xdist itself would go by the number
# of tests, and begin the longest files, which have few, at the end.) "." holds the tests of the commands.
FOLDERS = (
    "invariance",
    "docs",
    ".",
    "rl",
    "training",
    "models",
    "hf",
    "generation",
    "aot",
    "golden",
    "mutants",
    "parallel",
    "xla",
    "scripts",
    "data",
    "data/preparing",
    "process",
    "batching",
    "reporting",
    "config",
    "config/hf",
)
WITHOUT_JAX = ("batching", "reporting", "config")
"""Folders whose tests take milliseconds each: `--fast` runs the first case of each of their test functions."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast",
        action="store_true",
        help="the tests marked `fast`, and those that need no jax",
    )


def fast_tests(items: list[pytest.Item]) -> list[pytest.Item]:
    """Every case that is marked `fast`, and where no jax is needed the first case of every test function."""
    chosen = []
    functions = set()
    for item in items:
        function = (item.path, getattr(item, "originalname", item.name))
        needs_no_jax = item.path.relative_to(TESTS).parts[0] in WITHOUT_JAX
        if item.get_closest_marker("fast") or (
            needs_no_jax and function not in functions
        ):
            chosen.append(item)
        functions.add(function)
    return chosen


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    places = {folder: place for place, folder in enumerate(FOLDERS)}
    items.sort(
        key=lambda item: places.get(item.path.parent.relative_to(TESTS).as_posix(), 0)
    )
    if config.getoption("fast"):
        fast = fast_tests(items)
        config.hook.pytest_deselected(
            items=[item for item in items if item not in fast]
        )
        items[:] = fast


# ---- A bucket ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def bucket_environment():
    """The variables with which a process reaches an emulated bucket; this process has them while it is served."""
    from tests.bucket_emulator import bucket_server

    with bucket_server() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables


@pytest.fixture
def bucket(bucket_environment, tmp_path):
    """A path in that bucket that nothing is below."""
    from maxtext_lite.config.bucket import any_path

    return any_path(f"gs://bucket{tmp_path}", "bucket")


# ---- One device ----------------------------------------------------------------------------------------------------


def use_one_device(patch: pytest.MonkeyPatch) -> None:
    """Has runs see the first device alone, for which a step compiles in half the time."""
    import jax

    first = jax.devices()[:1]
    patch.setattr(jax, "devices", lambda *_: first)
    patch.setattr(jax, "device_count", lambda *_: 1)


@pytest.fixture
def one_device(monkeypatch):
    use_one_device(monkeypatch)


@pytest.fixture(scope="module")
def one_device_for_all():
    """The same for all tests of a module and for its fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        yield
