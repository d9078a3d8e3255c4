# SPDX-License-Identifier: Apache-2.0
"""The NetworkPolicies of a service: who may connect to its pods, where the operator isolates services.

Two objects: one for all its pods, which lets in the service itself, Headrace's own programs and the namespaces that the
operator names; and one for the pods that clients use, which lets in the service's namespace.
"""

from __future__ import annotations

from headrace.fleet.names import (
    ACTIVATOR,
    APP_NAME_LABEL,
    COMPONENT_LABEL,
    OPERATOR,
    SERVICE_LABEL,
    SERVICE_TYPE,
    trunc63,
)
from headrace.fleet.planning.context import Object, PlanContext
from headrace.fleet.planning.front_router import FRONT

NETWORK_POLICY = ("networking.k8s.io/v1", "NetworkPolicy")
NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label of every namespace from Kubernetes 1.21 on: its name."""
_EXPOSED = ("LoadBalancer", "NodePort")


def network_policies(context: PlanContext, entry: str) -> list[Object]:
    """Return the NetworkPolicies of a service; none unless services are isolated. `entry`: the component for clients."""
    settings = context.facts.settings
    if not settings.isolate_services:
        return []
    service = {SERVICE_LABEL: trunc63(context.name)}
    sources: list[Object] = [
        {"podSelector": {"matchLabels": service}},
        {
            "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: settings.own_namespace}},
            "podSelector": {"matchExpressions": [_one_of(APP_NAME_LABEL, OPERATOR, ACTIVATOR)]},
        },
    ]
    if settings.client_namespaces:
        sources.append(namespaces(*settings.client_namespaces))
    everybody = context.annotations.get(SERVICE_TYPE) in _EXPOSED
    clients: Object = {} if everybody else {"from": [{"podSelector": {}}]}
    return [
        _policy(context, context.name, {"matchLabels": service}, {"from": sources}),
        _policy(
            context,
            f"{context.name}-clients",
            {"matchLabels": service, "matchExpressions": [_one_of(COMPONENT_LABEL, entry, FRONT)]},
            clients,
        ),
    ]


def namespaces(*names: str) -> Object:
    """Return a source of a rule: all pods of these namespaces."""
    return {"namespaceSelector": {"matchExpressions": [_one_of(NAMESPACE_NAME, *names)]}}


def _one_of(label: str, *values: str) -> Object:
    return {"key": label, "operator": "In", "values": list(values)}


def _policy(context: PlanContext, name: str, pods: Object, rule: Object) -> Object:
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [rule]}
    return context.new_object(NETWORK_POLICY, name, context.own_labels("network-policy"), spec=spec)
