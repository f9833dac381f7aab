"""The start of a process: the other processes of its run, and the devices of all."""

import os
import re
import signal
import sys
import threading
from types import TracebackType
from typing import Any

import jax

from maxtext_lite.config import UserError

_ADDRESS, _NUM_PROCESSES, _PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_SIMULATED = "--xla_force_host_platform_device_count="
_EXIT_SECONDS = 5.0


def start_devices(*, timeout_seconds: float = 300) -> list[Any]:
    """All devices of the run, once the runtime is up. Call it before anything else asks jax for a device.

    A process that is one of several joins the others first, and sees their devices too. It is one of several where the
    environment says so: JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID, as
    scripts/launch_local.py sets them. (jax itself reads only the first of the three.)

    A CPU that simulates N devices gets 2 N threads. XLA gives it one for each core or device, every device blocks
    one inside a collective, and work that finds none left stops the run: XLA aborts after 40 seconds.

    Args:
      timeout_seconds: how long to wait for the other processes. After that the process ends with exit code 1.
    Raises:
      UserError: one of the three variables is missing or wrong.
    """
    for flag in os.environ.get("XLA_FLAGS", "").split():
        if flag.startswith(_SIMULATED):
            os.environ.setdefault("NPROC", str(2 * int(flag.removeprefix(_SIMULATED))))
    if _is_one_of_several() and not jax.distributed.is_initialized():
        _join_the_others(timeout_seconds)
    return jax.devices()


def _is_one_of_several() -> bool:
    return bool(os.environ.get(_ADDRESS)) or os.environ.get(_NUM_PROCESSES, "1") != "1"


def _join_the_others(timeout_seconds: float) -> None:
    address = os.environ.get(_ADDRESS, "")
    if not re.fullmatch(r".+:\d+", address):
        raise UserError(f"{_ADDRESS}={address} is not host:port of process 0.")
    num_processes = _whole_number(_NUM_PROCESSES, minimum=1)
    process_id = _whole_number(_PROCESS_ID, minimum=0)
    if process_id >= num_processes:
        raise UserError(
            f"{_PROCESS_ID}={process_id} is not below {_NUM_PROCESSES}={num_processes}. "
            f"Nearest that works: {num_processes - 1}."
        )
    # XLA answers a time-out with abort() and a stack trace, which Python cannot catch: we give up before it does.
    watch = threading.Timer(timeout_seconds, _give_up, (address, num_processes, process_id, timeout_seconds))
    watch.daemon = True
    watch.start()
    jax.distributed.initialize(
        address,
        num_processes,
        process_id,
        cluster_detection_method="deactivate",  # it might hand us a share of the devices
        initialization_timeout=int(timeout_seconds) + 60,
    )
    watch.cancel()
    sys.excepthook = _report_and_end_soon


def end_soon(code: int) -> None:
    """Call it where a process that is one of several is about to exit because it failed.

    At exit jax waits for the other processes, which wait for this one in a collective: minutes, and then abort(). Those
    that failed alike, as on a wrong config, need a moment; after a few seconds this process ends with `code`. With one
    process there is nothing to wait for, and this does nothing.
    """
    if jax.distributed.is_initialized():
        watch = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
        watch.daemon = True
        watch.start()


def _report_and_end_soon(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, traceback)
    end_soon(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)


def _whole_number(variable: str, *, minimum: int) -> int:
    text = os.environ.get(variable, "")
    if not (text.isascii() and text.isdigit() and int(text) >= minimum):
        raise UserError(
            f"{variable}={text} is not a whole number of at least {minimum}. Nearest that works: {minimum}."
        )
    return int(text)


def _give_up(address: str, num_processes: int, process_id: int, timeout_seconds: float) -> None:
    waited_for = f"process 0 at {_ADDRESS}={address}" if process_id else f"all {num_processes} processes"
    print(
        f"error: process {process_id} of {num_processes} waited {timeout_seconds:g} seconds for {waited_for}; "
        f"{'it does' if process_id else 'some did'} not answer.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
