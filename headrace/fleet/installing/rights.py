# SPDX-License-Identifier: Apache-2.0
"""What each program may do, and nothing else.

The operator's rights follow from the table of kinds that the controller reads and writes, so that neither can fall behind
the other. It has none to Secrets but the one of its webhooks, and none to give rights away: it may make the Roles of routers
because it has all that is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.fleet.cluster.resources import BENCHMARKS, CHILDREN, FACTS, JOBS, LEASES, PODS, SERVICES
from headrace.fleet.cluster.webhooks.settings import CONFIGURATION, MUTATING, SECRET, VALIDATING
from headrace.fleet.installing.settings import ManifestSettings, labels_of, metadata
from headrace.fleet.names import GROUP
from headrace.fleet.words import Document

Rule = dict[str, Any]

_RBAC = "rbac.authorization.k8s.io"
_FOLLOW = ("list", "watch")
_READ = ("get", *_FOLLOW)
_WRITE = (*_READ, "create", "patch", "delete")
_SCALED = ("apps/deployments", "leaderworkerset.x-k8s.io/leaderworkersets")
"""What our router wakes: it is given the right to, so the operator must have it."""
_MODELS = ("basemodels", "clusterbasemodels")


def cluster_rules() -> list[Rule]:
    """What the operator may do in all namespaces."""
    rules = [
        _rule(GROUP, [SERVICES.plural, BENCHMARKS.plural], [*_FOLLOW, "patch"]),
        _rule(GROUP, [f"{SERVICES.plural}/status", f"{BENCHMARKS.plural}/status"], ["patch"]),
        # Asked for by clusters that check who may keep an owner from being deleted.
        _rule(GROUP, [f"{SERVICES.plural}/finalizers", f"{BENCHMARKS.plural}/finalizers"], ["update"]),
        _rule(GROUP, [each.plural for each in FACTS], _FOLLOW),
        # What the agents found in a model's files is written into it, where it says nothing itself.
        _rule(GROUP, _MODELS, ["patch"]),
        _rule(GROUP, [f"{each}/status" for each in _MODELS], ["patch"]),
        _rule("", [PODS.plural], _READ),
        _rule("", ["events"], ["create"]),
    ]
    groups: dict[str, list[str]] = {}
    for each in (*CHILDREN, JOBS):
        plurals = groups.setdefault(each.group, [])
        if each.plural not in plurals:
            plurals.append(each.plural)
    rules += [_rule(group, plurals, _WRITE) for group, plurals in groups.items()]
    for scaled in _SCALED:
        group, _, plural = scaled.partition("/")
        rules.append(_rule(group, [f"{plural}/scale"], ["get", "patch"]))
    return rules


def webhook_rules(settings: ManifestSettings) -> list[Rule]:
    """What it takes beyond that to register the webhooks: their owner, the namespace, is looked up."""
    return [
        _rule(
            MUTATING.resource.group,
            [MUTATING.resource.plural, VALIDATING.resource.plural],
            ["get", "create", "patch"],
            [CONFIGURATION],
        ),
        _rule("", ["namespaces"], ["get"], [settings.namespace]),
    ]


def own_rules() -> list[Rule]:
    """What the operator may do in its own namespace alone."""
    return [_rule(LEASES.resource.group, [LEASES.resource.plural], ["get", "create", "update"])]


def certificate_rules() -> list[Rule]:
    """The Secret comes with the manifests, empty: to make one would be a right to make any."""
    return [_rule("", ["secrets"], ["get", "update"], [SECRET])]


def agent_rules() -> list[Rule]:
    """What the model agent may do in the cluster: read models, and say on its node which are there."""
    return [_rule(GROUP, _MODELS, _FOLLOW), _rule("", ["nodes"], ["get", "patch"])]


def agent_own_rules(settings: ManifestSettings) -> list[Rule]:
    """In its own namespace: the states of nodes, and Secrets that were named. By name: the webhooks' key is there."""
    states = _rule("", ["configmaps"], ["get", "create", "patch"])
    return [states, _rule("", ["secrets"], ["get"], settings.agent_secrets)] if settings.agent_secrets else [states]


def secrets_role(program: str) -> Document:
    """A right to Secrets, bound to nobody: for who has models with credentials, to be bound where those are."""
    named = {"name": f"{program}-secrets", "labels": labels_of(program)}
    rules = [_rule("", ["secrets"], ["get"])]
    return {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": named, "rules": rules}


def granted(settings: ManifestSettings, program: str, rules: Sequence[Rule], *, name: str = "") -> list[Document]:
    """A ClusterRole with rules, and the program's account bound to it."""
    named = {"name": name or program, "labels": labels_of(program)}
    return _pair("ClusterRole", named, settings, program, rules)


def granted_here(settings: ManifestSettings, program: str, rules: Sequence[Rule], *, name: str = "") -> list[Document]:
    """The same for the program's own namespace."""
    return _pair("Role", metadata(settings, program, name), settings, program, rules)


def _pair(
    kind: str, named: Mapping[str, Any], settings: ManifestSettings, program: str, rules: Sequence[Rule]
) -> list[Document]:
    role = {"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": named, "rules": list(rules)}
    binding = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": f"{kind}Binding",
        "metadata": named,
        "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": named["name"]},
        "subjects": [{"kind": "ServiceAccount", "name": program, "namespace": settings.namespace}],
    }
    return [role, binding]


def _rule(group: str, resources: Iterable[str], verbs: Iterable[str], names: Iterable[str] = ()) -> Rule:
    rule: Rule = {"apiGroups": [group], "resources": list(resources)}
    if names:
        rule["resourceNames"] = list(names)
    return rule | {"verbs": list(verbs)}
