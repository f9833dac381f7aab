"""Every launcher's variables are understood, a single process starts nothing, and errors take one line."""

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.parallel import hosts as cluster
from maxtext_lite.parallel.hosts import ProcessInfo, process_info


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


def test_slurms_coordinator_is_the_first_node_at_a_port_of_the_job():
    found = told(SLURM)
    assert (found.num_processes, found.process_id) == (8, 5)
    assert found.address == f"gpu-007:{61440 + 4242 % 4096}"
    assert found.stated_by == f"{found.address} (SLURM_STEP_NODELIST=gpu-[007-008])"
    assert found.method is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[001,007-015],host2", "node001"),
        ("rack2-n[3,5]-ib,x", "rack2-n3-ib"),
    ],
)
def test_the_first_of_slurms_nodes(nodes, first):
    assert told({**SLURM, "SLURM_STEP_NODELIST": nodes}).address.split(":")[0] == first


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        (
            {"SLURM_STEP_TASKS_PER_NODE": "1(x8)"},
            None,
        ),  # one process on each node has all its GPUs
        ({}, (1,)),  # one GPU each, as jax has it
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


def test_an_address_or_a_port_that_is_stated_replaces_the_launchers():
    assert told({**SLURM, "JAX_COORDINATOR_ADDRESS": "head:99"}).address == "head:99"
    assert told({**SLURM, "JAX_COORDINATOR_PORT": "99"}).address == "gpu-007:99"


def test_open_mpis_coordinator_is_where_its_launcher_runs():
    found = told(OPEN_MPI)
    port = 61440 + (1531576320 // 4096) % 4096
    assert (found.num_processes, found.process_id, found.address) == (
        4,
        2,
        f"10.96.0.1:{port}",
    )
    assert found.local_device_ids == (0,)
    five = {
        key: value for key, value in OPEN_MPI.items() if key != "OMPI_MCA_orte_hnp_uri"
    }
    assert told({**five, "JAX_COORDINATOR_ADDRESS": "head:99"}).address == "head:99"


def test_gke_counts_the_hosts_of_all_slices():
    found = told(GKE, on_tpu=True)
    assert (found.num_processes, found.process_id, found.method) == (8, 5, "gketpu")
    assert found.stated_by == "MEGASCALE_COORDINATOR_ADDRESS=slice-0-0.job"
    one = {key: value for key, value in GKE.items() if not key.startswith("MEGASCALE")}
    assert told(one, on_tpu=True).num_processes == 4
    assert (
        told({**one, "TPU_SKIP_MDS_QUERY": "true"}, on_tpu=True).num_processes == 4
    )  # as GKE sets it
    assert told({"TPU_WORKER_HOSTNAMES": "localhost"}, on_tpu=True) is None


def tpu_vm(workers, number, environment=""):
    told_of = {
        "worker-network-endpoints": workers,
        "agent-worker-number": number,
        "tpu-env": environment,
    }
    return lambda attribute: told_of[attribute]


def test_a_tpu_vm_is_asked_for_its_metadata():
    pod = "unknown:unknown:10.1.0.1,unknown:unknown:10.1.0.2"
    found = told({}, on_tpu=True, metadata=tpu_vm(pod, "1"))
    assert (found.num_processes, found.process_id, found.method) == (2, 1, "gcetpu")
    slices = "ACCELERATOR_TYPE: 'v5litepod-8'\nMEGASCALE_NUM_SLICES: '3'\nMEGASCALE_SLICE_ID: '2'\n"
    found = told({}, on_tpu=True, metadata=tpu_vm(pod, "1", slices))
    assert (found.num_processes, found.process_id) == (6, 5)
    assert told({}, on_tpu=True, metadata=tpu_vm("10.1.0.1", "0")) is None  # one host
    assert told({}, on_tpu=True, metadata=lambda attribute: "") is None  # no TPU VM
    assert (
        told({"TPU_SKIP_MDS_QUERY": "true"}, on_tpu=True, metadata=tpu_vm(pod, "1"))
        is None
    )  # as GKE sets it


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_NUM_PROCESSES"),
        (
            {**STATED, "JAX_COORDINATOR_ADDRESS": "localhost"},
            "JAX_COORDINATOR_ADDRESS=localhost",
        ),
        ({**SLURM, "SLURM_PROCID": "8"}, "SLURM_PROCID=8 .*Nearest that works: 7"),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"},
            "SLURM_STEP_TASKS_PER_NODE=many",
        ),
        (
            {**SLURM, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"},
            "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 .*Nearest that works: 3",
        ),
        (
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": ""},
            "JAX_COORDINATOR_ADDRESS=host:port",
        ),
        (
            {**GKE, "MEGASCALE_SLICE_ID": "2"},
            "MEGASCALE_SLICE_ID=2 .*Nearest that works: 1",
        ),
    ],
)
def test_wrong_variables_are_refused(environment, named):
    with pytest.raises(UserError, match=named):
        told(environment, on_tpu=True)
