# SPDX-License-Identifier: Apache-2.0
"""The calls of `cluster.api` that a person makes and the operator does not: under another name, and none by force."""

from __future__ import annotations

from headrace.fleet.client.contract import MANAGER
from headrace.fleet.cluster.api import Api, Refused, connect
from headrace.fleet.cluster.resources import Resource, Served
from headrace.fleet.words import Document, items, kind_of, name_of, part, text

_APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
_SECONDS = 15.0
"""A person waits; no answer is given out sooner than the operator gives up."""


class UserApi(Api):
    """An API server, as somebody with a kubeconfig. Raises Refused and Unreachable, as all of them do."""

    async def found(self, where: Served, namespace: str, name: str) -> Document | None:
        """One object; None if there is none. Unlike `get`, a kind that is not there is Refused."""
        try:
            got = await self._call("GET", where.path(namespace, name))
        except Refused as refused:
            if refused.code == 404 and refused.reason == "NotFound":
                return None
            raise
        return {"apiVersion": where.api_version, "kind": where.resource.kind, **got}

    async def send(self, where: Served, document: Document, *, dry_run: bool, force: bool) -> Document:
        """Server-side apply of what a user wrote."""
        path = where.path(text(document, "metadata", "namespace"), name_of(document))
        asked = {"fieldManager": MANAGER, "force": "true" if force else "", "dryRun": "All" if dry_run else ""}
        return await self._call("PATCH", path, asked, document, _APPLY)

    async def change(self, where: Served, namespace: str, name: str, change: Document) -> Document:
        """A merge patch."""
        return await self._call("PATCH", where.path(namespace, name), {"fieldManager": MANAGER}, change, _MERGE)

    async def groups(self) -> frozenset[str]:
        """The API groups that there are."""
        return frozenset(text(each, "name") for each in items(await self._call("GET", "/apis"), "groups"))

    async def kind(self, document: Document) -> Served:
        """Where objects of a document's kind are, of whoever it is. Refused with 404 where there is no such kind."""
        group, _, version = text(document, "apiVersion").rpartition("/")
        listed = await self._call("GET", f"/apis/{group}/{version}" if group else f"/api/{version}")
        for each in items(listed, "resources"):
            if text(each, "kind") == kind_of(document) and "/" not in text(each, "name"):
                namespaced = part({"it": each}, "it").get("namespaced") is True
                resource = Resource(group, (version,), kind_of(document), text(each, "name"), namespaced)
                return Served(resource, version)
        raise Refused(404, "", f"no kind {kind_of(document)}")


def connect_user(kubeconfig: str, context: str) -> UserApi:
    """The API server of a kubeconfig. Raises FailedPrecondition."""
    found = connect(kubeconfig, context, timeout=_SECONDS)
    return UserApi(found._client, found.server, found.namespace)
