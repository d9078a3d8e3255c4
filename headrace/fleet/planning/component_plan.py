# SPDX-License-Identifier: Apache-2.0
"""Plan one component: its mode, autoscaler, revisions, names and ports, and its objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.fleet.documents import Problem
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
from headrace.fleet.planning.autoscalers import (
    Scaler,
    horizontal_pod_autoscaler,
    keda_problems,
    scaled_object,
    scaler_of,
    scales_to_zero,
    scaling_problems,
)
from headrace.fleet.planning.context import Object, PlanContext, full_name
from headrace.fleet.planning.front_router import ActivationTarget, front_name, keda_trigger
from headrace.fleet.planning.knative import knative_rollout, knative_service
from headrace.fleet.planning.multi_node import (
    LEADER_WORKER_SET,
    head_selector,
    leader_pod,
    leader_selector,
    lws_objects,
    ray_objects,
)
from headrace.fleet.planning.pod_templates import pod_problems
from headrace.fleet.planning.raw_deployment import DEPLOYMENT, HTTP_PORT, canary_name, main_port, raw_objects
from headrace.fleet.planning.revisions import Rollout, is_settled, plan_rollout, revision_of
from headrace.fleet.planning.router_component import Share
from headrace.fleet.rollouts.policy import STEPPED, STEPS, parse_policy
from headrace.platforms.kubernetes_client.objects import Document, get_int
from headrace.platforms.kubernetes_client.objects import get_mapping as within

_MODE_REQUIREMENTS = {
    SERVERLESS: ("knative", "Knative Serving", f"install it, or remove the annotation {DEPLOYMENT_MODE}"),
    MULTI_NODE: ("lws", "LeaderWorkerSet", "install it, or choose a runtime for one node"),
    MULTI_NODE_RAY: ("ray", "KubeRay", f"install it, or set the annotation {DEPLOYMENT_MODE} to MultiNode"),
}


@dataclass(frozen=True)
class ComponentPlan:
    """A component with its planned mode, autoscaler and rollout."""

    component: Component
    mode: str
    name: str
    """`llama-chat-engine`."""
    scaler: Scaler
    rollout: Rollout
    live: Document | None
    """The live workload under the component's own name."""
    workload: tuple[str, str, str]
    """API version, kind and name of the workload."""

    @property
    def service(self) -> str:
        """Name of its Service."""
        return trunc63(self.name)

    @property
    def target(self) -> int:
        """Port of its pods."""
        return main_port(
            leader_pod(self.component) if self.mode in (MULTI_NODE, MULTI_NODE_RAY) else self.component.pod
        )

    @property
    def port(self) -> int:
        """Port of its Service."""
        return HTTP_PORT if self.mode == SERVERLESS else self.target

    @property
    def shares(self) -> list[Share]:
        """Services of its revisions with their shares of the requests."""
        share = self.rollout.percent if self.rollout.two else 0
        shares = [(self.service, self.port, 100 - share)]
        return [*shares, (trunc63(canary_name(self.name)), self.port, share)] if self.rollout.two else shares

    @property
    def revisions(self) -> dict[str, str]:
        """Revisions by Service, if there are two."""
        names = [share[0] for share in self.shares]
        return dict(zip(names, (self.rollout.stable, self.rollout.latest), strict=True)) if self.rollout.two else {}

    @property
    def selector(self) -> dict[str, str]:
        """Selector of the pods of its main workload that serve."""
        if self.mode == MULTI_NODE:
            return leader_selector(self.name)
        return head_selector(self.name) if self.mode == MULTI_NODE_RAY else {APP_LABEL: trunc63(self.name)}


def plan_component(context: PlanContext, component: Component) -> ComponentPlan:
    """Plan a component."""
    mode = effective_mode(context, component)
    name = full_name(context, component)
    policy = parse_policy(context.annotations) if component.name in STEPPED else None
    scaler: Scaler = scaler_of(context, component, mode) if mode in (RAW, MULTI_NODE) else "none"
    workload = (*DEPLOYMENT, name) if mode == RAW else (*LEADER_WORKER_SET, lws_name(name))
    status = within(context.service, "status", "components", component.name)
    if mode == SERVERLESS:
        live = context.live_object("Service", trunc63(name))
        return ComponentPlan(
            component, mode, name, scaler, knative_rollout(component, live, status, policy), None, workload
        )
    if mode not in (RAW, MULTI_NODE):
        latest = revision_of(component)
        return ComponentPlan(component, mode, name, scaler, Rollout("single", latest, latest), None, workload)
    canary = canary_name(name) if mode == RAW else lws_name(canary_name(name))
    live = context.live_object(workload[1], workload[2])
    splitters = (
        context.live_object("Deployment", router)
        for router in (front_name(context), component_name(context.name, ROUTER))
    )
    split_settled = context.split_applied and all(splitter is None or is_settled(splitter) for splitter in splitters)
    rollout = plan_rollout(component, live, context.live_object(workload[1], canary), status, policy, split_settled)
    return ComponentPlan(component, mode, name, scaler, rollout, live, workload)


