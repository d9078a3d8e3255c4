# SPDX-License-Identifier: Apache-2.0
"""The controller of InferenceServices: plans them, and reconciles their pods, routers and status.

A reconciliation never blocks: pods and routers are tasks that trigger another one when they change. It remembers nothing
that the next one needs, so the daemon may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound
from headrace.core.fault_points import fault_point
from headrace.fleet.documents import ClusterFacts, FleetSettings, Problem, cluster_facts
from headrace.fleet.explain import shipped_runtimes
from headrace.fleet.local.autoscaler import Autoscaler, ScalingCondition, with_scaling_conditions
from headrace.fleet.local.endpoints import (
    activation_config,
    component_urls,
    entry_service,
    measures_streams,
    proxied_services,
    service_backends,
)
from headrace.fleet.local.events import Events
from headrace.fleet.local.kubelet import Kubelet
from headrace.fleet.local.object_store import DocumentStore, Service, ServiceObjects
from headrace.fleet.local.replica_watches import ReplicaWatches
from headrace.fleet.local.scaling_metrics import backend_counts
from headrace.fleet.local.service_proxy import Routers, router_status
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import ResourceUsage, System
from headrace.fleet.local.workload_controller import WorkloadController
from headrace.fleet.local.workloads import autoscaler_of, desired_replicas, replica_bounds
from headrace.fleet.names import COMPONENT_LABEL, SERVICE
from headrace.fleet.planning import Plan, ScaleUp, Urls, plan
from headrace.fleet.planning.autoscalers import COUNTS_REQUESTS
from headrace.fleet.rollouts.controller import advance_rollouts, is_in_progress
from headrace.fleet.rollouts.revision_stats import RouterStats, parse_router_stats
from headrace.fleet.status.conditions import Observed, get_mappings
from headrace.fleet.status.service_status import build_status, problem_status
from headrace.platforms.kubernetes_client.objects import (
    Document,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    labels_of,
    name_of,
)

log = logging.getLogger("headrace.fleet")

CAPABILITIES = frozenset({"lws", "keda", COUNTS_REQUESTS})
"""What the local fleet supports beside Deployments: LeaderWorkerSets as groups of processes, KEDA by the autoscaler."""
SETTINGS = FleetSettings(node_pinning="none", pre_stop_seconds=0, pod_security="unchanged")
"""Settings of all services. A deleted replica leaves the endpoints at once; processes have the rights of their user."""
_HOUSEKEEPING_SECONDS = 5.0
_POLL_SECONDS = 0.5
"""Between two polls of a rollout."""
_MAX_REASON = 200
_BATCH_SECONDS = 0.05
"""Between two rounds: changes that come together are reconciled once."""
_STARTING = frozenset(
    {
        "Creating",
        "Deploying",
        "Waiting",
        "Pending",
        "ContainerCreating",
        "ContainersNotReady",
        "MinimumReplicasUnavailable",
    }
)


class Controller:
    """Reconciles all services. Used from the loop's thread only."""

    def __init__(
        self,
        settings: LocalSettings,
        store: DocumentStore,
        kubelet: Kubelet,
        routers: Routers,
        objects: ServiceObjects,
        events: Events,
        system: System,
    ) -> None:
        self._settings = settings
        self._store = store
        self._kubelet = kubelet
        self._routers = routers
        self._objects = objects
        self._events = events
        self._now = system.now
        self._workloads = WorkloadController(kubelet, objects, system.clock)
        self._autoscaler = Autoscaler(objects, kubelet, routers, self._set_replicas, self._condition_changed)
        self.watches = ReplicaWatches(self.replicas)
        self._usage = kubelet.system.usage()
        self._usage_lock = asyncio.Lock()
        self._used: dict[str, tuple[float, ResourceUsage]] = {}
        """The last usage of each pod that a client asked for, and when."""
        self._ready: dict[Service, set[str]] = {}
        """Pods that were ready at the last update: a cache."""
        self._rollouts = RolloutMonitor(store, routers, self.enqueue)
        self._queue: set[Service] = set()
        self._queued = asyncio.Event()
        self._facts: ClusterFacts | None = None
        kubelet.on_change, routers.on_change = self._pod_changed, self.enqueue
        kubelet.objects = objects.of

    @property
    def facts(self) -> ClusterFacts:
        """What services are planned with: the runtimes that we ship, and the applied documents."""
        if self._facts is None:
            applied = self._store.all()
            names = {(kind_of(document), name_of(document)) for document in applied}
            shipped = [
                document for document in shipped_runtimes() if (kind_of(document), name_of(document)) not in names
            ]
            facts = cluster_facts([*shipped, *applied], SETTINGS)
            self._facts = replace(facts, capabilities=CAPABILITIES)
        return self._facts

    def enqueue(self, service: Service) -> None:
        """Reconcile a service soon."""
        self._queue.add(service)
        self._queued.set()

    def document_changed(self, document: Document) -> None:
        """Handle a document that was applied, changed or removed."""
        if kind_of(document) == SERVICE:
            self.enqueue((get_str(document, "metadata", "namespace"), name_of(document)))
            return
        self._facts = None
        for service in self._store.all(SERVICE):
            self.enqueue((get_str(service, "metadata", "namespace"), name_of(service)))
        self._kubelet.retry(reset_backoff=True)

    async def run(self) -> None:
        """Reconcile queued services until cancelled."""
        for document in self._store.all(SERVICE):
            self.enqueue((get_str(document, "metadata", "namespace"), name_of(document)))
        with_pods = {pod.record.service for pod in self._kubelet.pods.values()}
        for service in with_pods | self._routers.services() | self._objects.services():
            self.enqueue(service)
        background = asyncio.gather(self._housekeeping(), self._autoscaler.run(), self._rollouts.run())
        try:
            while True:
                await self._queued.wait()
                self._queued.clear()
                queue, self._queue = self._queue, set()
                for service in sorted(queue):
                    self._reconcile(service)
                await asyncio.sleep(_BATCH_SECONDS)
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            try:
                self._routers.rotate_logs()
                self._events.flush()
            except Exception:
                log.exception("Rotating logs and writing events failed; trying again")
            for service in self._store.all(SERVICE):
                if get_str(_ready_condition(get_mapping(service, "status")), "status") != "True":
                    self.enqueue((get_str(service, "metadata", "namespace"), name_of(service)))

    def scale(self, service: Service, component: str, replicas: int, reason: str = "") -> Document:
        """Set the replicas of a component, or of a workload by its name. For `headrace scale`, and for activation.

        `reason`: why, for the event; by default a user's request.
        """
        workloads = [
            workload
            for workload in self._objects.workloads(service)
            if component in (labels_of(workload).get(COMPONENT_LABEL), name_of(workload))
        ]
        if not workloads:
            raise NotFound(f"{service[1]} has no {component} that runs: see `headrace describe isvc {service[1]}`")
        if replicas < 0 or replicas > 1000:
            raise InvalidArgument("replicas must be a number from 0 to 1000")
        autoscaler = autoscaler_of(workloads[0], list(self._objects.of(service).values()))
        before = desired_replicas(workloads[0], autoscaler)
        self._objects.scale(service, workloads[0], replicas)
        changed = next(
            workload for workload in self._objects.workloads(service) if name_of(workload) == name_of(workloads[0])
        )
        desired = desired_replicas(changed, autoscaler)
        if desired != replicas:
            self._objects.scale(service, workloads[0], desired)
        document = self._store.get(SERVICE, *service)
        if document is not None and desired != before:
            shown_reason = reason[:_MAX_REASON] or "requested by a user"
            name = labels_of(workloads[0]).get(COMPONENT_LABEL) or name_of(workloads[0])
            self._events.record(document, "Normal", "Scaled", f"{name}: {before} -> {desired} replicas: {shown_reason}")
        if document is not None and not get_str(document, "metadata", "deletionTimestamp"):
            # At once: a request may wait for the replica.
            self._workloads.reconcile(service, document)
        self.enqueue(service)
        result = {"name": name_of(workloads[0]), "kind": kind_of(workloads[0]), "asked": replicas, "replicas": desired}
        if autoscaler is not None:
            result["min"], result["max"] = replica_bounds(autoscaler)
        return result

    async def router_statuses(self, service: Service) -> list[Document]:
        """Return the status of each router of a service that answers."""
        routers = [router for router in self._routers.routers_of(service) if router.is_up]
        statuses = await asyncio.gather(*(router_status(router.port) for router in routers))
        return [status for status in statuses if status is not None]

    async def replica_metrics(self, service: Service) -> dict[str, Document]:
        """Return what each replica does, by the pod's name: requests that routers sent to it, CPU cores and memory."""
        pods = self._kubelet.pods_of(service)
        routers = [router for router in self._routers.routers_of(service) if router.is_up]
        statuses = await asyncio.gather(*(router_status(router.port) for router in routers))
        now = asyncio.get_running_loop().time()
        sessions = {session for pod in pods for session in pod.sessions}
        async with self._usage_lock:
            usage = await asyncio.to_thread(self._usage.read, now, sessions) if sessions else {}
        metrics: dict[str, Document] = {}
        for pod in pods:
            ports = pod.record.placement.ports.values() if pod.record.placement else ()
            numbers: dict[str, Any] = backend_counts(statuses, ports)
            used = [usage[session] for session in pod.sessions]
            if used:
                numbers["memory_bytes"] = sum(each.memory for each in used)
                total = ResourceUsage({key: ticks for each in used for key, ticks in each.ticks.items()})
                before = self._used.get(pod.record.uid)
                if before is not None and now > before[0]:
                    numbers["cores"] = round(self._usage.cores(before[1], total, now - before[0]), 3)
                self._used[pod.record.uid] = now, total
            metrics[pod.name] = numbers
        alive = {pod.record.uid for pod in self._kubelet.pods.values()}
        self._used = {uid: used for uid, used in self._used.items() if uid in alive}
        return metrics

    def replicas(self, service: Service, component: str) -> Document:
        """Return the replica counts of a component: `wanted` and `ready`, for routers that scale it from zero.

        With the start times of the first ready pod.
        """
        for workload in self._objects.workloads(service):
            if component in (labels_of(workload).get(COMPONENT_LABEL), name_of(workload)):
                autoscaler = autoscaler_of(workload, list(self._objects.of(service).values()))
                ready = get_mapping(workload, "status").get("readyReplicas", 0)
                counts = {"name": name_of(workload), "wanted": desired_replicas(workload, autoscaler), "ready": ready}
                ready_pods = [
                    pod
                    for pod in self._kubelet.pods_of(service)
                    if pod.record.owner[1] == name_of(workload) and pod.is_ready
                ]
                start_times = self._kubelet.start_times.get(ready_pods[0].record.uid) if ready_pods else None
                return {**counts, **asdict(start_times)} if start_times is not None else counts
        raise NotFound(f"{service[1]} has no {component} that runs")

    def record_cold_start(self, key: Service, parts: Mapping[str, float]) -> None:
        """Record how long a request waited for each part of a service's start. Only the last record is kept."""
        service = self._store.get(SERVICE, *key)
        if service is not None and parts:
            details = ", ".join(f"{name.replace('_', ' ')} {seconds * 1000:.0f}" for name, seconds in parts.items())
            message = f"first byte after {sum(parts.values()) * 1000:.0f} ms: {details}"
            self._events.record(service, "Normal", "ColdStart", message, latest=True)

    def _pod_changed(self, key: Service) -> None:
        """Handle a changed pod. A change of readiness is routed at once, since requests may wait for it."""
        ready = {pod.record.uid for pod in self._kubelet.pods_of(key) if pod.is_ready}
        service = self._store.get(SERVICE, *key)
        if ready != self._ready.get(key, set()) and service is not None:
            self._ready[key] = ready
            self._workloads.update_status(key)
            self._route(key, service)
            self.watches.notify(key)
        self.enqueue(key)

    # One reconciliation

    def _reconcile(self, key: Service) -> None:
        service = self._store.get(SERVICE, *key)
        try:
            if service is None or get_str(service, "metadata", "deletionTimestamp"):
                self._remove(key, service)
            else:
                self._reconcile_service(key, service)
        except HeadraceError as error:
            log.error("%s/%s: %s", *key, error.message)
            asyncio.get_running_loop().call_later(self._settings.retry_seconds, self.enqueue, key)
        except Exception:
            # A bug in Headrace. It must not affect the other services.
            log.exception("Cannot reconcile %s/%s", *key)

    def _reconcile_service(self, key: Service, service: Document) -> None:
        self._workloads.update_status(key)
        _yield_cpu()
        planned = self._plan(key, service)
        _yield_cpu()
        problems = [planned] if isinstance(planned, Problem) else planned.problems
        error_message = ""
        if not problems and isinstance(planned, Plan):
            try:
                for scale_up in planned.scale_ups:
                    self._scale_up(key, scale_up)
                self._objects.apply(key, planned.objects)
            except FailedPrecondition as error:
                error_message = error.message
        # Also with problems: what ran before keeps running.
        self._workloads.reconcile(key, service)
        _yield_cpu()
        error_message = self._route(key, service) or error_message
        self._workloads.update_status(key)
        self.watches.notify(key)
        _yield_cpu()
        if isinstance(planned, Problem):
            new_status = problem_status(service, [planned], self._now(), reason="InternalError")
        elif error_message:
            asyncio.get_running_loop().call_later(self._settings.retry_seconds, self.enqueue, key)
            problem = Problem("", error_message, "it is tried again")
            new_status = problem_status(service, [problem], self._now(), reason="ReconcileError")
        else:
            new_status = self._status(key, service, planned)
        _yield_cpu()
        self._autoscaler.objects_changed()
        self._update_status(
            service,
            with_scaling_conditions(
                new_status, self._autoscaler.components(key), self._autoscaler.conditions(key), self._now()
            ),
        )

    def _set_replicas(self, key: Service, workload: Document, replicas: int) -> None:
        self._objects.scale(key, workload, replicas)
        self.enqueue(key)

    def _condition_changed(self, key: Service, condition: ScalingCondition) -> None:
        service = self._store.get(SERVICE, *key)
        if service is not None:
            self._events.record(
                service, "Normal" if condition.active else "Warning", condition.reason, condition.message
            )
            self.enqueue(key)

    def _scale_up(self, key: Service, scale_up: ScaleUp) -> None:
        for workload in self._objects.workloads(key):
            if (kind_of(workload), name_of(workload)) == (scale_up.kind, scale_up.name):
                self._objects.scale(key, workload, scale_up.replicas)

    def _plan(self, key: Service, service: Document) -> Plan | Problem:
        try:
            return plan(service, self.facts, self._objects.of(key))
        except Exception:
            log.exception("Cannot plan %s/%s", *key)
            return Problem("", "this service cannot be planned", "see the log of `headrace up`, and report it")

    def _route(self, key: Service, service: Document) -> str:
        """Update the backends of the routers; return the error message, if any."""
        objects = list(self._objects.of(key).values())
        try:
            self._routers.ensure(key, proxied_services(key, objects))
            for name in proxied_services(key, objects):
                router = self._routers.get(key[0], name)
                backends, split = service_backends(key, name, objects, self._kubelet.pods_of(key))
                if router is not None:
                    router.update(
                        backends,
                        split,
                        activation_config(key, name, objects),
                        lambda: self.enqueue(key),
                        measure_streams=measures_streams(key, name, objects),
                    )
        except HeadraceError as error:
            self._events.record(service, "Warning", "RouterFailed", error.message)
            return error.message
        return ""

    def _status(self, key: Service, service: Document, planned: Plan) -> Document:
        objects = list(self._objects.of(key).values())
        entry = entry_service(key[1], objects)
        router = self._routers.get(key[0], entry)
        url = router.url if router is not None else ""
        # The entry is open when its router is up, and has the ready pods as backends.
        is_open = bool(url) and (
            router is None or router.has_backends or not any(pod.is_ready for pod in self._kubelet.pods_of(key))
        )
        visible = [
            document
            for document in objects
            if is_open or not (kind_of(document) == "Service" and name_of(document) == entry)
        ]
        components = component_urls(key, planned.urls.components, self._routers, url)
        if planned.objects:
            planned = replace(planned, urls=Urls(url, url, components))
        pods = tuple(pod.to_document() for pod in self._kubelet.pods_of(key))
        service, events = advance_rollouts(service, planned, self._rollouts.counted(key), self._now())
        for event in events:
            fault_point("fleet.rollout.step")
            self._events.record(service, event.kind, event.reason, event.message)
        return build_status(service, planned, Observed(tuple(visible), pods), self._now())

    def _update_status(self, service: Document, new_status: Document) -> None:
        before, after = get_mapping(service, "status"), json.loads(json.dumps(new_status))
        if before == after:
            return
        current = self._store.get(SERVICE, get_str(service, "metadata", "namespace"), name_of(service))
        if current is None:
            return
        self._store.update_status({**current, "status": after})
        for reason, message in rollout_changes(get_mapping(before, "components"), get_mapping(after, "components")):
            self._events.record(service, "Normal", reason, message)
        self._record_readiness(service, _ready_condition(before), _ready_condition(after))

    def _record_readiness(self, service: Document, old: Document, new: Document) -> None:
        """Record an event if Ready has changed. A starting service is not an event, unless it was ready before."""
        was, now, reason = get_str(old, "status"), get_str(new, "status"), get_str(new, "reason")
        if now == "True" and was != "True":
            self._events.record(service, "Normal", "InferenceServiceReady", f"{name_of(service)} is ready")
        elif (
            now == "False"
            and (was, get_str(old, "reason")) != (now, reason)
            and (reason not in _STARTING or was == "True")
        ):
            message = get_str(new, "message") or "it is not ready"
            self._events.record(service, "Warning", reason or "InferenceServiceNotReady", message)

    def _remove(self, key: Service, service: Document | None) -> None:
        """Delete the pods and routers of a service; when they are gone, remove it."""
        pods = self._kubelet.pods_of(key)
        for pod in pods:
            pod.delete()
        self._routers.ensure(key, ())
        if pods or self._routers.is_stopping(key):
            return
        self._objects.remove(key)
        self._workloads.forget(key)
        self._ready.pop(key, None)
        if service is not None:
            self._store.remove(service)


