"""Manifests: valid by the API's schema if `kubernetes-validate` is installed, and right in what it cannot check."""

from __future__ import annotations

import json
from typing import Any

import pytest

from telegrad.cli import main
from telegrad.environment.detection import detect, restart_count
from telegrad.launch.kubernetes import Manifest, render, to_yaml
from telegrad.rpc.init_arguments import complete

COMMAND = ["python", "train.py", '--note=it\'s "quoted": yes']


def documents(**options: Any) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="`make test-cluster` installs it")
    return list(yaml.safe_load_all(render(Manifest("registry/image:1", COMMAND, 4, **options))))


@pytest.mark.parametrize("restarts", [0, 2])
def test_the_job_is_valid(restarts: int) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="`make test-cluster` installs it")
    service, job = documents(restarts=restarts, resources={"nvidia.com/gpu": "1"})
    for document in (service, job):
        validator.validate(document, validator.latest_version(), strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate({**job, "spec": {**job["spec"], "completion": 4}}, validator.latest_version(), strict=True)


def test_the_job_of_a_jobset_is_valid() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="`make test-cluster` installs it")
    (jobset,) = documents(jobset=True, restarts=3)
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 3}
    (group,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **group["template"]}
    validator.validate(job, validator.latest_version(), strict=True)


def test_the_pods_find_each_other() -> None:
    service, job = documents(name="train", restarts=1)
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"] == "train"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    assert container["command"] == COMMAND
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    environ = {**given, "JOB_COMPLETION_INDEX": "3", "TELEGRAD_RESTART": "2"}
    detected = detect(environ)
    assert detected is not None
    assert (detected.place.rank, detected.place.size, restart_count(environ)) == (3, 4, 2)
    assert given["MASTER_ADDR"] == "train-0.train"
    secret = next(one for one in container["env"] if one["name"] == "TELEGRAD_TOKEN")
    assert secret["valueFrom"] == {"secretKeyRef": {"name": "telegrad", "key": "token"}}


def test_the_pods_of_a_jobset_find_each_other() -> None:
    (jobset,) = documents(name="train", jobset=True)
    (group,) = jobset["spec"]["replicatedJobs"]
    (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert given["MASTER_ADDR"] == f"train-{group['name']}-0-0.{jobset['spec']['network']['subdomain']}"


def test_yaml_keeps_values() -> None:
    yaml = pytest.importorskip("yaml", reason="`make test-cluster` installs it")
    value = {"a": [1, ["b", {"c": True}], {}], "d": {"e": "no: #'\"\n", "f": []}, "g": "1"}
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "A"}, "the name must be"),
        ({"secret": "x" * 60}, "the secret must be"),
        ({"workers": 0}, "at least 1"),
        ({"port": 0}, "the port must be"),
        ({"restarts": -1}, "at least 0"),
    ],
)
def test_invalid_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Manifest(**{"image": "i", "command": ["c"], "workers": 1, **options})


def test_the_command_prints_a_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["k8s", "--image", "i:1", "-n", "2", "--limit", "memory=1Gi", "--", "python", "x.py"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert output == render(Manifest("i:1", ["python", "x.py"], 2, resources={"memory": "1Gi"}))
    assert main([*arguments[:5], "--limit", "memory", "x"]) == 2
    assert "--limit must be given as in nvidia.com/gpu=1, not 'memory'" in capsys.readouterr().err


def test_a_pod_of_the_manifest_needs_no_arguments() -> None:
    from telegrad.options import Options

    environ = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "29500"}
    _, rank, size, _ = complete(Options(), -1, None, environ)
    assert (rank, size) == (1, 4)
    assert json.loads(to_yaml("x")) == "x"
