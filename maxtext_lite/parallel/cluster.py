"""The number and place of this process in its run, read from what a launcher, SLURM, Open MPI or a TPU slice sets.

jax itself finds the processes of a TPU slice, and does so here. For SLURM and Open MPI it reads the same variables, but
assigns one GPU to each process of a node, whatever its share, and takes the tasks of a job for those of a step.
"""

import dataclasses
import re
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from maxtext_lite.config import UserError

_ADDRESS, _NUM_PROCESSES, _PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_FIRST_PORT, _NUM_PORTS = 61440, 4096  # for jobs that share nothing but a number
_LARGEST_PORT = 65535
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"

Environment = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """One of several processes.

    Attributes:
      stated_by: the source of process 0's address, as VARIABLE=value.
      address: host:port of process 0; "" if jax finds it.
      local_device_ids: this process's GPUs among those of the machine; None: all that it sees.
      method: the `cluster_detection_method` with which jax finds everything; None: everything is stated here.
    """

    stated_by: str
    num_processes: int
    process_id: int
    address: str = ""
    local_device_ids: tuple[int, ...] | None = None
    method: str | None = None


def process_info(
    environment: Environment, *, on_tpu: bool, metadata: Callable[[str], str] | None = None
) -> ProcessInfo | None:
    """The place of this process in its run; None if it is alone.

    The first of these that describes several processes counts:

    1. JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID, as set by
       scripts/launch_local.py. The first of them alone only replaces the address from SLURM or Open MPI.
    2. SLURM: a step of several tasks. Tasks on one node that see the same GPUs share them equally.
    3. Open MPI, in the same way.
    4. On TPUs: GKE's TPU_WORKER_HOSTNAMES and MEGASCALE_*, or the metadata of a TPU VM.

    Args:
      on_tpu: whether the process will use TPUs.
      metadata: returns an attribute of this TPU VM by name, "" if there is none.
    Raises:
      UserError: a description is incomplete or wrong.
    """
    address = environment.get(_ADDRESS, "")
    if environment.get(_NUM_PROCESSES, "1") != "1":
        return _stated(environment)
    found = _slurm(environment) or _open_mpi(environment)
    if found is None and not address:
        return _tpu(environment, metadata or _tpu_metadata) if on_tpu else None
    return _stated(environment) if found is None else found


def _stated(environment: Environment) -> ProcessInfo:
    address = _address(environment)
    num_processes = _whole_number(environment, _NUM_PROCESSES, minimum=1)
    process_id = _below(environment, _PROCESS_ID, num_processes, _NUM_PROCESSES)
    return ProcessInfo(f"{_ADDRESS}={address}", num_processes, process_id, address)


def _address(environment: Environment) -> str:
    address = environment.get(_ADDRESS, "")
    port = re.fullmatch(r".+:([0-9]{1,5})", address)
    if port is None or int(port[1]) > _LARGEST_PORT:
        raise UserError(f"{_ADDRESS}={address} is not host:port of process 0.")
    return address


def _slurm(environment: Environment) -> ProcessInfo | None:
    nodes = environment.get("SLURM_STEP_NODELIST", "")  # set by srun for the processes that it starts
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    if not nodes or environment.get(count, "1") == "1":
        return None
    num_processes = _whole_number(environment, count, minimum=1)
    process_id = _below(environment, "SLURM_PROCID", num_processes, count)
    job = _whole_number(environment, "SLURM_JOB_ID", minimum=1)
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if first is None:
        raise UserError(f"SLURM_STEP_NODELIST={nodes} does not begin with a node.")
    stated_by, address = _coordinator(
        environment, f"SLURM_STEP_NODELIST={nodes}", "".join(part or "" for part in first.groups()), job
    )
    here = _tasks_on_node(environment)
    local = None
    if here > 1 and "SLURM_GPUS_PER_TASK" not in environment:  # with it, each task sees only its own GPUs
        local = _share(environment, "SLURM_LOCALID", here)
    return ProcessInfo(stated_by, num_processes, process_id, address, local)


def _tasks_on_node(environment: Environment) -> int:
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = environment.get(name, "1")
    counts: list[int] = []
    for part in text.split(","):  # 2(x3),1 means 2, 2, 2, 1
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise UserError(f"{name}={text} is not a list of task counts such as 2(x3),1.")
        counts += [int(found[1])] * int(found[2] or 1)
    node = _whole_number(environment, "SLURM_NODEID", minimum=0) if len(counts) > 1 else 0
    if node >= len(counts):
        raise UserError(f"SLURM_NODEID={node} is not one of the {len(counts)} nodes of {name}={text}.")
    return counts[node]


