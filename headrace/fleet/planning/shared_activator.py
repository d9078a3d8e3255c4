# SPDX-License-Identifier: Apache-2.0
"""The shared activator: its port for each service that is scaled to zero, and how requests get there.

The activator is one Deployment for all services (`headrace operator activator`). It has a port for each service, so that any
request finds its service, whatever host name and protocol it uses. The operator writes two things: the service's activation
settings, in an annotation of the front router's Deployment, and an EndpointSlice that adds the activator's pods to
the Service of the InferenceService. The endpoints of the front router are in other EndpointSlices, which Kubernetes itself
writes: the activator is added before the front router goes, and removed after the front router is back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.fleet.names import trunc63
from headrace.fleet.planning.context import Object, PlanContext
from headrace.platforms.kubernetes_client.objects import Document, annotations_of, get_int, get_list, get_str

ACTIVATION = "ome.io/activation"
"""Annotation of a front router's Deployment: the service's activation settings for the shared activator, as JSON."""
FIRST_PORT, LAST_PORT = 20_000, 29_999
"""Ports of the activator, one for each service: below those that Linux gives to outgoing connections."""
ENDPOINT_SLICE = ("discovery.k8s.io/v1", "EndpointSlice")
SLICE_SERVICE = "kubernetes.io/service-name"
SLICE_MANAGER = "endpointslice.kubernetes.io/managed-by"
MANAGER = "headrace-operator"
COMPONENT = "activator"


def activation_annotation(port: int, activation: Mapping[str, Any]) -> str:
    """Return the value of the annotation `ACTIVATION`."""
    return json.dumps({"port": port, **activation}, sort_keys=True)


def activation_of(front: Document | None) -> dict[str, Any] | None:
    """Return the activation settings in the annotation of a front router's Deployment; None without valid ones."""
    text = annotations_of(front).get(ACTIVATION, "") if front is not None else ""
    try:
        activation = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    port = get_int(activation, "port")
    return activation if port is not None and FIRST_PORT <= port <= LAST_PORT else None


def slice_name(context: PlanContext) -> str:
    """Return `llama-chat-activator`."""
    return f"{context.name}-{COMPONENT}"


@dataclass(frozen=True)
class SharedActivator:
    """The shared activator from the view of one service."""

    namespace: str
    account: str
    """Its ServiceAccount, which may scale the service's workloads."""
    addresses: tuple[str, ...]
    """IP addresses of its ready pods; never empty."""
    port: int
    """Its port for this service."""

    def endpoint_slice(self, context: PlanContext) -> Object:
        """Return the EndpointSlice that adds the activator to the Service of the InferenceService."""
        family = _family(self.addresses[0])
        labels = {
            **context.own_labels(COMPONENT),
            SLICE_SERVICE: trunc63(context.name),
            SLICE_MANAGER: MANAGER,
        }
        return context.new_object(
            ENDPOINT_SLICE,
            slice_name(context),
            labels,
            addressType=family,
            endpoints=[
                {"addresses": [address], "conditions": {"ready": True}}
                for address in self.addresses
                if _family(address) == family
            ],
            # The name is that of the Service's port: kube-proxy matches endpoints by it.
            ports=[{"name": "http", "port": self.port, "protocol": "TCP"}],
        )

    def has_taken_over(self, context: PlanContext) -> bool:
        """Whether the live EndpointSlice names the activator's present pods and this service's port."""
        live = context.live_object("EndpointSlice", slice_name(context))
        planned = self.endpoint_slice(context)
        return live is not None and _endpoints(live) == _endpoints(planned)


def _endpoints(endpoint_slice: Document) -> tuple[list[Any], list[int | None]]:
    addresses = [get_list(endpoint, "addresses") for endpoint in get_list(endpoint_slice, "endpoints")]
    return addresses, [get_int(port, "port") for port in get_list(endpoint_slice, "ports")]


def _family(address: str) -> str:
    return "IPv6" if ":" in address else "IPv4"


def is_scaled_to_zero(context: PlanContext, workloads: Sequence[tuple[str, str]]) -> bool:
    """Whether all of these workloads (kind, name) exist and have zero desired replicas."""
    lives = [context.live_object(kind, name) for kind, name in workloads]
    return bool(lives) and all(live is not None and get_int(live, "spec", "replicas") == 0 for live in lives)


def front_serves(front: Document | None) -> bool:
    """Whether a front router runs and is not being scaled down: only then do requests go to it alone."""
    if front is None or get_int(front, "spec", "replicas") == 0 or get_str(front, "metadata", "deletionTimestamp"):
        return False
    observed, generation = get_int(front, "status", "observedGeneration"), get_int(front, "metadata", "generation")
    if observed is not None and generation is not None and observed < generation:
        return False
    return (get_int(front, "status", "availableReplicas") or 0) > 0
