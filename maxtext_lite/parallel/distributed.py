"""The start of a process: joining the other processes of its run, and the devices of all of them."""

import os
import signal
import socket
import sys
import threading
import time
from types import TracebackType
from typing import Any

import jax

from maxtext_lite.config import UserError
from maxtext_lite.config.kernels import Accelerator, installed_tokamax
from maxtext_lite.config.observers import EXIT_HANGS, observers
from maxtext_lite.config.status_line import status_line
from maxtext_lite.parallel.cluster import ProcessInfo, process_info
from maxtext_lite.parallel.compiler_flags import installed_compilers, set_compiler_flags, set_gpu_memory
from maxtext_lite.parallel.coordination import coordinator_address

_SIMULATED = "--xla_force_host_platform_device_count="
_NAME_SERVER_SECONDS = 10.0
_EXIT_SECONDS = 5.0
_NO_PORT = "Failed to start RPC server"  # as jax says it of a port that is taken


def start_devices(*, timeout_seconds: float = 300) -> list[Any]:
    """All devices of the run, once the runtime is up. Call it before anything else asks jax for a device.

    One of several processes first joins the others, and then sees their devices too: see `cluster.process_info`. A
    process that is alone starts nothing.

    A CPU that simulates N devices gets 2 N threads. By default XLA gives it one for each core or device; inside a
    collective every device blocks one, and if work then finds none left, XLA aborts after 40 seconds.

    Args:
      timeout_seconds: how long to wait for the other processes before the process ends with exit code 1.
    Raises:
      UserError: the environment describes the processes incompletely or wrongly.
    """
    for compiler in installed_compilers():
        set_compiler_flags(compiler)
        if compiler == "gpu":
            set_gpu_memory()
    for flag in os.environ.get("XLA_FLAGS", "").split():
        if flag.startswith(_SIMULATED):
            os.environ.setdefault("NPROC", str(2 * int(flag.removeprefix(_SIMULATED))))
    if not jax.distributed.is_initialized():
        found = process_info(os.environ, on_tpu=_uses_tpu())
        if found is not None:
            _join_the_others(found, timeout_seconds)
    devices = jax.devices()
    status_line.is_first = jax.process_index() == 0
    return devices


def accelerator_of(device: Any) -> Accelerator:
    """The kind of a device, as far as the choice of a kernel depends on it."""
    if device.platform != "gpu":
        return Accelerator(device.platform)
    return Accelerator("gpu", device.compute_capability, installed_tokamax())


def simulated_devices(num_devices: int) -> list[Any]:
    """CPU devices that this process simulates, without joining others; call it before jax is asked for any device.

    Raises:
      UserError: jax is already running with fewer.
    """
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_SIMULATED)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_SIMULATED}{num_devices}"])
    jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()
    if len(devices) < num_devices:
        raise UserError(
            f"--devices={num_devices}: jax has started with {len(devices)}. Nearest that works: {len(devices)}."
        )
    return devices[:num_devices]


def devices_share_threads() -> bool:
    """Whether they are simulated devices of a CPU, on which one program must end before the next begins.

    They share a few threads: with two programs running, a collective of one can wait forever for a device whose thread
    the other holds.
    """
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def _uses_tpu() -> bool:
    """Whether this process will use TPUs: jax lists them in its platforms if it finds any."""
    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    return "tpu" in (platforms or "").split(",")


def _join_the_others(found: ProcessInfo, timeout_seconds: float) -> None:
    for observer in observers:
        timeout_seconds = observer.seconds_to_join(timeout_seconds)
    # After a time-out XLA calls abort() with a stack trace, which Python cannot catch, so we stop before that.
    watch = threading.Timer(timeout_seconds, _give_up, (found, timeout_seconds))
    watch.daemon = True
    # SIGTERM stays ours: jax would have each host ask its preemption service for the step after which to save.
    jax.config.update("jax_enable_preemption_service", False)
    arguments: dict[str, Any] = {}
    for observer in observers:
        arguments |= observer.before_joining(found.process_id)
    try:
        address = found.address or coordinator_address(found.method, timeout_seconds)
        _require_host(found, address)
        watch.start()
        jax.distributed.initialize(
            address,
            found.num_processes,
            found.process_id,
            local_device_ids=found.local_device_ids,
            cluster_detection_method="deactivate",  # it might assign only some of the devices
            initialization_timeout=int(timeout_seconds) + 60,
            **arguments,
        )
    except (ValueError, RuntimeError) as error:
        if _NO_PORT in str(error):
            raise UserError(f"{found.stated_by}: process 0 cannot listen there: {_NO_PORT}.") from None
        if isinstance(error, RuntimeError) and found.method is None:
            raise  # about the connection; other errors mean that the environment contains what jax cannot use
        raise UserError(f"{found.stated_by} cannot be used: {str(error).splitlines()[0]}") from None
    finally:
        watch.cancel()
    for observer in observers:
        observer.after_joining(found.process_id, found.num_processes)
    sys.excepthook = _report_and_end_soon


def _require_host(found: ProcessInfo, address: str) -> None:
    """Refuses a coordinator whose name has no address. In Kubernetes a pod's name has none until the pod runs."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return
    host = address.rpartition(":")[0].strip("[]")
    until = time.monotonic() + _NAME_SERVER_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or time.monotonic() > until:  # EAI_AGAIN: no name server answers now
                raise UserError(f"{found.stated_by}: the host {host} is not known here ({error.strerror}).") from None
        time.sleep(1)


def end_soon(code: int) -> None:
    """Call it when one of several processes is about to exit because it failed.

    At exit jax waits for the other processes, which wait for this one in a collective: minutes, and then abort().
    Processes with the same failure, such as a wrong config, need a moment; after a few seconds this process ends with
    `code`. A single process has nothing to wait for, so this does nothing.
    """
    if jax.distributed.is_initialized():
        watch = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
        watch.daemon = True
        watch.start()


def _report_and_end_soon(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, traceback)
    code = 128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1
    if code == 1:
        for observer in observers:
            observer.failed(error)
    end_soon(code)
    for observer in observers:
        observer.finish(code)


def _give_up(found: ProcessInfo, seconds: float) -> None:
    missing = f"not all of the {found.num_processes} processes have connected after {seconds:g} seconds"
    print(f"error: {missing}. Process 0 is at {found.stated_by}.", file=sys.stderr, flush=True)
    os._exit(EXIT_HANGS if observers else 1)
