"""The runtime gets enough threads for its simulated devices, and processes of one run find each other."""

import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.kernels import Accelerator
from maxtext_lite.parallel import accelerator_of, distributed, start_devices
from maxtext_lite.parallel.distributed import end_soon
from tests.processes import quick_python
from tests.source_tree import REPOSITORY

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

START = """
import sys, jax
from maxtext_lite.cli import run_command
from maxtext_lite.config import UserError
from maxtext_lite.parallel import start_devices
"""


@pytest.mark.parametrize(("flags", "before", "threads"), [
    ("--xla_force_host_platform_device_count=4", None, "8"),
    ("--xla_other=1 --xla_force_host_platform_device_count=8", None, "16"),
    ("--xla_force_host_platform_device_count=4", "32", "32"),  # the user's own choice is kept
    ("", None, None),
])  # fmt: skip
def test_simulated_devices_get_two_threads_each(flags, before, threads, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("NPROC", raising=False)
    if before:
        monkeypatch.setenv("NPROC", before)
    assert start_devices() == jax.devices()
    assert os.environ.get("NPROC") == threads


def launch(program: str, *, grace: str) -> subprocess.CompletedProcess[str]:
    """The program as two processes with two devices each."""
    launcher = [sys.executable, str(REPOSITORY / "scripts" / "launch_local.py"), "--processes", "2"]
    return subprocess.run(
        [*launcher, "--devices-per-process", "2", "--grace", grace, "--", *quick_python(), "-c", START + program],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.fast
def test_two_processes_of_two_devices_are_four_devices_and_sum_over_all():
    result = launch(
        """
devices = start_devices()
assert start_devices() == devices, "a second call finds the same"
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
over_data = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
ranks = jax.make_array_from_callback((4,), over_data, lambda index: 10.0 ** jax.numpy.arange(4)[index])
psum = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=over_data.spec, out_specs=over_data.spec)
total = {float(shard.data[0]) for shard in jax.jit(psum)(ranks).addressable_shards}
print(jax.process_index(), jax.process_count(), len(devices), jax.local_device_count(), total)
""",
        grace="30",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if "Gloo" not in line]
    assert sorted(lines) == [f"[{process}] {process} 2 4 2 {{1111.0}}" for process in (0, 1)]


@pytest.mark.parametrize("told", [
    {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "{process}",
     "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "{process}", "JAX_COORDINATOR_PORT": "{port}"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "{process}", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
     "OMPI_COMM_WORLD_LOCAL_RANK": "{process}", "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:9",
     "JAX_COORDINATOR_PORT": "{port}"},
], ids=["slurm", "open_mpi"])  # fmt: skip
def test_two_processes_find_each_other_through_a_clusters_variables(told):
    program = START + "start_devices()\nprint(jax.process_index(), jax.process_count(), jax.device_count())"
    port, common = free_port(), {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "PYTHONPATH": str(REPOSITORY)}
    common["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    processes = [
        subprocess.Popen(
            [*quick_python(), "-c", program],
            env={**os.environ, **common, **{k: v.format(process=process, port=port) for k, v in told.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    for number, process in enumerate(processes):
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert [line for line in output.splitlines() if "Gloo" not in line] == [f"{number} 2 4"]


@pytest.mark.parametrize(("failure", "code", "message"), [
    ("raise UserError('steps=0 is wrong')", 2, "[1] error: steps=0 is wrong"),
    ("raise OSError('no such disk')", 1, "[1] OSError: no such disk"),
])  # fmt: skip
def test_a_process_that_fails_alone_ends_the_run_though_jax_would_wait_for_the_others(failure, code, message):
    started = time.monotonic()
    result = launch(
        f"""
def main(argv):
    start_devices()
    if jax.process_index() == 1:
        {failure}
    import time; time.sleep(600)
sys.exit(run_command(main))
""",
        grace="1",
    )
    assert result.returncode == code
    assert message in result.stderr.splitlines()
    assert time.monotonic() - started < 60


def test_processes_that_all_fail_alike_each_report_only_that():
    result = launch(
        """
def main(argv):
    start_devices()
    raise UserError("steps=0 is wrong")
sys.exit(run_command(main))
""",
        grace="30",
    )
    assert result.returncode == 2
    assert sorted(result.stderr.splitlines()) == [f"[{process}] error: steps=0 is wrong" for process in (0, 1)]


@pytest.mark.parametrize(("process", "waits_for"), [
    ("0", "waited 1 seconds for all 2 processes; some did not answer."),
    ("1", "waited 1 seconds for process 0 at JAX_COORDINATOR_ADDRESS=127.0.0.1:9; it does not answer."),
])  # fmt: skip
def test_a_process_left_alone_names_whom_it_waited_for(process, waits_for):
    address = "127.0.0.1:9" if process == "1" else f"127.0.0.1:{free_port()}"
    told = dict(zip(VARIABLES, (address, "2", process), strict=True))
    result = subprocess.run(
        [*quick_python(), "-c", START + "start_devices(timeout_seconds=1)"],
        env={**os.environ, **told, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stderr == f"error: process {process} of 2 {waits_for}\n"


@pytest.mark.parametrize(("platforms", "said"), [
    ("tpu", "TPU_WORKER_ID=5 is not below 2, the workers of TPU_WORKER_HOSTNAMES. Nearest that works: 1."),
    ("tpu,cpu", "TPU_WORKER_ID=5 is not below 2, the workers of TPU_WORKER_HOSTNAMES. Nearest that works: 1."),
    ("cpu", "1"),  # what TPUs are told is nothing to a process that uses none
])  # fmt: skip
def test_tpu_variables_count_only_if_tpus_are_used(platforms, said):
    program = "try: print(len(start_devices()))\nexcept UserError as error: print(error)"
    told = {"JAX_PLATFORMS": platforms, "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "5", "XLA_FLAGS": ""}
    result = subprocess.run(
        [*quick_python(), "-c", START + program],
        env={**os.environ, **told, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == said + "\n", result.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(("told", "message"), [
    (("", "2", "0"), "JAX_COORDINATOR_ADDRESS= is not host:port of process 0."),
    (("localhost", "2", "0"), "JAX_COORDINATOR_ADDRESS=localhost is not host:port of process 0."),
    (("localhost:1234", "", "0"), "JAX_NUM_PROCESSES= is not a whole number of at least 1. Nearest that works: 1."),
    (("localhost:1234", "2", "x"), "JAX_PROCESS_ID=x is not a whole number of at least 0. Nearest that works: 0."),
    (("localhost:1234", "2", "2"), "JAX_PROCESS_ID=2 is not below JAX_NUM_PROCESSES=2. Nearest that works: 1."),
])  # fmt: skip
def test_an_incomplete_description_is_refused(told, message, monkeypatch):
    for variable, text in zip(VARIABLES, told, strict=True):
        monkeypatch.setenv(variable, text)
    with pytest.raises(UserError) as raised:
        start_devices()
    assert raised.value.problems == (message,)


def test_a_single_process_is_not_ended_early_by_its_failure(monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("ended"))
    before = threading.active_count()
    end_soon(2)
    assert threading.active_count() == before


def test_an_accelerator_has_what_kernels_depend_on(monkeypatch):
    monkeypatch.setattr(distributed, "installed_tokamax", lambda: "0.0.17")
    h100 = SimpleNamespace(platform="gpu", compute_capability="9.0")
    assert accelerator_of(h100) == Accelerator("gpu", "9.0", "0.0.17")
    assert accelerator_of(jax.devices()[0]) == Accelerator("cpu")
