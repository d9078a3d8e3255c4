# SPDX-License-Identifier: Apache-2.0
"""Which Services of a service need a router here, and which pods stand behind each. Pure; for `controller`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from headrace.fleet.local.objects import WORKLOADS
from headrace.fleet.local.replica import Replica
from headrace.fleet.local.routing import Backend, Routers
from headrace.fleet.local.selectors import selected
from headrace.fleet.names import APP_LABEL, COMPONENT_LABEL, component_name, trunc63
from headrace.fleet.planning.front import FRONT
from headrace.fleet.planning.site import CLUSTER_DOMAIN, REVISION_LABEL
from headrace.fleet.status.observed import named
from headrace.fleet.words import Document, items, kind_of, labels_of, name_of, part, text, whole

Service = tuple[str, str]


def entry_of(name: str, objects: Sequence[Document]) -> str:
    """The Service that requests from outside come to: that of the service's own name, else its router's or engine's."""
    there = {name_of(each) for each in named(objects, "Service")}
    for each in (name, component_name(name, "router"), component_name(name, "engine")):
        if trunc63(each) in there:
            return trunc63(each)
    return ""


def needed(key: Service, objects: Sequence[Document]) -> list[str]:
    """Services with a router: the way in, and those that pods of this service name."""
    entry = entry_of(key[1], objects)
    templates = [part(each, "spec") for each in objects if kind_of(each) in WORKLOADS and not is_front(each)]
    said = json.dumps(templates, default=str)
    names = [name_of(each) for each in named(objects, "Service")]
    found = {trunc63(component_name(key[1], each)) for template in templates for each in _looked_for(template)}
    return [each for each in names if each == entry or each in found or f"{each}.{key[0]}.{CLUSTER_DOMAIN}" in said]


def _looked_for(template: Document) -> set[str]:
    """The components whose pods a router of ours looks for by their labels."""
    containers = items(template, "template", "spec", "containers")
    return selected([str(word) for each in containers for word in (*items(each, "command"), *items(each, "args"))])


def is_front(workload: Document) -> bool:
    """Whether it is the router that splits or wakes: the way in does that here."""
    return labels_of(workload).get(COMPONENT_LABEL) == FRONT


def backends_of(
    key: Service, name: str, objects: Sequence[Document], pods: Sequence[Replica]
) -> tuple[list[Backend], bool]:
    """The pods that are ready behind a Service, and whether their weights are shares to be kept."""
    service = next((each for each in named(objects, "Service") if name_of(each) == name), None)
    if service is None:
        return [], False
    shares = [_share(said) for said in _front_file(key, name, objects).get("backends", [])]
    if not shares:
        return _pods(service, pods, 100.0), False
    found: list[Backend] = []
    for target, weight in shares:
        behind = next((each for each in named(objects, "Service") if name_of(each) == target), None)
        if behind is not None and weight > 0:
            found += _pods(behind, pods, float(weight))
    return found, len(shares) > 1


def component_urls(key: Service, planned: Mapping[str, str], routers: Routers, url: str) -> dict[str, str]:
    """Where components are: the entry where the service is, others where they have a router of their own."""
    entry = "router" if "router" in planned else "engine"
    found = {entry: url} if url and entry in planned else {}
    for each in planned:
        router = routers.get(key[0], trunc63(component_name(key[1], each)))
        if router is not None and router.url:
            found[each] = router.url
    return found


def activation_of(key: Service, name: str, objects: Sequence[Document]) -> Document | None:
    """What the front would wake and put to sleep, where one stands before a Service."""
    found = _front_file(key, name, objects).get("activation")
    return found if isinstance(found, dict) else None


def _front_file(key: Service, name: str, objects: Sequence[Document]) -> Document:
    """What the front is told, where one stands before a Service."""
    front = f"{key[1]}-{FRONT}"
    service = next((each for each in named(objects, "Service") if name_of(each) == name), {})
    if part(service, "spec", "selector").get(APP_LABEL) != trunc63(front):
        return {}
    for each in objects:
        if kind_of(each) == "ConfigMap" and name_of(each) == front:
            for content in part(each, "data").values():
                found: Document = json.loads(content)
                return found
    return {}


def _share(said: str) -> tuple[str, int]:
    """`http://digits-engine.default.svc.cluster.local:8080,weight=90,revision=1f0c`."""
    url, _, options = said.partition(",weight=")
    weight = options.partition(",")[0]
    host = url.partition("://")[2].partition(".")[0]
    return host, int(weight) if weight.isdecimal() else 100


def _pods(service: Document, pods: Sequence[Replica], weight: float) -> list[Backend]:
    wanted = part(service, "spec", "selector")
    found = [
        each
        for each in pods
        if each.ready and all(labels_of(each.record.document).get(name) == value for name, value in wanted.items())
    ]
    first: Document = next(iter(items(service, "spec", "ports")), {})
    ports = [(each, _port(each, first)) for each in found]
    return [
        Backend(port, weight / len(found), labels_of(each.record.document).get(REVISION_LABEL, ""))
        for each, port in ports
        if port
    ]


def _port(replica: Replica, said: Document) -> int | None:
    target = said.get("targetPort")
    number = target if isinstance(target, int) else whole(said, "port")
    if isinstance(target, str):
        for each in items(replica.record.document, "spec", "containers"):
            for port in items(each, "ports"):
                if text(port, "name") == target:
                    number = whole(port, "containerPort")
    return replica.port(number) if number else None
