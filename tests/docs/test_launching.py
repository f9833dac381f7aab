"""Every command of docs/launching.md that needs no cluster runs as written, and what the page says of others is so."""

import re
import subprocess

import pytest
import yaml

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
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


def test_the_mesh_of_the_page_is_two_slices():
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    mesh = yaml.safe_load(text)
    plan = make_plan(load_config(None, [f"{key}={value}" for key, value in mesh.items()]), num_devices=32, num_hosts=8)
    assert (plan.dcn_mesh["data"], plan.ici_mesh["fsdp"]) == (2, 16)


def test_the_page_has_every_manifest_and_image():
    for path in (REPOSITORY / "scripts" / "k8s").iterdir():
        assert f"`{path.name}`" in PAGE or f"k8s/{path.name}" in PAGE
    for target in re.findall(r"^FROM \S+ AS (\w+)", (REPOSITORY / "scripts" / "Dockerfile").read_text(), re.MULTILINE):
        assert f"`{target}`" in PAGE or target == "base"


def test_every_option_and_command_of_the_page_is_one_of_the_script():
    script = (REPOSITORY / "scripts" / "tpu_vm.sh").read_text(encoding="utf-8")
    part = PAGE[PAGE.index("## TPU VMs") : PAGE.index("## SLURM")]
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", part)):
        assert option in script
    for command in re.findall(r"^\| (`.*?`) \|", part, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", command):
            assert f"  {name})" in script
