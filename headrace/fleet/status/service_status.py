# SPDX-License-Identifier: Apache-2.0
"""The status of an InferenceService: conditions, components, model, URL; also of one that cannot be planned."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from headrace.fleet.documents import Problem
from headrace.fleet.names import CLUSTER_LOCAL, DEPLOYMENT_MODE, VIRTUAL, VISIBILITY_LABEL
from headrace.fleet.rollouts.history import HISTORY, next_history
from headrace.fleet.status.components import component_status
from headrace.fleet.status.conditions import (
    INGRESS_READY,
    LATEST_DEPLOYMENT_READY,
    READY,
    ROUTES_READY,
    Condition,
    ConditionStatus,
    Observed,
    conditions_to_json,
    format_time,
    get_mappings,
    of_kinds,
    summarize,
    truncate,
)
from headrace.fleet.status.model_status import INVALID, model_status
from headrace.fleet.status.workloads import FAILED, PENDING, workload_ready, workloads
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_int,
    get_mapping,
    get_str,
    kind_of,
    labels_of,
    name_of,
)

if TYPE_CHECKING:
    from headrace.fleet.planning import Plan


def build_status(service: Document, plan: Plan, observed: Observed, now: datetime) -> Document:
    """Compute the status of a service from its plan and the observed objects. `service` has the old status."""
    if plan.problems:
        failure = plan.selection.failure if plan.selection is not None else ""
        return problem_status(service, plan.problems, now, failure=failure)
    if annotations_of(service).get(DEPLOYMENT_MODE) == VIRTUAL:
        return _virtual(service, plan, now)
    components = {name: component_status(service, plan, item, observed) for name, item in plan.components.items()}
    ingress = ingress_ready(service, plan.objects, observed)
    ready_conditions = [component.conditions[0] for component in components.values()]
    others = [condition for component in components.values() for condition in component.conditions[1:]]
    latest = summarize([component.latest for component in components.values()], LATEST_DEPLOYMENT_READY, informs=True)
    conditions = [summarize([ingress, *ready_conditions]), ingress, *ready_conditions, *others, latest]
    routes = [other for other in others if other.type.endswith("RouteReady")]
    if routes:
        conditions.append(summarize(routes, ROUTES_READY, informs=True))
    result = _common_fields(service, plan, conditions, now)
    if ingress.status == "True" or get_str(service, "status", "url") == plan.urls.url:
        result |= _urls(plan)
    result["components"] = {name: component.entry for name, component in components.items()}
    result["modelStatus"] = model_status({name: component.copies for name, component in components.items()}, plan.model)
    result[HISTORY] = next_history(service, now)
    return result


def _common_fields(service: Document, plan: Plan, conditions: Sequence[Condition], now: datetime) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if get_int(service, "metadata", "generation") is not None:
        result["observedGeneration"] = get_int(service, "metadata", "generation")
    result["conditions"] = conditions_to_json(conditions, service, now)
    if get_mapping(service, "status", "annotations"):
        result["annotations"] = get_mapping(service, "status", "annotations")
    selection = plan.selection
    if selection is not None and selection.runtime is not None:
        result["runtime"] = {
            "name": name_of(selection.runtime),
            "kind": kind_of(selection.runtime),
            "reason": selection.reason,
        }
    if plan.model is not None:
        result["model"] = {"name": name_of(plan.model), "kind": kind_of(plan.model)}
        path = get_str(plan.model, "spec", "storage", "path")
        result["model"] |= {"path": path} if path else {}
    return result


def _urls(plan: Plan) -> dict[str, Any]:
    result: dict[str, Any] = {"url": plan.urls.url} if plan.urls.url else {}
    return result | ({"address": {"url": plan.urls.address}} if plan.urls.address else {})


def _virtual(service: Document, plan: Plan, now: datetime) -> Document:
    conditions = [Condition(READY, "True", VIRTUAL), Condition(INGRESS_READY, "True", VIRTUAL)]
    result = _common_fields(service, plan, conditions, now) | _urls(plan)
    # OME writes this name, and external controllers of virtual services read it.
    return {**result, "components": {"predictor": {"url": plan.urls.url}}} if plan.urls.url else result


_INVALID_SPEC = "InvalidPredictorSpec"
"""The FailureReason of the CRD for an invalid spec; a predictor is what is an engine today."""
_MAX_PROBLEMS = 5


def problem_status(
    service: Document, problems: Sequence[Problem], now: datetime, *, failure: str = "", reason: str = ""
) -> Document:
    """Return a status with Ready False and all problems in its message.

    failure: the FailureReason, if selection knows it. reason: the reason of the condition if the spec is not at fault
    (`ReconcileError`); `modelStatus` then stays as it was.
    """
    failure_code = failure or failure_reason(problems)
    message = describe_problems(problems)
    before = get_mapping(service, "status")
    condition = Condition(
        READY, "False", reason or (failure_code if failure_code != _INVALID_SPEC else INVALID), message
    )
    result: dict[str, Any] = {
        **before,
        "conditions": conditions_to_json([condition, *_other_conditions(before)], service, now),
        "modelStatus": get_mapping(before, "modelStatus")
        if reason
        else _model_status(before, failure_code, message, now),
    }
    if get_int(service, "metadata", "generation") is not None:
        result["observedGeneration"] = get_int(service, "metadata", "generation")
    return {name: value for name, value in result.items() if value != {}}


def failure_reason(problems: Sequence[Problem]) -> str:
    """Return the FailureReason of the first problem that has one."""
    for problem in problems:
        disabled = "disabled" in problem.message
        if problem.field in ("spec.model.name", "spec.model.kind"):
            return "BaseModelNotReady" if disabled else "BaseModelNotFound"
        if problem.field == "spec.runtime.name":
            return "RuntimeDisabled" if disabled else "RuntimeNotRecognized"
    return _INVALID_SPEC


def describe_problems(problems: Sequence[Problem]) -> str:
    """Join the first problems, with the number of the others."""
    value = "; ".join(str(problem) for problem in problems[:_MAX_PROBLEMS])
    return value + (f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else "")


def _other_conditions(before: Document) -> list[Condition]:
    """Return the old conditions but Ready: their objects have not changed."""
    conditions = []
    for record in get_mappings(before, "conditions"):
        if get_str(record, "type") in ("", READY):
            continue
        value: ConditionStatus = "True" if get_str(record, "status") == "True" else "False"
        if get_str(record, "status") not in ("True", "False"):
            value = "Unknown"
        informs = get_str(record, "severity") == "Info"
        conditions.append(
            Condition(get_str(record, "type"), value, get_str(record, "reason"), get_str(record, "message"), informs)
        )
    return conditions


def _model_status(before: Document, failure: str, message: str, now: datetime) -> dict[str, Any]:
    active = get_str(before, "modelStatus", "modelRevisionStates", "activeModelState", default=PENDING)
    info = {"reason": failure, "message": truncate(message)}
    last = get_mapping(before, "modelStatus", "lastFailureInfo")
    unchanged = all(last.get(name) == value for name, value in info.items())
    result: dict[str, Any] = {
        "transitionStatus": INVALID,
        "modelRevisionStates": {"activeModelState": active, "targetModelState": FAILED},
        "lastFailureInfo": {**info, "time": get_str(last, "time") if unchanged else format_time(now)},
    }
    if get_mapping(before, "modelStatus", "modelCopies"):
        result["modelCopies"] = get_mapping(before, "modelStatus", "modelCopies")
    return result


_INGRESS_KINDS = ("Ingress", "HTTPRoute", "VirtualService")
FRONT = "front"
"""The component label of a front router."""


def ingress_ready(service: Document, objects: Sequence[Document], observed: Observed) -> Condition:
    """Return whether the planned ingress is ready, as reported by the gateway."""
    ways = of_kinds(objects, *_INGRESS_KINDS)
    entry = [document for document in of_kinds(objects, "Service") if name_of(document) == name_of(service)]
    for way in [*ways, *entry]:
        if observed.live(way) is None:
            message = f"{kind_of(way)} {name_of(way)} has not been created yet"
            return Condition(INGRESS_READY, "Unknown", "Creating", message)
    # While a service is scaled to zero or being activated, its requests go to the shared activator.
    activated = any(observed.live(document) is not None for document in of_kinds(objects, "EndpointSlice"))
    for workload in () if activated else workloads(objects, FRONT):
        front = workload_ready(INGRESS_READY, workload, observed, observed.pods_of(FRONT))
        if front.status != "True":
            return front
    if not ways:
        local = labels_of(service).get(VISIBILITY_LABEL) == CLUSTER_LOCAL
        return Condition(INGRESS_READY, "True", "ClusterLocal" if local else "IngressDisabled")
    routes = [_route_condition(observed.live(way) or way) for way in ways if kind_of(way) == "HTTPRoute"]
    return next((condition for condition in routes if condition.status != "True"), Condition(INGRESS_READY, "True"))


def _route_condition(live: Document) -> Condition:
    parents = get_mappings(live, "status", "parents")
    if not parents:
        message = f"no gateway has accepted HTTPRoute {name_of(live)} yet"
        return Condition(INGRESS_READY, "Unknown", "WaitingForGateway", message)
    for parent in parents:
        for record in get_mappings(parent, "conditions"):
            if get_str(record, "type") in ("Accepted", "ResolvedRefs") and get_str(record, "status") == "False":
                message = f"HTTPRoute {name_of(live)}: {get_str(record, 'message')}"
                return Condition(INGRESS_READY, "False", get_str(record, "reason"), message)
    return Condition(INGRESS_READY, "True")