def effective_mode(context: PlanContext, component: Component) -> str:
    """Return the mode of a component in this cluster: without Knative, our router scales it to zero."""
    if component.mode != SERVERLESS:
        return component.mode
    requested = component.annotations.get(DEPLOYMENT_MODE)
    # For an engine that scales to zero admission writes no mode: the user wants it without Knative.
    if requested == RAW and get_int(context.service, "spec", "engine", "minReplicas") == 0:
        return RAW
    return SERVERLESS if context.has("knative") or requested == SERVERLESS else RAW


def component_problems(context: PlanContext, part: ComponentPlan) -> Iterator[Problem]:
    """Yield what cannot be created in this cluster, or at all."""
    component = part.component
    yield from component.problems
    yield from pod_problems(component)
    if part.mode in _MODE_REQUIREMENTS and not context.has(_MODE_REQUIREMENTS[part.mode][0]):
        _, needed, fix = _MODE_REQUIREMENTS[part.mode]
        message = f"{part.mode} needs {needed}, which this cluster does not have"
        yield Problem(f"spec.{component.name}", message, fix)
    if part.mode == MULTI_NODE_RAY and component.name in STEPPED and parse_policy(context.annotations) is not None:
        message = f"{part.mode} has one revision at a time, so it has no steps"
        yield Problem(f"metadata.annotations[{STEPS}]", message, "remove it")
    if component.extension.slo and part.mode not in (RAW, MULTI_NODE):
        message = f"{part.mode} does not scale by latency"
        fix = f"remove slo, or set the annotation {DEPLOYMENT_MODE} to {RAW}"
        yield Problem(f"spec.{component.name}.slo", message, fix)
    if part.mode in (RAW, MULTI_NODE):
        yield from scaling_problems(context, component, part.scaler)
    if part.scaler == "keda":
        yield from keda_problems(component)


def component_objects(context: PlanContext, part: ComponentPlan, entry_port: int, discovered: bool) -> list[Object]:
    """Return the objects of a component. `discovered`: a router finds its pods by their labels."""
    component = part.component
    if part.mode == SERVERLESS:
        return [knative_service(context, component, part.rollout)]
    if part.mode == MULTI_NODE_RAY:
        return ray_objects(context, component, part.rollout.latest)
    new_objects = raw_objects if part.mode == RAW else lws_objects
    objects = new_objects(context, component, part.scaler, part.rollout, discovered)
    extension = component.extension
    if part.scaler == "hpa":
        limits = extension.min_replicas, extension.max_replicas
        objects.append(horizontal_pod_autoscaler(context, component, part.name, part.workload, *limits))
    elif part.scaler == "keda":
        request_trigger = keda_trigger(context, entry_port) if scales_to_zero(component, part.mode) else None
        objects.append(scaled_object(context, component, part.workload, request_trigger))
    return objects


@dataclass(frozen=True)
class ScaleUp:
    """A workload at zero replicas that no longer scales to zero: nothing else would scale it up."""

    api_version: str
    kind: str
    name: str
    replicas: int


def scale_ups_of(context: PlanContext, part: ComponentPlan) -> Iterator[ScaleUp]:
    """Yield the workloads to scale up. Autoscalers ignore workloads at zero."""
    for scale_up in (_main_scale_up(context, part), _canary_scale_up(context, part)):
        if scale_up is not None:
            yield scale_up


def _canary_scale_up(context: PlanContext, part: ComponentPlan) -> ScaleUp | None:
    """Return the scale-up of a canary whose previous revision was rolled back to zero pods."""
    if part.scaler != "hpa" or part.rollout.state != "canary" or not part.rollout.requested_percent:
        return None
    api, kind, _ = part.workload
    name = canary_name(part.name)
    live = context.live_object(kind, name)
    return ScaleUp(api, kind, name, 1) if live is not None and get_int(live, "spec", "replicas") == 0 else None


def _main_scale_up(context: PlanContext, part: ComponentPlan) -> ScaleUp | None:
    min_replicas = part.component.extension.min_replicas
    if min_replicas < 1 or part.scaler != "hpa" or part.live is None or get_int(part.live, "spec", "replicas") != 0:
        return None
    return (
        ScaleUp(*part.workload, min_replicas)
        if context.live_object("Deployment", front_name(context)) is not None
        else None
    )


def activation_target(part: ComponentPlan) -> ActivationTarget | None:
    """Return the component as a target that our router scales up, if it is one."""
    if not scales_to_zero(part.component, part.mode) or part.scaler == "external":
        return None
    api, kind, name = part.workload
    return ActivationTarget(part.component, (api, kind), name, part.scaler == "front")
