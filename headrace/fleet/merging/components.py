# SPDX-License-Identifier: Apache-2.0
"""Merge the runtime and the service into components: the deployment mode of each, and its complete pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.fleet.documents import ClusterFacts, Problem, namespace_of
from headrace.fleet.merging.component_specs import (
    Component,
    pod_spec_of,
    read_extension,
    runtime_component,
    service_component,
)
from headrace.fleet.merging.metadata import Placeholders, annotations_for, find_placeholder, labels_for
from headrace.fleet.merging.pod_builder import PodBuilder, add_accelerator, add_model, add_parallelism, claim_problem
from headrace.fleet.merging.strategic_merge import COMPONENT, MergeSources, Origins, merge
from headrace.fleet.names import (
    COMPONENTS,
    DECODER,
    DEPLOYMENT_MODE,
    ENGINE,
    MAIN_CONTAINER,
    MULTI_NODE,
    MULTI_NODE_RAY,
    OME_NATIVE,
    RAW,
    ROUTER,
    ROUTER_CONTAINER,
    SERVERLESS,
    VIRTUAL,
)
from headrace.fleet.selection.accelerators import AcceleratorChoice, choose_accelerator
from headrace.fleet.selection.runtimes import matching_entry
from headrace.platforms.kubernetes_client.objects import (
    EMPTY,
    Document,
    annotations_of,
    get_int,
    get_list,
    get_mapping,
    get_str,
)


@dataclass(frozen=True)
class _MergeContext:
    """Inputs that all components of a service share."""

    service: Document
    runtime: Document | None
    model: Document | None
    weights: Sequence[Document]
    facts: ClusterFacts
    placeholders: Placeholders

    @property
    def upstream(self) -> bool:
        return self.facts.settings.upstream_selection


@dataclass(frozen=True)
class _ComponentInputs:
    """A component of the runtime, of the service, and merged."""

    name: str
    base: Document
    patch: Document
    both: Document

    @property
    def default_main(self) -> str:
        return ROUTER_CONTAINER if self.name == ROUTER else MAIN_CONTAINER


def merge_components(
    service: Document,
    runtime: Document | None,
    model: Document | None,
    weights: Sequence[Document],
    facts: ClusterFacts,
) -> dict[str, Component]:
    """Merge the components that the service names, in the order of their creation."""
    context = _MergeContext(service, runtime, model, weights, facts, Placeholders(service))
    spec = get_mapping(service, "spec")
    return {name: _component(name, context) for name in COMPONENTS if isinstance(spec.get(name), Mapping)}


def _component(name: str, context: _MergeContext) -> Component:
    base, patch = runtime_component(context.runtime, name), service_component(context.service, name)
    inputs = _ComponentInputs(name, base, patch, merge(base, patch, COMPONENT))
    mode = choose_mode(name, inputs.both, context.service, context.facts)
    layout = _layout(inputs.both, mode)
    workers = _worker_count(inputs.both, layout)
    choice = (
        choose_accelerator(context.service, context.runtime, name, context.facts)
        if name != ROUTER
        else AcceleratorChoice()
    )
    noted = annotations_for(inputs.both, context.service, context.runtime, context.model, context.weights)
    builders = {role: _build_pod(inputs, path, context, choice, workers, noted) for role, path in layout.items()}
    first = builders.get("pod") or builders["leader"]
    return Component(
        name=name,
        mode=mode.mode,
        rule=mode.rule,
        pod=first.pod,
        leader=builders["leader"].pod if "leader" in builders else None,
        worker=builders["worker"].pod if "worker" in builders else None,
        worker_size=workers,
        extension=read_extension(inputs.base, inputs.both, context.service, name),
        labels=labels_for(name, inputs.both, context.service, context.runtime, context.model, context.weights),
        annotations=noted,
        origins=Origins(lambda: _merge_sources(inputs, layout, builders)),
        config={key: value for key, value in get_mapping(inputs.both, "config").items() if isinstance(value, str)},
        accelerator=choice.name,
        accelerator_reason=choice.reason,
        problems=tuple(_problems(inputs, builders, context, choice)),
    )


def _layout(merged: Document, mode: Mode) -> dict[str, tuple[str, ...]]:
    """Return the pods of a component, and the path of each. A leader without containers is the component's own pod."""
    if mode.mode not in (MULTI_NODE, MULTI_NODE_RAY):
        return {"pod": ()}
    leader = get_mapping(merged, "leader")
    has_containers = bool(get_mapping(leader, "runner") or get_list(leader, "containers"))
    layout: dict[str, tuple[str, ...]] = {"leader": ("leader",) if has_containers else ()}
    if isinstance(merged.get("worker"), Mapping):
        layout["worker"] = ("worker",)
    return layout


