# SPDX-License-Identifier: Apache-2.0
"""Plan a service: admission, selection, merging, and then the objects of each component."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.fleet import admission
from headrace.fleet.documents import ClusterFacts, Problem
from headrace.fleet.merging import Component, merge_components
from headrace.fleet.names import DEPLOYMENT_MODE, ROUTER, SERVERLESS, SERVICE_LABEL, VIRTUAL, model_config_name, trunc63
from headrace.fleet.planning.component_plan import (
    ComponentPlan,
    ScaleUp,
    activation_target,
    component_objects,
    component_problems,
    plan_component,
    scale_ups_of,
)
from headrace.fleet.planning.context import Object, PlanContext, plan_context
from headrace.fleet.planning.inference_pool import pool_objects, pool_problems
from headrace.fleet.planning.ingress import (
    Routing,
    Urls,
    plan_routing,
    pods_selector,
    routing_objects,
    routing_problems,
    service_urls,
)
from headrace.fleet.planning.network_policies import network_policies
from headrace.fleet.planning.revisions import Rollout
from headrace.fleet.planning.router_component import access_objects, has_no_image, prepare_router
from headrace.fleet.planning.shared_activator import SharedActivator
from headrace.fleet.selection import Selection, select
from headrace.platforms.kubernetes_client.objects import EMPTY, Document, get_list, get_mapping, get_str, name_of


@dataclass(frozen=True)
class Plan:
    """The plan of one service."""

    service: Document
    """The service with its defaults."""
    objects: list[Object] = field(default_factory=list)
    """All objects, in the order to apply them; other objects of the service are deleted. Empty with problems."""
    components: Mapping[str, Component] = field(default_factory=dict)
    """Components with the modes that this cluster supports."""
    selection: Selection | None = None
    problems: list[Problem] = field(default_factory=list)
    """With any problem nothing is changed or deleted."""
    urls: Urls = field(default_factory=Urls)
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    """Rollouts by component."""
    model: Document | None = None
    scale_ups: list[ScaleUp] = field(default_factory=list)
    """Workloads to scale up before the objects are applied."""
    notes: list[str] = field(default_factory=list)
    """Remarks; not problems."""
    counted: frozenset[str] = frozenset()
    """Components whose requests our own router splits and counts by revision."""

    @property
    def modes(self) -> dict[str, str]:
        """Modes by component."""
        return {name: item.mode for name, item in self.components.items()}


def plan(
    service: Document,
    facts: ClusterFacts,
    live: Mapping[str, Document] = EMPTY,
    activator: SharedActivator | None = None,
    split_applied: bool = True,
) -> Plan:
    """Plan a service. `live`: the objects that it owns already, by `live_key(kind, name)`.

    split_applied: whether the front routers run with the shares that their ConfigMap has.
    """
    admitted = admission.with_defaults(service, facts)
    problems = admission.validate(admitted, facts)
    context = plan_context(admitted, facts, live, activator, split_applied)
    if problems:
        return Plan(admitted, problems=problems)
    if context.annotations.get(DEPLOYMENT_MODE) == VIRTUAL:
        url = f"http://{context.host(context.name)}"
        return Plan(admitted, urls=Urls(url, url))
    selection = select(admitted, facts)
    if selection.problem is not None:
        return Plan(admitted, selection=selection, problems=[selection.problem])
    return _plan_components(context, selection)


def _plan_components(context: PlanContext, selection: Selection) -> Plan:
    spec, facts = get_mapping(context.service, "spec"), context.facts
    name = get_str(spec, "model", "name")
    model = facts.model(context.namespace, name, get_str(spec, "model", "kind")) if name else None
    weights = [
        document
        for weight in get_list(spec, "model", "fineTunedWeights")
        if (document := facts.weight(weight)) is not None
    ]
    merged = merge_components(context.service, selection.runtime, model, weights, facts)
    parts = {name: plan_component(context, item) for name, item in merged.items() if name != ROUTER}
    is_headrace_router = False
    if ROUTER in merged:
        is_headrace_router = has_no_image(merged[ROUTER]) and "decoder" not in merged and "engine" in parts
        shares, revisions = (parts["engine"].shares, parts["engine"].revisions) if is_headrace_router else ([], {})
        parts[ROUTER] = plan_component(context, prepare_router(context, merged[ROUTER], shares, revisions))
    planned = {name: replace(item.component, mode=item.mode, rule=_mode_rule(item)) for name, item in parts.items()}
    problems = [problem for part in parts.values() for problem in component_problems(context, part)]
    if "engine" not in parts and not problems:
        problems = [Problem("spec.engine", "nothing would be served", "add spec.engine, if only 'engine: {}'")]
    base = Plan(context.service, components=planned, selection=selection, model=model, problems=problems)
    if problems:
        return base
    activation_targets = [target for part in parts.values() if (target := activation_target(part)) is not None]
    routes = plan_routing(context, parts, activation_targets)
    problems = [*routing_problems(routes), *pool_problems(context, parts)]
    if problems:
        return replace(base, problems=problems)
    objects = model_config(context, model, weights)
    for name, item in parts.items():
        if name == ROUTER:
            objects += access_objects(context, item.component)
        objects += component_objects(context, item, routes.port, not is_headrace_router and item is not routes.entry)
    return replace(
        base,
        objects=[*objects, *routing_objects(routes), *_pool_objects(routes), *_network_policies(routes)],
        urls=service_urls(routes),
        rollouts={name: item.rollout for name, item in parts.items()},
        scale_ups=[scale_up for part in parts.values() for scale_up in scale_ups_of(context, part)],
        notes=[] if is_headrace_router else _notes(parts, routes.entry),
        counted=frozenset(_counted_components(routes, is_headrace_router)),
    )


def _pool_objects(routes: Routing) -> list[Object]:
    return pool_objects(routes.context, pods_selector(routes.entry, stable=False), routes.entry.target)


def _network_policies(routes: Routing) -> list[Object]:
    if any(part.mode == SERVERLESS for part in routes.parts.values()):
        return []  # Knative's own programs are between clients and pods
    return network_policies(routes.context, routes.entry.component.name)


def _counted_components(routes: Routing, is_headrace_router: bool) -> Iterator[str]:
    if is_headrace_router:
        yield "engine"
    elif routes.needs_front and routes.entry.mode != SERVERLESS:
        yield routes.entry.component.name


def _mode_rule(part: ComponentPlan) -> str:
    if part.mode == part.component.mode:
        return part.component.rule
    return f"{part.component.rule}; without Knative, so our router scales it up from zero"


def _notes(parts: Mapping[str, ComponentPlan], entry: ComponentPlan) -> list[str]:
    return [
        f"{part.name} has two revisions behind a router that finds pods by their labels: the share of the newest is that of"
        " its pods"
        for part in parts.values()
        if part.rollout.two and part is not entry
    ]


_CONFIG_MAP = ("v1", "ConfigMap")


def model_config(context: PlanContext, model: Document | None, weights: Sequence[Document]) -> list[Object]:
    """Return the ConfigMap that describes a service's model; none for a service without a model."""
    if model is None:
        return []
    entry: dict[str, Any] = {"modelName": name_of(model), "modelSpec": _model_summary(model)}
    if weights:
        entry["fineTunedWeightSpec"] = _model_summary(weights[0])
    data = {"models.json": json.dumps([entry], sort_keys=True)}
    return [
        context.new_object(
            _CONFIG_MAP, model_config_name(context.name), {SERVICE_LABEL: trunc63(context.name)}, data=data
        )
    ]


def _model_summary(model: Document) -> dict[str, Any]:
    spec = get_mapping(model, "spec")
    storage = get_mapping(spec, "storage")
    summary: dict[str, Any] = {
        "storageUri": get_str(storage, "storageUri"),
        "path": get_str(storage, "path"),
        "schemaPath": get_str(storage, "schemaPath"),
        # Without the token: everyone in the namespace may read a ConfigMap.
        "parameters": {name: value for name, value in get_mapping(storage, "parameters").items() if name != "token"},
        "storageKey": get_str(storage, "key"),
        "modelFormatName": get_str(spec, "modelFormat", "name"),
        "modelFormatVersion": get_str(spec, "modelFormat", "version"),
        "modelType": get_str(spec, "modelType"),
        "modelFrameworkName": get_str(spec, "modelFramework", "name"),
        "modelFrameworkVersion": get_str(spec, "modelFramework", "version"),
    }
    return {name: value for name, value in summary.items() if value}
