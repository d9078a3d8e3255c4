# SPDX-License-Identifier: Apache-2.0
"""What must be so before anything is started on a cluster. Called by the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.platforms.contract import Check
from headrace.platforms.kubernetes.cluster import Cluster, Refused, together
from headrace.platforms.kubernetes.settings import KubernetesSettings

GPU = "nvidia.com/gpu"
_WORKLOADS = {"job": ("create", "batch", "jobs"), "statefulset": ("create", "apps", "statefulsets")}
_NEEDED = (
    ("create", "", "services"),
    ("create", "", "secrets"),
    ("list", "", "pods"),
    ("get", "", "pods/log"),
)


async def preflight(cluster: Cluster, settings: KubernetesSettings) -> list[Check]:
    """All that can be known; the first thing that makes the rest unknowable is the last that is told."""
    try:
        server = cluster.server
    except HeadraceError as error:
        return [Check("kubeconfig", passed=False, message=error.message)]
    checks = [Check("kubeconfig", passed=True, message=f"{server}, namespace {settings.namespace}")]
    try:
        checks.append(await _rights(cluster, settings))
        checks.append(await _namespace(cluster, settings.namespace))
        if settings.image_pull_secret:
            checks.append(await _pull_secret(cluster, settings.image_pull_secret))
        checks.append(await _nodes(cluster))
    except (HeadraceError, Refused) as error:
        told = error.told if isinstance(error, Refused) else error
        checks.append(Check("cluster", passed=False, message=told.message))
    return checks


def gpus_of(node: Mapping[str, Any]) -> int:
    """How many a node could give, were it empty."""
    told = str(((node.get("status") or {}).get("allocatable") or {}).get(GPU, "0"))
    return int(told) if told.isdigit() else 0


async def _rights(cluster: Cluster, settings: KubernetesSettings) -> Check:
    wanted = (_WORKLOADS[settings.workload], *_NEEDED)
    answers = await together(*(cluster.allowed(*each) for each in wanted))
    missing = [f"{verb} {what}" for (verb, _, what), fine in zip(wanted, answers, strict=True) if not fine]
    told = "all that is needed" if not missing else "have these allowed by a Role: " + ", ".join(missing)
    return Check("rights", not missing, told)


async def _namespace(cluster: Cluster, name: str) -> Check:
    try:
        there = await cluster.get("Namespace", name) is not None
    except Refused as refused:
        if refused.code != 403:
            raise
        return Check("namespace", passed=True, message=f"{name}: whether it is there may not be asked")
    return Check("namespace", there, f"{name} is there" if there else f"make it: kubectl create namespace {name}")


async def _pull_secret(cluster: Cluster, name: str) -> Check:
    found = await cluster.get("Secret", name)
    if found is None:
        told = f"{name} is not there: `kubectl create secret docker-registry` makes it"
        return Check("image pull secret", passed=False, message=told)
    fits = found.get("type") == "kubernetes.io/dockerconfigjson"
    return Check("image pull secret", fits, f"{name} is " + ("there" if fits else "no secret of type docker-registry"))


async def _nodes(cluster: Cluster) -> Check:
    """GPUs are only counted here: a service may need none."""
    try:
        nodes = await cluster.list("Node")
    except Refused as refused:
        if refused.code != 403:
            raise
        return Check("GPUs", passed=True, message="nodes may not be looked at: the scheduler will tell")
    total = sum(gpus_of(node) for node in nodes)
    return Check("GPUs", passed=True, message=f"{len(nodes)} nodes with {total} allocatable {GPU}")
