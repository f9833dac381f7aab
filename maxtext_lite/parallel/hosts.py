"""The processes of a run: where each stands, how they join, and what they tell each other outside the train step.

jax itself finds process 0 in SLURM, with Open MPI and in TPU slices. It would assign one GPU to each process of a node,
whatever its share, and takes the tasks of a SLURM job for those of a step: both are decided here.
"""

import dataclasses
import errno
import hashlib
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from maxtext_lite.config.errors import UserError, writing
from maxtext_lite.config.kernels import Accelerator, installed_tokamax
from maxtext_lite.config.phases import EXIT_HANGS, observers, phases, status_line
from maxtext_lite.parallel.coordination import coordinator_address, detected_tpus
from maxtext_lite.parallel.mesh import over_all_devices, sharding

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
    """This process's GPUs on the node, where `num_sharing` processes see the same ones; None: all that it sees."""
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


@dataclass(frozen=True)
class Flag:
    """A flag of a compiler.

    Attributes:
      name: without dashes or value, as xla_gpu_enable_command_buffer.
      value: as it stands after the equals sign.
      why: what it brings, by the compiled program.
    """

    name: str
    value: str
    why: str


Compiler = Literal["gpu", "tpu"]

VARIABLES: Mapping[Compiler, str] = {"gpu": "XLA_FLAGS", "tpu": "LIBTPU_INIT_ARGS"}
"""The environment variable that each compiler reads its flags from, once, when it starts."""

FLAGS: Mapping[Compiler, tuple[Flag, ...]] = {
    "gpu": (Flag(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        str(2 << 20),
        "a layer's gradients are reduced one by one beside its matmuls, not all at once after them: 1 to 7 % less of a "
        "step is spent waiting",
    ),),
    "tpu": (Flag(
        "xla_tpu_scoped_vmem_limit_kib",
        "98304",
        "fusions around matmuls may hold larger tiles on the chip: 9 to 11 % fewer cycles of a dense layer",
    ),),
}  # fmt: skip
"""What is set on each platform unless its variable names the flag already. docs/performance.md has the figures."""


_LIBRARIES: Mapping[Compiler, tuple[str, ...]] = {
    "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    "tpu": ("libtpu",),
}


def installed_compilers() -> tuple[Compiler, ...]:
    """Those whose library is installed, of which nothing is imported."""
    return tuple(compiler for compiler, names in _LIBRARIES.items() if any(map(importlib.util.find_spec, names)))


GPU_MEMORY = "XLA_CLIENT_MEM_FRACTION", "0.94"
"""The variable that says what share of a GPU's memory jax may use, and its value: the vendor's figure of an H100 or an
H200, which plans fill, as a GPU has 6 to 7 % more. jax's default is 0.75. The rest is left to CUDA and NCCL."""
_OLDER_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"

SCHEDULED_MEMORY = Flag(
    "xla_gpu_memory_limit_slop_factor",
    "115",
    "XLA may fill 115 % of 80 % of the memory, within the share above; beyond its own 95 % of 80 % it overlaps no "
    "collectives: a program of 82 to 90 % of an H200 takes 5 % less time, and 3 % more memory",
)
"""What XLA's scheduler may fill. It does not know how much jax may use."""


def set_gpu_memory() -> None:
    """Sets the shares of a GPU's memory for jax and for XLA's scheduler, unless the environment says that for jax.

    Call it before jax starts.
    """
    variable, share = GPU_MEMORY
    if not os.environ.get(variable) and not os.environ.get(_OLDER_NAME):
        os.environ[variable] = share
        set_compiler_flags("gpu", (SCHEDULED_MEMORY,))


def set_compiler_flags(compiler: Compiler, flags: tuple[Flag, ...] | None = None) -> None:
    """Adds flags to the variable that a compiler reads, but those that it names already. Call it before jax starts.

    Args:
      flags: None: those of FLAGS.
    """
    variable = VARIABLES[compiler]
    given = os.environ.get(variable, "").split()
    named = {flag.lstrip("-").partition("=")[0] for flag in given}
    more = [f"--{flag.name}={flag.value}" for flag in flags or FLAGS[compiler] if flag.name not in named]
    if more:
        os.environ[variable] = " ".join([*given, *more])


