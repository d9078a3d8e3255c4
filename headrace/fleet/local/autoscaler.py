# SPDX-License-Identifier: Apache-2.0
"""The autoscaler: polls the load of workloads with an autoscaler and changes their replicas.

It does what HorizontalPodAutoscalers, KEDA and their metrics servers do in a cluster. It sleeps while there is no such
workload, and polls every two seconds while there is no load. It keeps the samples of the last window only: after a restart
no replica is removed before there are new samples. `fleet.autoscaling` computes the replicas for a load; routers scale from
one to zero and back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headrace.core.errors import FailedPrecondition
from headrace.fleet.autoscaling.autoscaler import (
    CONCURRENCY,
    NO_PANIC,
    RPS,
    TICK_SECONDS,
    LoadMeter,
    PanicState,
    Sample,
    decide_replicas,
)
from headrace.fleet.autoscaling.promql import QueryEvaluator, Series
from headrace.fleet.local.endpoints import is_front
from headrace.fleet.local.kubelet import Kubelet
from headrace.fleet.local.latency_scaling import LatencyScaling
from headrace.fleet.local.object_store import Service, ServiceObjects
from headrace.fleet.local.pod import Pod
from headrace.fleet.local.scaling_metrics import RequestCounter, RequestLoad, scrape_metrics
from headrace.fleet.local.scaling_targets import CPU, LATENCY, QUERY, InvalidTarget, ScalingTarget, scaling_target
from headrace.fleet.local.service_proxy import Routers, router_status
from headrace.fleet.local.system import ResourceUsage
from headrace.fleet.local.workloads import autoscaler_of, desired_replicas
from headrace.fleet.status.conditions import format_time, get_mappings, truncate
from headrace.platforms.kubernetes_client.objects import Document, get_mapping, get_str, name_of

log = logging.getLogger("headrace.fleet")

_CONDITION_TYPE = "ScalingActive"
"""The condition type of HorizontalPodAutoscalers."""
_LIMITED = "ScalingLimited"
_BUSY_SECONDS = 0.5
"""Between two polls of routers while there are requests."""
_MAX_FAILURES = 3
_USAGE_SECONDS = 10.0
_NOT_COUNTED = (
    "no router of this machine sends it requests, so they are not counted: scale it by cpu, memory or a query"
)
_NOT_MEASURED = (
    "no router of this machine measures its streams: restart `headrace up`, and report it if that does not help"
)


@dataclass(frozen=True)
class ScalingCondition:
    """Whether a workload can be scaled, and why."""

    component: str
    active: bool
    reason: str
    message: str


class Autoscaler:
    """Scales all workloads. Used from the loop's thread only."""

    def __init__(
        self,
        objects: ServiceObjects,
        kubelet: Kubelet,
        routers: Routers,
        scale: Callable[[Service, Document, int], None],
        on_condition: Callable[[Service, ScalingCondition], None],
    ) -> None:
        """scale: sets the replicas of a workload; may raise FailedPrecondition. on_condition: called for a new condition."""
        self._objects = objects
        self._kubelet = kubelet
        self._routers = routers
        self._scale = scale
        self._on_condition = on_condition
        self._scalers: dict[tuple[Service, str], WorkloadScaler] = {}
        self._conditions: dict[tuple[Service, str], ScalingCondition] = {}
        self._usage = kubelet.system.usage()
        self._used: dict[int, tuple[float, ResourceUsage]] = {}
        self._changed = asyncio.Event()

    def objects_changed(self) -> None:
        """Wake up: the objects of a service may have changed."""
        if not self._scalers:
            self._changed.set()

    def conditions(self, service: Service) -> list[ScalingCondition]:
        """Return the conditions of the workloads of a service."""
        return [condition for (owner, _), condition in sorted(self._conditions.items()) if owner == service]

    def components(self, service: Service) -> set[str]:
        """Return the components of a service that have a scaling target, valid or not."""
        objects = list(self._objects.of(service).values())
        targets = [
            scaling_target(workload, objects) for workload in self._objects.workloads(service) if not is_front(workload)
        ]
        return {target.component for target in targets if target is not None}

    async def run(self) -> None:
        """Poll and scale until cancelled."""
        while True:
            self._changed.clear()
            try:
                self._update_targets()
                await self._poll()
            except Exception:
                log.exception("Polling the load failed; trying again")
                await asyncio.sleep(TICK_SECONDS)
            if not self._scalers:
                await self._changed.wait()
                continue
            await asyncio.sleep(min(map(_poll_seconds, self._scalers.values())))

    # Targets

    def _update_targets(self) -> None:
        keys: set[tuple[Service, str]] = set()
        for service in self._objects.services():
            objects = list(self._objects.of(service).values())
            for workload in self._objects.workloads(service):
                target = None if is_front(workload) else scaling_target(workload, objects)
                if target is None:
                    continue
                key = (service, name_of(workload))
                keys.add(key)
                if isinstance(target, InvalidTarget):
                    self._scalers.pop(key, None)
                    self._set_condition(key, ScalingCondition(target.component, False, target.reason, target.message))
                elif key not in self._scalers or self._scalers[key].target != target:
                    self._scalers[key] = WorkloadScaler(target)
        for removed in self._scalers.keys() - keys:
            del self._scalers[removed]
        for removed in self._conditions.keys() - keys:
            del self._conditions[removed]

    # Load

    async def _poll(self) -> None:
        now = asyncio.get_running_loop().time()
        due = {key: scaler for key, scaler in self._scalers.items() if scaler.is_due(now)}
        await self._count_requests(now)
        await self._measure(now, {key: scaler for key, scaler in due.items() if not scaler.by_requests})
        for key, scaler in due.items():
            # The workload may have changed while metrics were read.
            workload = self._workload(*key)
            if workload is not None and self._scalers.get(key) is scaler:
                self._decide(key, scaler, workload)

    async def _count_requests(self, now: float) -> None:
        scalers = {key: scaler for key, scaler in self._scalers.items() if scaler.by_requests}
        for service in {service for service, _ in scalers}:
            routers = [router for router in self._routers.routers_of(service) if router.is_up]
            answers = await asyncio.gather(*(router_status(router.port) for router in routers))
            statuses: dict[str, Any] = {router.name: answer for router, answer in zip(routers, answers, strict=True)}
            for key, scaler in scalers.items():
                if key[0] != service:
                    continue
                if scaler.latency is not None:
                    if scaler.latency.add_statuses(now, statuses):
                        self._clear_failures(key)
                    elif None not in answers and routers:
                        self._count_failure(key, "NotCounted", _NOT_MEASURED)
                    continue
                pods = list(self._pods(key, every=True))
                ports = {port for pod in pods if pod.record.placement for port in pod.record.placement.ports.values()}
                load = scaler.requests.update(statuses, ports)
                if load.routed:
                    scaler.add_load(now, load)
                    self._clear_failures(key)
                elif any(pod.is_ready for pod in pods) and None not in answers and routers:
                    self._count_failure(key, "NotCounted", _NOT_COUNTED)

    async def _measure(self, now: float, due: dict[tuple[Service, str], WorkloadScaler]) -> None:
        pods = {key: [pod for pod in self._pods(key) if pod.is_ready] for key in due}
        by_resource = {key: pods[key] for key, scaler in due.items() if scaler.target.metric != QUERY}
        sessions = {session for ready in by_resource.values() for pod in ready for session in pod.sessions}
        usage = await asyncio.to_thread(self._usage.read, now, sessions) if sessions else {}
        for key, ready in by_resource.items():
            own_sessions = {session for pod in ready for session in pod.sessions}
            value = self._resource_value(due[key].target, now, usage, own_sessions)
            if value is not None:
                due[key].add_sample(now, value)
                self._clear_failures(key)
        recent = {session: used for session, used in self._used.items() if now - used[0] < _USAGE_SECONDS}
        self._used = recent | {session: (now, used) for session, used in usage.items()}
        for key, scaler in due.items():
            if scaler.query is None or not pods[key]:
                continue
            try:
                scaler.add_series(now, await scrape_metrics(pods[key], scaler.query.wants))
                self._clear_failures(key)
            except FailedPrecondition as error:
                self._count_failure(key, "NoMetric", error.message)

    def _resource_value(
        self, target: ScalingTarget, now: float, usage: Mapping[int, ResourceUsage], sessions: Set[int]
    ) -> float | None:
        """Return the cores or bytes of all pods together; None until there is a previous reading."""
        if not sessions or not sessions <= usage.keys():
            return None
        if target.metric != CPU:
            return float(sum(usage[session].memory for session in sessions))
        if not sessions <= self._used.keys():
            return None
        before = {session: self._used[session] for session in sessions}
        return sum(self._usage.cores(old, usage[session], now - then) for session, (then, old) in before.items())

    # Replicas

    def _decide(self, key: tuple[Service, str], scaler: WorkloadScaler, workload: Document) -> None:
        service = key[0]
        desired = desired_replicas(workload, autoscaler_of(workload, list(self._objects.of(service).values())))
        if not desired:
            return  # scaled to zero: its router scales it up
        ready = get_mapping(workload, "status").get("readyReplicas", 0)
        change = scaler.decide(asyncio.get_running_loop().time(), desired, ready)
        if change is None:
            known = self._conditions.get(key)
            if scaler.limited and (known is None or known.reason != _LIMITED):
                self._set_condition(key, ScalingCondition(scaler.target.component, True, _LIMITED, scaler.limited))
            return
        try:
            self._scale(service, workload, change.replicas)
        except FailedPrecondition as error:
            log.error("Cannot scale %s: %s", key[1], error.message)
            return
        self._set_condition(key, ScalingCondition(scaler.target.component, True, "SuccessfulRescale", change.message))

    # Helpers

    def _pods(self, key: tuple[Service, str], *, every: bool = False) -> Iterator[Pod]:
        """Yield the pods of a workload. every: also those that are being deleted."""
        for pod in self._kubelet.pods_of(key[0]):
            if pod.record.owner[1] == key[1] and (every or not pod.record.deleting):
                yield pod

    def _workload(self, service: Service, name: str) -> Document | None:
        workloads = (workload for workload in self._objects.workloads(service) if name_of(workload) == name)
        return next(workloads, None)

    def _clear_failures(self, key: tuple[Service, str]) -> None:
        """Reset the failure count of a workload."""
        scaler, condition = self._scalers[key], self._conditions.get(key)
        scaler.failures = 0
        if condition is not None and not condition.active:
            self._set_condition(
                key,
                ScalingCondition(condition.component, True, "ValidMetricFound", f"{scaler.target.metric} is counted"),
            )

    def _count_failure(self, key: tuple[Service, str], reason: str, message: str) -> None:
        """Count a failure; reported when it persists, as a new pod may have no metrics yet."""
        scaler = self._scalers[key]
        scaler.failures += 1
        if scaler.failures >= _MAX_FAILURES:
            self._set_condition(key, ScalingCondition(scaler.target.component, False, reason, message))

    def _set_condition(self, key: tuple[Service, str], condition: ScalingCondition) -> None:
        if self._conditions.get(key) != condition:
            self._conditions[key] = condition
            self._on_condition(key[0], condition)


