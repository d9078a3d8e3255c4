# SPDX-License-Identifier: Apache-2.0
"""What can be chosen when Headrace is installed, and what all of its objects have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.fleet.names import NAMESPACE
from headrace.fleet.words import Document, FleetSettings

OPERATOR = "headrace-operator"
AGENT = "headrace-model-agent"
PORT = 8080
"""Where a program tells of itself: `/metrics`, `/healthz`."""
PARTS = ("crds", "namespace", "config", "webhook", "agent")
"""What can be left out."""
MODELS_PATH = "/mnt/models"


@dataclass(frozen=True)
class ManifestSettings:
    """How Headrace is to be run."""

    namespace: str = NAMESPACE
    image: str = FleetSettings.image
    replicas: int = 1
    """Of the operator; one leads."""
    arguments: tuple[str, ...] = ()
    """More words for `headrace operator run`."""
    without: frozenset[str] = frozenset()
    """Of `PARTS`."""
    models_path: str = MODELS_PATH
    """Where nodes keep models. The agent writes nowhere else."""
    agent_secrets: tuple[str, ...] = ()
    """Secrets of the namespace that the agent may read: the `storage.key` of models. Of others it may read none."""
    pull_secret: str = ""
    """The Secret of the operator's namespace that the image is pulled with."""

    def __post_init__(self) -> None:
        unknown = sorted(self.without - set(PARTS))
        if unknown:
            raise InvalidArgument(f"{unknown[0]} cannot be left out: what can is {', '.join(PARTS)}")

    def has(self, part: str) -> bool:
        """Whether a part is wanted."""
        return part not in self.without


def labels_of(program: str) -> dict[str, str]:
    """What every object of a program carries."""
    return {"app.kubernetes.io/name": program, "app.kubernetes.io/part-of": "headrace"}


def metadata(settings: ManifestSettings, program: str, name: str = "") -> dict[str, Any]:
    """Of an object in the namespace."""
    return {"name": name or program, "namespace": settings.namespace, "labels": labels_of(program)}


def account(settings: ManifestSettings, program: str) -> Document:
    """Who the program is to the API server."""
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(settings, program)}


def scraped(program: str) -> dict[str, Any]:
    """The metadata of a program's pods: they are found by Prometheus."""
    notes = {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT), "prometheus.io/path": "/metrics"}
    return {"labels": labels_of(program), "annotations": notes}


def secured() -> dict[str, Any]:
    """A container that may do nothing but run."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def from_pod(name: str, path: str) -> dict[str, Any]:
    """A variable that tells a program about its pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def pulled(settings: ManifestSettings) -> dict[str, Any]:
    """How the pod gets its image."""
    return {"imagePullSecrets": [{"name": settings.pull_secret}]} if settings.pull_secret else {}
