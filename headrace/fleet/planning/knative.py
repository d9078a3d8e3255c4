# SPDX-License-Identifier: Apache-2.0
"""Serverless: a Knative Service, with the traffic of its two last revisions in a canary."""

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
from headrace.fleet.planning.pods import completed, main_container
from headrace.fleet.planning.revisions import Rollout, revision_of
from headrace.fleet.planning.site import REVISION_LABEL, Object, Site, app_labels, full_name
from headrace.fleet.rollouts.policy import Policy
from headrace.fleet.rollouts.state import PROMOTED, asked_share, share_of, state_of
from headrace.fleet.words import Document, items, labels_of, part, text, whole

KNATIVE = ("serving.knative.dev/v1", "Service")
_CLASS, _TARGET, _METRIC = (f"autoscaling.knative.dev/{each}" for each in ("class", "target", "metric"))
_PORT_NAMES = ("http1", "h2c")


def knative_rollout(component: Component, live: Document | None, told: Document, policy: Policy | None) -> Rollout:
    """Which share the newest revision gets. Knative keeps the revisions; which it has of ours, a label of it says."""
    latest, state = revision_of(component), state_of(told)
    if policy is None:
        asked = asked_share(None, state, latest, component.extension.canary_traffic_percent)
        return Rollout("single", latest, latest, asked)
    alone = Rollout("single", latest, latest, policy=policy)
    running = labels_of(live).get(REVISION_LABEL, "") if live is not None else ""
    if not running or not text(told, "latestRolledoutRevision"):
        return alone
    mine = running == latest
    known = state is not None and state.revision == latest
    # Of one that is there already, and of which nobody has told, its traffic says whether it is on trial.
    trial = known or not mine or len(items(live, "spec", "traffic")) > 1
    if not trial or (state is not None and known and state.phase == PROMOTED):
        return alone
    share = share_of(policy, state, latest)
    settled, stuck = (_settled(live), _stuck(live)) if mine else (False, "")
    return replace(alone, asked=share, trial=True, settled=settled, stuck=stuck)


def knative_service(site: Site, component: Component, roll: Rollout) -> Object:
    """The Knative Service of a component."""
    name = full_name(site, component)
    own = {key: value for key, value in component.annotations.items() if key != KNATIVE_ROLLOUT_DURATION}
    spec: Object = _served(completed(component.pod))
    extension = component.extension
    if extension.container_concurrency is not None:
        spec["containerConcurrency"] = extension.container_concurrency
    if extension.timeout_seconds is not None:
        spec["timeoutSeconds"] = spec["responseStartTimeoutSeconds"] = extension.timeout_seconds
    duration = component.annotations.get(KNATIVE_ROLLOUT_DURATION)
    return site.made(
        KNATIVE,
        trunc63(name),
        {**component.labels, REVISION_LABEL: roll.latest} if roll.policy is not None else component.labels,
        {KNATIVE_ROLLOUT_DURATION: duration} if duration else None,
        spec={
            "template": {
                "metadata": {"labels": app_labels(component, name), "annotations": {**own, **_scaling(component)}},
                "spec": spec,
            },
            "traffic": _traffic(site, component, roll.asked),
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


def _settled(live: Document | None) -> bool:
    """Whether the newest revision is the one that answers."""
    status = part(live, "status")
    seen, generation = whole(status, "observedGeneration"), whole(live, "metadata", "generation")
    if seen is not None and generation is not None and seen < generation:
        return False
    created = text(status, "latestCreatedRevisionName")
    return bool(created) and created == text(status, "latestReadyRevisionName")


def _stuck(live: Document | None) -> str:
    for each in items(live, "status", "conditions"):
        if (text(each, "type"), text(each, "status")) == ("ConfigurationsReady", "False"):
            return text(each, "message") or text(each, "reason") or "its revision does not become ready"
    return ""


def _traffic(site: Site, component: Component, share: int | None) -> list[Object]:
    before = text(site.service, "status", "components", component.name, "latestRolledoutRevision")
    tag = {"tag": "latest"} if site.annotations.get(ENABLE_TAG_ROUTING) == "true" else {}
    if share is None or share >= 100 or not before:
        return [{"latestRevision": True, "percent": 100, **tag}]
    return [
        {"latestRevision": True, "percent": share, **tag},
        {"latestRevision": False, "revisionName": before, "percent": 100 - share, "tag": "prev"},
    ]


def _served(pod: Object) -> Object:
    """The pod as Knative takes it: one port in all, which it names itself."""
    main = text(main_container(pod), "name")
    return {**pod, "containers": [_one_port(each, text(each, "name") == main) for each in items(pod, "containers")]}


def _one_port(container: Any, serves: bool) -> Document:
    changed = {key: value for key, value in container.items() if key != "ports"}
    ports = items(container, "ports")
    if serves and ports:
        port = {key: value for key, value in part(ports[0]).items() if key in ("containerPort", "protocol")}
        named = text(ports[0], "name")
        changed["ports"] = [{**port, **({"name": named} if named in _PORT_NAMES else {})}]
    return changed
