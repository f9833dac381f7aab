"""Which of several processes this one is, and how they join.

jax itself finds process 0 in SLURM, with Open MPI and in TPU slices. It would assign one GPU to each process of a node,
whatever its share, and takes the tasks of a SLURM job for those of a step: both are decided here.
"""

import dataclasses
import errno
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from maxtext_lite.config.errors import UserError
from maxtext_lite.config.phases import EXIT_HANGS, observers
from maxtext_lite.parallel.coordination import coordinator_address, detected_tpus
from maxtext_lite.parallel.hosts import end_soon

_ADDRESS, _NUM_PROCESSES, _PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_LARGEST_PORT = 65535

Environment = Mapping[str, str]


@dataclass(frozen=True)
class ProcessInfo:
    """One of several processes.

    Attributes:
      stated_by: what says where process 0 is, as VARIABLE=value or a method of jax.
      address: host:port of process 0; "" if jax finds it.
      local_device_ids: this process's GPUs among those of the machine; None: all that it sees.
      method: the `cluster_detection_method` with which jax finds the address.
    """

    stated_by: str
    num_processes: int
    process_id: int
    address: str = ""
    local_device_ids: tuple[int, ...] | None = None
    method: str | None = None


def process_info(environment: Environment, *, on_tpu: bool) -> ProcessInfo | None:
    """The place of this process in its run; None if it is alone.

    The first of these that describes several processes counts:

    1. JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID, as set by
       scripts/launch_local.py. The first of them alone only replaces the address from SLURM or Open MPI.
    2. SLURM: a step of several tasks. Tasks on one node that see the same GPUs share them equally.
    3. Open MPI, in the same way.
    4. On TPUs: GKE's TPU_WORKER_HOSTNAMES and MEGASCALE_*, or the metadata of a TPU VM, as jax reads them.

    Args:
      on_tpu: whether the process will use TPUs.
    Raises:
      UserError: a description is incomplete or wrong.
    """
    found = None
    if environment.get(_NUM_PROCESSES, "1") == "1":
        found = _slurm(environment) or _open_mpi(environment)
        if found is None and not environment.get(_ADDRESS):
            return _tpu() if on_tpu else None
    if found is None:
        num_processes = _whole_number(environment, _NUM_PROCESSES, minimum=1)
        process_id = _whole_number(environment, _PROCESS_ID, minimum=0)
        if process_id >= num_processes:
            raise UserError(
                f"{_PROCESS_ID}={process_id} is not below {_NUM_PROCESSES}={num_processes}. "
                f"Nearest that works: {num_processes - 1}."
            )
        found = ProcessInfo("", num_processes, process_id)
    address = environment.get(_ADDRESS)
    if not address and found.method:
        return found
    port = re.fullmatch(r".+:([0-9]{1,5})", address or "")
    if port is None or int(port[1]) > _LARGEST_PORT:
        raise UserError(f"{_ADDRESS}={address or ''} is not host:port of process 0.")
    return dataclasses.replace(found, stated_by=f"{_ADDRESS}={address}", address=address)


def _slurm(environment: Environment) -> ProcessInfo | None:
    nodes = environment.get("SLURM_STEP_NODELIST")  # set by srun for the processes that it starts
    count = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    if nodes is None or count == "1":
        return None
    local = None
    if "SLURM_GPUS_PER_TASK" not in environment:  # with it, each task sees only its own GPUs
        counts: list[int] = []
        for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "1")):
            counts += [int(tasks)] * int(times or 1)  # 2(x3),1 means 2, 2, 2, 1
        here = counts[int(environment.get("SLURM_NODEID", "0"))]
        local = _share_of_gpus(environment, int(environment["SLURM_LOCALID"]), here)
    process_id = int(environment["SLURM_PROCID"])
    address = ""
    # jax drops the end of gpu-[1,3-5].cluster
    suffixed = re.match(r"([^\[,]+)\[([^\],-]+)[^\]]*\]([^,]+)", nodes)
    if suffixed:
        port = environment.get("JAX_COORDINATOR_PORT", str(61440 + int(environment["SLURM_JOB_ID"]) % 4096))
        address = f"{''.join(suffixed.groups())}:{port}"
    return ProcessInfo(f"SLURM_STEP_NODELIST={nodes}", int(count), process_id, address, local, "slurm")