def _yield_cpu() -> None:
    """Let processes that serve requests run between two steps of the daemon."""
    os.sched_yield()


def _ready_condition(service_status: Document) -> Document:
    conditions: Sequence[Any] = get_list(service_status, "conditions")
    return next((condition for condition in conditions if get_str(condition, "type") == "Ready"), {})


class RolloutMonitor:
    """Polls the request counts of routers for services with a stepwise rollout, and has the controller reconcile them.

    It keeps the last counts only: after a restart the daemon continues from the status, with the next counts. Used from the
    loop's thread only.
    """

    def __init__(self, store: DocumentStore, routers: Routers, enqueue: Callable[[Service], None]) -> None:
        """enqueue: has a service reconciled."""
        self._store = store
        self._routers = routers
        self._enqueue = enqueue
        self._counted: dict[Service, RouterStats | None] = {}

    def counted(self, service: Service) -> RouterStats | None:
        """Return the last counts of a service's routers; None until all routers have answered."""
        return self._counted.get(service)

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                await self._poll()
            except Exception:
                log.exception("Polling rollouts failed; trying again")
            await asyncio.sleep(_POLL_SECONDS)

    async def _poll(self) -> None:
        services = [
            (get_str(service, "metadata", "namespace"), name_of(service))
            for service in self._store.all(SERVICE)
            if is_in_progress(service)
        ]
        for removed in [service for service in self._counted if service not in services]:
            del self._counted[removed]
        for service in services:
            routers = self._routers.routers_of(service)
            answers = await asyncio.gather(*(router_status(router.port) for router in routers))
            statuses = {router.name: answer for router, answer in zip(routers, answers, strict=True)}
            self._counted[service] = parse_router_stats(statuses) if statuses else None
            self._enqueue(service)


def rollout_changes(before: Document, after: Document) -> list[tuple[str, str]]:
    """Return reason and message of events: new revisions and changed shares, from two statuses of components."""
    changes: list[tuple[str, str]] = []
    for name in after:
        old, new = get_mapping(before, name), get_mapping(after, name)
        revision, previous = get_str(new, "latestCreatedRevision"), get_str(old, "latestCreatedRevision")
        if revision and revision != previous:
            created = f"{name}: revision {revision} created{f' after {previous}' if previous else ''}"
            changes.append(("RevisionCreated", created))
        shares = _shares(new)
        if shares != _shares(old) and len(shares) + len(_shares(old)) > 1:
            parts = ", ".join(f"{revision} ({percent} %)" for revision, percent in shares.items())
            changes.append(("TrafficChanged", f"{name}: requests go to {parts}"))
    return changes


def _shares(component: Document) -> dict[str, int]:
    traffic = get_mappings(component, "traffic")
    return {get_str(part, "revisionName"): get_int(part, "percent") or 0 for part in traffic}
