# SPDX-License-Identifier: Apache-2.0
"""The scalers of a router: through the Kubernetes API server, or through the fleet daemon of this machine.

`programs.router` imports this module only if the router has activation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from headrace.core.errors import HeadraceError
from headrace.fleet.local.api_client import LocalFleet
from headrace.fleet.router.scale_targets import ReplicaCounts, ScalerError
from headrace.fleet.router.settings import LocalService, ScaleTarget

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

log = logging.getLogger("headrace.router")

_FIELD_MANAGER = "headrace-router"
_MERGE = {"content-type": "application/merge-patch+json"}
_CALL_SECONDS = 10.0
_WATCH_SECONDS = 60
_REFUSALS = {
    401: "the API server rejected our credentials: check the router's service account",
    403: "the API server denied access: bind a Role with get, list and watch of it, and patch of its scale",
    404: "the API server has no such object: check whether it was deleted, and whether the kind is installed",
}
_NONE = ReplicaCounts(0, 0)
_UNKNOWN = ReplicaCounts(-1, -1)


class KubernetesScaler:
    """Watches workloads and patches their `scale` subresource.

    Needs `get`, `list` and `watch` of the workloads and `patch` of their `scale`, for these by name.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def replicas(self, target: ScaleTarget) -> ReplicaCounts:
        """Return the current counts."""
        return (await self._list(target))[0]

    async def scale(self, target: ScaleTarget, replicas: int) -> None:
        """Set the desired replicas."""
        body = orjson.dumps({"spec": {"replicas": replicas}})
        path = f"{_path(target)}/{target.name}/scale"
        await self._call("PATCH", path, {"fieldManager": _FIELD_MANAGER}, body)

    async def watch(self, target: ScaleTarget) -> AsyncIterator[ReplicaCounts]:
        """Yield the current counts and every change."""
        known, version = await self._list(target)
        yield known
        params = {**_name_selector(target), "watch": "true", "timeoutSeconds": str(_WATCH_SECONDS)}
        import httpx2

        # Detect a dead connection: the server ends a live watch before this timeout.
        timeout = httpx2.Timeout(_CALL_SECONDS, read=_WATCH_SECONDS + _CALL_SECONDS)
        try:
            async with self._client.stream(
                "GET", _path(target), params={**params, "resourceVersion": version}, timeout=timeout
            ) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise _refusal(response)
                async for line in response.aiter_lines():
                    event = orjson.loads(line) if line else {}
                    if event.get("type") == "ERROR":
                        return  # most likely the resource version is too old: start again
                    if event:
                        yield _parse_counts(event["object"]) if event["type"] != "DELETED" else _NONE
        except (httpx2.HTTPError, orjson.JSONDecodeError, KeyError, AttributeError) as error:
            raise _unreachable(error) from None

    async def close(self) -> None:
        """Close the client."""
        await self._client.aclose()

    async def _list(self, target: ScaleTarget) -> tuple[ReplicaCounts, str]:
        reply = await self._call("GET", _path(target), _name_selector(target))
        try:
            items = reply["items"]
            return (_parse_counts(items[0]) if items else _NONE), str(reply["metadata"]["resourceVersion"])
        except (KeyError, TypeError, AttributeError) as error:
            raise _unreachable(error) from None

    async def _call(self, method: str, path: str, params: Mapping[str, str], body: bytes | None = None) -> Any:
        import httpx2

        try:
            response = await self._client.request(
                method, path, params=dict(params), content=body, headers=_MERGE if body else None
            )
            if response.status_code >= 400:
                raise _refusal(response)
            return orjson.loads(response.content)
        except (httpx2.HTTPError, orjson.JSONDecodeError) as error:
            raise _unreachable(error) from None


def connect_kubernetes(kubeconfig: str = "") -> KubernetesScaler:
    """Return a scaler for the cluster that we run in, or for that of a kubeconfig. Raises FailedPrecondition."""
    # Not imported by the routers of a local fleet, which should start quickly.
    from headrace.platforms.kubernetes_client.kubeconfig import open_client, read_kubeconfig

    return KubernetesScaler(open_client(read_kubeconfig(kubeconfig), _CALL_SECONDS))


def _path(target: ScaleTarget) -> str:
    root = "/apis" if "/" in target.api_version else "/api"
    return f"{root}/{target.api_version}/namespaces/{target.namespace}/{target.kind.lower()}s"


def _name_selector(target: ScaleTarget) -> dict[str, str]:
    # A Role for one name allows list and watch only with this selector.
    return {"fieldSelector": f"metadata.name={target.name}"}


def _parse_counts(workload: dict[str, Any]) -> ReplicaCounts:
    wanted = workload.get("spec", {}).get("replicas", 1)
    ready = workload.get("status", {}).get("readyReplicas", 0)
    return ReplicaCounts(wanted if isinstance(wanted, int) else 1, ready if isinstance(ready, int) else 0)


def _refusal(response: Response) -> ScalerError:
    log.info("The API server answered %d: %s", response.status_code, response.text[:500])
    text = _REFUSALS.get(response.status_code, f"the API server answered {response.status_code}; see the router's log")
    return ScalerError(text)


def _unreachable(error: Exception) -> ScalerError:
    log.debug("The API server cannot be reached: %s: %s", type(error).__name__, error)
    return ScalerError("the API server does not answer, or sent an invalid answer; retrying")


class LocalScaler:
    """Scales through the socket of `headrace up`. While the daemon does not run, scaling fails and is retried."""

    def __init__(self, service: LocalService) -> None:
        self._fleet = LocalFleet(Path(service.folder))
        self._service = service.service
        self._reports: set[asyncio.Task[None]] = set()

    async def replicas(self, target: ScaleTarget) -> ReplicaCounts:
        """Return the current counts."""
        return await self._counts_after(target, _UNKNOWN)

    async def scale(self, target: ScaleTarget, replicas: int) -> None:
        """Set the desired replicas."""
        try:
            await self._fleet.scale(target.namespace, self._service, target.name, replicas)
        except HeadraceError as error:
            raise ScalerError(error.message) from None

    async def watch(self, target: ScaleTarget) -> AsyncIterator[ReplicaCounts]:
        """Long-poll the daemon, which answers when the counts change."""
        known = _UNKNOWN
        while True:
            counts = await self._counts_after(target, known)
            if counts != known:
                known = counts
                yield counts

    async def close(self) -> None:
        """Cancel reports; no connection is open between requests."""
        for task in self._reports:
            task.cancel()
        await asyncio.gather(*self._reports, return_exceptions=True)

    def report(self, target: ScaleTarget, parts: Mapping[str, float]) -> None:
        """Send the parts of a cold start to the daemon, for `headrace describe`. Failures are only logged."""
        task = asyncio.ensure_future(self._send_report(target, parts))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _send_report(self, target: ScaleTarget, parts: Mapping[str, float]) -> None:
        try:
            await self._fleet.report_cold_start(target.namespace, self._service, parts)
        except HeadraceError as error:
            log.info("Could not report a cold start: %s", error.message)

    async def _counts_after(self, target: ScaleTarget, known: ReplicaCounts) -> ReplicaCounts:
        known_counts = {"wanted": known.wanted, "ready": known.ready}
        try:
            reply = await self._fleet.replicas(target.namespace, self._service, target.name, known_counts)
        except HeadraceError as error:
            raise ScalerError(error.message) from None
        return ReplicaCounts(reply["wanted"], reply["ready"], reply.get("started", 0.0), reply.get("found", 0.0))