_SIMULATED = "--xla_force_host_platform_device_count="
_EXIT_SECONDS = 5.0


def start_devices(*, timeout_seconds: float = 300) -> list[Any]:
    """All devices of the run, once the runtime is up. Call it before anything else asks jax for a device.

    One of several processes first joins the others, and then sees their devices too: see `hosts.process_info`. A
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
    """Refuses a port at which another program listens: a server of jax that cannot start may crash as it ends."""
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
    first_line = str(error).partition("\n")[0]
    for observer in observers:
        observer.finish(code, f"{kind.__name__}: {first_line}")


def _give_up(found: ProcessInfo, seconds: float) -> None:
    missing = f"not all of the {found.num_processes} processes have connected after {seconds:g} seconds"
    print(f"error: {missing}. Process 0 is at {found.stated_by}.", file=sys.stderr, flush=True)
    os._exit(EXIT_HANGS if observers else 1)


Result = TypeVar("Result")

_FIRST_BYTES = 2**10  # of every message, including its length; most messages are no longer
_MOST_BYTES = 2**26  # sent at once, because they pass through the memory of the devices


def exchange(value: Any) -> list[Any]:
    """The value of every host, by host number. All hosts must call it, in the same order; values are JSON.

    Each distinct value is sent once, and none if all hosts have the same.
    """
    if jax.process_count() == 1:
        return [value]
    phases.advance()
    text = json.dumps(value).encode()
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
    digests = [each.tobytes() for each in np.asarray(multihost_utils.process_allgather(digest))]
    texts = {digest.tobytes(): text}
    if len(set(digests)) > 1:
        texts = {each: bytes_of_host(digests.index(each), text) for each in dict.fromkeys(digests)}
    return [json.loads(texts[each]) for each in digests]


def value_of_host(host: int, value: Any) -> Any:
    """The value of one host, on every host. All hosts must call it, in the same order; that host's value is JSON."""
    if jax.process_count() == 1:
        return value
    return json.loads(bytes_of_host(host, json.dumps(value).encode() if jax.process_index() == host else b""))


def on_first_host(path: str | Path, work: Callable[[], Result]) -> Result:
    """The result of `work()` on the first host, on every host; it is JSON. All hosts must call it, in the same order.

    The others wait until the work is done. If it fails, the first host raises the error, and its end ends them.

    Args:
      path: what `work` writes.
    Raises:
      WriteError: in place of an OSError.
    """
    result: Any = None
    if jax.process_index() == 0:
        with writing(path):
            result = work()
    return value_of_host(0, result)


def bytes_of_host(host: int, data: bytes) -> bytes:
    """The bytes of one host, on every host. All hosts must call it, in the same order; `data` of others is ignored.

    They travel in pieces padded to powers of two, so that few programs are compiled.
    """
    if jax.process_count() == 1:
        return data
    phases.advance()
    is_source = jax.process_index() == host
    message = len(data).to_bytes(8, "big") + data if is_source else b""
    found = _piece_of_host(message[:_FIRST_BYTES], _FIRST_BYTES, is_source)
    length = 8 + int.from_bytes(found[:8], "big")
    for start in range(_FIRST_BYTES, length, _MOST_BYTES):
        here = min(length - start, _MOST_BYTES)
        found += _piece_of_host(message[start : start + here], here, is_source)
    return found[8:length]


def _piece_of_host(piece: bytes, num_bytes: int, is_source: bool) -> bytes:
    padded = np.zeros(1 << (num_bytes - 1).bit_length(), np.uint8)
    padded[: len(piece)] = np.frombuffer(piece, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded, is_source)).tobytes()[:num_bytes]


def make_largest_of_hosts(mesh: Mesh) -> Callable[[int], jax.Array]:
    """A function from this host's number to the largest of all hosts' numbers, on the devices.

    All hosts must call it, in the same order as their other device work; it does not wait.
    """
    split = over_all_devices(mesh)
    largest = jax.jit(jnp.max, out_shardings=sharding(mesh))

    def largest_of_hosts(number: int) -> jax.Array:
        return largest(jax.make_array_from_callback((mesh.size,), split, lambda index: np.full(1, number, np.int32)))

    return largest_of_hosts
