# SPDX-License-Identifier: Apache-2.0
"""RBAC: the roles of the operator and of the model agent.

The operator's permissions are generated from the table of resources that it reads and writes. It has access to no Secret but
that of its webhooks, and no `escalate` or `bind`: it may create the Roles of routers because it has all their permissions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.fleet.cluster.resources import BENCHMARKS, CHILDREN, FACTS, JOBS, SERVICES
from headrace.fleet.cluster.webhooks.settings import CLUSTER_ROLES, CONFIGURATION, MUTATING, ROLE, SECRET, VALIDATING
from headrace.fleet.install.settings import ManifestSettings, metadata, program_labels
from headrace.fleet.names import GROUP
from headrace.platforms.kubernetes_client.objects import LEASES, PODS, Document

Rule = dict[str, Any]

_RBAC = "rbac.authorization.k8s.io"
_WATCH = ("list", "watch")
_READ = ("get", *_WATCH)
_WRITE = (*_READ, "create", "patch", "delete")
_SCALED = ("apps/deployments", "leaderworkerset.x-k8s.io/leaderworkersets")
"""Workloads that the front router scales: the operator grants this permission, so it needs it itself."""
_MODELS = ("basemodels", "clusterbasemodels")


def cluster_rules() -> list[Rule]:
    """Return the operator's rules in all namespaces."""
    rules = [
        _rule(GROUP, [SERVICES.plural, BENCHMARKS.plural], [*_WATCH, "patch"]),
        _rule(GROUP, [f"{SERVICES.plural}/status", f"{BENCHMARKS.plural}/status"], ["patch"]),
        # Required by clusters with OwnerReferencesPermissionEnforcement.
        _rule(GROUP, [f"{SERVICES.plural}/finalizers", f"{BENCHMARKS.plural}/finalizers"], ["update"]),
        _rule(GROUP, [resource.plural for resource in FACTS], _WATCH),
        # The operator fills empty fields of a model's spec with what the agents read from its files.
        _rule(GROUP, _MODELS, ["patch"]),
        _rule(GROUP, [f"{plural}/status" for plural in _MODELS], ["patch"]),
        _rule("", [PODS.plural], _READ),
        _rule("", ["events"], ["create", "patch"]),
    ]
    groups: dict[str, list[str]] = {}
    for resource in (*CHILDREN, JOBS):
        plurals = groups.setdefault(resource.group, [])
        if resource.plural not in plurals:
            plurals.append(resource.plural)
    rules += [_rule(group, plurals, _WRITE) for group, plurals in groups.items()]
    for scaled in _SCALED:
        group, _, plural = scaled.partition("/")
        rules.append(_rule(group, [f"{plural}/scale"], ["get", "patch"]))
    # OpenShift asks for this where an EndpointSlice names addresses of pods, as that of the shared activator does.
    rules.append(_rule("discovery.k8s.io", ["endpointslices/restricted"], ["create"]))
    return rules


def activator_rules() -> list[Rule]:
    """Return the shared activator's rules: read workloads. The Role of each service's front router lets it scale them."""
    rules = []
    for scaled in _SCALED:
        group, _, plural = scaled.partition("/")
        rules.append(_rule(group, [plural], _WATCH))
    return rules


def webhook_rules() -> list[Rule]:
    """Return the operator's rules to register the webhooks. Their owner, the ClusterRole with these rules, is read."""
    return [
        _rule(
            MUTATING.resource.group,
            [MUTATING.resource.plural, VALIDATING.resource.plural],
            ["get", "create", "patch"],
            [CONFIGURATION],
        ),
        _rule(_RBAC, [CLUSTER_ROLES.resource.plural], ["get"], [ROLE]),
    ]


def namespace_rules() -> list[Rule]:
    """Return the operator's rules in its own namespace."""
    return [_rule(LEASES.resource.group, [LEASES.resource.plural], ["get", "create", "update"])]


def certificate_rules() -> list[Rule]:
    """Return the rules for the certificates' Secret. The manifests create it, empty: `create` would allow any Secret."""
    return [_rule("", ["secrets"], ["get", "update"], [SECRET])]


def agent_rules() -> list[Rule]:
    """Return the model agent's rules in the cluster: watch models, and label its node."""
    return [_rule(GROUP, _MODELS, _WATCH), _rule("", ["nodes"], ["get", "patch"])]


def agent_namespace_rules(settings: ManifestSettings) -> list[Rule]:
    """Return the agent's rules in its namespace. Secrets are listed by name: the webhooks' key is there, too."""
    states = _rule("", ["configmaps"], ["get", "create", "patch"])
    return [states, _rule("", ["secrets"], ["get"], settings.agent_secrets)] if settings.agent_secrets else [states]


def secrets_role(program: str) -> Document:
    """Return an unbound ClusterRole to read Secrets, to be bound in the namespaces of models with credentials."""
    metadata = {"name": f"{program}-secrets", "labels": program_labels(program)}
    rules = [_rule("", ["secrets"], ["get"])]
    return {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": metadata, "rules": rules}


def bind_cluster_role(
    settings: ManifestSettings, program: str, rules: Sequence[Rule], *, name: str = ""
) -> list[Document]:
    """Return a ClusterRole and its binding to the program's ServiceAccount."""
    metadata = {"name": name or program, "labels": program_labels(program)}
    return _role_and_binding("ClusterRole", metadata, settings, program, rules)


def bind_role(settings: ManifestSettings, program: str, rules: Sequence[Rule], *, name: str = "") -> list[Document]:
    """Return a Role in the program's own namespace and its binding."""
    return _role_and_binding("Role", metadata(settings, program, name), settings, program, rules)


def _role_and_binding(
    kind: str, metadata: Mapping[str, Any], settings: ManifestSettings, program: str, rules: Sequence[Rule]
) -> list[Document]:
    role = {"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": metadata, "rules": list(rules)}
    binding = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": f"{kind}Binding",
        "metadata": metadata,
        "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": metadata["name"]},
        "subjects": [{"kind": "ServiceAccount", "name": program, "namespace": settings.namespace}],
    }
    return [role, binding]


def _rule(group: str, resources: Iterable[str], verbs: Iterable[str], names: Iterable[str] = ()) -> Rule:
    rule: Rule = {"apiGroups": [group], "resources": list(resources)}
    if names:
        rule["resourceNames"] = list(names)
    return rule | {"verbs": list(verbs)}
