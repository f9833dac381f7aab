"""The manifests of scripts/k8s against published schemas, the program they run, and what they do with its exit codes.

PyPI has no schema of Kueue's objects: of those only their connection with the others is tested.
"""

from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.io_k8s_api_core_v1_persistent_volume_claim import IoK8sApiCoreV1PersistentVolumeClaim
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime

from maxtext_lite.batching import make_plan
from maxtext_lite.cli import EXIT_FAILED, EXIT_USER_ERROR
from maxtext_lite.config import load_config
from maxtext_lite.parallel.cluster import process_info
from maxtext_lite.process.progress import EXIT_HANGS
from maxtext_lite.process.signals import EXIT_INTERRUPTED
from maxtext_lite.train import EXIT_NON_FINITE, EXIT_STOPPED_BY_SIGNAL
from tests.source_tree import REPOSITORY

FILES = sorted((REPOSITORY / "scripts" / "k8s").glob("*.yaml"))
MANIFESTS = {
    (path.stem, each["kind"], each["metadata"]["name"]): each
    for path in FILES
    for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))
}
MODELS: dict[str, Any] = {
    "JobSet": JobsetV1alpha2JobSet,
    "PersistentVolumeClaim": IoK8sApiCoreV1PersistentVolumeClaim,
    "TrainJob": TrainerV1alpha1TrainJob,
    "TrainingRuntime": TrainerV1alpha1TrainingRuntime,
}
WITH_SCHEMA = [key for key in MANIFESTS if key[0] != "kueue"]


def only(stem: str, kind: str) -> dict[str, Any]:
    (found,) = [each for key, each in MANIFESTS.items() if key[:2] == (stem, kind)]
    return found


def jobset_of(stem: str) -> dict[str, Any]:
    """The spec of the JobSet, which a TrainingRuntime holds as a template."""
    if stem == "trainjob":
        return only(stem, "TrainingRuntime")["spec"]["template"]["spec"]
    return only(stem, "JobSet")["spec"]


def job_of(stem: str) -> dict[str, Any]:
    (replicated,) = jobset_of(stem)["replicatedJobs"]
    return replicated["template"]["spec"]


def container_of(stem: str) -> dict[str, Any]:
    """What runs: the container, and of a TrainJob what it says in the place of the runtime's."""
    (container,) = job_of(stem)["template"]["spec"]["containers"]
    if stem == "trainjob":
        trainer = only(stem, "TrainJob")["spec"]["trainer"]
        return {**container, **trainer, "resources": trainer["resourcesPerNode"]}
    return container


@pytest.mark.fast
@pytest.mark.parametrize("key", WITH_SCHEMA, ids="-".join)
def test_a_manifest_is_what_the_published_schema_says(key: tuple[str, str, str]):
    manifest = MANIFESTS[key]
    # The models drop keys that they do not know, such as a misspelled one: what comes back must be all.
    assert MODELS[manifest["kind"]].from_dict(manifest).to_dict() == manifest


def test_a_misspelled_key_and_a_wrong_type_do_not_pass_the_schema():
    def with_policy(**changed: object) -> dict[str, Any]:
        job = only("gpu", "JobSet")
        policy = {**job["spec"]["failurePolicy"], **changed}
        return {**job, "spec": {**job["spec"], "failurePolicy": policy}}

    misspelled = with_policy(maxRestart=1)
    assert JobsetV1alpha2JobSet.from_dict(misspelled).to_dict() != misspelled
    with pytest.raises(ValueError, match="maxRestarts"):
        JobsetV1alpha2JobSet.from_dict(with_policy(maxRestarts="many"))


def environments(stem: str) -> list[dict[str, str]]:
    """Of all pods, as the cluster makes them: Kubernetes, GKE's webhook for TPUs, Trainer's plugin for jax."""
    job, name = job_of(stem), "maxtext-lite"
    if stem == "tpu":
        slices, hosts = jobset_of(stem)["replicatedJobs"][0]["replicas"], job["parallelism"]
        return [
            {
                "TPU_WORKER_HOSTNAMES": ",".join(f"{name}-slice-{index}-{host}.{name}" for host in range(hosts)),
                "TPU_WORKER_ID": str(worker),
                "MEGASCALE_NUM_SLICES": str(slices),
                "MEGASCALE_SLICE_ID": str(index),
                "MEGASCALE_COORDINATOR_ADDRESS": f"{name}-slice-0-0.{name}",
            }
            for index in range(slices)
            for worker in range(hosts)
        ]
    if stem == "trainjob":
        nodes = only(stem, "TrainJob")["spec"]["trainer"]["numNodes"]
        said = {"JAX_COORDINATOR_ADDRESS": f"{name}-node-0-0.{name}:6666", "JAX_NUM_PROCESSES": str(nodes)}
        return [{**said, "JAX_COORDINATOR_PORT": "6666", "JAX_PROCESS_ID": str(pod)} for pod in range(nodes)]
    entries = {entry["name"]: entry for entry in container_of(stem)["env"]}
    place = entries.pop("JAX_PROCESS_ID")["valueFrom"]["fieldRef"]["fieldPath"]
    assert place == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    said = {key: entry["value"] for key, entry in entries.items()}
    return [{**said, "JAX_PROCESS_ID": str(pod)} for pod in range(job["completions"])]


