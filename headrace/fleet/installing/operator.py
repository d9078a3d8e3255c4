# SPDX-License-Identifier: Apache-2.0
"""The operator: its account and rights, its Deployment, and the way for the API server to its webhooks."""

from __future__ import annotations

from typing import Any

from headrace.fleet.cluster.webhooks import settings as hooks
from headrace.fleet.installing import rights
from headrace.fleet.installing.settings import (
    OPERATOR,
    PORT,
    ManifestSettings,
    account,
    from_pod,
    metadata,
    pulled,
    scraped,
    secured,
)
from headrace.fleet.words import Document

SELECTOR = {"app.kubernetes.io/name": OPERATOR}


def operator_objects(settings: ManifestSettings) -> list[Document]:
    """All of them, in the order to make them."""
    objects = [
        account(settings, OPERATOR),
        *rights.granted(settings, OPERATOR, rights.cluster_rules()),
        *rights.granted_here(settings, OPERATOR, rights.own_rules()),
    ]
    if settings.has("webhook"):
        objects += webhook_objects(settings)
    if settings.replicas > 1:
        objects.append(disruption_budget(settings))
    return [*objects, deployment(settings)]


def webhook_objects(settings: ManifestSettings) -> list[Document]:
    """What the webhooks need; the operator registers them itself, once it has a certificate."""
    name = f"{OPERATOR}-webhook"
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(settings, OPERATOR, hooks.SECRET),
        "type": "Opaque",
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(settings, OPERATOR, hooks.SERVICE),
        "spec": {
            "selector": SELECTOR,
            "ports": [{"name": "https", "port": hooks.SERVICE_PORT, "targetPort": hooks.PORT, "protocol": "TCP"}],
        },
    }
    return [
        *rights.granted(settings, OPERATOR, rights.webhook_rules(settings), name=name),
        *rights.granted_here(settings, OPERATOR, rights.certificate_rules(), name=name),
        secret,
        service,
    ]


def disruption_budget(settings: ManifestSettings) -> Document:
    """One stays, so that nobody waits for the next to lead: only where there are several."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(settings, OPERATOR),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": SELECTOR}},
    }


def deployment(settings: ManifestSettings) -> Document:
    """The operator itself."""
    pod = {
        "serviceAccountName": OPERATOR,
        **pulled(settings),
        "containers": [_container(settings)],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(settings, OPERATOR),
        "spec": {
            "replicas": settings.replicas,
            "selector": {"matchLabels": SELECTOR},
            "template": {"metadata": scraped(OPERATOR), "spec": pod},
        },
    }


def _container(settings: ManifestSettings) -> dict[str, Any]:
    ports = [{"name": "metrics", "containerPort": PORT, "protocol": "TCP"}]
    words = ["operator", "run", f"--listen=0.0.0.0:{PORT}", f"--namespace={settings.namespace}"]
    # The routers that it puts before services are of the same image.
    words.append(f"--image={settings.image}")
    ready: dict[str, Any] = {"path": "/healthz", "port": PORT}
    if settings.has("webhook"):
        ports.append({"name": "webhook", "containerPort": hooks.PORT, "protocol": "TCP"})
        words.append(f"--webhook-listen=0.0.0.0:{hooks.PORT}")
        ready = {"path": hooks.READY_PATH, "port": hooks.PORT, "scheme": "HTTPS"}
    return {
        "name": "operator",
        "image": settings.image,
        "args": [*words, *settings.arguments],
        "ports": ports,
        "env": [from_pod("POD_NAME", "metadata.name")],
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": PORT}, "initialDelaySeconds": 5, "periodSeconds": 20},
        "readinessProbe": {"httpGet": ready, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": secured(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 the pod's own
    }
