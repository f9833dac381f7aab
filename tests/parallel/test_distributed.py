"""The runtime is given threads enough for the devices it simulates, and processes of one run find each other."""

import contextlib
import os
import socket
import subprocess
from types import SimpleNamespace

import jax
import jax._src.clusters.cloud_tpu_cluster as tpu_cluster
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.parallel import processes as distributed
from maxtext_lite.parallel import start_devices
from tests.processes import quick_python
from tests.source_tree import REPOSITORY


@pytest.mark.parametrize(("in_kubernetes", "refused"), [(False, True), (True, False)])
def test_a_coordinator_without_an_address_is_refused_at_once(
    monkeypatch, in_kubernetes, refused
):
    """In Kubernetes the name of a pod has none until the pod runs."""

    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if in_kubernetes:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    found = SimpleNamespace(stated_by="JAX_COORDINATOR_ADDRESS=node7:1")
    with (
        pytest.raises(UserError, match="node7") if refused else contextlib.nullcontext()
    ):
        distributed._require_host(found, "node7:1")


START = """
import sys, time, jax
from maxtext_lite.cli import run_command
from maxtext_lite.config import UserError
from maxtext_lite.parallel import start_devices
"""


@pytest.mark.parametrize(
    ("flags", "before", "threads"),
    [
        ("--xla_other=1 --xla_force_host_platform_device_count=8", None, "16"),
        (
            "--xla_force_host_platform_device_count=4",
            "32",
            "32",
        ),  # the user's own choice stands
        ("", None, None),
    ],
)
def test_simulated_devices_get_two_threads_each(flags, before, threads, monkeypatch):
    devices = jax.devices()  # jax has read its flags, one of which it does not know
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("NPROC", raising=False)
    if before:
        monkeypatch.setenv("NPROC", before)
    assert start_devices() == devices
    assert os.environ.get("NPROC") == threads


def start(program, **told):
    """The program as a process that is told this by its environment."""
    return subprocess.Popen(
        [*quick_python(), "-c", START + program],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **told},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SUM = """
devices = start_devices()
assert start_devices() == devices, "a second call finds the same"
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
over_data = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
ranks = jax.make_array_from_callback((4,), over_data, lambda index: 10.0 ** jax.numpy.arange(4)[index])
psum = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=over_data.spec, out_specs=over_data.spec)
total = {float(shard.data[0]) for shard in jax.jit(psum)(ranks).addressable_shards}
print(jax.process_index(), jax.process_count(), len(devices), jax.local_device_count(), total)
"""


def test_two_processes_of_two_devices_that_slurm_has_started_are_four_devices_and_sum_over_all():
    told = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "JAX_COORDINATOR_PORT": str(free_port()),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    processes = [
        start(SUM, **told, SLURM_PROCID=number, SLURM_LOCALID=number) for number in "01"
    ]
    for number, process in enumerate(processes):
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        # Gloo's threads write lines of their own, which may be mixed.
        assert f"{number} 2 4 2 {{1111.0}}" in output.splitlines()


def test_processes_that_wait_for_others_in_vain_end_in_time():
    """Of four processes the last two never start; of two, process 0 does not."""

    def begin(process, num_processes, address, seconds):
        told = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": num_processes,
            "JAX_PROCESS_ID": process,
        }
        return start(
            f"sys.exit(run_command(lambda _: start_devices(timeout_seconds={seconds})))",
            **told,
        )

    address = f"127.0.0.1:{free_port()}"
    waiting = [
        begin("0", "4", address, 3),
        begin("1", "4", address, 8),
        begin("1", "2", "127.0.0.1:9", 1),
    ]
    said = [process.communicate(timeout=60)[1] for process in waiting]
    for words, count in zip(said, (4, 4, 2), strict=True):
        (line,) = words.splitlines()
        assert line.startswith(
            f"error: not all of the {count} processes have connected"
        )
    assert [process.returncode for process in waiting] == [1, 1, 1]


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = start(
            "sys.exit(run_command(lambda _: start_devices(timeout_seconds=60)))",
            JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{server.getsockname()[1]}",
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID="0",
        )
        said = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 2
    (line,) = [line for line in said if line.startswith("error:")]
    assert "cannot listen there" in line


@pytest.mark.parametrize("platforms", ["tpu,cpu", "cpu"])
def test_what_tpu_workers_are_told_is_heard_where_tpus_are_used(platforms, monkeypatch):
    joined = []
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "1")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "0")
    monkeypatch.setattr(tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(
        distributed.jax, "config", SimpleNamespace(jax_platforms=platforms)
    )
    monkeypatch.setattr(distributed, "_join", lambda found, _: joined.append(found))
    start_devices()
    assert [found.process_id for found in joined] == [1] * ("tpu" in platforms)
