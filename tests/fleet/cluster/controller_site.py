# SPDX-License-Identifier: Apache-2.0
"""A cluster with a controller in it, for tests: the real API server, our kinds, others as bare CRDs."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import yaml
from kubernetes_server import KubernetesServer

from headrace.fleet.cluster.api import Api, Refused, Unreachable, connect
from headrace.fleet.cluster.program import Controller, OperatorSettings
from headrace.fleet.cluster.resources import CHILDREN
from headrace.fleet.schema.crds import crds

FLEET = Path(__file__).parents[3] / "headrace" / "fleet"
SERVICES = "/apis/ome.io/v1beta1/namespaces/default/inferenceservices"
FOREIGN = [each for each in CHILDREN if each.capability]


def foreign_crd(kind: Any) -> dict[str, Any]:
    """A kind of Knative and the like, with no schema: nobody acts on it here."""
    version = {
        "name": kind.versions[0],
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": kind.group,
            "scope": "Namespaced",
            "names": {"kind": kind.kind, "plural": kind.plural, "singular": kind.kind.lower()},
            "versions": [version],
        },
    }


def install(server: KubernetesServer, foreign: list[Any] = FOREIGN) -> None:
    """Our kinds and those of others, ready to be used."""
    documents = [*crds().values(), *(foreign_crd(each) for each in foreign)]
    server.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(documents))
    site = Site(server)
    for each in documents:
        spec = each["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        until(lambda path=path: site.fetch(path) is not None)
    site.close()


def until(look: Callable[[], Any], seconds: float = 90.0) -> Any:
    """What `look` returns, once it is true. The cluster's garbage collector takes up to a minute to know of new kinds."""
    limit = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > limit:
            raise AssertionError("it did not come to that in time")
        time.sleep(0.05)


class Killed(httpx2.ConnectError):
    """The controller's end, at a call of the test's choice: from then on nothing that it does comes through."""


class CountingTransport(httpx2.AsyncBaseTransport):
    """Passes calls on; notes writes, and may end the controller before one of them."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self.inner = inner
        self.writes: list[str] = []
        self.left: int | None = None
        self.down = False
        self.lost = 0
        """Calls that nobody answered."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.down:
            raise httpx2.ConnectError("the test has cut the wire", request=request)
        writes = request.method != "GET"
        if writes and self.left is not None and self.left <= 0:
            raise Killed("killed", request=request)
        if writes:
            self.writes.append(f"{request.method} {request.url.path}")
            if self.left is not None:
                self.left -= 1
        try:
            return await self.inner.handle_async_request(request)
        except httpx2.TransportError:
            self.lost += 1
            raise

    async def aclose(self) -> None:
        await self.inner.aclose()


def _versions(documents: list[Any]) -> set[tuple[str, str]]:
    return {(each["metadata"]["uid"], each["metadata"]["resourceVersion"]) for each in documents}


