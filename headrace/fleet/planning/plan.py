# SPDX-License-Identifier: Apache-2.0
"""The plan of a service: admission, selection, merging, and then one module for each kind of object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from headrace.fleet import admission
from headrace.fleet.merging import Component, components
from headrace.fleet.names import DEPLOYMENT_MODE, ROUTER, SERVERLESS, VIRTUAL
from headrace.fleet.planning.model_config import model_config
from headrace.fleet.planning.parts import Part, Rise, part_objects, part_of, part_problems, rises_of, sleeper_of
from headrace.fleet.planning.revisions import Rollout
from headrace.fleet.planning.routers import access_objects, brings_none, prepared
from headrace.fleet.planning.routes import Routing, Urls, routing, routing_objects, routing_problems, urls
from headrace.fleet.planning.site import Object, Site, site_of
from headrace.fleet.selection import Selection, select
from headrace.fleet.words import NOTHING, ClusterFacts, Document, Problem, items, part, text


@dataclass(frozen=True)
class Plan:
    """What one service needs."""

    service: Document
    """The service after admission."""
    objects: list[Object] = field(default_factory=list)
    """All objects, in the order to apply them; what the service owns beside them is to be deleted. None with problems."""
    components: Mapping[str, Component] = field(default_factory=dict)
    """As planned: their modes are those that this cluster can do."""
    selection: Selection | None = None
    problems: list[Problem] = field(default_factory=list)
    """With any of these nothing may be changed or deleted: what runs goes on."""
    urls: Urls = field(default_factory=Urls)
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    """Revisions by component."""
    model: Document | None = None
    rises: list[Rise] = field(default_factory=list)
    """What is to be scaled up before the objects are applied."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know that is no mistake."""
    counted: frozenset[str] = frozenset()
    """Components whose requests a router of ours splits, and counts by revision."""

    @property
    def modes(self) -> dict[str, str]:
        """Mode by component."""
        return {name: each.mode for name, each in self.components.items()}


def plan(service: Document, facts: ClusterFacts, live: Mapping[str, Document] = NOTHING) -> Plan:
    """The objects of a service as its user wrote it. `live`: objects that it owns already, by `live_key(kind, name)`."""
    admitted = admission.defaulted(service, facts)
    problems = admission.problems(admitted, facts)
    site = site_of(admitted, facts, live)
    if problems:
        return Plan(admitted, problems=problems)
    if site.annotations.get(DEPLOYMENT_MODE) == VIRTUAL:
        url = f"http://{site.host(site.name)}"
        return Plan(admitted, urls=Urls(url, url))
    selection = select(admitted, facts)
    if selection.problem is not None:
        return Plan(admitted, selection=selection, problems=[selection.problem])
    return _planned(site, selection)


def _planned(site: Site, selection: Selection) -> Plan:
    spec, facts = part(site.service, "spec"), site.facts
    name = text(spec, "model", "name")
    model = facts.model(site.namespace, name, text(spec, "model", "kind")) if name else None
    weights = [found for each in items(spec, "model", "fineTunedWeights") if (found := facts.weight(each)) is not None]
    merged = components(site.service, selection.runtime, model, weights, facts)
    parts = {name: part_of(site, each) for name, each in merged.items() if name != ROUTER}
    ours = False
    if ROUTER in merged:
        ours = brings_none(merged[ROUTER]) and "decoder" not in merged and "engine" in parts
        shares, revisions = (parts["engine"].shares, parts["engine"].revisions) if ours else ([], {})
        parts[ROUTER] = part_of(site, prepared(site, merged[ROUTER], shares, revisions))
    planned = {name: replace(each.component, mode=each.mode, rule=_rule(each)) for name, each in parts.items()}
    problems = [problem for each in parts.values() for problem in part_problems(site, each)]
    if "engine" not in parts and not problems:
        problems = [Problem("spec.engine", "nothing would be served", "add spec.engine, if only 'engine: {}'")]
    base = Plan(site.service, components=planned, selection=selection, model=model, problems=problems)
    if problems:
        return base
    sleepers = [sleeper for each in parts.values() if (sleeper := sleeper_of(each)) is not None]
    routes = routing(site, parts, sleepers)
    problems = list(routing_problems(routes))
    if problems:
        return replace(base, problems=problems)
    objects = model_config(site, model, weights)
    for name, each in parts.items():
        if name == ROUTER:
            objects += access_objects(site, each.component)
        objects += part_objects(site, each, routes.port, not ours and each is not routes.entry)
    return replace(
        base,
        objects=[*objects, *routing_objects(routes)],
        urls=urls(routes),
        rollouts={name: each.rollout for name, each in parts.items()},
        rises=[rise for each in parts.values() for rise in rises_of(site, each)],
        notes=[] if ours else _notes(parts, routes.entry),
        counted=frozenset(_counted(routes, ours)),
    )


def _counted(routes: Routing, ours: bool) -> Iterator[str]:
    if ours:
        yield "engine"
    elif routes.fronted and routes.entry.mode != SERVERLESS:
        yield routes.entry.component.name


def _rule(each: Part) -> str:
    if each.mode == each.component.mode:
        return each.component.rule
    return f"{each.component.rule}; without Knative, so our router wakes it"


def _notes(parts: Mapping[str, Part], entry: Part) -> list[str]:
    return [
        f"{each.name} has two revisions behind a router that finds pods by their labels: the share of the newest is that of"
        " its pods"
        for each in parts.values()
        if each.rollout.two and each is not entry
    ]