def _open_mpi(environment: Environment) -> ProcessInfo | None:
    count = "OMPI_COMM_WORLD_SIZE"
    if environment.get(count, "1") == "1":
        return None
    num_processes = _whole_number(environment, count, minimum=1)
    process_id = _below(environment, "OMPI_COMM_WORLD_RANK", num_processes, count)
    launcher = environment.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.search(r"^(\d+).*?(?:tcp6://\[([^\],]+)|tcp://([^,:]+))", launcher)
    if found is None and _ADDRESS not in environment:
        raise UserError(
            f"{count}={num_processes}, but this Open MPI does not say where process 0 is. "
            f"Set {_ADDRESS}=host:port, as in: mpirun -x {_ADDRESS}=$(hostname):{_FIRST_PORT} ..."
        )
    job, host = (int(found[1]) // 4096, found[2] or found[3]) if found else (0, "")
    stated_by, address = _coordinator(environment, f"OMPI_MCA_orte_hnp_uri={launcher}", host, job)
    here = _whole_number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", minimum=1)
    local = _share(environment, "OMPI_COMM_WORLD_LOCAL_RANK", here) if here > 1 else None
    return ProcessInfo(stated_by, num_processes, process_id, address, local)


def _coordinator(environment: Environment, stated_by: str, host: str, job: int) -> tuple[str, str]:
    """(the source of process 0's address, the address as host:port)."""
    if _ADDRESS in environment:
        address = _address(environment)
        return f"{_ADDRESS}={address}", address
    port = str(_FIRST_PORT + job % _NUM_PORTS)
    if "JAX_COORDINATOR_PORT" in environment:
        port = str(_whole_number(environment, "JAX_COORDINATOR_PORT", minimum=1))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{address} ({stated_by})", address


def _share(environment: Environment, variable: str, num_sharing: int) -> tuple[int, ...] | None:
    """This process's GPUs on the node, where `num_sharing` processes see the same ones."""
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return None  # jax reads the variable
    index = _below(environment, variable, num_sharing, "the processes on this node")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        uses_gpus = environment.get("JAX_PLATFORMS", "cuda").startswith(("cuda", "gpu"))
        count, named = (gpus_of_node() if uses_gpus else 0) or num_sharing, "the node"
    else:
        count, named = len([gpu for gpu in visible.split(",") if gpu]), f"CUDA_VISIBLE_DEVICES={visible}"
    if count < num_sharing:  # each process sees its own
        return None
    if count % num_sharing:
        raise UserError(
            f"{named} has {count} GPUs, which {num_sharing} processes on one node cannot share "
            f"equally. Nearest that works: {max(n for n in range(1, num_sharing) if count % n == 0)} on each node."
        )
    each = count // num_sharing
    return tuple(range(index * each, (index + 1) * each))


def gpus_of_node() -> int:
    """NVIDIA's GPUs of this node, or those that its container shows; found without starting CUDA."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])


def _tpu(environment: Environment, metadata: Callable[[str], str]) -> ProcessInfo | None:
    """The place in a TPU slice, from its list of workers, or in several slices; jax finds the same by itself."""
    name = "TPU_PROCESS_ADDRESSES" if "TPU_PROCESS_ADDRESSES" in environment else "TPU_WORKER_HOSTNAMES"
    if name in environment:
        method, number, said = "gketpu", "TPU_WORKER_ID", dict(environment)
        workers = environment[name].split(",")
    else:
        method, name = "gcetpu", "worker-network-endpoints"
        text = "" if "TPU_SKIP_MDS_QUERY" in environment else metadata(name)
        if not text:
            return None  # a machine with TPUs that is not a TPU VM
        workers, number = text.split(","), "agent-worker-number"
        said = {number: metadata(number), **_lines(metadata("tpu-env")), **environment}
    num_slices = _whole_number(said, "MEGASCALE_NUM_SLICES", minimum=1) if said.get("MEGASCALE_NUM_SLICES") else 1
    if len(workers) * num_slices == 1:
        return None
    worker = _below(said, number, len(workers), f"the workers of {name}")
    own_slice = _below(said, "MEGASCALE_SLICE_ID", num_slices, "MEGASCALE_NUM_SLICES") if num_slices > 1 else 0
    stated_by = f"{name}={','.join(workers)}"
    if num_slices > 1:
        stated_by = f"MEGASCALE_COORDINATOR_ADDRESS={said.get('MEGASCALE_COORDINATOR_ADDRESS', '')}"
    return ProcessInfo(stated_by, len(workers) * num_slices, own_slice * len(workers) + worker, method=method)


def _lines(text: str) -> dict[str, str]:
    """Lines of the form KEY: 'value'."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip().strip("'") for key, value in pairs}


def _tpu_metadata(attribute: str) -> str:
    request = urllib.request.Request(_METADATA + attribute, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode()
    except OSError:  # no such attribute, or no such server: not a TPU VM
        return ""


def _whole_number(environment: Environment, variable: str, *, minimum: int) -> int:
    text = environment.get(variable, "")
    if not (text.isascii() and text.isdigit() and int(text) >= minimum):
        raise UserError(
            f"{variable}={text} is not a whole number of at least {minimum}. Nearest that works: {minimum}."
        )
    return int(text)


def _below(environment: Environment, variable: str, count: int, counted: str) -> int:
    number = _whole_number(environment, variable, minimum=0)
    if number >= count:
        named = f"{counted}={count}" if counted.isupper() else f"{count}, {counted}"
        raise UserError(f"{variable}={number} is not below {named}. Nearest that works: {count - 1}.")
    return number
