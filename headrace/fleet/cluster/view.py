# SPDX-License-Identifier: Apache-2.0
"""The operator's cache of the cluster: services, the resources they are planned with, their objects and pods."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from headrace.fleet.benchmarks.job import service_of
from headrace.fleet.cluster.activator_pods import ActivatorPods, front_owner
from headrace.fleet.cluster.diff import digest
from headrace.fleet.cluster.resources import (
    BENCHMARK_PODS,
    BENCHMARK_RESOURCES,
    BENCHMARKS,
    CHILDREN,
    FACTS,
    JOBS,
    SERVICES,
)
from headrace.fleet.documents import ClusterFacts, FleetSettings, object_key
from headrace.fleet.names import BENCHMARK_LABEL, NAMESPACE, SERVICE_LABEL, trunc63
from headrace.fleet.planning.pod_defaults import SLEEP_ACTION
from headrace.fleet.planning.shared_activator import ACTIVATION, SharedActivator
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError
from headrace.platforms.kubernetes_client.informer import Informer
from headrace.platforms.kubernetes_client.objects import (
    PODS,
    Document,
    Key,
    Resource,
    ServedResource,
    annotations_of,
    controller_uid,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    labels_of,
    name_of,
    served_resources,
)

log = logging.getLogger("headrace.operator")

_MODELS = frozenset({"BaseModel", "ClusterBaseModel"})
SLEEP_ACTION_VERSION = (1, 33)
"""Kubelets sleep in a hook from 1.30 on, and may be three minor versions behind their API server."""
_MAX_MISSES = 3
"""Number of failed discoveries in a row after which a resource type counts as removed."""
_USED_BY_ALL = frozenset({"AcceleratorClass"})


class ClusterView:
    """Runs an informer for every served resource type, and queues the services that a change concerns."""

    def __init__(
        self, api: ApiClient, settings: FleetSettings, enqueue: Callable[[Key], None], namespace: str = NAMESPACE
    ) -> None:
        """namespace: that of the operator and of the shared activator."""
        self._api = api
        self._activator = ActivatorPods(api, namespace, self._activator_changed)
        self._activator_task: asyncio.Task[None] | None = None
        self._settings = settings
        self._enqueue = enqueue
        self._informers: dict[Resource, Informer] = {}
        self._tasks: dict[Resource, asyncio.Task[None]] = {}
        self._missed: dict[Resource, int] = {}
        self._facts: ClusterFacts | None = None
        self._version: tuple[int, int] | None = None

    @property
    def complete(self) -> bool:
        """Whether our custom resources are served, and all informers are synced."""
        needed = {SERVICES, *FACTS}
        return needed <= set(self._informers) and all(informer.synced.is_set() for informer in self._required())

    def activator_for(self, service: Document) -> SharedActivator | None:
        """Return the shared activator for a service; None while it does not run."""
        return self._activator.for_service(object_key(service), self._fronts)

    async def discover(self) -> bool:
        """Start informers for newly served resource types, and stop those of removed ones. Return whether any changed."""
        if self._version is None:
            # Once only: while a control plane is upgraded its servers differ, and each change would replace all pods.
            try:
                self._version = await self._api.version()
            except ApiError as error:
                if error.code >= 500:
                    raise
                self._version = (0, 0)  # no permission to read it
        if self._activator_task is None:
            self._activator_task = asyncio.create_task(self._activator.informer.run(), name="informer activator")
        kinds = [SERVICES, *FACTS, *CHILDREN, PODS, *BENCHMARK_RESOURCES]
        served = served_resources(kinds, await self._api.discover(kinds))
        for resource in self._informers:
            self._missed[resource] = 0 if resource in served else self._missed.get(resource, 0) + 1
        # An API server that has just started does not list custom resources yet: do not replan services for that.
        removed = [resource for resource in self._informers if self._missed[resource] >= _MAX_MISSES]
        for resource in removed:
            log.info("the cluster no longer serves %s", resource.plural)
            self._tasks.pop(resource).cancel()
            del self._informers[resource]
        fresh = [resource for resource in served if resource not in self._informers]
        for resource in fresh:
            self._informers[resource] = informer = self._informer(served[resource])
            self._tasks[resource] = asyncio.create_task(informer.run(), name=f"informer {resource.plural}")
        if removed or fresh:
            self._facts = None
        return bool(removed or fresh)

    async def wait_synced(self) -> None:
        """Return when all informers are synced."""
        for informer in self._required():
            await informer.synced.wait()

    def _required(self) -> list[Informer]:
        """Return all informers but those of benchmarks: without permission for Jobs, services are still reconciled."""
        informers = [item for resource, item in self._informers.items() if resource not in BENCHMARK_RESOURCES]
        # Without the activator's pods, every service at zero would get a router of its own.
        return [*informers, self._activator.informer]

    async def close(self) -> None:
        """Stop the informers."""
        tasks = [*self._tasks.values(), *filter(None, [self._activator_task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._activator_task = None

    # Reading

    @property
    def facts(self) -> ClusterFacts:
        """The resources that services are planned with; the same object until one changes."""
        if self._facts is None:
            runtimes, cluster_runtimes, models, cluster_models, weights, accelerators = (
                tuple(self._informers[resource].all()) if resource in self._informers else () for resource in FACTS
            )
            self._facts = ClusterFacts(
                runtimes=runtimes + cluster_runtimes,
                models=models + cluster_models,
                weights=weights,
                accelerators=accelerators,
                capabilities=frozenset(self._capabilities()),
                settings=self._settings,
            )
        return self._facts

    def _capabilities(self) -> Iterator[str]:
        yield from (resource.capability for resource in self._informers if resource.capability)
        if self._version is not None and self._version >= SLEEP_ACTION_VERSION:
            yield SLEEP_ACTION

    def set_settings(self, settings: FleetSettings) -> None:
        """Set the settings of the fleet, and queue everything if they changed."""
        if settings != self._settings:
            self._settings = settings
            self._facts = None if self._facts is None else replace(self._facts, settings=settings)
            self.enqueue_all()

    def service(self, key: Key) -> Document | None:
        """Return a service by namespace and name."""
        return self._informers[SERVICES].get(key) if SERVICES in self._informers else None

    def services(self) -> list[Document]:
        """Return all services."""
        return self._informers[SERVICES].all() if SERVICES in self._informers else []

    def owned(self, service: Document) -> list[Document]:
        """Return the objects that a service controls, by its uid."""
        uid, key = get_str(service, "metadata", "uid"), object_key(service)
        return [
            child for resource in CHILDREN for child in self._indexed(resource, key) if controller_uid(child) == uid
        ]

    def pods(self, service: Document) -> list[Document]:
        """Return the pods of a service."""
        return self._indexed(PODS, object_key(service))

    def benchmark(self, key: Key) -> Document | None:
        """Return a BenchmarkJob by namespace and name."""
        return self._informers[BENCHMARKS].get(key) if BENCHMARKS in self._informers else None

    def benchmark_job(self, benchmark: Document) -> tuple[Document | None, list[Document]] | None:
        """Return the Job of a BenchmarkJob and its pods; None while their informers are not synced."""
        informers = [self._informers.get(resource) for resource in BENCHMARK_RESOURCES]
        if any(informer is None or not informer.synced.is_set() for informer in informers):
            return None
        uid, key = get_str(benchmark, "metadata", "uid"), object_key(benchmark)
        jobs = [job for job in self._indexed(JOBS, key) if controller_uid(job) == uid]
        job = jobs[0] if jobs else None
        job_uid = get_str(job, "metadata", "uid")
        labelled = self._indexed(BENCHMARK_PODS, (key[0], trunc63(key[1])))
        pods = [pod for pod in labelled if controller_uid(pod) == job_uid]
        return job, pods if job is not None else []

    def served(self, resource: Resource) -> ServedResource | None:
        """Return the served version of a resource type; None if it is not served."""
        informer = self._informers.get(resource)
        return informer.served if informer is not None else None

    def put(self, resource: Resource, document: Document) -> None:
        """Store the answer of a write."""
        if resource in self._informers:
            self._informers[resource].put(document)

    def _indexed(self, resource: Resource, key: Key) -> list[Document]:
        return self._informers[resource].indexed(key) if resource in self._informers else []

    # Changes

    def enqueue_all(self) -> None:
        """Queue every service and every benchmark."""
        for service in self.services():
            self._enqueue(object_key(service))
        for benchmark in self._benchmarks():
            self._enqueue(benchmark_key(object_key(benchmark)))

    def _informer(self, served: ServedResource) -> Informer:
        resource = served.resource
        if resource == SERVICES:
            return Informer(self._api, served, self._service_changed)
        if resource in FACTS:
            return Informer(self._api, served, self._fact_changed)
        if resource in BENCHMARK_RESOURCES:
            return Informer(
                self._api,
                served,
                self._benchmark_changed,
                selector=resource.selector,
                index_by=_BENCHMARK_INDEXES.get(resource, _no_keys),
            )
        owner = _pod_owner_keys if resource == PODS else _owner_keys
        # Objects made by OME and by us have this label; no others are cached.
        selector = resource.selector or SERVICE_LABEL
        return Informer(self._api, served, self._child_changed, selector=selector, index_by=owner)

    def _fronts(self) -> Iterator[tuple[Key, Document]]:
        """Yield the Deployments of front routers that the activator knows of, with the keys of their services."""
        for informer in (self._informers.get(resource) for resource in CHILDREN if resource.kind == "Deployment"):
            for deployment in informer.all() if informer is not None else ():
                if ACTIVATION in annotations_of(deployment):
                    yield front_owner(deployment), deployment

    def _activator_changed(self, flips: bool) -> None:
        """Queue the services that the activator serves; all of them when its first pod is ready, or its last one gone."""
        if flips and self.complete:
            self.enqueue_all()
            return
        for key, _ in self._fronts():
            self._enqueue(key)

    def _service_changed(self, before: Document | None, after: Document | None) -> None:
        document = after if after is not None else before
        if after is None and before is not None:
            self._activator.forget(object_key(before))
        if document is not None:
            self._enqueue(object_key(document))
            for benchmark in self._benchmarks():
                if service_of(benchmark) == object_key(document):
                    self._enqueue(benchmark_key(object_key(benchmark)))

    def _benchmark_changed(self, before: Document | None, after: Document | None) -> None:
        document = after if after is not None else before
        if document is None:
            return
        if kind_of(document) == BENCHMARKS.kind:
            self._enqueue(benchmark_key(object_key(document)))
            return
        label = labels_of(document).get(BENCHMARK_LABEL)
        for benchmark in self._benchmarks():
            if (
                trunc63(name_of(benchmark)) == label
                and get_str(benchmark, "metadata", "namespace") == object_key(document)[0]
            ):
                self._enqueue(benchmark_key(object_key(benchmark)))

    def _benchmarks(self) -> list[Document]:
        return self._informers[BENCHMARKS].all() if BENCHMARKS in self._informers else []

    def _child_changed(self, before: Document | None, after: Document | None) -> None:
        for child in (before, after):
            if child is not None:
                owner_keys = _pod_owner_keys if kind_of(child) == "Pod" else _owner_keys
                for key in owner_keys(child):
                    self._enqueue(key)

    def _fact_changed(self, before: Document | None, after: Document | None) -> None:
        document = after if after is not None else before
        if document is None or (before is not None and after is not None and _same_content(before, after)):
            return
        self._facts = None
        for service in self.services():
            if _may_use(service, document):
                self._enqueue(object_key(service))


def _same_content(before: Document, after: Document) -> bool:
    # The node states of a model are part of its services' status; the status of other kinds is not used.
    same_status = kind_of(after) not in _MODELS or get_mapping(before, "status") == get_mapping(after, "status")
    return same_status and digest(before) == digest(after)


def _may_use(service: Document, fact: Document) -> bool:
    """Whether a change of a fact may concern a service. A false positive does no harm."""
    kind, namespace = kind_of(fact), get_str(fact, "metadata", "namespace")
    if kind in _USED_BY_ALL:
        return True
    if namespace and namespace != get_str(service, "metadata", "namespace"):
        return False
    spec = get_mapping(service, "spec")
    if kind.endswith("ServingRuntime") and not get_mapping(spec, "runtime"):
        return True
    return name_of(fact) in _strings(spec) or name_of(fact) == get_str(service, "status", "runtime", "name")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def benchmark_key(key: Key) -> Key:
    """Return the queue key of a benchmark."""
    return key[0], f"{BENCHMARKS.plural}/{key[1]}"


def _owner_keys(document: Document, kind: str = SERVICES.kind) -> Iterable[Key]:
    return [
        (get_str(document, "metadata", "namespace"), get_str(owner, "name"))
        for owner in get_list(document, "metadata", "ownerReferences")
        if get_str(owner, "kind") == kind
    ]


def _pod_owner_keys(pod: Document) -> Iterable[Key]:
    name = labels_of(pod).get(SERVICE_LABEL)
    return [(get_str(pod, "metadata", "namespace"), name)] if name else []


def _no_keys(_: Document) -> Iterable[Key]:
    return ()


def _benchmark_pod_keys(pod: Document) -> Iterable[Key]:
    return [(get_str(pod, "metadata", "namespace"), labels_of(pod).get(BENCHMARK_LABEL, ""))]


_BENCHMARK_INDEXES: dict[Resource, Callable[[Document], Iterable[Key]]] = {
    JOBS: lambda job: _owner_keys(job, BENCHMARKS.kind),
    BENCHMARK_PODS: _benchmark_pod_keys,
}
