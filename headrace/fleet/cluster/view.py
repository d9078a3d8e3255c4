# SPDX-License-Identifier: Apache-2.0
"""All that the controller knows of the cluster: services, what they are planned with, what was made of them, their pods."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from headrace.fleet.benchmarks.planning import service_of
from headrace.fleet.cluster.api import Api
from headrace.fleet.cluster.differing import digest
from headrace.fleet.cluster.following import Follower
from headrace.fleet.cluster.queue import Key
from headrace.fleet.cluster.resources import (
    BENCHMARK_PODS,
    BENCHMARKS,
    CHILDREN,
    FACTS,
    JOBS,
    MEASURING,
    PODS,
    SERVICES,
    Resource,
    Served,
    served,
)
from headrace.fleet.names import BENCHMARK_LABEL, SERVICE_LABEL, trunc63
from headrace.fleet.words import ClusterFacts, Document, FleetSettings, items, kind_of, labels_of, name_of, part, text

log = logging.getLogger("headrace.operator")

_MODELS = frozenset({"BaseModel", "ClusterBaseModel"})
_MISSES = 3
"""How often in a row a kind must not be there to be gone."""
_OF_ALL = frozenset({"AcceleratorClass"})


class View:
    """Follows every kind that there is, and tells which services to look at. Writes nothing."""

    def __init__(self, api: Api, settings: FleetSettings, ask: Callable[[Key], None]) -> None:
        self._api = api
        self._settings = settings
        self._ask = ask
        self._followers: dict[Resource, Follower] = {}
        self._tasks: dict[Resource, asyncio.Task[None]] = {}
        self._missed: dict[Resource, int] = {}
        self._facts: ClusterFacts | None = None

    @property
    def complete(self) -> bool:
        """Whether our own kinds are there, and everything has been seen once."""
        needed = {SERVICES, *FACTS}
        return needed <= set(self._followers) and all(each.listed.is_set() for each in self._needed())

    async def discover(self) -> bool:
        """Look which kinds there are, and follow those that are new. Whether any came or went."""
        kinds = [SERVICES, *FACTS, *CHILDREN, PODS, *MEASURING]
        found = served(kinds, await self._api.offered(kinds))
        for each in self._followers:
            self._missed[each] = 0 if each in found else self._missed.get(each, 0) + 1
        # An API server that has just started does not tell of custom resources yet. What runs must not be rebuilt for that.
        gone = [each for each in self._followers if self._missed[each] >= _MISSES]
        for resource in gone:
            log.info("the cluster no longer has %s", resource.plural)
            self._tasks.pop(resource).cancel()
            del self._followers[resource]
        fresh = [resource for resource in found if resource not in self._followers]
        for resource in fresh:
            self._followers[resource] = follower = self._follower(found[resource])
            self._tasks[resource] = asyncio.create_task(follower.run(), name=f"follow {resource.plural}")
        if gone or fresh:
            self._facts = None
        return bool(gone or fresh)

    async def listed(self) -> None:
        """Return when everything has been seen once."""
        for each in self._needed():
            await each.listed.wait()

    def _needed(self) -> list[Follower]:
        """All but those of benchmarks: an operator without a right to Jobs still has services to look at."""
        return [each for resource, each in self._followers.items() if resource not in MEASURING]

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    # What is there

    @property
    def facts(self) -> ClusterFacts:
        """What services are planned with; the same object until something of it changes."""
        if self._facts is None:
            runtimes, cluster_runtimes, models, cluster_models, weights, accelerators = (
                tuple(self._followers[each].all()) if each in self._followers else () for each in FACTS
            )
            self._facts = ClusterFacts(
                runtimes=runtimes + cluster_runtimes,
                models=models + cluster_models,
                weights=weights,
                accelerators=accelerators,
                capabilities=frozenset(each.capability for each in self._followers if each.capability),
                settings=self._settings,
            )
        return self._facts

    def set_settings(self, settings: FleetSettings) -> None:
        """What the operator is told for all services, when it changes."""
        if settings != self._settings:
            self._settings = settings
            self._facts = None if self._facts is None else replace(self._facts, settings=settings)
            self.ask_all()

    def service(self, key: Key) -> Document | None:
        """A service by namespace and name."""
        return self._followers[SERVICES].get(key) if SERVICES in self._followers else None

    def services(self) -> list[Document]:
        """All services."""
        return self._followers[SERVICES].all() if SERVICES in self._followers else []

    def owned(self, service: Document) -> list[Document]:
        """The objects that this very service owns, not one of the same name before it."""
        uid, key = text(service, "metadata", "uid"), _key(service)
        return [each for resource in CHILDREN for each in self._of(resource, key) if owner_uid(each) == uid]

    def pods(self, service: Document) -> list[Document]:
        """The pods of a service."""
        return self._of(PODS, _key(service))

    def benchmark(self, key: Key) -> Document | None:
        """A BenchmarkJob by namespace and name."""
        return self._followers[BENCHMARKS].get(key) if BENCHMARKS in self._followers else None

    def measuring(self, benchmark: Document) -> tuple[Document | None, list[Document]] | None:
        """The Job of this very BenchmarkJob, and its pods; None as long as not all of them are known."""
        followers = [self._followers.get(each) for each in MEASURING]
        if any(each is None or not each.listed.is_set() for each in followers):
            return None
        uid, key = text(benchmark, "metadata", "uid"), _key(benchmark)
        jobs = [each for each in self._of(JOBS, key) if owner_uid(each) == uid]
        job = jobs[0] if jobs else None
        of = text(job, "metadata", "uid")
        pods = [each for each in self._of(BENCHMARK_PODS, (key[0], trunc63(key[1]))) if owner_uid(each) == of]
        return job, pods if job is not None else []

    def where(self, resource: Resource) -> Served | None:
        """How the cluster has a kind, if it does."""
        follower = self._followers.get(resource)
        return follower.where if follower is not None else None

    def put(self, resource: Resource, document: Document) -> None:
        """What a write gave back."""
        if resource in self._followers:
            self._followers[resource].put(document)

    def _of(self, resource: Resource, key: Key) -> list[Document]:
        return self._followers[resource].of(key) if resource in self._followers else []

    # What changes

    def ask_all(self) -> None:
        """Look at every service, and every benchmark."""
        for each in self.services():
            self._ask(_key(each))
        for each in self._benchmarks():
            self._ask(benchmark_key(_key(each)))

    def _follower(self, where: Served) -> Follower:
        resource = where.resource
        if resource == SERVICES:
            return Follower(self._api, where, self._service_changed)
        if resource in FACTS:
            return Follower(self._api, where, self._fact_changed)
        if resource in MEASURING:
            return Follower(
                self._api,
                where,
                self._measuring_changed,
                selector=resource.selector,
                owner=_MEASURED.get(resource, _none),
            )
        owner = _pod_owner if resource == PODS else _owner
        # Objects of OME and of ours alike have it; nobody else's are worth their memory.
        return Follower(self._api, where, self._child_changed, selector=SERVICE_LABEL, owner=owner)

    def _service_changed(self, before: Document | None, after: Document | None) -> None:
        document = after if after is not None else before
        if document is not None:
            self._ask(_key(document))
            for each in self._benchmarks():
                if service_of(each) == _key(document):
                    self._ask(benchmark_key(_key(each)))

    def _measuring_changed(self, before: Document | None, after: Document | None) -> None:
        document = after if after is not None else before
        if document is None:
            return
        if kind_of(document) == BENCHMARKS.kind:
            self._ask(benchmark_key(_key(document)))
            return
        label = labels_of(document).get(BENCHMARK_LABEL)
        for each in self._benchmarks():
            if trunc63(name_of(each)) == label and text(each, "metadata", "namespace") == _key(document)[0]:
                self._ask(benchmark_key(_key(each)))

    def _benchmarks(self) -> list[Document]:
        return self._followers[BENCHMARKS].all() if BENCHMARKS in self._followers else []

    def _child_changed(self, before: Document | None, after: Document | None) -> None:
        for each in (before, after):
            if each is not None:
                owner = _pod_owner if kind_of(each) == "Pod" else _owner
                for key in owner(each):
                    self._ask(key)

    def _fact_changed(self, before: Document | None, after: Document | None) -> None:
        document = after if after is not None else before
        if document is None or (before is not None and after is not None and _same(before, after)):
            return
        self._facts = None
        for each in self.services():
            if _uses(each, document):
                self._ask(_key(each))


def owner_uid(document: Document) -> str:
    """The uid of the object that controls this one."""
    for each in items(document, "metadata", "ownerReferences"):
        if part(each).get("controller") is True:
            return text(each, "uid")
    return ""


def _same(before: Document, after: Document) -> bool:
    # The state of a model on the nodes is told in the status of its services; other kinds have no such word.
    told = kind_of(after) not in _MODELS or part(before, "status") == part(after, "status")
    return told and digest(before) == digest(after)


def _uses(service: Document, fact: Document) -> bool:
    """Whether a service may have to be planned anew. Too often does no harm; too seldom would."""
    kind, namespace = kind_of(fact), text(fact, "metadata", "namespace")
    if kind in _OF_ALL:
        return True
    if namespace and namespace != text(service, "metadata", "namespace"):
        return False
    spec = part(service, "spec")
    if kind.endswith("ServingRuntime") and not part(spec, "runtime"):
        return True
    return name_of(fact) in _texts(spec) or name_of(fact) == text(service, "status", "runtime", "name")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _key(service: Document) -> Key:
    return text(service, "metadata", "namespace"), name_of(service)


def benchmark_key(key: Key) -> Key:
    """How a benchmark is asked for."""
    return key[0], f"{BENCHMARKS.plural}/{key[1]}"


def _owner(document: Document, kind: str = SERVICES.kind) -> Iterable[Key]:
    return [
        (text(document, "metadata", "namespace"), text(each, "name"))
        for each in items(document, "metadata", "ownerReferences")
        if text(each, "kind") == kind
    ]


def _pod_owner(pod: Document) -> Iterable[Key]:
    name = labels_of(pod).get(SERVICE_LABEL)
    return [(text(pod, "metadata", "namespace"), name)] if name else []


def _none(_: Document) -> Iterable[Key]:
    return ()


def _benchmark_pod(pod: Document) -> Iterable[Key]:
    return [(text(pod, "metadata", "namespace"), labels_of(pod).get(BENCHMARK_LABEL, ""))]


_MEASURED: dict[Resource, Callable[[Document], Iterable[Key]]] = {
    JOBS: lambda job: _owner(job, BENCHMARKS.kind),
    BENCHMARK_PODS: _benchmark_pod,
}