def _poll_seconds(scaler: WorkloadScaler) -> float:
    tick = scaler.target.spec.windows.tick_seconds
    return min(tick, _BUSY_SECONDS) if scaler.busy else tick


@dataclass(frozen=True)
class ScaleDecision:
    """A new number of replicas and the reason."""

    replicas: int
    message: str


class WorkloadScaler:
    """The samples of one workload, and the decisions on them. Has no clock of its own."""

    def __init__(self, target: ScalingTarget) -> None:
        self.target = target
        self.requests = RequestCounter()
        self.query = QueryEvaluator(target.query) if target.query is not None else None
        self.latency = LatencyScaling(target.latency) if target.latency is not None else None
        self._busy = False
        self.failures = 0
        """Failed polls in a row."""
        self.limited = ""
        """Why latency targets are missed although the replicas stay as they are."""
        windows = target.spec.windows
        self._meter = LoadMeter(windows)
        self._samples: deque[Sample] = deque(maxlen=int(windows.stable_seconds / windows.tick_seconds) + 1)
        self._panic: PanicState = NO_PANIC
        self._desired: int | None = None
        self._total = 0
        self._next = 0.0

    @property
    def by_requests(self) -> bool:
        """Whether it is scaled by what routers count."""
        return self.target.metric in (CONCURRENCY, RPS, LATENCY)

    @property
    def busy(self) -> bool:
        """Whether there were requests at the last poll."""
        return self.latency.busy if self.latency is not None else self._busy

    def is_due(self, now: float) -> bool:
        """Whether a decision is due; then the next one is due a tick later."""
        if now < self._next:
            return False
        self._next = now + self.target.spec.windows.tick_seconds
        return True

    def add_load(self, now: float, load: RequestLoad) -> None:
        """Add the load that routers counted."""
        self._busy = load.concurrent > 0 or load.total > self._total
        self._total = load.total
        self._meter.add(now, load.concurrent, load.total)

    def add_sample(self, now: float, value: float) -> None:
        """Add a sample of a resource or a query."""
        self._samples.append(Sample(now, value))

    def add_series(self, now: float, series: Series) -> None:
        """Add the series of the pods. Raises FailedPrecondition if the query has no value."""
        if self.query is None:
            return
        self.query.add(now, series)
        value = self.query.value(now)
        # A ratio says by which factor replicas are missing.
        self.add_sample(now, value * (self._desired or 1) if self.target.ratio else value)

    def decide(self, now: float, desired: int, ready: int) -> ScaleDecision | None:
        """Return the change, if any. desired: replicas so far."""
        if self.latency is not None:
            by_latency = self.latency.decide(now, desired, ready)
            self.limited = by_latency.limited if by_latency is not None else ""
            if by_latency is None or by_latency.replicas == desired:
                return None
            message = f"{by_latency.reason}: {desired} -> {by_latency.replicas} replicas"
            return ScaleDecision(by_latency.replicas, message)
        spec = self.target.spec
        if self._desired != desired and (self._desired is not None or desired > spec.min_replicas):
            # A user or an earlier daemon set the replicas: keep them until the window has samples.
            self._panic = PanicState(now + spec.windows.stable_seconds, desired)
        self._desired = desired
        decision = decide_replicas(self._current_samples, now, spec, ready, self._panic, desired)
        if decision is None:
            return None
        self._panic = decision.panic
        if decision.replicas == desired:
            return None
        self._desired = decision.replicas
        description = self.target.describe(decision.average, decision.seconds)
        return ScaleDecision(decision.replicas, f"{description}: {desired} -> {decision.replicas} replicas")

    @property
    def _current_samples(self) -> Sequence[Sample]:
        return self._meter.samples(self.target.metric) if self.by_requests else self._samples


