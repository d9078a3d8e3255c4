# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicies of Headrace's own programs: which connections the operator, the activator and the model agent accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.fleet.cluster.webhooks import settings as hooks
from headrace.fleet.install.settings import AGENT, PORT, ManifestSettings, metadata
from headrace.fleet.names import ACTIVATOR, APP_NAME_LABEL, OPERATOR
from headrace.fleet.planning.network_policies import NETWORK_POLICY, namespaces
from headrace.fleet.planning.shared_activator import FIRST_PORT, LAST_PORT
from headrace.platforms.kubernetes_client.objects import Document

Rule = dict[str, Any]


def network_policy_objects(settings: ManifestSettings) -> list[Document]:
    """Return the NetworkPolicies of the programs that are installed."""
    objects = [operator_policy(settings)]
    if settings.has("activator"):
        objects.append(activator_policy(settings))
    if settings.has("agent"):
        objects.append(agent_policy(settings))
    return objects


def operator_policy(settings: ManifestSettings) -> Document:
    """Return the operator's policy. The API server, which calls the webhooks, is not a pod, so no selector matches it."""
    webhooks: list[Rule] = [{"ports": [_port(hooks.PORT)]}] if settings.has("webhook") else []
    return _policy(settings, OPERATOR, [_metrics(settings), *webhooks])


def activator_policy(settings: ManifestSettings) -> Document:
    """Return the activator's policy. Clients of services are anywhere, and outside of the cluster."""
    services = {"ports": [{**_port(FIRST_PORT), "endPort": LAST_PORT}]}
    return _policy(settings, ACTIVATOR, [_metrics(settings), services])


def agent_policy(settings: ManifestSettings) -> Document:
    """Return the model agent's policy."""
    return _policy(settings, AGENT, [_metrics(settings)])


def _metrics(settings: ManifestSettings) -> Rule:
    """Return the rule for `/metrics`: Headrace's namespace and those that are named."""
    sources: list[Rule] = [{"podSelector": {}}]
    if settings.client_namespaces:
        sources.append(namespaces(*settings.client_namespaces))
    return {"from": sources, "ports": [_port(PORT)]}


def _port(number: int) -> Rule:
    return {"port": number, "protocol": "TCP"}


def _policy(settings: ManifestSettings, program: str, rules: Sequence[Rule]) -> Document:
    return {
        "apiVersion": NETWORK_POLICY[0],
        "kind": NETWORK_POLICY[1],
        "metadata": metadata(settings, program),
        "spec": {
            "podSelector": {"matchLabels": {APP_NAME_LABEL: program}},
            "policyTypes": ["Ingress"],
            "ingress": list(rules),
        },
    }
