# SPDX-License-Identifier: Apache-2.0
"""Brings services of this machine to what they ask for: plan, pods, routers, status. Made by `program`.

One look at a service never waits for anything: what takes time are tasks of pods and routers, which ask for another look
when they have changed. It remembers nothing that the next look needs, so that the daemon may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound
from headrace.fleet.explaining import shipped_runtimes
from headrace.fleet.local.events import Events
from headrace.fleet.local.kubelet import Kubelet
from headrace.fleet.local.objects import Objects
from headrace.fleet.local.priority import give_way
from headrace.fleet.local.questions import Questions
from headrace.fleet.local.routes import activation_of, backends_of, component_urls, entry_of, needed
from headrace.fleet.local.routing import Routers
from headrace.fleet.local.scaling.autoscaling import Autoscaling, Note
from headrace.fleet.local.scaling.telling import with_scaling
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.stepping import Stepping
from headrace.fleet.local.store import Store
from headrace.fleet.local.system import System
from headrace.fleet.local.units import Units
from headrace.fleet.local.workloads import scaler_of, wanted_of
from headrace.fleet.names import COMPONENT_LABEL
from headrace.fleet.planning import Plan, Rise, Urls, plan
from headrace.fleet.planning.scaling import COUNTS_REQUESTS
from headrace.fleet.rollouts.looking import rolled_on
from headrace.fleet.status.document import status
from headrace.fleet.status.failures import status_of_problems
from headrace.fleet.status.observed import Observed
from headrace.fleet.words import (
    ClusterFacts,
    Document,
    FleetSettings,
    Problem,
    cluster_facts,
    items,
    kind_of,
    labels_of,
    name_of,
    part,
    text,
)

log = logging.getLogger("headrace.fleet")

Service = tuple[str, str]
SERVICE = "InferenceService"
CAPABILITIES = frozenset({"lws", "keda", COUNTS_REQUESTS})
"""What this machine can do beside Deployments: groups of processes stand for LeaderWorkerSets, `scaling` for KEDA."""
_REST_SECONDS = 5.0
_GATHER_SECONDS = 0.05
"""Between two looks: what comes together is looked at once."""
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
    """See the module. Used from the loop's thread only."""

    def __init__(
        self,
        settings: LocalSettings,
        store: Store,
        kubelet: Kubelet,
        routers: Routers,
        objects: Objects,
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
        self._units = Units(kubelet, objects, system.clock)
        self._autoscaling = Autoscaling(objects, kubelet, routers, self._scaled, self._noted)
        self.questions = Questions(self.replicas)
        self._ready: dict[Service, set[str]] = {}
        """Pods that were ready when that was last told: only to be quick."""
        self._stepping = Stepping(store, routers, self.ask)
        self._asked: set[Service] = set()
        self._any = asyncio.Event()
        self._facts: ClusterFacts | None = None
        kubelet.on_change, routers.on_change = self._pod_changed, self.ask
        kubelet.objects = objects.of

    @property
    def facts(self) -> ClusterFacts:
        """What services are planned with: the runtimes we ship, and what was applied."""
        if self._facts is None:
            applied = self._store.all()
            names = {(kind_of(each), name_of(each)) for each in applied}
            ours = [each for each in shipped_runtimes() if (kind_of(each), name_of(each)) not in names]
            made = cluster_facts([*ours, *applied], FleetSettings(node_pinning="none"))
            self._facts = replace(made, capabilities=CAPABILITIES)
        return self._facts

    def ask(self, service: Service) -> None:
        """Have a look at a service, soon."""
        self._asked.add(service)
        self._any.set()

    def changed(self, document: Document) -> None:
        """A document was applied, changed or removed."""
        if kind_of(document) == SERVICE:
            self.ask((text(document, "metadata", "namespace"), name_of(document)))
            return
        self._facts = None
        for each in self._store.all(SERVICE):
            self.ask((text(each, "metadata", "namespace"), name_of(each)))
        self._kubelet.look_again(hurry=True)

    async def run(self) -> None:
        """Until cancelled."""
        for each in self._store.all(SERVICE):
            self.ask((text(each, "metadata", "namespace"), name_of(each)))
        known = {each.record.service for each in self._kubelet.replicas.values()}
        for service in known | self._routers.services() | self._objects.services():
            self.ask(service)
        looking = asyncio.gather(self._sometimes(), self._autoscaling.run(), self._stepping.run())
        try:
            while True:
                await self._any.wait()
                self._any.clear()
                asked, self._asked = self._asked, set()
                for service in sorted(asked):
                    self._look(service)
                await asyncio.sleep(_GATHER_SECONDS)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _sometimes(self) -> None:
        while True:
            await asyncio.sleep(_REST_SECONDS)
            try:
                self._routers.rotate()
                self._events.flush()
            except Exception:
                log.exception("keeping logs and events failed; trying again")
            for each in self._store.all(SERVICE):
                if text(_ready(part(each, "status")), "status") != "True":
                    self.ask((text(each, "metadata", "namespace"), name_of(each)))

    def scale(self, service: Service, component: str, replicas: int) -> Document:
        """Another number of replicas of a component, or of a workload by its name. For `headrace scale`, and for waking."""
        found = [
            each
            for each in self._objects.workloads(service)
            if component in (labels_of(each).get(COMPONENT_LABEL), name_of(each))
        ]
        if not found:
            raise NotFound(f"{service[1]} has no {component} that runs: look at `headrace describe isvc {service[1]}`")
        if replicas < 0 or replicas > 1000:
            raise InvalidArgument("replicas are a number from 0 to 1000")
        self._objects.scale(service, found[0], replicas)
        scaler = scaler_of(found[0], list(self._objects.of(service).values()))
        changed = next(each for each in self._objects.workloads(service) if name_of(each) == name_of(found[0]))
        wanted = wanted_of(changed, scaler)
        if wanted != replicas:
            self._objects.scale(service, found[0], wanted)
        document = self._store.get(SERVICE, *service)
        if document is not None and not text(document, "metadata", "deletionTimestamp"):
            # Now, and not with the next look: a request may wait for this.
            self._units.bring(service, document)
        self.ask(service)
        return {"name": name_of(found[0]), "kind": kind_of(found[0]), "asked": replicas, "replicas": wanted}

    def replicas(self, service: Service, component: str) -> Document:
        """How many there are of a component: for who wakes it. `ready` can answer, `wanted` should be there.

        Of the first that is ready also when it `started`, and when it was `found` to be.
        """
        for each in self._objects.workloads(service):
            if component in (labels_of(each).get(COMPONENT_LABEL), name_of(each)):
                scaler = scaler_of(each, list(self._objects.of(service).values()))
                ready = part(each, "status").get("readyReplicas", 0)
                told = {"name": name_of(each), "wanted": wanted_of(each, scaler), "ready": ready}
                mine = [pod for pod in self._kubelet.of(service) if pod.record.owner[1] == name_of(each) and pod.ready]
                moments = self._kubelet.moments.get(mine[0].record.uid) if mine else None
                return {**told, **asdict(moments)} if moments is not None else told
        raise NotFound(f"{service[1]} has no {component} that runs")

    def woken(self, key: Service, parts: Mapping[str, float]) -> None:
        """A request has waited while a service was started: how long, and for what. The last time is kept."""
        service = self._store.get(SERVICE, *key)
        if service is not None and parts:
            each = ", ".join(f"{name.replace('_', ' ')} {seconds * 1000:.0f}" for name, seconds in parts.items())
            said = f"first byte after {sum(parts.values()) * 1000:.0f} ms: {each}"
            self._events.record(service, "Normal", "ColdStart", said, latest=True)

    def _pod_changed(self, key: Service) -> None:
        """A pod is otherwise. Who comes or goes is told at once, since requests may wait for it; the rest can wait."""
        ready = {each.record.uid for each in self._kubelet.of(key) if each.ready}
        service = self._store.get(SERVICE, *key)
        if ready != self._ready.get(key, set()) and service is not None:
            self._ready[key] = ready
            self._units.tell(key)
            self._route(key, service)
            self.questions.look(key)
        self.ask(key)

    # One look

    def _look(self, key: Service) -> None:
        service = self._store.get(SERVICE, *key)
        try:
            if service is None or text(service, "metadata", "deletionTimestamp"):
                self._remove(key, service)
            else:
                self._bring(key, service)
        except HeadraceError as error:
            log.error("%s/%s: %s", *key, error.message)
            asyncio.get_running_loop().call_later(self._settings.retry_seconds, self.ask, key)
        except Exception:
            # A mistake of ours. It must not reach the others.
            log.exception("%s/%s cannot be looked at", *key)

    def _bring(self, key: Service, service: Document) -> None:
        self._units.tell(key)
        give_way()
        planned = self._plan(key, service)
        give_way()
        problems = [planned] if isinstance(planned, Problem) else planned.problems
        trouble = ""
        if not problems and isinstance(planned, Plan):
            try:
                for rise in planned.rises:
                    self._wake(key, rise)
                self._objects.bring(key, planned.objects)
            except FailedPrecondition as error:
                trouble = error.message
        # Also with problems: what ran before goes on as it was.
        self._units.bring(key, service)
        give_way()
        trouble = self._route(key, service) or trouble
        self._units.tell(key)
        self.questions.look(key)
        give_way()
        if isinstance(planned, Problem):
            told = status_of_problems(service, [planned], self._now(), reason="InternalError")
        elif trouble:
            asyncio.get_running_loop().call_later(self._settings.retry_seconds, self.ask, key)
            problem = Problem("", trouble, "it is tried again")
            told = status_of_problems(service, [problem], self._now(), reason="ReconcileError")
        else:
            told = self._status(key, service, planned)
        give_way()
        scaling = self._autoscaling
        scaling.changed()
        self._tell(service, with_scaling(told, scaling.components(key), scaling.notes(key), self._now()))

    def _scaled(self, key: Service, workload: Document, replicas: int) -> None:
        self._objects.scale(key, workload, replicas)
        self.ask(key)

    def _noted(self, key: Service, note: Note) -> None:
        service = self._store.get(SERVICE, *key)
        if service is not None:
            self._events.record(service, "Normal" if note.active else "Warning", note.reason, note.message)
            self.ask(key)

    def _wake(self, key: Service, rise: Rise) -> None:
        for each in self._objects.workloads(key):
            if (kind_of(each), name_of(each)) == (rise.kind, rise.name):
                self._objects.scale(key, each, rise.replicas)

    def _plan(self, key: Service, service: Document) -> Plan | Problem:
        try:
            return plan(service, self.facts, self._objects.of(key))
        except Exception:
            log.exception("%s/%s cannot be planned", *key)
            return Problem("", "this service cannot be planned", "look at the log of `headrace up`, and report it")

    def _route(self, key: Service, service: Document) -> str:
        """Have the routers know who is ready. What is in the way, if anything is."""
        objects = list(self._objects.of(key).values())
        try:
            self._routers.want(key, needed(key, objects))
            for name in needed(key, objects):
                router = self._routers.get(key[0], name)
                backends, split = backends_of(key, name, objects, self._kubelet.of(key))
                if router is not None:
                    router.tell(backends, split, activation_of(key, name, objects), lambda: self.ask(key))
        except HeadraceError as error:
            self._events.record(service, "Warning", "RouterFailed", error.message)
            return error.message
        return ""

    def _status(self, key: Service, service: Document, planned: Plan) -> Document:
        objects = list(self._objects.of(key).values())
        entry = entry_of(key[1], objects)
        router = self._routers.get(key[0], entry)
        url = router.url if router is not None else ""
        # The way in is open when its router is there, and knows of those that are ready.
        open_ = bool(url) and (router is None or router.leads or not any(each.ready for each in self._kubelet.of(key)))
        seen = [each for each in objects if open_ or not (kind_of(each) == "Service" and name_of(each) == entry)]
        components = component_urls(key, planned.urls.components, self._routers, url)
        if planned.objects:
            planned = replace(planned, urls=Urls(url, url, components))
        pods = tuple(each.shown() for each in self._kubelet.of(key))
        service, notes = rolled_on(service, planned, self._stepping.counted(key), self._now())
        for each in notes:
            self._events.record(service, each.kind, each.reason, each.message)
        return status(service, planned, Observed(tuple(seen), pods), self._now())

    def _tell(self, service: Document, told: Document) -> None:
        before, after = part(service, "status"), json.loads(json.dumps(told))
        if before == after:
            return
        current = self._store.get(SERVICE, text(service, "metadata", "namespace"), name_of(service))
        if current is None:
            return
        self._store.told({**current, "status": after})
        self._record(service, _ready(before), _ready(after))

    def _record(self, service: Document, old: Document, new: Document) -> None:
        """An event where Ready has changed. That a service is on its way is no news, unless it was there."""
        was, now, reason = text(old, "status"), text(new, "status"), text(new, "reason")
        if now == "True" and was != "True":
            self._events.record(service, "Normal", "InferenceServiceReady", f"{name_of(service)} is ready")
        elif (
            now == "False"
            and (was, text(old, "reason")) != (now, reason)
            and (reason not in _STARTING or was == "True")
        ):
            said = text(new, "message") or "it is not ready"
            self._events.record(service, "Warning", reason or "InferenceServiceNotReady", said)

    def _remove(self, key: Service, service: Document | None) -> None:
        """End all that a service has; when nothing is left, forget it."""
        pods = self._kubelet.of(key)
        for each in pods:
            each.delete()
        self._routers.want(key, ())
        if pods or self._routers.ending(key):
            return
        self._objects.remove(key)
        self._units.forget(key)
        self._ready.pop(key, None)
        if service is not None:
            self._store.remove(service)


def _ready(told: Document) -> Document:
    found: Sequence[Any] = items(told, "conditions")
    return next((each for each in found if text(each, "type") == "Ready"), {})
