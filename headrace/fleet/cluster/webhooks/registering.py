# SPDX-License-Identifier: Apache-2.0
"""The two configurations that make the API server ask us. Written by the replica that leads, and only when they differ."""

from __future__ import annotations

import base64
import logging
from typing import Any

from headrace.fleet.cluster.api import Api, Refused
from headrace.fleet.cluster.differing import differs
from headrace.fleet.cluster.resources import SERVICES, Resource, Served
from headrace.fleet.cluster.webhooks.settings import (
    CHECKED,
    CONFIGURATION,
    MUTATING,
    NAMESPACES,
    OPT_OUT,
    SERVICE,
    SERVICE_PORT,
    VALIDATING,
    WebhookSettings,
    path_of,
)
from headrace.fleet.names import GROUP, VERSION
from headrace.fleet.words import Document, text

log = logging.getLogger("headrace.operator")

TIMEOUT_SECONDS = 5
"""How long an edit waits for an operator that hangs."""


def configurations(settings: WebhookSettings, authorities: str, owner: Document | None = None) -> list[Document]:
    """Both configurations. `owner`: the operator's Namespace, so that they go when it goes."""
    metadata: dict[str, Any] = {"name": CONFIGURATION, "labels": {"app.kubernetes.io/part-of": "headrace"}}
    if owner is not None:
        uid = text(owner, "metadata", "uid")
        reference = {"apiVersion": "v1", "kind": "Namespace", "name": settings.namespace, "uid": uid}
        metadata["ownerReferences"] = [reference]
    deeds = ((MUTATING, "mutate", (SERVICES,)), (VALIDATING, "validate", CHECKED))
    return [
        {
            "apiVersion": where.api_version,
            "kind": where.resource.kind,
            "metadata": metadata,
            "webhooks": [_webhook(settings, authorities, each, deed) for each in kinds],
        }
        for where, deed, kinds in deeds
    ]


def _webhook(settings: WebhookSettings, authorities: str, kind: Resource, deed: str) -> dict[str, Any]:
    path = path_of(kind.kind, deed)
    client: dict[str, Any] = {"caBundle": base64.b64encode(authorities.encode()).decode()}
    if settings.url:
        client["url"] = settings.url.rstrip("/") + path
    else:
        service = {"name": SERVICE, "namespace": settings.namespace, "path": path, "port": SERVICE_PORT}
        client["service"] = service
    rule = {
        "apiGroups": [GROUP],
        "apiVersions": [VERSION],
        # Not DELETE: nothing of ours may keep a document from being deleted. Nor status, which is ours.
        "operations": ["CREATE", "UPDATE"],
        "resources": [kind.plural],
        "scope": "Namespaced" if kind.namespaced else "Cluster",
    }
    # Kubernetes 1.21 and later have the first label by themselves; the manifests put the second on the operator's own.
    apart = [
        {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", settings.namespace]},
        {"key": OPT_OUT, "operator": "NotIn", "values": ["disabled"]},
    ]
    return {
        "name": f"{deed}.{kind.plural}.{GROUP}",
        "clientConfig": client,
        "rules": [rule],
        "namespaceSelector": {"matchExpressions": apart},
        "failurePolicy": settings.failure_policy,
        "matchPolicy": "Equivalent",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": TIMEOUT_SECONDS,
    }


class Registrar:
    """Keeps both configurations as they should be."""

    def __init__(self, api: Api, settings: WebhookSettings) -> None:
        self._api = api
        self._settings = settings

    async def register(self, authorities: str) -> bool:
        """Write what differs. Whether nothing did. Raises Refused or Unreachable."""
        owner = await self._owner()
        same = True
        for where, wanted in zip(
            (MUTATING, VALIDATING), configurations(self._settings, authorities, owner), strict=True
        ):
            same &= not await self._one(where, wanted)
        return same

    async def _one(self, where: Served, wanted: Document) -> bool:
        live = await self._api.get(where, "", CONFIGURATION)
        if live is not None and not differs(wanted, live):
            return False
        await self._api.apply(where, wanted)
        log.info("%s %s is %s", where.resource.kind, CONFIGURATION, "new" if live is None else "put right")
        return True

    async def _owner(self) -> Document | None:
        try:
            return await self._api.get(NAMESPACES, "", self._settings.namespace)
        except Refused as refused:
            if refused.code != 403:
                raise
            return None  # then whoever removes the operator removes them
