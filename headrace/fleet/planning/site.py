# SPDX-License-Identifier: Apache-2.0
"""What every object of one service is made with: its names, its owner, the cluster, and what runs already."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.fleet.merging import Component
from headrace.fleet.names import API_VERSION, APP_LABEL, COMPONENT_LABEL, SERVICE_LABEL, component_name, trunc63
from headrace.fleet.words import ClusterFacts, Document, annotations_of, name_of, namespace_of, part, text, whole

CLUSTER_DOMAIN = "svc.cluster.local"
REVISION_LABEL = "ome.io/revision"
"""Which pods, in ten characters: on a component's workload and its pods."""
CANARY_SUFFIX = "canary"

Object = dict[str, Any]


def live_key(kind: str, name: str) -> str:
    """Where a live object stands in the mapping that `plan` takes: `Deployment/llama-chat-engine`."""
    return f"{kind}/{name}"


@dataclass(frozen=True)
class Site:
    """One service in its cluster."""

    service: Document
    """After admission."""
    facts: ClusterFacts
    live: Mapping[str, Document]
    name: str
    namespace: str
    annotations: Mapping[str, str]
    owners: list[Object]

    def found(self, kind: str, name: str) -> Document | None:
        """The live object, if there is one."""
        return self.live.get(live_key(kind, name))

    def has(self, capability: str) -> bool:
        """Whether the cluster has Knative and the like."""
        return capability in self.facts.capabilities

    def host(self, service: str) -> str:
        """Where a Service is, inside the cluster."""
        return f"{service}.{self.namespace}.{CLUSTER_DOMAIN}"

    def made(
        self,
        kind: tuple[str, str],
        name: str,
        labels: Mapping[str, str],
        annotations: Mapping[str, str] | None = None,
        **body: Any,
    ) -> Object:
        """An object of (API version, kind), owned by the service."""
        metadata: Object = {"name": name, "namespace": self.namespace, "labels": dict(labels)}
        if annotations:
            metadata["annotations"] = dict(annotations)
        metadata["ownerReferences"] = self.owners
        return {"apiVersion": kind[0], "kind": kind[1], "metadata": metadata, **body}

    def own_labels(self, component: str) -> dict[str, str]:
        """Labels of an object that belongs to the service and to none of its components."""
        return {SERVICE_LABEL: trunc63(self.name), COMPONENT_LABEL: component}


def site_of(service: Document, facts: ClusterFacts, live: Mapping[str, Document]) -> Site:
    """The site of a service whose defaults are in. Without a uid (a file, no cluster) its owner reference has none."""
    owner = {
        "apiVersion": text(service, "apiVersion") or API_VERSION,
        "kind": "InferenceService",
        "name": name_of(service),
        "uid": text(service, "metadata", "uid"),
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return Site(service, facts, live, name_of(service), namespace_of(service), annotations_of(service), [owner])


def full_name(site: Site, component: Component) -> str:
    """`llama-chat-engine`."""
    return component_name(site.name, component.name)


def app_labels(component: Component, name: str) -> dict[str, str]:
    """The component's labels and the `app` by which its pods are selected."""
    return {**component.labels, APP_LABEL: trunc63(name)}


def shortened(name: str, most: int) -> str:
    """The name if it has at most so many characters, else a digest and its end. Begins with a letter."""
    if len(name) <= most:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:7]
    return f"a{digest}-{name[-(most - 9) :]}"


def digest_of(text: str) -> str:
    """Ten characters that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def available(live: Document | None) -> int:
    """How many replicas of a live Deployment or LeaderWorkerSet answer."""
    status = part(live, "status")
    count = whole(status, "availableReplicas")
    return count if count is not None else whole(status, "readyReplicas") or 0
