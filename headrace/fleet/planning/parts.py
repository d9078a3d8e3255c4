# SPDX-License-Identifier: Apache-2.0
"""A component on its way to becoming objects: its mode, who scales it, its revisions, its names and ports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.fleet.merging import Component
from headrace.fleet.names import (
    APP_LABEL,
    DEPLOYMENT_MODE,
    MULTI_NODE,
    MULTI_NODE_RAY,
    RAW,
    ROUTER,
    SERVERLESS,
    component_name,
    lws_name,
    trunc63,
)
from headrace.fleet.planning.front import Sleeper, counted_by, front_name
from headrace.fleet.planning.groups import GROUPS, group_objects, leader_pod, leaders_of
from headrace.fleet.planning.keda import keda_problems, scaled_object
from headrace.fleet.planning.knative import knative_rollout, knative_service
from headrace.fleet.planning.pods import pod_problems
from headrace.fleet.planning.raw import DEPLOYMENT, canary_name, raw_objects
from headrace.fleet.planning.ray import heads_of, ray_objects
from headrace.fleet.planning.revisions import Rollout, revision_of, rollout, settled
from headrace.fleet.planning.routers import Share
from headrace.fleet.planning.scaling import Scaler, autoscaler, scaler_of, scaling_problems, wakes
from headrace.fleet.planning.services import HTTP, port_of
from headrace.fleet.planning.site import Object, Site, full_name
from headrace.fleet.rollouts.policy import STEPPED, STEPS, policy_of
from headrace.fleet.words import Document, Problem, whole
from headrace.fleet.words import part as within

_NEEDS = {
    SERVERLESS: ("knative", "Knative Serving", f"install it, or remove the annotation {DEPLOYMENT_MODE}"),
    MULTI_NODE: ("lws", "LeaderWorkerSet", "install it, or choose a runtime for one node"),
    MULTI_NODE_RAY: ("ray", "KubeRay", f"install it, or set the annotation {DEPLOYMENT_MODE} to MultiNode"),
}


@dataclass(frozen=True)
class Part:
    """A component with all that was decided about it."""

    component: Component
    mode: str
    name: str
    """`llama-chat-engine`."""
    scaler: Scaler
    rollout: Rollout
    live: Document | None
    """The live workload under the component's own name."""
    workload: tuple[str, str, str]
    """API version, kind and name of what has the replicas."""

    @property
    def service(self) -> str:
        """The name of its Service."""
        return trunc63(self.name)

    @property
    def target(self) -> int:
        """The port of its pods."""
        return port_of(leader_pod(self.component) if self.mode in (MULTI_NODE, MULTI_NODE_RAY) else self.component.pod)

    @property
    def port(self) -> int:
        """The port of its Service."""
        return HTTP if self.mode == SERVERLESS else self.target

    @property
    def shares(self) -> list[Share]:
        """Who of its revisions gets which share of the requests."""
        share = self.rollout.percent if self.rollout.two else 0
        found = [(self.service, self.port, 100 - share)]
        return [*found, (trunc63(canary_name(self.name)), self.port, share)] if self.rollout.two else found

    @property
    def revisions(self) -> dict[str, str]:
        """Of the Services in `shares`, where there are two."""
        names = [each[0] for each in self.shares]
        return dict(zip(names, (self.rollout.stable, self.rollout.latest), strict=True)) if self.rollout.two else {}

    @property
    def selector(self) -> dict[str, str]:
        """The pods under its own name that answer."""
        if self.mode == MULTI_NODE:
            return leaders_of(self.name)
        return heads_of(self.name) if self.mode == MULTI_NODE_RAY else {APP_LABEL: trunc63(self.name)}


def part_of(site: Site, component: Component) -> Part:
    """What is decided about a component."""
    mode = mode_of(site, component)
    name = full_name(site, component)
    policy = policy_of(site.annotations) if component.name in STEPPED else None
    scaler: Scaler = scaler_of(site, component, mode) if mode in (RAW, MULTI_NODE) else "none"
    workload = (*DEPLOYMENT, name) if mode == RAW else (*GROUPS, lws_name(name))
    told = within(site.service, "status", "components", component.name)
    if mode == SERVERLESS:
        live = site.found("Service", trunc63(name))
        return Part(component, mode, name, scaler, knative_rollout(component, live, told, policy), None, workload)
    if mode not in (RAW, MULTI_NODE):
        latest = revision_of(component)
        return Part(component, mode, name, scaler, Rollout("single", latest, latest), None, workload)
    second = canary_name(name) if mode == RAW else lws_name(canary_name(name))
    live = site.found(workload[1], workload[2])
    splitters = (site.found("Deployment", each) for each in (front_name(site), component_name(site.name, ROUTER)))
    calm = all(each is None or settled(each) for each in splitters)
    roll = rollout(component, live, site.found(workload[1], second), told, policy, calm)
    return Part(component, mode, name, scaler, roll, live, workload)


