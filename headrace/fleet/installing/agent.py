# SPDX-License-Identifier: Apache-2.0
"""The model agent: its account and rights, and its DaemonSet."""

from __future__ import annotations

from typing import Any

from headrace.fleet.installing import rights
from headrace.fleet.installing.settings import (
    AGENT,
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

SELECTOR = {"app.kubernetes.io/name": AGENT}
_TMP = "/tmp"  # noqa: S108 the pod's own


def agent_objects(settings: ManifestSettings) -> list[Document]:
    """All of them, in the order to make them."""
    return [
        account(settings, AGENT),
        *rights.granted(settings, AGENT, rights.agent_rules()),
        *rights.granted_here(settings, AGENT, rights.agent_own_rules(settings)),
        rights.secrets_role(AGENT),
        daemon_set(settings),
    ]


def daemon_set(settings: ManifestSettings) -> Document:
    """One agent for each node."""
    folder = {"path": settings.models_path, "type": "DirectoryOrCreate"}
    pod = {
        "serviceAccountName": AGENT,
        **pulled(settings),
        "containers": [_container(settings)],
        # The folder on the node is root's. Of root's powers it has none but to own it.
        "securityContext": {"runAsUser": 0, "runAsNonRoot": False, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 30,
        # Nodes with GPUs are tainted, and models are for them above all.
        "tolerations": [{"operator": "Exists"}],
        "volumes": [{"name": "models", "hostPath": folder}, {"name": "tmp", "emptyDir": {}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata(settings, AGENT),
        "spec": {
            "selector": {"matchLabels": SELECTOR},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%"}},
            "template": {"metadata": scraped(AGENT), "spec": pod},
        },
    }


def _container(settings: ManifestSettings) -> dict[str, Any]:
    told = {"HOME": _TMP, "TMPDIR": _TMP, "HF_HOME": f"{_TMP}/hf"}
    return {
        "name": "agent",
        "image": settings.image,
        "args": [
            "model-agent",
            f"--listen=0.0.0.0:{PORT}",
            f"--namespace={settings.namespace}",
            f"--models-root={settings.models_path}",
        ],
        "ports": [{"name": "metrics", "containerPort": PORT, "protocol": "TCP"}],
        "env": [
            from_pod("NODE_NAME", "spec.nodeName"),
            *({"name": name, "value": value} for name, value in told.items()),
        ],
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": PORT}, "initialDelaySeconds": 5, "periodSeconds": 20},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": PORT}, "periodSeconds": 10},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": secured(),
        # At the same place as on the node: what is written down there holds here.
        "volumeMounts": [
            {"name": "models", "mountPath": settings.models_path},
            {"name": "tmp", "mountPath": _TMP},
        ],
    }
