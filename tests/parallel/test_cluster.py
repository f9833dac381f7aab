"""Every launcher's variables are understood, a single process starts nothing, and errors take one line."""

import jax._src.clusters.cloud_tpu_cluster as tpu_cluster
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.parallel import processes as cluster
from maxtext_lite.parallel.processes import ProcessInfo, process_info


def told(environment, **options):
    return process_info(environment, **{"on_tpu": False, **options})


STATED = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}

# As srun sets it for task 5 of 8, of which four are on each of two nodes.
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "gpu-[007-008]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}

# As Open MPI 4 sets it for rank 2 of 4, two on each machine.
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}

# As GKE sets it in worker 1 of the second of two slices of four hosts.
GKE = {
    "TPU_WORKER_HOSTNAMES": "w-0.job,w-1.job,w-2.job,w-3.job",
    "TPU_WORKER_ID": "1",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "slice-0-0.job",
}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # In a batch script SLURM describes the job, but this process is not a task of a step.
        {
            key: value
            for key, value in SLURM.items()
            if not key.startswith("SLURM_STEP")
        },
        # A separate task in an allocation of eight.
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        GKE,  # but the process does not use TPUs
    ],
)
def test_a_process_alone_starts_nothing(environment):
    assert told(environment) is None


@pytest.mark.fast
def test_the_three_variables_come_first():
    found = told({**SLURM, **STATED})
    assert found == ProcessInfo(
        "JAX_COORDINATOR_ADDRESS=10.0.0.1:1234", 4, 3, "10.0.0.1:1234"
    )


def test_jax_finds_slurms_first_node():
    found = told(SLURM)
    assert (found.num_processes, found.process_id) == (8, 5)
    assert (found.address, found.method) == ("", "slurm")
    assert found.stated_by == "SLURM_STEP_NODELIST=gpu-[007-008]"


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        (
            {"SLURM_STEP_TASKS_PER_NODE": "1(x8)"},
            None,
        ),  # one process on each node has all its GPUs
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, (2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "5"}, None),  # SLURM has bound the task to its GPU
        ({"JAX_LOCAL_DEVICE_IDS": "7"}, None),  # jax reads it
        ({"SLURM_STEP_TASKS_PER_NODE": "7,1"}, None),  # alone on the second node
    ],
)
def test_tasks_of_one_node_share_its_gpus(changes, devices):
    assert told({**SLURM, **changes}).local_device_ids == devices


@pytest.mark.parametrize(("gpus", "devices"), [(8, (2, 3)), (4, (1,)), (0, (1,))])
def test_without_a_list_the_gpus_that_the_node_has_are_shared(
    gpus, devices, monkeypatch
):
    monkeypatch.setattr(cluster, "gpus_of_node", lambda: gpus)
    assert told(SLURM).local_device_ids == devices


def test_an_address_that_is_stated_replaces_the_launchers():
    assert told({**SLURM, "JAX_COORDINATOR_ADDRESS": "head:99"}).address == "head:99"


def test_jax_finds_the_machine_of_open_mpis_launcher():
    found = told({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "0,1"})
    assert (found.num_processes, found.process_id) == (4, 2)
    assert (found.address, found.method) == ("", "ompi")
    assert found.local_device_ids == (0,)
    five = {
        key: value for key, value in OPEN_MPI.items() if key != "OMPI_MCA_orte_hnp_uri"
    }
    assert told({**five, "JAX_COORDINATOR_ADDRESS": "head:99"}).address == "head:99"


@pytest.mark.parametrize(
    ("without", "processes"), [("", (8, 5, "gketpu")), ("MEGASCALE", (4, 1, "gketpu"))]
)
def test_gke_counts_the_hosts_of_all_slices(without, processes, monkeypatch):
    monkeypatch.setattr(tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(
        tpu_cluster, "get_tpu_env_value_from_metadata", lambda key: None
    )
    for variable, text in GKE.items():
        if not without or not variable.startswith(without):
            monkeypatch.setenv(variable, text)
    found = told({}, on_tpu=True)
    assert (found.num_processes, found.process_id, found.method) == processes
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    monkeypatch.delenv("MEGASCALE_NUM_SLICES", raising=False)
    assert told({}, on_tpu=True) is None


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_tpu_vm_is_asked_for_its_metadata(hosts, monkeypatch):
    metadata = {
        "worker-network-endpoints": ",".join(["10.1.0.1", "10.1.0.2"][:hosts]),
        "agent-worker-number": "0",
        "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-8'",
    }
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setattr(tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(tpu_cluster, "get_metadata", lambda key: (metadata[key], 200))
    found = told({}, on_tpu=True)
    assert (found and found.method) == (None if hosts == 1 else "gcetpu")


def test_without_metadata_a_machine_with_tpus_is_alone(monkeypatch):
    def no_server(key):
        raise ConnectionError

    monkeypatch.setattr(tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(tpu_cluster, "get_metadata", no_server)
    assert told({}, on_tpu=True) is None


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_NUM_PROCESSES"),
        ({**STATED, "JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4 .*Nearest that works: 3"),
        (
            {**STATED, "JAX_COORDINATOR_ADDRESS": "localhost"},
            "JAX_COORDINATOR_ADDRESS=localhost",
        ),
        (
            {**SLURM, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"},
            "6 GPUs equally. Nearest that works: 3",
        ),
        (
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": ""},
            "JAX_COORDINATOR_ADDRESS=host:port",
        ),
    ],
)
def test_wrong_variables_are_refused(environment, named):
    with pytest.raises(UserError, match=named):
        told(environment, on_tpu=True)
