# SPDX-License-Identifier: Apache-2.0
"""The context of a plan: the service, the cluster's facts and the live objects; and how objects are built from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.fleet.documents import ClusterFacts, namespace_of
from headrace.fleet.merging import Component
from headrace.fleet.names import API_VERSION, APP_LABEL, COMPONENT_LABEL, SERVICE_LABEL, component_name, trunc63
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_int,
    get_mapping,
    get_str,
    name_of,
)

if TYPE_CHECKING:
    from headrace.fleet.planning.shared_activator import SharedActivator

CLUSTER_DOMAIN = "svc.cluster.local"
REVISION_LABEL = "ome.io/revision"
"""Label of a component's workload and pods: a digest of the pods, in ten characters."""
CANARY_SUFFIX = "canary"

Object = dict[str, Any]


def live_key(kind: str, name: str) -> str:
    """Return the key of a live object for `plan`: `Deployment/llama-chat-engine`."""
    return f"{kind}/{name}"


@dataclass(frozen=True)
class PlanContext:
    """One service in its cluster."""

    service: Document
    """The service with its defaults."""
    facts: ClusterFacts
    live: Mapping[str, Document]
    name: str
    namespace: str
    annotations: Mapping[str, str]
    owners: list[Object]
    activator: SharedActivator | None = None
    """The shared activator, if one runs."""
    split_applied: bool = True
    """Whether the front routers run with the shares that their ConfigMap has."""

    def live_object(self, kind: str, name: str) -> Document | None:
        """Return a live object, if there is one."""
        return self.live.get(live_key(kind, name))

    def has(self, capability: str) -> bool:
        """Whether the cluster has an optional feature such as Knative."""
        return capability in self.facts.capabilities

    def host(self, service: str) -> str:
        """Return the host name of a Service in the cluster."""
        return f"{service}.{self.namespace}.{CLUSTER_DOMAIN}"

    def new_object(
        self,
        kind: tuple[str, str],
        name: str,
        labels: Mapping[str, str],
        annotations: Mapping[str, str] | None = None,
        **body: Any,
    ) -> Object:
        """Return an object of (API version, kind) that the service owns."""
        metadata: Object = {"name": name, "namespace": self.namespace, "labels": dict(labels)}
        if annotations:
            metadata["annotations"] = dict(annotations)
        metadata["ownerReferences"] = self.owners
        return {"apiVersion": kind[0], "kind": kind[1], "metadata": metadata, **body}

    def own_labels(self, component: str) -> dict[str, str]:
        """Return the labels of an object of the service itself, not of a component."""
        return {SERVICE_LABEL: trunc63(self.name), COMPONENT_LABEL: component}


def plan_context(
    service: Document,
    facts: ClusterFacts,
    live: Mapping[str, Document],
    activator: SharedActivator | None = None,
    split_applied: bool = True,
) -> PlanContext:
    """Return the context of a service with its defaults. Without a uid (a file) its owner reference has none."""
    owner = {
        "apiVersion": get_str(service, "apiVersion") or API_VERSION,
        "kind": "InferenceService",
        "name": name_of(service),
        "uid": get_str(service, "metadata", "uid"),
        "controller": True,
        "blockOwnerDeletion": True,
    }
    name, namespace = name_of(service), namespace_of(service)
    annotations = annotations_of(service)
    return PlanContext(service, facts, live, name, namespace, annotations, [owner], activator, split_applied)


def full_name(context: PlanContext, component: Component) -> str:
    """Return `llama-chat-engine`."""
    return component_name(context.name, component.name)


def app_labels(component: Component, name: str) -> dict[str, str]:
    """Return the component's labels and the label `app`, which selects its pods."""
    return {**component.labels, APP_LABEL: trunc63(name)}


def shorten_name(name: str, max_length: int) -> str:
    """Return the name if it has at most `most` characters, else a digest and its end. Begins with a letter."""
    if len(name) <= max_length:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:7]
    return f"a{digest}-{name[-(max_length - 9) :]}"


def digest_of(value: str) -> str:
    """Return a digest of ten characters."""
    return hashlib.sha256(value.encode()).hexdigest()[:10]


def available_replicas(live: Document | None) -> int:
    """Return the available replicas of a live Deployment or LeaderWorkerSet."""
    status = get_mapping(live, "status")
    count = get_int(status, "availableReplicas")
    return count if count is not None else get_int(status, "readyReplicas") or 0
