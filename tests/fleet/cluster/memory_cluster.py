# SPDX-License-Identifier: Apache-2.0
"""A cluster in memory, for the operator's programs in virtual time: an API server, and what nodes do with Deployments.

The API server has list, watch, server-side apply, merge patches, `scale` and deletion. Nodes are as slow as a test says: a
pod takes `start_seconds` to start, keeps serving for `stop_seconds` after its deletion, and kube-proxy learns of endpoints
`proxy_seconds` late. `tests/support/fake_kubelet.py` is the stand-in beside a real API server.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from managed_fields import as_applied

from headrace.fleet.cluster.resources import BENCHMARK_RESOURCES, CHILDREN, FACTS, SERVICES
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError
from headrace.platforms.kubernetes_client.objects import PODS, Document, Resource, ServedResource

KINDS = {item.kind: item for item in (SERVICES, *FACTS, *CHILDREN, PODS, *BENCHMARK_RESOURCES) if not item.capability}
_Key = tuple[str, str, str]
"""Plural, namespace and name."""


class MemoryCluster(ApiClient):
    """The API server."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.objects: dict[_Key, dict[str, Any]] = {}
        self._version = 0
        self._watches: list[tuple[str, asyncio.Queue[tuple[str, Document]]]] = []

    def set(self, document: dict[str, Any]) -> dict[str, Any]:
        """Store an object as it is; a changed `spec` is a new generation."""
        self._version += 1
        key = (KINDS[document["kind"]].plural, document["metadata"].get("namespace", ""), document["metadata"]["name"])
        before = self.objects.get(key, {})
        metadata = {"creationTimestamp": f"2026-01-01T00:00:00.{self._version:06}Z", **before.get("metadata", {})}
        metadata |= {"uid": f"uid-{self._version}", **document["metadata"]}
        if before:
            metadata |= {"uid": before["metadata"]["uid"], "generation": before["metadata"]["generation"]}
        metadata["generation"] = metadata.get("generation", 0) + (before.get("spec") != document.get("spec"))
        metadata["resourceVersion"] = str(self._version)
        self.objects[key] = stored = copy.deepcopy({**document, "metadata": metadata})
        self._notify(key[0], "MODIFIED" if before else "ADDED", stored)
        return stored

    def get_now(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any] | None:
        """Return an object."""
        return self.objects.get((KINDS[kind].plural, namespace, name))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return all objects of a kind."""
        return [item for key, item in sorted(self.objects.items()) if key[0] == KINDS[kind].plural]

    def remove(self, kind: str, name: str, namespace: str = "default") -> None:
        """Delete an object."""
        plural = KINDS[kind].plural
        self._notify(plural, "DELETED", self.objects.pop((plural, namespace, name)))

    def _notify(self, plural: str, change: str, document: dict[str, Any]) -> None:
        for watched, queue in self._watches:
            if watched == plural:
                queue.put_nowait((change, copy.deepcopy(document)))

    # As the API client

    async def version(self) -> tuple[int, int]:
        return 1, 33

    async def discover(self, resources: Sequence[Resource]) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = {}
        for item in resources:
            if not item.capability:
                group = f"{item.group}/{item.versions[0]}" if item.group else item.versions[0]
                found.setdefault(group, set()).add(item.plural)
        return {group: frozenset(plurals) for group, plurals in found.items()}

    async def list(
        self, served: ServedResource, selector: str = "", namespace: str = "", fields: str = "", **_: Any
    ) -> tuple[list[Document], str]:
        found = [
            copy.deepcopy(document)
            for (plural, space, _), document in sorted(self.objects.items())
            if plural == served.resource.plural and namespace in ("", space) and _selected(document, selector, fields)
        ]
        return found, str(self._version)

    async def watch(
        self,
        served: ServedResource,
        version: str,
        selector: str = "",
        namespace: str = "",
        fields: str = "",
        seconds: int = 300,
    ) -> AsyncIterator[tuple[str, Document]]:
        queue: asyncio.Queue[tuple[str, Document]] = asyncio.Queue()
        entry = (served.resource.plural, queue)
        for (plural, _, _), document in sorted(self.objects.items()):
            if plural == entry[0] and int(document["metadata"]["resourceVersion"]) > int(version):
                queue.put_nowait(("MODIFIED", copy.deepcopy(document)))
        self._watches.append(entry)
        try:
            async with asyncio.timeout(seconds):
                while True:
                    change, document = await queue.get()
                    space = document["metadata"].get("namespace", "")
                    if namespace in ("", space) and _selected(document, selector, fields):
                        yield change, document
        except TimeoutError:
            return
        finally:
            self._watches.remove(entry)

    async def get(self, served: ServedResource, namespace: str, name: str) -> Document | None:
        return copy.deepcopy(self.objects.get((served.resource.plural, namespace, name)))

    async def apply(self, served: ServedResource, document: dict[str, Any]) -> Document:
        key = (served.resource.plural, document["metadata"].get("namespace", ""), document["metadata"]["name"])
        before = self.objects.get(key)
        wanted = copy.deepcopy(document)
        applied = as_applied(wanted)
        for name in ("uid", "resourceVersion", "generation"):
            del applied["metadata"][name]
        if before is not None:
            applied |= {"status": before["status"]} if "status" in before else {}
            if "replicas" in before.get("spec", {}) and "replicas" not in wanted.get("spec", {}):
                applied["spec"]["replicas"] = before["spec"]["replicas"]
        return copy.deepcopy(self.set(applied))

    async def patch(
        self, served: ServedResource, namespace: str, name: str, change: Any, subresource: str = ""
    ) -> Document:
        before = self.objects.get((served.resource.plural, namespace, name))
        if before is None:
            raise ApiError(404, "NotFound", f"there is no {name}")
        return copy.deepcopy(self.set(_merged(before, {**change, "metadata": {}})))

    async def create(self, served: ServedResource, namespace: str, document: Document) -> Document:
        return document

    async def delete(self, served: ServedResource, namespace: str, name: str, uid: str = "") -> None:
        if (served.resource.plural, namespace, name) in self.objects:
            self.remove(served.resource.kind, name, namespace)

    async def close(self) -> None:
        pass


def _selected(document: Document, selector: str, fields: str) -> bool:
    if fields and fields != f"metadata.name={document['metadata']['name']}":
        return False
    labels = document["metadata"].get("labels", {})
    return all(
        labels.get(name) == value if equals else name in labels
        for name, equals, value in (item.partition("=") for item in selector.split(",") if item)
    )


def _merged(value: Any, change: Any) -> Any:
    if not isinstance(change, dict):
        return change
    made = dict(value) if isinstance(value, dict) else {}
    for name, item in change.items():
        made[name] = _merged(made.get(name), item)
    return {name: item for name, item in made.items() if item is not None}


Stop = Callable[[], Awaitable[None]]
"""Stops a pod's program."""


