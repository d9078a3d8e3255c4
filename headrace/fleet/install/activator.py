# SPDX-License-Identifier: Apache-2.0
"""The objects of the shared activator: `headrace operator activator`, which holds requests of services at zero."""

from __future__ import annotations

from typing import Any

from headrace.fleet.install import rbac
from headrace.fleet.install.settings import (
    PORT,
    ManifestSettings,
    container_security,
    life_probes,
    metadata,
    pod_metadata,
    pull_secrets,
    service_account,
)
from headrace.fleet.names import ACTIVATOR, APP_NAME_LABEL
from headrace.platforms.kubernetes_client.objects import Document

SELECTOR = {APP_NAME_LABEL: ACTIVATOR}
PRE_STOP_SECONDS = 15
"""From the deletion of a pod to SIGTERM: the operator takes it out of the EndpointSlices of all services meanwhile."""
GRACE_SECONDS = 600
"""How long held requests may take after SIGTERM."""
BUDGET_ABOVE = 2
"""Replicas above which there is a PodDisruptionBudget: its version is in Kubernetes from 1.21 on, and two run by default."""
_EXIT_SECONDS = 30
_TMP = "/tmp"  # noqa: S108 the pod's own


def activator_objects(settings: ManifestSettings) -> list[Document]:
    """Return all objects of the shared activator, in the order to create them."""
    objects = [
        service_account(settings, ACTIVATOR),
        *rbac.bind_cluster_role(settings, ACTIVATOR, rbac.activator_rules()),
    ]
    if settings.activator_replicas > BUDGET_ABOVE:
        objects.append(activator_budget(settings))
    return [*objects, activator_deployment(settings)]


def activator_budget(settings: ManifestSettings) -> Document:
    """Return a budget that takes away one replica at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(settings, ACTIVATOR),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": SELECTOR}},
    }


def activator_deployment(settings: ManifestSettings) -> Document:
    """Return the Deployment. Its replicas need no coordination: none of them scales anything to zero."""
    pod = {
        "serviceAccountName": ACTIVATOR,
        **pull_secrets(settings),
        "containers": [_container(settings)],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS + GRACE_SECONDS + _EXIT_SECONDS,
        # On different nodes, if there are several.
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": SELECTOR},
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(settings, ACTIVATOR),
        "spec": {
            "replicas": settings.activator_replicas,
            "selector": {"matchLabels": SELECTOR},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": pod_metadata(ACTIVATOR), "spec": pod},
        },
    }


def _container(settings: ManifestSettings) -> dict[str, Any]:
    return {
        "name": "activator",
        "image": settings.image,
        "args": [
            "operator",
            "activator",
            "--host=0.0.0.0",
            f"--listen=0.0.0.0:{PORT}",
            f"--grace-seconds={GRACE_SECONDS}",
        ],
        "ports": [{"name": "metrics", "containerPort": PORT, "protocol": "TCP"}],
        **life_probes(),
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": PORT}, "periodSeconds": 2},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
        # Held requests have their bodies in memory: 256 MiB for each service at most.
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": _TMP}],
    }
