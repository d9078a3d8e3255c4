# SPDX-License-Identifier: Apache-2.0
"""The mutating and validating webhook configurations. Only the leader writes them, and only when they differ."""

from __future__ import annotations

import base64
import logging
from typing import Any

from headrace.fleet.cluster.diff import differs
from headrace.fleet.cluster.resources import SERVICES
from headrace.fleet.cluster.webhooks.settings import (
    CLUSTER_ROLES,
    CONFIGURATION,
    MUTATING,
    OPT_OUT,
    ROLE,
    SERVICE,
    SERVICE_PORT,
    VALIDATED_KINDS,
    VALIDATING,
    WebhookSettings,
    webhook_path,
)
from headrace.fleet.names import GROUP, VERSION
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError
from headrace.platforms.kubernetes_client.objects import Document, Resource, ServedResource, get_str

log = logging.getLogger("headrace.operator")

TIMEOUT_SECONDS = 5
"""How long the API server waits for an answer."""


def configurations(settings: WebhookSettings, authorities: str, owner: Document | None = None) -> list[Document]:
    """Return both configurations. `owner`: the ClusterRole `ROLE`, with which they are deleted."""
    metadata: dict[str, Any] = {"name": CONFIGURATION, "labels": {"app.kubernetes.io/part-of": "headrace"}}
    if owner is not None:
        kind, uid = CLUSTER_ROLES.resource.kind, get_str(owner, "metadata", "uid")
        reference = {"apiVersion": CLUSTER_ROLES.api_version, "kind": kind, "name": ROLE, "uid": uid}
        metadata["ownerReferences"] = [reference]
    operations = ((MUTATING, "mutate", (SERVICES,)), (VALIDATING, "validate", VALIDATED_KINDS))
    return [
        {
            "apiVersion": served.api_version,
            "kind": served.resource.kind,
            "metadata": metadata,
            "webhooks": [_webhook(settings, authorities, kind, operation) for kind in kinds],
        }
        for served, operation, kinds in operations
    ]


def _webhook(settings: WebhookSettings, authorities: str, kind: Resource, operation: str) -> dict[str, Any]:
    path = webhook_path(kind.kind, operation)
    client: dict[str, Any] = {"caBundle": base64.b64encode(authorities.encode()).decode()}
    if settings.url:
        client["url"] = settings.url.rstrip("/") + path
    else:
        service = {"name": SERVICE, "namespace": settings.namespace, "path": path, "port": SERVICE_PORT}
        client["service"] = service
    rule = {
        "apiGroups": [GROUP],
        "apiVersions": [VERSION],
        # Not DELETE: a webhook must not block deletions. Nor status, which the operator writes.
        "operations": ["CREATE", "UPDATE"],
        "resources": [kind.plural],
        "scope": "Namespaced" if kind.namespaced else "Cluster",
    }
    # Kubernetes 1.21 and later set the first label; the manifests set the second on the operator's namespace.
    exceptions = [
        {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", settings.namespace]},
        {"key": OPT_OUT, "operator": "NotIn", "values": ["disabled"]},
    ]
    return {
        "name": f"{operation}.{kind.plural}.{GROUP}",
        "clientConfig": client,
        "rules": [rule],
        "namespaceSelector": {"matchExpressions": exceptions},
        "failurePolicy": settings.failure_policy,
        "matchPolicy": "Equivalent",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": TIMEOUT_SECONDS,
    }


class WebhookRegistrar:
    """Writes the webhook configurations."""

    def __init__(self, api: ApiClient, settings: WebhookSettings) -> None:
        self._api = api
        self._settings = settings

    async def register(self, authorities: str) -> bool:
        """Write the configurations that differ. Return whether none did. Raises ApiError or Unreachable."""
        owner = await self._owner()
        unchanged = True
        for served, desired in zip(
            (MUTATING, VALIDATING), configurations(self._settings, authorities, owner), strict=True
        ):
            unchanged &= not await self._write(served, desired)
        return unchanged

    async def _write(self, served: ServedResource, desired: Document) -> bool:
        live = await self._api.get(served, "", CONFIGURATION)
        if live is not None and not differs(desired, live):
            return False
        await self._api.apply(served, desired)
        log.info("%s %s %s", "created" if live is None else "corrected", served.resource.kind, CONFIGURATION)
        return True

    async def _owner(self) -> Document | None:
        try:
            return await self._api.get(CLUSTER_ROLES, "", ROLE)
        except ApiError as error:
            if error.code != 403:
                raise
            return None  # without permission, the configurations have no owner
