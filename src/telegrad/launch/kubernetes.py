"""Renders a group as a Kubernetes manifest: an Indexed Job with a headless service, or a JobSet.

Each pod is one worker. Its completion index is its rank, the first pod hosts the rendezvous, and the token comes from a
Secret. Nothing here talks to a cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from telegrad.connection.worker_record import AWAIT_VARIABLE
from telegrad.environment.launchers import RESTART_VARIABLE

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
_MAX_NAME = 50  # a host name has 63 characters, with the numbers of job and pod
_FAILURES = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
_AWAITED = 300  # seconds within which a pod is replaced: scheduling, and pulling the image


@dataclass(frozen=True)
class Manifest:
    """What is to run."""

    image: str
    command: Sequence[str]
    """In the container, as in ``["python", "train.py"]``."""
    workers: int
    name: str = "telegrad"
    secret: str = "telegrad"
    """The Secret with the token, under the key `token`."""
    port: int = 29500
    restarts: int = 0
    """How often a pod that fails is replaced. In a JobSet: how often all are."""
    resources: Mapping[str, str] = field(default_factory=dict)
    """Of each pod, as in ``{"nvidia.com/gpu": "1", "memory": "16Gi"}``."""
    jobset: bool = False

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("secret", self.secret)):
            if not _NAME.match(text) or len(text) > _MAX_NAME:
                raise ValueError(
                    f"the {what} must be 1 to {_MAX_NAME} lower-case letters, digits and '-', not {text!r}"
                )
        if self.workers < 1:
            raise ValueError(f"the number of workers must be at least 1, not {self.workers}")
        if not 1 <= self.port <= 0xFFFF:
            raise ValueError(f"the port must be 1 to 65535, not {self.port}")
        if self.restarts < 0:
            raise ValueError(f"the number of restarts must be at least 0, not {self.restarts}")


def render(manifest: Manifest) -> str:
    """Return the manifest as YAML.

    >>> print(render(Manifest("registry/image:1", ["python", "train.py"], 2)).splitlines()[0])
    # kubectl create secret generic telegrad --from-literal=token=$(telegrad token)
    """
    documents = [_jobset(manifest)] if manifest.jobset else [_service(manifest), _job(manifest)]
    intro = f"# kubectl create secret generic {manifest.secret} --from-literal=token=$(telegrad token)\n"
    return intro + "---\n".join(to_yaml(document) for document in documents)


def _service(manifest: Manifest) -> dict[str, object]:
    """Return the headless service: with it, pods have names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": manifest.name},
        "spec": {
            "clusterIP": "None",
            # Workers look for the first one while it starts.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": manifest.name},
        },
    }


def _job(manifest: Manifest) -> dict[str, object]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": manifest.name},
        "spec": _job_spec(manifest, f"{manifest.name}-0.{manifest.name}", manifest.name),
    }


def _jobset(manifest: Manifest) -> dict[str, object]:
    """Return a JobSet, which makes the headless service itself, and restarts all pods when one fails."""
    group = "worker"
    spec: dict[str, object] = {
        "network": {"enableDNSHostnames": True, "subdomain": manifest.name},
        "replicatedJobs": [
            {
                "name": group,
                "replicas": 1,
                "template": {"spec": _job_spec(manifest, f"{manifest.name}-{group}-0-0.{manifest.name}", None)},
            }
        ],
    }
    if manifest.restarts:
        spec["failurePolicy"] = {"maxRestarts": manifest.restarts}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": manifest.name},
        "spec": spec,
    }


def _job_spec(manifest: Manifest, host: str, subdomain: str | None) -> dict[str, object]:
    replaces_pods = manifest.restarts > 0 and not manifest.jobset
    environment: list[object] = [
        {"name": "WORLD_SIZE", "value": str(manifest.workers)},
        {"name": "MASTER_ADDR", "value": host},
        {"name": "MASTER_PORT", "value": str(manifest.port)},
        {"name": "TELEGRAD_TOKEN", "valueFrom": {"secretKeyRef": {"name": manifest.secret, "key": "token"}}},
    ]
    if replaces_pods:
        environment += [
            {"name": RESTART_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": _FAILURES}}},
            {"name": AWAIT_VARIABLE, "value": str(_AWAITED)},
        ]
    container: dict[str, object] = {
        "name": "worker",
        "image": manifest.image,
        "command": list(manifest.command),
        "env": environment,
    }
    if manifest.resources:
        container["resources"] = {"limits": dict(manifest.resources)}
    pod: dict[str, object] = {"restartPolicy": "Never", "containers": [container]}
    if subdomain is not None:
        pod["subdomain"] = subdomain
    return {
        "completionMode": "Indexed",
        "completions": manifest.workers,
        "parallelism": manifest.workers,
        # A pod is replaced when it has ended, so there is at most one process of each name.
        **(
            {"backoffLimitPerIndex": manifest.restarts, "podReplacementPolicy": "Failed"}
            if replaces_pods
            else {"backoffLimit": 0}
        ),
        "template": {"spec": pod},
    }


def to_yaml(value: object, indent: int = 0) -> str:
    """Return a value as block YAML. Texts are quoted as in JSON, which is YAML.

    >>> print(to_yaml({"a": [1, {"b": "x", "c": True}], "d": {}}), end="")
    a:
      - 1
      - b: "x"
        c: true
    d: {}
    """
    space = " " * indent
    if isinstance(value, Mapping) and value:
        return "".join(f"{space}{key}:{_nested(item, indent)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return "".join(f"{space}- {to_yaml(item, indent + 2).lstrip(' ')}" for item in value)
    return f"{space}{json.dumps(value)}\n"


def _nested(value: object, indent: int) -> str:
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str) and value:
        return "\n" + to_yaml(value, indent + 2)
    return " " + to_yaml(value)
