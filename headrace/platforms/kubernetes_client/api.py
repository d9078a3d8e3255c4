# SPDX-License-Identifier: Apache-2.0
"""REST calls to a Kubernetes API server, with plain JSON objects."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from headrace.platforms.kubernetes_client.kubeconfig import import_httpx2, open_client, read_kubeconfig
from headrace.platforms.kubernetes_client.objects import (
    PODS,
    Document,
    Resource,
    ServedResource,
    get_int,
    get_list,
    get_mapping,
    get_str,
)

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

FIELD_MANAGER = "headrace-operator"
"""The field manager of the operator and the model agent."""

_APPLY_PATCH, _MERGE_PATCH = "application/apply-patch+yaml", "application/merge-patch+json"
_PAGE_SIZE = 500
_WATCH_SECONDS = 300


class ApiError(Exception):
    """The API server answered with an error status: HTTP `code`, Kubernetes `reason`, `message`."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason, self.message = code, reason, message


class Unreachable(Exception):
    """The API server did not answer, or the answer is not that of an API server."""


class InvalidAnswer(Unreachable):
    """The answer is not that of an API server."""


class ApiClient:
    """Calls one API server as one user.

    Every call raises ApiError or Unreachable, or FailedPrecondition if the login method of the kubeconfig fails.
    """

    def __init__(
        self, client: AsyncClient, server: str = "", namespace: str = "", *, field_manager: str = FIELD_MANAGER
    ) -> None:
        self._client = client
        self._field_manager = field_manager
        self.server = server
        """Its URL."""
        self.namespace = namespace
        """The namespace of the context or of the pod."""
        self.calls = 0
        self.writes = 0
        """Calls that may change something."""

    async def discover(self, resources: Sequence[Resource]) -> dict[str, frozenset[str]]:
        """Return the plural names served under each API version that one of the resource types could have."""
        plurals: dict[str, frozenset[str]] = {}
        groups = {
            get_str(group, "name"): {get_str(version, "version") for version in get_list(group, "versions")}
            for group in get_list(await self._call("GET", "/apis"), "groups")
        }
        for group, version in sorted(
            {(resource.group, version) for resource in resources for version in resource.versions}
        ):
            if group and version not in groups.get(group, ()):
                continue
            path = f"/apis/{group}/{version}" if group else f"/api/{version}"
            try:
                served = get_list(await self._call("GET", path), "resources")
            except ApiError as error:
                if error.code != 404:
                    raise
                continue
            plurals[f"{group}/{version}" if group else version] = frozenset(get_str(item, "name") for item in served)
        return plurals

    async def version(self) -> tuple[int, int]:
        """Return the version of Kubernetes: (1, 33)."""
        answer = await self._call("GET", "/version")
        # Managed clusters write the minor version as `33+`.
        numbers = [re.match("[0-9]+", get_str(answer, name)) for name in ("major", "minor")]
        major, minor = (int(number[0]) if number else 0 for number in numbers)
        return major, minor

    async def list(
        self,
        served: ServedResource,
        label_selector: str = "",
        namespace: str = "",
        field_selector: str = "",
        *,
        resource_version: str = "",
    ) -> tuple[list[Document], str]:
        """Return all selected objects, and the resource version of the list, to watch from.

        resource_version: "0" for what the API server has in its cache, which costs it little; "" for the newest state.
        """
        objects: list[Document] = []
        token = ""
        while True:
            query = {"limit": str(_PAGE_SIZE), "labelSelector": label_selector, "fieldSelector": field_selector}
            query |= {"continue": token, "resourceVersion": "" if token else resource_version}
            page = await self._call("GET", served.path(namespace), query)
            if "items" not in page:
                raise InvalidAnswer("the answer is not a list")
            type_meta = {"apiVersion": served.api_version, "kind": served.resource.kind}
            objects += [{**type_meta, **item} for item in get_list(page, "items")]
            token = get_str(page, "metadata", "continue")
            if not token:
                return objects, get_str(page, "metadata", "resourceVersion")

    async def watch(
        self,
        served: ServedResource,
        resource_version: str,
        label_selector: str = "",
        namespace: str = "",
        field_selector: str = "",
        seconds: int = _WATCH_SECONDS,
    ) -> AsyncIterator[tuple[str, Document]]:
        """Yield changes since a version until the server ends the watch: (ADDED, MODIFIED, DELETED or BOOKMARK, object)."""
        import httpx2

        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": resource_version}
        query |= {"timeoutSeconds": str(seconds), "labelSelector": label_selector, "fieldSelector": field_selector}
        # The server ends a live watch before this timeout: a connection that was cut silently runs into it.
        timeout = httpx2.Timeout(30, read=seconds + 30)
        self.calls += 1
        try:
            async with self._client.stream(
                "GET", served.path(namespace), params=_without_empty(query), timeout=timeout
            ) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise _api_error(response)
                async for line in response.aiter_lines():
                    if line:
                        event = orjson.loads(line)
                        kind, document = get_str(event, "type"), get_mapping(event, "object")
                        if kind == "ERROR":
                            raise ApiError(
                                get_int(document, "code") or 500,
                                get_str(document, "reason"),
                                get_str(document, "message"),
                            )
                        yield kind, document
        except httpx2.HTTPError as error:
            raise Unreachable(type(error).__name__) from error
        except orjson.JSONDecodeError as error:
            raise InvalidAnswer("the answer is not JSON") from error

    async def get(self, served: ServedResource, namespace: str, name: str) -> Document | None:
        """Return one object; None if there is none."""
        try:
            return await self._call("GET", served.path(namespace, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def apply(self, served: ServedResource, document: Document) -> Document:
        """Send a server-side apply that takes over fields of other managers, and return the object."""
        metadata = document["metadata"]
        path = served.path(metadata.get("namespace", ""), metadata["name"])
        body = {**document, "apiVersion": served.api_version}
        return await self._call(
            "PATCH", path, {"fieldManager": self._field_manager, "force": "true"}, body, _APPLY_PATCH
        )

    async def patch(
        self, served: ServedResource, namespace: str, name: str, change: Document, subresource: str = ""
    ) -> Document:
        """Send a merge patch (null removes) and return the object.

        With a resourceVersion in it, the server answers 409 if the object has changed since.
        """
        path = served.path(namespace, name, subresource)
        return await self._call("PATCH", path, {"fieldManager": self._field_manager}, change, _MERGE_PATCH)

    async def create(self, served: ServedResource, namespace: str, document: Document) -> Document:
        """Create an object."""
        return await self._call("POST", served.path(namespace), {"fieldManager": self._field_manager}, document)

    async def replace(self, served: ServedResource, namespace: str, name: str, document: Document) -> Document:
        """Replace an object by a changed copy of it."""
        return await self._call("PUT", served.path(namespace, name), {"fieldManager": self._field_manager}, document)

    async def delete(
        self,
        served: ServedResource,
        namespace: str,
        name: str,
        uid: str = "",
        *,
        grace_seconds: int | None = None,
        propagation: str = "Background",
    ) -> None:
        """Delete an object, and what it owns. An object that is already gone, or has another uid, is not an error."""
        body: dict[str, Any] = {"propagationPolicy": propagation}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            await self._call("DELETE", served.path(namespace, name), body=body)
        except ApiError as error:
            if error.code != 404 and not (uid and error.code == 409):
                raise

    async def log(self, namespace: str, pod: str, container: str, tail: int) -> str:
        """Return the last lines of a container's log."""
        path = ServedResource(PODS, "v1").path(namespace, pod, "log")
        return (await self._send("GET", path, {"container": container, "tailLines": str(max(tail, 0))})).text

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
        content_type: str = "application/json",
    ) -> Document:
        response = await self._send(method, path, query, body, content_type)
        try:
            answer = orjson.loads(response.content)
        except orjson.JSONDecodeError as error:
            raise InvalidAnswer("the answer is not JSON") from error
        if not isinstance(answer, dict):
            raise InvalidAnswer("the answer is not a JSON object")
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
        content_type: str = "application/json",
    ) -> Response:
        import httpx2

        self.calls += 1
        self.writes += method != "GET"
        content = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"Content-Type": content_type}
        try:
            response = await self._client.request(
                method, path, params=_without_empty(query or {}), content=content, headers=headers
            )
        except httpx2.HTTPError as error:
            raise Unreachable(type(error).__name__) from error
        if response.status_code >= 400:
            raise _api_error(response)
        return response


def connect(
    kubeconfig: str = "", context: str = "", timeout: float = 30.0, *, field_manager: str = FIELD_MANAGER
) -> ApiClient:
    """Open a client for the server of a kubeconfig; without one, in a pod, for the pod's own. Raises FailedPrecondition."""
    import_httpx2()  # before the kubeconfig: without the extra, none is of use
    config = read_kubeconfig(kubeconfig, context)
    return ApiClient(open_client(config, timeout), config.server, config.namespace, field_manager=field_manager)


def _without_empty(query: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in query.items() if value}


def _api_error(response: Response) -> ApiError:
    try:
        status = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        status = None
    return ApiError(response.status_code, get_str(status, "reason"), get_str(status, "message") or response.text[:500])