def _worker_count(merged: Document, layout: Mapping[str, Any]) -> int:
    if "worker" not in layout:
        return 0
    size = get_int(merged, "worker", "size")
    # A worker without a size means one; OME creates a group with only a leader.
    return 1 if size is None else max(0, size)


def _build_pod(
    inputs: _ComponentInputs,
    path: tuple[str, ...],
    context: _MergeContext,
    choice: AcceleratorChoice,
    workers: int,
    noted: Mapping[str, str],
) -> PodBuilder:
    """Build a pod with its model, accelerator and variables."""
    main = get_str(get_mapping(inputs.both, *path), "runner", "name") or inputs.default_main
    builder = PodBuilder(pod_spec_of(inputs.both, path, main), main, pod_spec_of(inputs.patch, path, main))
    serves = inputs.name != ROUTER
    if not serves:
        # Sorted: a changing order would roll out the pods at each reconciliation.
        config = get_mapping(inputs.both, "config")
        for key in sorted(config):
            if isinstance(config[key], str):
                builder.set_variable(key, config[key], keep=True)
    add_model(
        builder, context.model, context.weights, noted, serves=serves, pinning=context.facts.settings.node_pinning
    )
    if serves:
        if choice.accelerator is not None:
            entry = None
            if context.runtime is not None and context.model is not None:
                entry = matching_entry(context.runtime, context.model, context.facts)
            add_accelerator(builder, choice.accelerator, entry, upstream=context.upstream)
        add_parallelism(builder, choice.accelerator, workers, upstream=context.upstream)
    if builder.main is not None:
        filled = context.placeholders.filled(builder.main)
        if filled is not builder.main:
            builder.main.update(filled)
    return builder


def _merge_sources(
    inputs: _ComponentInputs, layout: Mapping[str, tuple[str, ...]], builders: Mapping[str, PodBuilder]
) -> dict[str, MergeSources]:
    sources = {}
    for role, path in layout.items():
        builder = builders[role]
        main = get_str(get_mapping(inputs.both, *path), "runner", "name") or inputs.default_main
        sources[role] = MergeSources(
            builder.pod, builder.service, pod_spec_of(inputs.base, path, main), tuple(builder.accelerated)
        )
    return sources


def _problems(
    inputs: _ComponentInputs, builders: Mapping[str, PodBuilder], context: _MergeContext, choice: AcceleratorChoice
) -> list[Problem]:
    problems = [
        problem for problem in (choice.problem, claim_problem(context.model, namespace_of(context.service))) if problem
    ]
    if context.upstream:
        for builder in builders.values():
            placeholder = find_placeholder(builder.main if builder.main is not None else EMPTY)
            if placeholder:
                message = f"OME takes {placeholder[:60]!a} for a placeholder of its own and fails"
                problems.append(
                    Problem(f"spec.{inputs.name}.runner", message, "remove it, or set upstream_selection: false")
                )
    return problems


_ENGINE_MODES = (SERVERLESS, RAW, MULTI_NODE_RAY, MULTI_NODE, VIRTUAL)
"""Modes that an engine's annotation may choose."""


class Mode(NamedTuple):
    """A deployment mode and its reason."""

    mode: str
    rule: str


