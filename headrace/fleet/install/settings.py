# SPDX-License-Identifier: Apache-2.0
"""Settings of the installation, and the parts that its objects have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.fleet.documents import FleetSettings
from headrace.fleet.names import APP_NAME_LABEL, NAMESPACE
from headrace.platforms.kubernetes_client.objects import Document

AGENT = "headrace-model-agent"
PORT = 8080
"""Port of `/metrics` and `/healthz`."""
PARTS = ("crds", "namespace", "config", "webhook", "agent", "activator")
"""Parts that can be left out."""
MODELS_PATH = "/mnt/models"


@dataclass(frozen=True)
class ManifestSettings:
    """Settings of the manifests."""

    namespace: str = NAMESPACE
    image: str = FleetSettings.image
    replicas: int = 1
    """Replicas of the operator; one is the leader."""
    activator_replicas: int = 2
    """Replicas of the shared activator."""
    arguments: tuple[str, ...] = ()
    """Additional arguments of `headrace operator run`."""
    without: frozenset[str] = frozenset()
    """Parts of `PARTS` to leave out."""
    models_path: str = MODELS_PATH
    """Folder of the models on nodes. The agent writes nowhere else."""
    agent_secrets: tuple[str, ...] = ()
    """Secrets of the namespace that the agent may read: the `storage.key` of models. It may read no others."""
    network_policies: bool = False
    """Whether the programs accept only the connections that they need."""
    isolate_services: bool = False
    """Whether services accept connections only from their namespace and from `client_namespaces`."""
    client_namespaces: tuple[str, ...] = ()
    """Namespaces that may connect to all services, and read the metrics of the programs."""
    pull_secret: str = ""
    """Image pull Secret in the operator's namespace."""

    def __post_init__(self) -> None:
        unknown = sorted(self.without - set(PARTS))
        if unknown:
            raise InvalidArgument(f"{unknown[0]} cannot be left out: only {', '.join(PARTS)} can")

    def has(self, part: str) -> bool:
        """Whether a part is included."""
        return part not in self.without


def program_labels(program: str) -> dict[str, str]:
    """Return the labels of every object of a program."""
    return {APP_NAME_LABEL: program, "app.kubernetes.io/part-of": "headrace"}


def metadata(settings: ManifestSettings, program: str, name: str = "") -> dict[str, Any]:
    """Return the metadata of an object in the namespace."""
    return {"name": name or program, "namespace": settings.namespace, "labels": program_labels(program)}


def service_account(settings: ManifestSettings, program: str) -> Document:
    """Return the ServiceAccount of a program."""
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(settings, program)}


def pod_metadata(program: str) -> dict[str, Any]:
    """Return the metadata of a program's pods, with the annotations for Prometheus."""
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT), "prometheus.io/path": "/metrics"}
    return {"labels": program_labels(program), "annotations": annotations}


def life_probes() -> dict[str, Any]:
    """Return the probes of a program: five minutes to start, which on a busy node is needed; then its life."""
    probe = {"httpGet": {"path": "/healthz", "port": PORT}}
    return {
        "startupProbe": {**probe, "periodSeconds": 2, "failureThreshold": 150},
        "livenessProbe": {**probe, "periodSeconds": 20},
    }


def container_security() -> dict[str, Any]:
    """Return the security context of a container without privileges."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def field_ref(name: str, path: str) -> dict[str, Any]:
    """Return an environment variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def pull_secrets(settings: ManifestSettings) -> dict[str, Any]:
    """Return the image pull secrets of a pod, if any."""
    return {"imagePullSecrets": [{"name": settings.pull_secret}]} if settings.pull_secret else {}
