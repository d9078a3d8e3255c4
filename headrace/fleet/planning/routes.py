# SPDX-License-Identifier: Apache-2.0
"""How requests reach the entry of a service: its own Service, the front where one is needed, what leads in from outside.

The entry is the router, else the engine. URLs are told together with the objects that make them true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from headrace.fleet.names import COMPONENT_LABEL, MULTI_NODE, MULTI_NODE_RAY, SERVERLESS, SERVICE_LABEL, trunc63
from headrace.fleet.planning.front import PORT, Backend, Sleeper, front_answers, front_objects, front_selector
from headrace.fleet.planning.groups import HEAD, NODE_TYPE, WORKER_INDEX
from headrace.fleet.planning.ingress import (
    KNATIVE_GATEWAY,
    WayIn,
    http_route,
    ingress,
    virtual_service,
    way_in,
    way_problems,
)
from headrace.fleet.planning.parts import Part
from headrace.fleet.planning.services import HTTP, alias_service, external_service
from headrace.fleet.planning.site import Object, Site, available
from headrace.fleet.words import Problem


@dataclass(frozen=True)
class Urls:
    """Where a service is."""

    url: str = ""
    """For clients."""
    address: str = ""
    """Inside the cluster."""
    components: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Routing:
    """The entry of a service, and what stands before it."""

    site: Site
    way: WayIn
    entry: Part
    parts: Mapping[str, Part]
    sleepers: list[Sleeper]

    @property
    def port(self) -> int:
        """Of the Service named after the InferenceService: with an Ingress 80, so that URLs need none."""
        return HTTP if self.way.made else self.entry.port

    @property
    def by_istio(self) -> bool:
        """Whether Istio leads to a Knative Service."""
        return self.way.made and self.way.istio and not self.way.gateway and self.entry.mode == SERVERLESS

    @property
    def fronted(self) -> bool:
        """Whether the front is needed: for sleepers, for Knative's hosts, for two revisions without a gateway."""
        if self.entry.mode == SERVERLESS:
            return not self.by_istio
        split = self.entry.rollout.two and not (self.way.made and self.way.gateway)
        return bool(self.sleepers) or split

    @property
    def through_front(self) -> bool:
        """Whether requests go there already: not while it starts and pods answer without it."""
        if not self.fronted:
            return False
        return front_answers(self.site) or self.entry.mode == SERVERLESS or available(self.entry.live) == 0


def routing(site: Site, parts: Mapping[str, Part], sleepers: list[Sleeper]) -> Routing:
    """The way to the entry of these components."""
    entry = parts["router"] if "router" in parts else parts["engine"]
    return Routing(site, way_in(site), entry, parts, sleepers)


def routing_problems(routes: Routing) -> Iterator[Problem]:
    """What cannot be reached."""
    yield from way_problems(routes.way)


def routing_objects(routes: Routing) -> list[Object]:
    """The front, the Service of the service, and what leads in from outside."""
    site, way, entry = routes.site, routes.way, routes.entry
    objects: list[Object] = []
    if routes.fronted:
        timeout = entry.component.extension.timeout_seconds
        backends = [Backend(*each, entry.revisions.get(each[0], "")) for each in entry.shares]
        objects += front_objects(site, backends, routes.sleepers, timeout, entry.mode != SERVERLESS)
    if routes.by_istio:
        labels = site.own_labels("ingress")
        return [*objects, alias_service(site, KNATIVE_GATEWAY), virtual_service(way, entry.service, labels)]
    if not way.private or routes.fronted:
        target = PORT if routes.through_front else entry.target
        selector = front_selector(site) if routes.through_front else _selector(entry)
        objects.append(external_service(site, selector, routes.port, target))
    if way.made:
        objects += _from_outside(routes)
    return objects


def urls(routes: Routing) -> Urls:
    """Where the service and its components are."""
    way, site = routes.way, routes.site
    own = site.host(trunc63(site.name)) if not way.private or routes.fronted else site.host(routes.entry.service)
    inside = _url("http", own, routes.port if own != site.host(routes.entry.service) else routes.entry.port)
    if not way.made:
        found = {name: _url("http", site.host(part.service), part.port) for name, part in routes.parts.items()}
        return Urls(inside, inside, found)
    found = {name: f"{way.scheme}://{way.host(part.name)}" for name, part in routes.parts.items()}
    return Urls(f"{way.scheme}://{way.host(site.name)}", inside, found)


def _from_outside(routes: Routing) -> list[Object]:
    site, way, entry = routes.site, routes.way, routes.entry
    labels = site.own_labels("ingress")
    own = (trunc63(site.name), HTTP)
    open_to = {name: part for name, part in routes.parts.items() if part.mode != SERVERLESS}
    if not way.gateway:
        backends = {site.name: own if routes.fronted else (entry.service, entry.port)}
        for part in open_to.values():
            backends[part.name] = own if part is entry and routes.fronted else (part.service, part.port)
        return [ingress(way, backends, labels)]
    timeout = entry.component.extension.timeout_seconds
    weighted = [(*own, 1)] if routes.fronted else entry.shares
    objects = [http_route(way, site.name, weighted, timeout, labels)]
    for part in open_to.values():
        leads = weighted if part is entry else [(part.service, part.port, 1)]
        objects.append(
            http_route(way, part.name, leads, part.component.extension.timeout_seconds, part.component.labels)
        )
    return objects


def _selector(entry: Part) -> dict[str, str]:
    """The pods that answer for the service: leaders alone, and of two revisions the one that was rolled out."""
    if entry.rollout.two:
        return dict(entry.selector)
    labels = entry.component.labels
    chosen = {SERVICE_LABEL: labels[SERVICE_LABEL], COMPONENT_LABEL: labels[COMPONENT_LABEL]}
    if entry.mode == MULTI_NODE:
        chosen[WORKER_INDEX] = "0"
    elif entry.mode == MULTI_NODE_RAY:
        chosen[NODE_TYPE] = HEAD
    return chosen


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{host}" if port == HTTP else f"{scheme}://{host}:{port}"