def choose_mode(name: str, component: Document, service: Document, facts: ClusterFacts) -> Mode:
    """Choose the deployment mode of a component."""
    if annotations_of(service).get(DEPLOYMENT_MODE) == VIRTUAL:
        return Mode(VIRTUAL, f"the service's annotation {DEPLOYMENT_MODE} is {VIRTUAL}")
    declared = _declared_mode(name, component, service)
    if declared is not None:
        return declared
    if name == DECODER:
        return _multi_node_mode(component) or Mode(RAW, "a decoder without leader and worker is a Deployment")
    if name != ENGINE:
        return _replica_mode(name, component, service, facts)
    mode = _engine_mode(component, service, facts)
    if mode.mode == SERVERLESS and "decoder" in get_mapping(service, "spec"):
        return Mode(RAW, f"{mode.rule}, but with a decoder there is no {SERVERLESS}")
    return mode


def _declared_mode(name: str, component: Document, service: Document) -> Mode | None:
    """Return the mode that OME 1.3's `spec.deploymentMode` or a component's annotation OMENative ask for."""
    annotation = get_str(component, "annotations", DEPLOYMENT_MODE)
    if annotation == OME_NATIVE:
        rule = f"the {name}'s annotation {DEPLOYMENT_MODE} is {OME_NATIVE}"
    else:
        requested = get_str(service, "spec", "deploymentMode")
        if not requested or (name == ENGINE and annotation in _ENGINE_MODES):
            return None
        rule = f"spec.deploymentMode is {requested}"
        if requested == RAW:
            return Mode(RAW, rule)
    multi_node = _multi_node_mode(component)
    if multi_node is None:
        return Mode(RAW, f"{rule}, and its replicas run as a Deployment")
    return Mode(MULTI_NODE, f"{rule}, and {multi_node.rule}")


def _engine_mode(component: Document, service: Document, facts: ClusterFacts) -> Mode:
    value = get_str(component, "annotations", DEPLOYMENT_MODE)
    if value in _ENGINE_MODES:
        return Mode(value, f"the engine's annotation {DEPLOYMENT_MODE} is {value}")
    requested = annotations_of(service).get(DEPLOYMENT_MODE, "")
    if not facts.settings.upstream_selection and requested == MULTI_NODE_RAY:
        # Admission writes the other modes by the rules below; this one was written by the user.
        return Mode(requested, f"the service's annotation {DEPLOYMENT_MODE} is {requested}")
    return _multi_node_mode(component) or _replica_mode("engine", component, service, facts)


def _multi_node_mode(component: Document) -> Mode | None:
    for field in ("leader", "worker"):
        if isinstance(component.get(field), dict):
            return Mode(MULTI_NODE, f"it has a {field}")
    return None


def _replica_mode(name: str, component: Document, service: Document, facts: ClusterFacts) -> Mode:
    """Choose between Serverless and RawDeployment. OME only checks minReplicas."""
    upstream = facts.settings.upstream_selection
    scales_to_zero = get_int(component, "minReplicas") == 0
    requested = annotations_of(service).get(DEPLOYMENT_MODE, "")
    # For an engine that scales to zero admission writes no mode: the user wants it without Knative.
    if scales_to_zero and not upstream and requested == RAW and get_int(service, "spec", "engine", "minReplicas") == 0:
        message = f"minReplicas is 0 and the service's annotation {DEPLOYMENT_MODE} is {RAW}"
        return Mode(RAW, f"{message}: a Deployment that our router scales up from zero")
    if scales_to_zero and (upstream or "knative" in facts.capabilities):
        return Mode(SERVERLESS, "minReplicas is 0")
    if scales_to_zero:
        return Mode(
            RAW, "minReplicas is 0 and the cluster has no Knative: a Deployment that our router scales up from zero"
        )
    if upstream:
        return Mode(RAW, "no other mode is requested")
    if requested == SERVERLESS:
        return Mode(SERVERLESS, f"the service's annotation {DEPLOYMENT_MODE} is {SERVERLESS}")
    if not requested and facts.settings.default_mode == SERVERLESS:
        return Mode(SERVERLESS, f"the operator's default is {SERVERLESS}")
    return Mode(RAW, "no other mode is requested" if name == ENGINE else f"a {name} is a Deployment")
