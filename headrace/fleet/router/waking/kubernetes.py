# SPDX-License-Identifier: Apache-2.0
"""The scaler of a cluster: follows workloads through a watch, and writes their number to the `scale` subresource.

Made by `apps.router`. Needs `get`, `list` and `watch` of the workloads and `patch` of their `scale`, for these by name, and
nothing else. lightkube reads the kubeconfig or the pod's account; it is imported only where something sleeps.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson

from headrace.fleet.router.waking.scaler import Replicas, ScalerFailed
from headrace.fleet.router.waking.settings import Target
from headrace.platforms.kubernetes.kubeconfig import open_client, read_kubeconfig

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

log = logging.getLogger("headrace.router")

_MANAGER = "headrace-router"
_MERGE = {"content-type": "application/merge-patch+json"}
_CALL_SECONDS = 10.0
_WATCH_SECONDS = 60
_REFUSALS = {
    401: "the API server does not know us: look at the router's service account",
    403: "the API server does not let us: bind a Role with get, list and watch of it, and patch of its scale",
    404: "the API server has no such thing: look whether it was deleted, and whether the kind is installed",
}


class KubernetesScaler:
    """See `scaler.Scaler`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def replicas(self, target: Target) -> Replicas:
        """See `Scaler.replicas`."""
        return (await self._list(target))[0]

    async def scale(self, target: Target, replicas: int) -> None:
        """See `Scaler.scale`."""
        body = orjson.dumps({"spec": {"replicas": replicas}})
        path = f"{_path(target)}/{target.name}/scale"
        await self._call("PATCH", path, {"fieldManager": _MANAGER}, body)

    async def watch(self, target: Target) -> AsyncIterator[Replicas]:
        """See `Scaler.watch`."""
        known, version = await self._list(target)
        yield known
        asked = {**_by_name(target), "watch": "true", "timeoutSeconds": str(_WATCH_SECONDS)}
        import httpx2

        # A connection that is cut without a word has to be noticed: the server ends a live one before this.
        patience = httpx2.Timeout(_CALL_SECONDS, read=_WATCH_SECONDS + _CALL_SECONDS)
        try:
            async with self._client.stream(
                "GET", _path(target), params={**asked, "resourceVersion": version}, timeout=patience
            ) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    raise _refused(answer)
                async for line in answer.aiter_lines():
                    event = orjson.loads(line) if line else {}
                    if event.get("type") == "ERROR":
                        return  # the version is too old, most likely: begin anew
                    if event:
                        yield _read(event["object"]) if event["type"] != "DELETED" else _NONE
        except (httpx2.HTTPError, orjson.JSONDecodeError, KeyError, AttributeError) as error:
            raise _unreachable(error) from None

    async def close(self) -> None:
        """See `Scaler.close`."""
        await self._client.aclose()

    async def _list(self, target: Target) -> tuple[Replicas, str]:
        found = await self._call("GET", _path(target), _by_name(target))
        try:
            items = found["items"]
            return (_read(items[0]) if items else _NONE), str(found["metadata"]["resourceVersion"])
        except (KeyError, TypeError, AttributeError) as error:
            raise _unreachable(error) from None

    async def _call(self, method: str, path: str, asked: Mapping[str, str], body: bytes | None = None) -> Any:
        import httpx2

        try:
            answer = await self._client.request(
                method, path, params=dict(asked), content=body, headers=_MERGE if body else None
            )
            if answer.status_code >= 400:
                raise _refused(answer)
            return orjson.loads(answer.content)
        except (httpx2.HTTPError, orjson.JSONDecodeError) as error:
            raise _unreachable(error) from None


def connect(kubeconfig: str = "") -> KubernetesScaler:
    """The cluster that we are in; outside of one, that of a kubeconfig. Raises FailedPrecondition."""
    return KubernetesScaler(open_client(read_kubeconfig(kubeconfig), _CALL_SECONDS))


_NONE = Replicas(0, 0)


def _path(target: Target) -> str:
    root = "/apis" if "/" in target.api_version else "/api"
    return f"{root}/{target.api_version}/namespaces/{target.namespace}/{target.kind.lower()}s"


def _by_name(target: Target) -> dict[str, str]:
    # A Role for one name allows to list and to watch only with this.
    return {"fieldSelector": f"metadata.name={target.name}"}


def _read(thing: dict[str, Any]) -> Replicas:
    wanted = thing.get("spec", {}).get("replicas", 1)
    ready = thing.get("status", {}).get("readyReplicas", 0)
    return Replicas(wanted if isinstance(wanted, int) else 1, ready if isinstance(ready, int) else 0)


def _refused(answer: Response) -> ScalerFailed:
    log.info("the API server answered %d: %s", answer.status_code, answer.text[:500])
    text = _REFUSALS.get(answer.status_code, f"the API server answered {answer.status_code}; the router's log has more")
    return ScalerFailed(text)


def _unreachable(error: Exception) -> ScalerFailed:
    log.debug("the API server cannot be reached: %s: %s", type(error).__name__, error)
    return ScalerFailed("the API server does not answer, or not as one would; it is asked again and again")