class Running:
    """A controller in a thread of its own."""

    def __init__(
        self, kubeconfig: Path, settings: OperatorSettings | None = None, *, writes: int | None = None
    ) -> None:
        self._kubeconfig = kubeconfig
        self._settings = settings or OperatorSettings(discover_seconds=1.0)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="controller")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._allowed = writes
        self._eyes: Api | None = None
        """The test's own: what it asks is not counted as the controller's."""
        self.controller: Controller | None = None
        self.transport: CountingTransport | None = None
        self.failure: BaseException | None = None

    def __enter__(self) -> Running:
        self._thread.start()
        until(lambda: self.controller is not None or not self._thread.is_alive())
        return self

    def __exit__(self, *told: object) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    @property
    def writes(self) -> list[str]:
        assert self.transport is not None
        return list(self.transport.writes)

    @property
    def lost(self) -> int:
        assert self.transport is not None
        return self.transport.lost

    @property
    def dead(self) -> bool:
        return self.transport is not None and self.transport.left is not None and self.transport.left <= 0

    def settle(self, seconds: float = 90.0) -> None:
        """Return when the controller has seen all that the API server holds, and had nothing to do for a moment."""

        def quiet() -> bool:
            count = len(self.writes)
            if self.controller is None or not self.controller.settled or not self._has_seen_all():
                return False
            time.sleep(0.4)
            return self.controller.settled and len(self.writes) == count and self._has_seen_all()

        until(quiet, seconds)

    def _has_seen_all(self) -> bool:
        """A watch may be late on a busy machine: a controller at rest need not know of what was applied a moment ago."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._compared(), self._loop).result()

    async def _compared(self) -> bool:
        assert self.controller is not None and self._eyes is not None
        try:
            for each in list(self.controller._view._followers.values()):
                held, _ = await self._eyes.list(each.where, each._selector)
                if _versions(held) != _versions(each.all()):
                    return False
        except (Refused, Unreachable):
            return False  # a kind that has just gone, or the whole server
        return True

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        api: Api = connect(str(self._kubeconfig))
        client = api._client
        self.transport = client._transport = CountingTransport(client._transport)
        self.transport.left = self._allowed
        self._eyes = connect(str(self._kubeconfig))
        self.controller = Controller(api, self._settings)
        work = asyncio.create_task(self.controller.run())
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        stopped.cancel()
        (ended, _) = await asyncio.gather(work, stopped, return_exceptions=True)
        if isinstance(ended, Exception):
            self.failure = ended
        await api.close()
        await self._eyes.close()
        # A connection that was being opened when its task was cancelled is nobody's: the HTTP client forgets it.
        for transport in list(self._loop._transports.values()):  # type: ignore[attr-defined]
            transport.abort()
        await asyncio.sleep(0)


class Site:
    """Short ways to look at a cluster and to change it."""

    def __init__(self, server: KubernetesServer) -> None:
        self.server = server
        config = yaml.safe_load(server.kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._client = httpx2.Client(
            base_url=cluster["server"], verify=context, headers={"Authorization": "Bearer admintoken"}, timeout=30
        )

    def close(self) -> None:
        self._client.close()

    def apply(self, *documents: Any) -> None:
        self.server.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(documents))

    def sample(self, name: str) -> list[Any]:
        return list(yaml.safe_load_all((FLEET / "samples" / f"{name}.yaml").read_text()))

    def runtimes(self) -> None:
        self.server.kubectl("apply", "-f", str(FLEET / "runtimes"))

    def fetch(self, path: str) -> Any:
        """What the API server has at a path; None if nothing."""
        answer = self._client.get(path)
        return answer.json() if answer.status_code == 200 else None

    def reachable(self) -> bool:
        try:
            return self._client.get("/readyz").status_code == 200
        except httpx2.TransportError:
            return False

    def service(self, name: str) -> Any:
        return self.fetch(f"{SERVICES}/{name}")

    def pods(self, service: str) -> list[Any]:
        return self.fetch(f"/api/v1/pods?labelSelector=ome.io/inferenceservice={service}")["items"]

    def children(self) -> dict[str, str]:
        """All objects of services, with their versions: `Deployment.apps default/x` to `1234`."""
        return dict(self._children())

    def events(self, name: str) -> list[Any]:
        """What was told about a service."""
        uid = self.service(name)["metadata"]["uid"]  # not one of the same name before it
        return self.fetch(f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.uid={uid}")["items"]

    def ready(self, name: str) -> dict[str, Any]:
        service = self.service(name) or {}
        conditions = service.get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == "Ready"), {})

    def mark_pods(self, service: str) -> None:
        """All pods of a service become ready, as soon as there are any."""

        def marked() -> bool:
            pods = self.pods(service)
            for each in pods:
                self.server.mark_ready(each["metadata"]["name"], each["metadata"]["namespace"])
            return bool(pods)

        until(marked)

    def _children(self) -> Iterator[tuple[str, str]]:
        for each in CHILDREN:
            for version in each.versions:
                root = f"/apis/{each.group}" if each.group else "/api"
                found = self.fetch(f"{root}/{version}/{each.plural}?labelSelector=ome.io/inferenceservice")
                for one in found["items"] if found else ():
                    metadata = one["metadata"]
                    name = f"{each.kind}.{each.group} {metadata['namespace']}/{metadata['name']}"
                    yield name, metadata["resourceVersion"]
                if found:
                    break
