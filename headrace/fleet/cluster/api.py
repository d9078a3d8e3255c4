# SPDX-License-Identifier: Apache-2.0
"""Calls to the API server: plain JSON goes in and comes out, and no field is lost on the way.

lightkube reads the kubeconfig, logs in and has the connections; its typed objects are not used, because they would drop what
a newer Kubernetes, or a custom resource, has beside the fields they know.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.fleet.cluster.resources import Resource, Served
from headrace.fleet.words import Document, items, text, whole
from headrace.platforms.kubernetes.kubeconfig import open_client, read_kubeconfig

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

MANAGER = "headrace-operator"
"""Whose the fields are that we write."""

_APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
_PAGE = 500
_WATCH_SECONDS = 300


class Refused(Exception):
    """The API server said no. `code` is HTTP's, `reason` one word of Kubernetes, `said` its sentence."""

    def __init__(self, code: int, reason: str, said: str) -> None:
        super().__init__(f"{code} {reason}: {said}")
        self.code, self.reason, self.said = code, reason, said


class Unreachable(Exception):
    """No answer came, or none that an API server would give."""


class Api:
    """An API server, as one user. Every call raises Refused or Unreachable. `writes` counts calls that may change things."""

    def __init__(self, client: AsyncClient, server: str = "", namespace: str = "") -> None:
        self._client = client
        self.server = server
        """Its URL."""
        self.namespace = namespace
        """That of the context, or of the pod; "" if neither says."""
        self.calls = 0
        self.writes = 0

    async def offered(self, resources: Sequence[Resource]) -> dict[str, frozenset[str]]:
        """The plurals of each API version that one of the kinds could be found under."""
        found: dict[str, frozenset[str]] = {}
        groups = {
            text(each, "name"): {text(version, "version") for version in items(each, "versions")}
            for each in items(await self._call("GET", "/apis"), "groups")
        }
        for group, version in sorted({(each.group, version) for each in resources for version in each.versions}):
            if group and version not in groups.get(group, ()):
                continue
            path = f"/apis/{group}/{version}" if group else f"/api/{version}"
            try:
                listed = items(await self._call("GET", path), "resources")
            except Refused as refused:
                if refused.code != 404:
                    raise
                continue
            found[f"{group}/{version}" if group else version] = frozenset(text(each, "name") for each in listed)
        return found

    async def list(
        self, where: Served, selector: str = "", namespace: str = "", fields: str = ""
    ) -> tuple[list[Document], str]:
        """All objects, by labels and by fields, and the version of the list, to watch from."""
        found: list[Document] = []
        more = ""
        while True:
            asked = {"limit": str(_PAGE), "labelSelector": selector, "fieldSelector": fields, "continue": more}
            page = await self._call("GET", where.path(namespace), asked)
            kinds = {"apiVersion": where.api_version, "kind": where.resource.kind}
            found += [{**kinds, **each} for each in items(page, "items")]
            more = text(page, "metadata", "continue")
            if not more:
                return found, text(page, "metadata", "resourceVersion")

    async def watch(
        self, where: Served, version: str, selector: str = "", namespace: str = ""
    ) -> AsyncIterator[tuple[str, Document]]:
        """Changes since a version, until the server has enough of it: (ADDED | MODIFIED | DELETED | BOOKMARK, object)."""
        import httpx2

        asked = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        asked |= {"timeoutSeconds": str(_WATCH_SECONDS)} | ({"labelSelector": selector} if selector else {})
        # A connection that is cut without a word must be noticed: the server ends a live one before this.
        limits = httpx2.Timeout(30, read=_WATCH_SECONDS + 30)
        self.calls += 1
        try:
            async with self._client.stream("GET", where.path(namespace), params=asked, timeout=limits) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    raise _refused(answer)
                async for line in answer.aiter_lines():
                    if line:
                        event = msgspec.json.decode(line)
                        if event["type"] == "ERROR":
                            told = event["object"]
                            raise Refused(whole(told, "code") or 500, text(told, "reason"), text(told, "message"))
                        yield event["type"], event["object"]
        except httpx2.HTTPError as error:
            raise Unreachable(type(error).__name__) from error
        except msgspec.MsgspecError as error:
            raise Unreachable("an answer that is no JSON") from error

    async def get(self, where: Served, namespace: str, name: str) -> Document | None:
        """One object; None if there is none."""
        try:
            return await self._call("GET", where.path(namespace, name))
        except Refused as refused:
            if refused.code == 404:
                return None
            raise

    async def apply(self, where: Served, document: Document) -> Document:
        """Server-side apply of what we want of an object; fields that others took from us are ours again."""
        metadata = document["metadata"]
        path = where.path(metadata.get("namespace", ""), metadata["name"])
        body = {**document, "apiVersion": where.api_version}
        return await self._call("PATCH", path, {"fieldManager": MANAGER, "force": "true"}, body, _APPLY)

    async def patch(self, where: Served, namespace: str, name: str, change: Document, part: str = "") -> Document:
        """A merge patch: null removes. With a resourceVersion in it, refused with 409 where somebody was quicker."""
        return await self._call("PATCH", where.path(namespace, name, part), {"fieldManager": MANAGER}, change, _MERGE)

    async def create(self, where: Served, namespace: str, document: Document) -> Document:
        """A new object."""
        return await self._call("POST", where.path(namespace), {"fieldManager": MANAGER}, document)

    async def replace(self, where: Served, namespace: str, name: str, document: Document) -> Document:
        """An object that was read, changed."""
        return await self._call("PUT", where.path(namespace, name), {"fieldManager": MANAGER}, document)

    async def delete(self, where: Served, namespace: str, name: str, uid: str) -> None:
        """The end of that very object, and of what it owns; that it is gone is fine."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._call("DELETE", where.path(namespace, name), body=body)
        except Refused as refused:
            if refused.code not in (404, 409):
                raise

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        asked: Mapping[str, str] | None = None,
        body: Document | None = None,
        kind: str = "application/json",
    ) -> Document:
        import httpx2

        self.calls += 1
        self.writes += method != "GET"
        given = {name: value for name, value in (asked or {}).items() if value}
        sent = {"content": msgspec.json.encode(body), "headers": {"Content-Type": kind}} if body is not None else {}
        try:
            answer = await self._client.request(method, path, params=given, **sent)  # type: ignore[arg-type]
            if answer.status_code >= 400:
                raise _refused(answer)
            found = msgspec.json.decode(answer.content)
        except httpx2.HTTPError as error:
            raise Unreachable(type(error).__name__) from error
        except msgspec.MsgspecError as error:
            raise Unreachable("an answer that is no JSON") from error
        if not isinstance(found, dict):
            raise Unreachable("an answer that is no object")
        return found


def connect(kubeconfig: str = "", context: str = "", timeout: float = 30.0) -> Api:
    """The API server of a kubeconfig; in a pod, and without one, that of the pod. Raises FailedPrecondition."""
    config = read_kubeconfig(kubeconfig, context)
    return Api(open_client(config, timeout), server=str(config.cluster.server), namespace=config.namespace or "")


def _refused(answer: Response) -> Refused:
    try:
        told = msgspec.json.decode(answer.content)
    except msgspec.MsgspecError:
        told = None
    return Refused(answer.status_code, text(told, "reason"), text(told, "message") or answer.text[:500])