def with_scaling_conditions(
    status: Document, components: Collection[str], new_conditions: Sequence[ScalingCondition], now: datetime
) -> Document:
    """Return the status with a condition such as `EngineScalingActive` for each scaled component.

    The conditions are informational. A previous condition stays if there is no new one: the daemon may have restarted.
    """
    conditions = get_mappings(status, "conditions")
    before = {
        get_str(condition, "type"): condition
        for condition in conditions
        if get_str(condition, "type").endswith(_CONDITION_TYPE)
    }
    if not new_conditions and not before:
        return status
    kept: list[Any] = [condition for condition in conditions if get_str(condition, "type") not in before]
    for component in sorted(components):
        own = [condition for condition in new_conditions if condition.component == component]
        if not own:
            kept += [
                condition
                for condition_type, condition in before.items()
                if condition_type == f"{component.capitalize()}{_CONDITION_TYPE}"
            ]
            continue
        worst = next((condition for condition in own if not condition.active), own[-1])
        condition_type, status_text = f"{component.capitalize()}{_CONDITION_TYPE}", "True" if worst.active else "False"
        previous = before.get(condition_type, {})
        since = get_str(previous, "lastTransitionTime") if get_str(previous, "status") == status_text else ""
        kept.append(
            {
                "type": condition_type,
                "status": status_text,
                "reason": worst.reason,
                "message": truncate(
                    "; ".join(condition.message for condition in own if condition.active == worst.active)
                ),
                "severity": "Info",
                "lastTransitionTime": since or format_time(now),
            }
        )
    return {**status, "conditions": kept}