def _open_mpi(environment: Environment) -> ProcessInfo | None:
    count = environment.get("OMPI_COMM_WORLD_SIZE", "1")
    if count == "1":
        return None
    launcher = environment.get("OMPI_MCA_orte_hnp_uri")
    if not launcher and _ADDRESS not in environment:
        raise UserError(
            f"OMPI_COMM_WORLD_SIZE={count}, but this Open MPI does not say where process 0 is. "
            f"Pass mpirun -x {_ADDRESS}=host:port."
        )
    here = int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    local = _share_of_gpus(environment, int(environment["OMPI_COMM_WORLD_LOCAL_RANK"]), here)
    process_id = int(environment["OMPI_COMM_WORLD_RANK"])
    return ProcessInfo(f"OMPI_MCA_orte_hnp_uri={launcher}", int(count), process_id, "", local, "ompi")


def _share_of_gpus(environment: Environment, local_process: int, num_sharing: int) -> tuple[int, ...] | None:
    """This process's GPUs on the node if `num_sharing` processes see the same ones; None: all that it sees."""
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return None  # jax reads the variable
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        uses_nvidia = environment.get("JAX_PLATFORMS", "cuda").startswith(("cuda", "gpu"))
        count = (gpus_of_node() if uses_nvidia else 0) or num_sharing  # another vendor's: one each
    else:
        count = len([gpu for gpu in visible.split(",") if gpu])
    if num_sharing == 1 or count < num_sharing:  # each process sees its own
        return None
    each, rest = divmod(count, num_sharing)
    if rest:
        raise UserError(
            f"{num_sharing} processes on a node cannot share its {count} GPUs equally. "
            f"Nearest that works: {max(n for n in range(1, num_sharing) if count % n == 0)} on each node."
        )
    return tuple(range(local_process * each, (local_process + 1) * each))


def gpus_of_node() -> int:
    """NVIDIA's GPUs of this node, or those that its container shows; found without starting CUDA."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])


def _tpu() -> ProcessInfo | None:
    """The place in TPU slices that jax detects."""
    method, num_processes, process_id = detected_tpus()
    return None if num_processes == 1 else ProcessInfo(method, num_processes, process_id, method=method)


def _whole_number(environment: Environment, variable: str, *, minimum: int) -> int:
    text = environment.get(variable, "")
    if not (text.isascii() and text.isdigit() and int(text) >= minimum):
        raise UserError(
            f"{variable}={text} is not a whole number of at least {minimum}. Nearest that works: {minimum}."
        )
    return int(text)


def join_the_others(*, on_tpu: bool, timeout_seconds: float) -> None:
    """Joins the other processes of the run, if there are any.

    Raises:
      UserError: the environment describes them incompletely or wrongly.
    """
    found = process_info(os.environ, on_tpu=on_tpu)
    if found is not None:
        _join(found, timeout_seconds)


def _join(found: ProcessInfo, timeout_seconds: float) -> None:
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
        if found.process_id == 0:
            _require_free_port(found, address)
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
    except ValueError as error:
        raise UserError(f"{found.stated_by} cannot be used: {str(error).splitlines()[0]}") from None
    finally:
        watch.cancel()
    for observer in observers:
        observer.after_joining(found.process_id, found.num_processes)
    sys.excepthook = _report_and_end_soon


def _require_free_port(found: ProcessInfo, address: str) -> None:
    """Refuses a port that another program listens on: a server of jax that cannot start may crash as it ends."""
    stated = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "[::]:" + address.rpartition(":")[2])
    host, _, port = stated.rpartition(":")
    host = host.strip("[]")
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        socket.create_server(
            (host, int(port)), family=family, dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6()
        ).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"{found.stated_by}: process 0 cannot listen there: {error.strerror}.") from None


def _require_host(found: ProcessInfo, address: str) -> None:
    """Refuses a coordinator whose name has no address. In Kubernetes a pod's name has none until the pod runs."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return
    host = address.rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        if error.errno != socket.EAI_AGAIN:  # no name server answers now: jax tries again
            raise UserError(f"{found.stated_by}: the host {host} is not known here ({error.strerror}).") from None


def _report_and_end_soon(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, traceback)
    code = 128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1
    if code == 1:
        for observer in observers:
            observer.failed(error)
    end_soon(code)
    first_line = str(error).partition("\n")[0]
    for observer in observers:
        observer.finish(code, f"{kind.__name__}: {first_line}")


def _give_up(found: ProcessInfo, seconds: float) -> None:
    missing = f"not all of the {found.num_processes} processes have connected after {seconds:g} seconds"
    print(f"error: {missing}. Process 0 is at {found.stated_by}.", file=sys.stderr, flush=True)
    os._exit(EXIT_HANGS if observers else 1)