@pytest.mark.parametrize(("stem", "pods", "devices"), [("tpu", 8, 32), ("gpu", 4, 32), ("trainjob", 4, 32)])
def test_the_pods_find_each_other_and_their_command_line_has_a_plan_for_them(stem: str, pods: int, devices: int):
    found = [process_info(environment, on_tpu=stem == "tpu") for environment in environments(stem)]
    assert [(each.num_processes, each.process_id) for each in found] == [(pods, index) for index in range(pods)]
    container = container_of(stem)
    assert container["command"] == ["python", "-m", "maxtext_lite.train"]
    config = load_config(None, container["args"])
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {config.base_output_directory, "/dev/shm"} == mounts
    limits = container["resources"]["limits"]
    assert pods * (limits.get("google.com/tpu") or limits["nvidia.com/gpu"]) == devices
    plan = make_plan(config, num_devices=devices, num_hosts=pods)
    assert plan.dcn_mesh["data"] == (2 if stem == "tpu" else 1)


@pytest.mark.parametrize("stem", ["tpu", "gpu"])
def test_all_pods_of_a_job_run_at_once_and_the_address_of_process_0_is_one_of_them(stem: str):
    job, manifest = job_of(stem), only(stem, "JobSet")
    assert job["parallelism"] == job["completions"]
    assert job["completionMode"] == "Indexed"
    if stem == "gpu":  # <jobSet>-<replicatedJob>-<job>-<pod>.<subdomain>, the JobSet's name unless it says another
        (replicated,) = manifest["spec"]["replicatedJobs"]
        name = manifest["metadata"]["name"]
        (address,) = {environment["JAX_COORDINATOR_ADDRESS"] for environment in environments(stem)}
        assert address.startswith(f"{name}-{replicated['name']}-0-0.{name}:")


def outcome(stem: str, exit_code: int) -> str:
    """What becomes of the run when a pod ends so, by the rules in the documents of Job and of JobSet."""
    job, policy = job_of(stem), jobset_of(stem)["failurePolicy"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # a pod failure policy needs it
    (container,) = job["template"]["spec"]["containers"]
    reason = "BackoffLimitExceeded" if job["backoffLimit"] == 0 else "another pod is started"
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule["onExitCodes"]
        assert (codes["containerName"], codes["operator"], rule["action"]) == (container["name"], "In", "FailJob")
        assert 0 not in codes["values"]  # Kubernetes refuses it
        if exit_code in codes["values"]:
            reason = "PodFailurePolicy"
            break
    for rule in policy["rules"]:
        if reason in rule["onJobFailureReasons"]:
            return rule["action"]
    return "RestartJobSet" if policy["maxRestarts"] else "FailJobSet"


@pytest.mark.parametrize("stem", ["tpu", "gpu", "trainjob"])
@pytest.mark.parametrize(("exit_code", "action"), [
    (EXIT_STOPPED_BY_SIGNAL, "RestartJobSet"), (EXIT_HANGS, "RestartJobSet"), (EXIT_INTERRUPTED, "RestartJobSet"),
    (137, "RestartJobSet"), (143, "RestartJobSet"),
    (EXIT_FAILED, "FailJobSet"), (EXIT_USER_ERROR, "FailJobSet"), (EXIT_NON_FINITE, "FailJobSet"),
])  # fmt: skip
def test_the_run_starts_again_where_that_helps_and_ends_where_it_does_not(stem: str, exit_code: int, action: str):
    assert outcome(stem, exit_code) == action


@pytest.mark.parametrize("stem", ["tpu", "gpu", "trainjob"])
def test_nothing_runs_as_root_and_what_is_mounted_is_there(stem: str):
    pod, container = job_of(stem)["template"]["spec"], container_of(stem)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    claims = {volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]} - {None}
    assert claims == {only("volume", "PersistentVolumeClaim")["metadata"]["name"]}
    assert pod["terminationGracePeriodSeconds"] >= 60


def test_the_queue_knows_what_the_pods_ask_for_and_has_enough_of_it():
    cluster_queue, local_queue = only("kueue", "ClusterQueue"), only("kueue", "LocalQueue")
    assert local_queue["spec"]["clusterQueue"] == cluster_queue["metadata"]["name"]
    quota = {}
    for group in cluster_queue["spec"]["resourceGroups"]:
        for flavor in group["flavors"]:
            assert ("kueue", "ResourceFlavor", flavor["name"]) in MANIFESTS
            assert [resource["name"] for resource in flavor["resources"]] == group["coveredResources"]
            quota |= {resource["name"]: resource["nominalQuota"] for resource in flavor["resources"]}
    scale = {"Gi": 2**30, "Ti": 2**40}

    def amount(text: int | str) -> int:
        return text if isinstance(text, int) else int(text[:-2]) * scale[text[-2:]]

    for stem, kind in (("tpu", "JobSet"), ("gpu", "JobSet"), ("trainjob", "TrainJob")):
        manifest = only(stem, kind)
        assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local_queue["metadata"]["name"]
        assert manifest["spec"]["suspend"] is True
        for resource, limit in container_of(stem)["resources"]["limits"].items():
            assert amount(limit) * len(environments(stem)) <= amount(quota[resource]), (stem, resource)
