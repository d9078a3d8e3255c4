# SPDX-License-Identifier: Apache-2.0
"""Backends that are pods: the ready ones that a selector finds, asked of the API server now and then.

Followed by `discoverer`. Needs `list` of the pods of one namespace, and nothing else. Imported only where pods are wanted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.fleet.router.settings import BackendAddress
from headrace.platforms.kubernetes.kubeconfig import open_client, read_kubeconfig

if TYPE_CHECKING:
    from httpx2 import AsyncClient

log = logging.getLogger("headrace.router")

_CALL_SECONDS = 10.0
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_REFUSALS = {
    401: "the API server does not know us: look at the router's service account",
    403: "the API server does not let us: bind a Role with list of pods to the router's service account",
}


class PodSource:
    """See the module."""

    def __init__(
        self,
        client: AsyncClient,
        selector: str,
        namespace: str,
        port: int,
        interval_seconds: float,
        *,
        role: str = "",
    ) -> None:
        self._client = client
        self._selector = selector
        self._namespace = namespace
        self._port = port
        self._seconds = interval_seconds
        self._role = role

    def __str__(self) -> str:
        return f"pods with {self._selector} in {self._namespace}"

    async def follow(self) -> AsyncIterator[Sequence[BackendAddress] | InvalidArgument]:
        """See `discoverer.Source`."""
        try:
            while True:
                try:
                    yield await self._look()
                except InvalidArgument as error:
                    yield error
                await asyncio.sleep(self._seconds)
        finally:
            await self._client.aclose()

    async def _look(self) -> list[BackendAddress]:
        import httpx2

        # Version 0: what the server has in memory will do, and costs it little.
        asked = {"labelSelector": self._selector, "resourceVersion": "0"}
        try:
            answer = await self._client.get(f"/api/v1/namespaces/{self._namespace}/pods", params=asked)
            if answer.status_code >= 400:
                log.info("the API server answered %d: %s", answer.status_code, answer.text[:500])
                text = _REFUSALS.get(answer.status_code, f"the API server answered {answer.status_code}")
                raise InvalidArgument(text)
            items = orjson.loads(answer.content)["items"]
        except (httpx2.HTTPError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            log.debug("the API server cannot be reached: %s: %s", type(error).__name__, error)
            raise InvalidArgument("the API server does not answer, or not as one would") from None
        found = [self._address(pod) for pod in items]
        return sorted({each.url: each for each in found if each is not None}.values(), key=lambda each: each.url)

    def _address(self, pod: Any) -> BackendAddress | None:
        """Of a pod that is ready and stays."""
        try:
            if pod["metadata"].get("deletionTimestamp"):
                return None
            conditions = pod["status"].get("conditions") or ()
            ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
            host, port = pod["status"].get("podIP"), self._port or _first_port(pod)
            if not ready or not host or not port:
                return None
            found = BackendAddress.parse(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            return replace(found, role=self._role)
        except (KeyError, TypeError, AttributeError, HeadraceError):
            return None


def connect_pods(
    selector: str, namespace: str, port: int, interval_seconds: float, kubeconfig: str = "", *, role: str = ""
) -> PodSource:
    """The cluster that we are in; outside of one, that of a kubeconfig. Raises FailedPrecondition."""
    config = read_kubeconfig(kubeconfig)
    client = open_client(config, _CALL_SECONDS)
    return PodSource(client, selector, namespace or _own_namespace(config), port, interval_seconds, role=role)


def _own_namespace(config: Any) -> str:
    try:
        return _OWN_NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError:
        return str(getattr(config, "namespace", "") or "default")


def _first_port(pod: Any) -> int:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            return int(port["containerPort"])
    return 0
