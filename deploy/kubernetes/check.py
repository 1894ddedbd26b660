#!/usr/bin/env python3
"""Checks the chart and the manifests for Kubernetes: `make deploy-test`.

Helm checks and renders the chart. All objects must follow the schemas of Kubernetes, from the
oldest to the newest release that kubernetes-validate has, of JobSet and of Kubeflow's Trainer.
kubectl must build the same objects from kustomize/. Wrong values must be refused.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import generate
import kubernetes_validate
import yaml
from generate import CHART, FOLDER, KINDS, rendered
from helm_python import errors
from helm_python.chart import Chart, lint
from kubeflow_trainer_api import models

Object = dict[str, Any]

# The schemas of objects that Kubernetes itself does not know.
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
# The kinds of the Prometheus operator. No package has their schemas.
WITHOUT_SCHEMA = {"PodMonitor", "PrometheusRule"}

VALUES: list[Object] = [
    *({"kind": kind} for kind in KINDS),
    *({"kind": kind, "monitoring": {"enabled": True}} for kind in KINDS),
    {"secret": {"create": True, "name": "shared"}, "networkPolicy": {"enabled": False}},
    {
        "nodes": 8,
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "b", "key": "c"}}}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"gpu": "yes"},
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "resources": {"limits": {"nvidia.com/gpu": 2}},
    },
]
WRONG: list[tuple[Object, str]] = [
    ({"kind": "deployment"}, "kind"),
    ({"nodes": 0}, "nodes"),
    ({"ranksPerNode": "auto"}, "ranksPerNode"),
    ({"program": "python train.py"}, "program"),
    ({"port": 65535}, "port"),
    ({"user": 0}, "user"),
    ({"replicas": 2}, "replicas"),
    ({"monitoring": {"interval": "often"}}, "interval"),
]


def pods(one: object) -> Iterator[Object]:
    """Yields the specifications of the pods in an object."""
    if isinstance(one, dict):
        if "containers" in one:
            yield one
        for value in one.values():
            yield from pods(value)
    elif isinstance(one, list):
        for value in one:
            yield from pods(value)


def lost(given: object, known: object, path: str) -> Iterator[str]:
    """Yields the places of an object that its schema does not have."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            if key in known:
                yield from lost(value, known[key], f"{path}.{key}")
            elif value not in ({}, None):
                yield f"{path}.{key}"
    elif isinstance(given, list) and isinstance(known, list):
        for number, pair in enumerate(zip(given, known, strict=True)):
            yield from lost(*pair, f"{path}[{number}]")


def check(one: Object, versions: list[str]) -> Iterator[str]:
    """Yields what is wrong with an object."""
    kind = one["kind"]
    if kind in MODELS:
        known = MODELS[kind].from_dict(one).to_dict()
        yield from (f"{place} is unknown" for place in lost(one, known, kind))
        for pod in pods(one):
            alone = {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": pod}
            yield from check(alone, versions)
    elif kind not in WITHOUT_SCHEMA:
        for version in versions:
            try:
                kubernetes_validate.validate(one, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{kind} with Kubernetes {version}: {error.message} at {error.path}"
    for pod in pods(one) if kind not in MODELS else ():
        security, container = pod["securityContext"], pod["containers"][0]["securityContext"]
        if not (
            security["runAsNonRoot"]
            and security["seccompProfile"]["type"] == "RuntimeDefault"
            and container["readOnlyRootFilesystem"]
            and container["capabilities"]["drop"] == ["ALL"]
            and not container["allowPrivilegeEscalation"]
        ):
            yield "a pod with more rights than it needs"


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """Returns objects by kind and name."""
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def kustomized(folder: str) -> list[Object]:
    """Returns what kubectl builds."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / folder)], capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"kubectl kustomize {folder}: {done.stderr}")
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def faults() -> Iterator[str]:
    """Yields all that is wrong."""
    all_versions = kubernetes_validate.utils.all_versions()
    versions = [all_versions[0], all_versions[-1]]
    for values in VALUES:
        for one in rendered(values):
            yield from (f"{values}: {fault}" for fault in check(one, versions))
    for kind in KINDS:
        for message in lint(CHART, values={"kind": kind}).get("messages", []):
            if message.get("severity", 0) > 1:  # not advice such as to add an icon
                yield f"helm lint: {message}"
    with Chart.load(CHART) as chart:
        for values, name in WRONG:
            try:
                chart.validate_schema(values)
                yield f"{values} is not refused"
            except errors.HelmError as error:
                if name not in str(error):
                    yield f"{values}: the error does not name {name}: {error}"
    if shutil.which("kubectl") is None:
        print("skipped: kubectl, which builds kustomize/, is not installed")
        return
    for kind in KINDS:
        if by_name(kustomized(kind)) != by_name(rendered({"kind": kind})):
            yield f"kustomize/{kind} and the chart differ"
    with_monitoring = by_name(rendered({"monitoring": {"enabled": True}}))
    for name, one in by_name(kustomized("monitoring")).items():
        if with_monitoring.get(name) != one:
            yield f"kustomize/monitoring and the chart differ in {name}"


def main() -> int:
    """Prints what is wrong."""
    found = list(faults())
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found or generate.main() else 0


if __name__ == "__main__":
    sys.argv[1:] = ["--check"]
    sys.exit(main())
