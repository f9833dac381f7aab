"""The manifests for Kubernetes and SkyPilot and the Dockerfile: by published schemas, and by the program they run."""

import json
import os
import re
import subprocess

import pytest
import yaml

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
from maxtext_lite.console import runs_a_command
from maxtext_lite.parallel.processes import process_info
from tests.source_tree import REPOSITORY

MANIFESTS = {}
for _path in sorted((REPOSITORY / "scripts" / "k8s").glob("*.yaml")):
    for _manifest in yaml.safe_load_all(_path.read_text(encoding="utf-8")):
        MANIFESTS[_path.stem, _manifest["kind"]] = _manifest
SCHEMAS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "PersistentVolumeClaim": "IoK8sApiCoreV1PersistentVolumeClaim",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
SPECS = {
    "tpu": MANIFESTS["tpu", "JobSet"]["spec"],
    "gpu": MANIFESTS["gpu", "JobSet"]["spec"],
    "trainjob": MANIFESTS["trainjob", "TrainingRuntime"]["spec"]["template"]["spec"],
}


@pytest.mark.fast
@pytest.mark.parametrize(
    "key", [key for key in MANIFESTS if key[1] in SCHEMAS], ids="-".join
)
def test_a_manifest_is_what_the_published_schema_says(key):
    from kubeflow_trainer_api import models  # takes seconds

    schema = getattr(models, SCHEMAS[key[1]])
    # The models drop keys that they do not know, such as a misspelled one: what comes back must be all.
    assert schema.from_dict(MANIFESTS[key]).to_dict() == MANIFESTS[key]


def container_of(stem):
    """What runs: the container, and of a TrainJob what it says in the place of the runtime's."""
    (container,) = SPECS[stem]["replicatedJobs"][0]["template"]["spec"]["template"][
        "spec"
    ]["containers"]
    if stem == "trainjob":
        trainer = MANIFESTS[stem, "TrainJob"]["spec"]["trainer"]
        return {**container, **trainer, "resources": trainer["resourcesPerNode"]}
    return container


@pytest.mark.parametrize(("stem", "pods"), [("tpu", 8), ("gpu", 4), ("trainjob", 4)])
def test_the_command_line_of_the_pods_has_a_plan_for_their_devices(stem, pods):
    container = container_of(stem)
    assert container["command"] == ["python", "-m", "maxtext_lite.train"]
    config = load_config(None, container["args"])
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {config.base_output_directory, "/dev/shm"} == mounts
    limits = container["resources"]["limits"]
    devices = pods * (limits.get("google.com/tpu") or limits["nvidia.com/gpu"])
    plan = make_plan(config, num_devices=devices, num_hosts=pods)
    assert (devices, plan.dcn_mesh["data"]) == (32, 2 if stem == "tpu" else 1)


ENDS = {75: "Restart", 76: "Restart", 137: "Restart", 2: "Fail", 3: "Fail"}


@pytest.mark.parametrize("stem", SPECS)
def test_the_run_starts_again_where_that_helps_and_ends_where_it_does_not(stem):
    """By the rules in the documents of Job and of JobSet."""
    job = SPECS[stem]["replicatedJobs"][0]["template"]["spec"]
    restart = job["template"]["spec"]["restartPolicy"]
    assert restart == "Never"  # a pod failure policy needs it
    assert job["backoffLimit"] == 0
    policy = SPECS[stem]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    for exit_code, action in ENDS.items():
        reason = "BackoffLimitExceeded"
        for rule in job["podFailurePolicy"]["rules"]:
            codes = rule["onExitCodes"]
            assert (codes["operator"], rule["action"]) == ("In", "FailJob")
            if exit_code in codes["values"]:
                reason = "PodFailurePolicy"
        rules = [
            each for each in policy["rules"] if reason in each["onJobFailureReasons"]
        ]
        actions = [*(each["action"] for each in rules), "RestartJobSet"]
        assert actions[0] == f"{action}JobSet"


def test_nodes_of_skypilot_find_each_other_and_run_the_training_command(tmp_path):
    task = yaml.safe_load(
        (REPOSITORY / "scripts" / "skypilot.yaml").read_text(encoding="utf-8")
    )
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/usr/bin/env bash\nenv | grep ^JAX_\nprintf '%s\\n' \"$@\"\nexit 76\n"
    )
    python.chmod(0o755)
    found = []
    for rank in range(task["num_nodes"]):
        sky = {
            "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(rank),
        }
        variables = {"PATH": os.environ["PATH"], **task["envs"], **sky}
        command = ["bash", "-c", task["run"]]
        result = subprocess.run(
            command,
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 76, (
            result.stderr
        )  # the exit code is that of the training command
        told = dict(
            line.split("=", 1)
            for line in result.stdout.splitlines()
            if line.startswith("JAX_")
        )
        process = process_info(told, on_tpu=False)
        found.append((process.num_processes, process.process_id, process.address))
        assert result.stdout.splitlines()[len(told) :][:3] == [
            "-u",
            "-m",
            "maxtext_lite.train",
        ]
    assert found == [(2, 0, "10.0.0.7:1234"), (2, 1, "10.0.0.7:1234")]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75, 76, 130]


def test_an_image_has_what_it_copies_its_extra_a_user_and_a_command_that_takes_signals():
    text = (
        (REPOSITORY / "scripts" / "Dockerfile")
        .read_text(encoding="utf-8")
        .replace("\\\n", " ")
    )
    base, *stages = re.split(r"^FROM \S+ AS ", text, flags=re.MULTILINE)[1:]
    assert {stage.split()[0] for stage in stages} == {"cpu", "cuda13", "tpu"}
    for stage in stages:
        assert re.search(
            r'^RUN pip install -c constraints\.txt -e "\.\[[\w,]+\]"$',
            stage,
            re.MULTILINE,
        )
        assert stage.rstrip().endswith("USER 1000")
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8")
    kept = re.findall(r"^!(.*)", ignored, re.MULTILINE)
    for line in re.findall(r"^COPY (.*)$", base, re.MULTILINE):
        assert {path.split("/")[0] for path in line.split()[:-1]} <= set(kept)
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", base, re.MULTILINE)
    assert runs_a_command(
        [*json.loads(entry), "train"]
    )  # the exec form: no shell stands between
