"""Every command of docs/launching.md that needs no cluster runs as written, and what the page says of others is so."""

import re
import subprocess

import pytest
import yaml

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
from maxtext_lite.parallel.cluster import process_info
from tests.docs.test_readme import blocks, environment
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "launching.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", blocks(PAGE), ids=lambda block: f"line_{block.line}")
def test_a_command_runs_and_prints_what_the_page_says(block):
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert result.returncode == block.exit_code, result.stdout
    assert result.stdout.replace(str(REPOSITORY), "REPOSITORY") == block.output


@pytest.mark.fast
def test_the_page_has_the_commands_it_should():
    assert len(blocks(PAGE)) == 4


def test_every_variable_that_says_where_a_process_stands_is_on_the_page():
    source = (REPOSITORY / "maxtext_lite" / "parallel" / "cluster.py").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:JAX|SLURM|OMPI|TPU|MEGASCALE)_[A-Z_]+[A-Z]\b", PAGE))
    known = set(re.findall(r"\b(?:JAX|SLURM|OMPI|TPU|MEGASCALE)_[A-Za-z_]+[A-Za-z]\b", source)) | {
        "JAX_LOCAL_DEVICE_IDS"
    }
    assert named - known - {"OMPI_MCA"} == set()


def manifests():
    return [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]


def test_the_mesh_of_the_page_is_two_slices():
    mesh = next(part for part in manifests() if "dcn_data_parallelism" in part)
    plan = make_plan(load_config(None, [f"{key}={value}" for key, value in mesh.items()]), num_devices=32, num_hosts=8)
    assert (plan.dcn_mesh["data"], plan.ici_mesh["fsdp"]) == (2, 16)


def test_the_pods_of_the_job_are_told_their_places():
    job = next(part for part in manifests() if part.get("kind") == "Job")
    spec = job["spec"]
    variables = {entry["name"]: entry.get("value") for entry in spec["template"]["spec"]["containers"][0]["env"]}
    assert variables["JAX_NUM_PROCESSES"] == str(spec["parallelism"]) == str(spec["completions"])
    name, subdomain = job["metadata"]["name"], spec["template"]["spec"]["subdomain"]
    assert variables["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-0.{subdomain}:")
    found = process_info({**variables, "JAX_PROCESS_ID": "3"}, on_tpu=False)
    assert (found.num_processes, found.process_id) == (4, 3)


def test_the_slices_of_the_jobset_are_those_of_its_mesh():
    jobset = next(part for part in manifests() if part.get("kind") == "JobSet")
    (slices,) = jobset["spec"]["replicatedJobs"]
    pod = slices["template"]["spec"]["template"]["spec"]
    overrides = [word for word in pod["containers"][0]["command"] if "=" in word]
    chips = 16  # 4x4
    hosts = slices["template"]["spec"]["parallelism"]
    assert pod["containers"][0]["resources"]["limits"]["google.com/tpu"] * hosts == chips
    plan = make_plan(load_config(None, overrides), num_devices=slices["replicas"] * chips, num_hosts=2 * hosts)
    assert plan.dcn_mesh["data"] == slices["replicas"]


def test_every_option_and_command_of_the_page_is_one_of_the_script():
    script = (REPOSITORY / "scripts" / "tpu_vm.sh").read_text(encoding="utf-8")
    part = PAGE[PAGE.index("## TPU VMs") : PAGE.index("## SLURM")]
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", part)):
        assert option in script
    for command in re.findall(r"^\| (`.*?`) \|", part, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", command):
            assert f"  {name})" in script