@dataclass
class Pod:
    """A pod of a Deployment."""

    address: str
    stop: Stop | None = None
    ready_at: float = 0.0
    going: bool = False
    """Whether it is being deleted."""


@dataclass
class Nodes:
    """Runs the pods of Deployments, and tells kube-proxy of endpoints. Addresses are of the loopback network."""

    cluster: MemoryCluster
    programs: dict[str, Callable[[str], Awaitable[Stop]]]
    """By Deployment: starts the program of a pod at an address."""
    start_seconds: dict[str, float] = field(default_factory=dict)
    """By Deployment; 3 for others."""
    stop_seconds: float = 5.0
    proxy_seconds: float = 1.0
    pods: dict[str, list[Pod]] = field(default_factory=dict)
    """By Deployment."""
    _history: list[tuple[float, dict[str, list[tuple[str, int]]]]] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            for deployment in self.cluster.of_kind("Deployment"):
                self._reconcile(deployment)
            endpoints = self._endpoints()
            if not self._history or self._history[-1][1] != endpoints:
                self._history.append((asyncio.get_running_loop().time(), endpoints))
            await asyncio.sleep(0.05)

    def running(self, deployment: str) -> int:
        """Return the number of pods, also of those that start or stop."""
        return len(self.pods.get(deployment, ()))

    def endpoints(self, service: str) -> list[tuple[str, int]]:
        """Return where kube-proxy sends new connections to a Service."""
        until = asyncio.get_running_loop().time() - self.proxy_seconds
        known = next((endpoints for at, endpoints in reversed(self._history) if at <= until), {})
        return known.get(service, [])

    async def close(self) -> None:
        """Stop all pods."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pods in self.pods.values():
            for pod in pods:
                if pod.stop is not None:
                    await pod.stop()

    def _reconcile(self, deployment: dict[str, Any]) -> None:
        name = deployment["metadata"]["name"]
        pods = self.pods.setdefault(name, [])
        staying = [pod for pod in pods if not pod.going]
        for _ in range(deployment["spec"]["replicas"] - len(staying)):
            pod = Pod(random_address())
            pods.append(pod)
            staying.append(pod)
            self._do(self._start(name, pod))
        for pod in staying[deployment["spec"]["replicas"] :]:
            pod.going = True
            staying.remove(pod)
            self._do(self._end(name, pod))
        ready = sum(1 for pod in staying if pod.ready_at)
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(staying),
            "updatedReplicas": len(staying),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "conditions": [{"type": "Available", "status": "True" if ready >= len(staying) else "False"}],
        }
        if deployment.get("status") != status:
            self.cluster.set({**deployment, "status": status})

    async def _start(self, name: str, pod: Pod) -> None:
        await asyncio.sleep(self.start_seconds.get(name, 3.0))
        if not pod.going:
            pod.stop = await self.programs[name](pod.address)
            pod.ready_at = asyncio.get_running_loop().time()

    async def _end(self, name: str, pod: Pod) -> None:
        await asyncio.sleep(self.stop_seconds)  # its preStop hook
        if pod.stop is not None:
            await pod.stop()
        self.pods[name].remove(pod)

    def _do(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _endpoints(self) -> dict[str, list[tuple[str, int]]]:
        found: dict[str, list[tuple[str, int]]] = {}
        for service in self.cluster.of_kind("Service"):
            app = service["spec"].get("selector", {}).get("app", "")
            [port] = service["spec"]["ports"][:1]
            ready = [pod for pod in self.pods.get(app, ()) if pod.ready_at and not pod.going]
            found[service["metadata"]["name"]] = [(pod.address, port["targetPort"]) for pod in ready]
        for item in self.cluster.of_kind("EndpointSlice"):
            named = found.setdefault(item["metadata"]["labels"]["kubernetes.io/service-name"], [])
            for endpoint in item["endpoints"]:
                named.append((endpoint["addresses"][0], item["ports"][0]["port"]))
        return found


def random_address() -> str:
    """Return an address of this machine that no other test uses, for servers with fixed ports."""
    return f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}.{random.randrange(2, 255)}"