def mode_of(site: Site, component: Component) -> str:
    """The mode a component is run in: what goes to zero by itself does so by our router where there is no Knative."""
    if component.mode != SERVERLESS:
        return component.mode
    asked = component.annotations.get(DEPLOYMENT_MODE)
    # With an engine that goes to zero admission writes no mode: somebody wants it without Knative.
    if asked == RAW and whole(site.service, "spec", "engine", "minReplicas") == 0:
        return RAW
    return SERVERLESS if site.has("knative") or asked == SERVERLESS else RAW


def part_problems(site: Site, part: Part) -> Iterator[Problem]:
    """What cannot be made in this cluster, or at all."""
    component = part.component
    yield from component.problems
    yield from pod_problems(component)
    if part.mode in _NEEDS and not site.has(_NEEDS[part.mode][0]):
        _, needed, fix = _NEEDS[part.mode]
        said = f"{part.mode} needs {needed}, which this cluster does not have"
        yield Problem(f"spec.{component.name}", said, fix)
    if part.mode == MULTI_NODE_RAY and component.name in STEPPED and policy_of(site.annotations) is not None:
        said = f"{part.mode} has one revision at a time, so that there are no steps"
        yield Problem(f"metadata.annotations[{STEPS}]", said, "remove it")
    if part.mode in (RAW, MULTI_NODE):
        yield from scaling_problems(site, component, part.scaler)
    if part.scaler == "keda":
        yield from keda_problems(component)


def part_objects(site: Site, part: Part, entry_port: int, found: bool) -> list[Object]:
    """The objects of a component. `found`: a router finds its pods by their labels."""
    component = part.component
    if part.mode == SERVERLESS:
        return [knative_service(site, component, part.rollout)]
    if part.mode == MULTI_NODE_RAY:
        return ray_objects(site, component, part.rollout.latest)
    make = raw_objects if part.mode == RAW else group_objects
    objects = make(site, component, part.scaler, part.rollout, found)
    extension = component.extension
    if part.scaler == "hpa":
        least, most = extension.min_replicas, extension.max_replicas
        objects.append(autoscaler(site, component, part.name, part.workload, least, most))
    elif part.scaler == "keda":
        counted = counted_by(site, entry_port) if wakes(component, part.mode) else None
        objects.append(scaled_object(site, component, part.workload, counted))
    return objects


@dataclass(frozen=True)
class Rise:
    """A workload that was put to sleep, and that may not sleep any more: nobody else would wake it."""

    api_version: str
    kind: str
    name: str
    replicas: int


def rises_of(site: Site, part: Part) -> Iterator[Rise]:
    """What of a part has to be woken. Autoscalers leave alone what is at zero."""
    for each in (_own_rise(site, part), _canary_rise(site, part)):
        if each is not None:
            yield each


def _canary_rise(site: Site, part: Part) -> Rise | None:
    """The workload of a revision that was taken back has no pods; the next one is to have some."""
    if part.scaler != "hpa" or part.rollout.state != "canary" or not part.rollout.asked:
        return None
    api, kind, _ = part.workload
    name = canary_name(part.name)
    live = site.found(kind, name)
    return Rise(api, kind, name, 1) if live is not None and whole(live, "spec", "replicas") == 0 else None


def _own_rise(site: Site, part: Part) -> Rise | None:
    least = part.component.extension.min_replicas
    if least < 1 or part.scaler != "hpa" or part.live is None or whole(part.live, "spec", "replicas") != 0:
        return None
    return Rise(*part.workload, least) if site.found("Deployment", front_name(site)) is not None else None


def sleeper_of(part: Part) -> Sleeper | None:
    """The part as one that our router wakes, if it is."""
    if not wakes(part.component, part.mode) or part.scaler == "external":
        return None
    api, kind, name = part.workload
    return Sleeper(part.component, (api, kind), name, part.scaler == "front")
