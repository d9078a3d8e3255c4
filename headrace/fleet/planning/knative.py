# SPDX-License-Identifier: Apache-2.0
"""Serverless: a Knative Service, with traffic to its last two revisions during a canary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.fleet.merging import Component
from headrace.fleet.names import (
    ENABLE_TAG_ROUTING,
    KNATIVE_MAX_SCALE,
    KNATIVE_MIN_SCALE,
    KNATIVE_ROLLOUT_DURATION,
    trunc63,
)
from headrace.fleet.planning.context import REVISION_LABEL, Object, PlanContext, app_labels, full_name
from headrace.fleet.planning.pod_defaults import with_few_privileges, with_last_log_lines
from headrace.fleet.planning.pod_templates import complete_pod, main_container
from headrace.fleet.planning.revisions import Rollout, revision_of, stuck_reason
from headrace.fleet.rollouts.policy import RolloutPolicy
from headrace.fleet.rollouts.state import PROMOTED, current_share, effective_share, read_state
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_list, get_mapping, get_str, labels_of

KNATIVE = ("serving.knative.dev/v1", "Service")
_CLASS, _TARGET, _METRIC = (f"autoscaling.knative.dev/{name}" for name in ("class", "target", "metric"))
_PORT_NAMES = ("http1", "h2c")


def knative_rollout(
    component: Component, live: Document | None, status: Document, policy: RolloutPolicy | None
) -> Rollout:
    """Return the share of the newest revision. Knative keeps the revisions; a label has the digest of the newest."""
    latest, state = revision_of(component), read_state(status)
    if policy is None:
        requested = effective_share(None, state, latest, component.extension.canary_traffic_percent)
        return Rollout("single", latest, latest, requested)
    single = Rollout("single", latest, latest, policy=policy)
    running = labels_of(live).get(REVISION_LABEL, "") if live is not None else ""
    if not running or not get_str(status, "latestRolledoutRevision"):
        return single
    is_latest = running == latest
    known = state is not None and state.revision == latest
    # For an existing revision without a rollout state, its traffic shows whether it is on trial.
    trial = known or not is_latest or len(get_list(live, "spec", "traffic")) > 1
    if not trial or (state is not None and known and state.phase == PROMOTED):
        return single
    share = current_share(policy, state, latest)
    settled, stuck = (_is_settled(live), stuck_reason(live, "ConfigurationsReady")) if is_latest else (False, "")
    return replace(single, requested_percent=share, trial=True, settled=settled, stuck=stuck)


def knative_service(context: PlanContext, component: Component, rollout: Rollout) -> Object:
    """Return the Knative Service of a component."""
    name = full_name(context, component)
    own = {key: value for key, value in component.annotations.items() if key != KNATIVE_ROLLOUT_DURATION}
    spec: Object = _knative_pod(complete_pod(with_last_log_lines(with_few_privileges(context, component.pod))))
    extension = component.extension
    if extension.container_concurrency is not None:
        spec["containerConcurrency"] = extension.container_concurrency
    if extension.timeout_seconds is not None:
        spec["timeoutSeconds"] = spec["responseStartTimeoutSeconds"] = extension.timeout_seconds
    duration = component.annotations.get(KNATIVE_ROLLOUT_DURATION)
    return context.new_object(
        KNATIVE,
        trunc63(name),
        {**component.labels, REVISION_LABEL: rollout.latest} if rollout.policy is not None else component.labels,
        {KNATIVE_ROLLOUT_DURATION: duration} if duration else None,
        spec={
            "template": {
                "metadata": {"labels": app_labels(component, name), "annotations": {**own, **_scaling(component)}},
                "spec": spec,
            },
            "traffic": _traffic(context, component, rollout.requested_percent),
        },
    )


def _scaling(component: Component) -> dict[str, str]:
    extension = component.extension
    scaling = {KNATIVE_MIN_SCALE: str(extension.min_replicas)}
    if extension.max_replicas:
        scaling[KNATIVE_MAX_SCALE] = str(extension.max_replicas)
    metric = extension.scale_metric
    if _CLASS not in component.annotations:
        resource = metric in ("cpu", "memory")
        scaling[_CLASS] = f"{'hpa' if resource else 'kpa'}.autoscaling.knative.dev"
    if extension.scale_target is not None:
        scaling[_TARGET] = str(extension.scale_target)
    if metric:
        scaling[_METRIC] = metric
    return scaling


def _is_settled(live: Document | None) -> bool:
    """Whether the newest revision is the ready one."""
    status = get_mapping(live, "status")
    observed, generation = get_int(status, "observedGeneration"), get_int(live, "metadata", "generation")
    if observed is not None and generation is not None and observed < generation:
        return False
    created = get_str(status, "latestCreatedRevisionName")
    return bool(created) and created == get_str(status, "latestReadyRevisionName")


def _traffic(context: PlanContext, component: Component, share: int | None) -> list[Object]:
    previous = get_str(context.service, "status", "components", component.name, "latestRolledoutRevision")
    tag = {"tag": "latest"} if context.annotations.get(ENABLE_TAG_ROUTING) == "true" else {}
    if share is None or share >= 100 or not previous:
        return [{"latestRevision": True, "percent": 100, **tag}]
    return [
        {"latestRevision": True, "percent": share, **tag},
        {"latestRevision": False, "revisionName": previous, "percent": 100 - share, "tag": "prev"},
    ]


def _knative_pod(pod: Object) -> Object:
    """Return the pod as Knative accepts it: with one port in total."""
    main = get_str(main_container(pod), "name")
    return {
        **pod,
        "containers": [
            _single_port(container, get_str(container, "name") == main) for container in get_list(pod, "containers")
        ],
    }


def _single_port(container: Any, serves: bool) -> Document:
    changed = {key: value for key, value in container.items() if key != "ports"}
    ports = get_list(container, "ports")
    if serves and ports:
        port = {key: value for key, value in get_mapping(ports[0]).items() if key in ("containerPort", "protocol")}
        port_name = get_str(ports[0], "name")
        changed["ports"] = [{**port, **({"name": port_name} if port_name in _PORT_NAMES else {})}]
    return changed
