# SPDX-License-Identifier: Apache-2.0
"""RawDeployment: a Deployment, its Service, its disruption budget; a second Deployment and Service in a canary."""

from __future__ import annotations

from math import ceil

from headrace.fleet.merging import Component
from headrace.fleet.names import APP_LABEL, ENABLE_TAG_ROUTING, trunc63
from headrace.fleet.planning.pods import template
from headrace.fleet.planning.revisions import SHARE, Rollout
from headrace.fleet.planning.scaling import Scaler, autoscaler
from headrace.fleet.planning.services import component_service
from headrace.fleet.planning.site import CANARY_SUFFIX, REVISION_LABEL, Object, Site, app_labels, full_name
from headrace.fleet.words import Document, part, whole

DEPLOYMENT = ("apps/v1", "Deployment")
BUDGET = ("policy/v1", "PodDisruptionBudget")
_STRATEGY = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}


def raw_objects(site: Site, component: Component, scaler: Scaler, roll: Rollout, found: bool) -> list[Object]:
    """The objects of a component but its autoscaler. `found`: a router finds its pods by their labels."""
    name = full_name(site, component)
    objects = [
        deployment(site, component, name, roll.stable, roll.kept),
        component_service(site, component, name, {APP_LABEL: trunc63(name)}, component.pod),
        _budget(site, component, name),
    ]
    if roll.two:
        second = canary_name(name)
        replicas = canary_replicas(site, component, scaler, roll, found)
        objects += [
            deployment(site, component, second, roll.latest, None, replicas, roll.percent),
            component_service(site, component, second, {APP_LABEL: trunc63(second)}, component.pod),
        ]
        if replicas is None:
            least, most = _part(component.extension.min_replicas, roll), _part(component.extension.max_replicas, roll)
            objects.append(autoscaler(site, component, second, (*DEPLOYMENT, second), least, most))
    return objects


def canary_name(name: str) -> str:
    """The workload of the second revision."""
    return f"{name}-{CANARY_SUFFIX}"


def deployment(
    site: Site,
    component: Component,
    name: str,
    revision: str,
    kept: Document | None = None,
    replicas: int | None = None,
    share: int | None = None,
) -> Object:
    """A Deployment. Without `replicas` their number is never sent: nobody's scaling is undone. `kept` has the pods."""
    labels = {**app_labels(component, name), REVISION_LABEL: revision}
    pods = kept_template(kept) if kept else template(component.pod, labels, component.annotations)
    spec: Object = {
        "selector": {"matchLabels": {APP_LABEL: trunc63(name)}},
        "strategy": dict(component.extension.deployment_strategy) or _STRATEGY,
        "revisionHistoryLimit": 10,
        "progressDeadlineSeconds": 600,
        "template": pods,
    }
    if replicas is not None:
        spec["replicas"] = replicas
    annotations = component.annotations if share is None else {**component.annotations, SHARE: str(share)}
    return site.made(DEPLOYMENT, name, {**component.labels, REVISION_LABEL: revision}, annotations, spec=spec)


def kept_template(live: Document) -> Object:
    """The pods of a live Deployment, as they are."""
    kept = part(live, "spec", "template")
    metadata = {name: value for name, value in part(kept, "metadata").items() if value is not None}
    return {**kept, "metadata": metadata}


def canary_replicas(site: Site, component: Component, scaler: Scaler, roll: Rollout, found: bool) -> int | None:
    """How many the second revision has; None where a HorizontalPodAutoscaler says.

    Where a router finds pods by their labels, their number is the share that they get.
    """
    if roll.held is not None:
        return roll.held
    share = _share(roll)
    if share <= 0:
        tagged = site.annotations.get(ENABLE_TAG_ROUTING) == "true"
        return 1 if tagged and not found else 0
    if scaler == "hpa" and not found:
        return None
    beside = whole(roll.kept, "spec", "replicas") if roll.kept else None
    beside = max(1, component.extension.min_replicas) if beside is None else max(1, beside)
    wanted = ceil(beside * share / (100 - share)) if share < 100 else beside
    return max(1, min(wanted, max(component.extension.max_replicas, 1)))


def _share(roll: Rollout) -> int:
    return roll.asked if roll.state == "canary" and roll.asked is not None else roll.percent


def _part(count: int, roll: Rollout) -> int:
    return max(1, ceil(count * _share(roll) / 100))


def _budget(site: Site, component: Component, name: str) -> Object:
    extension = component.extension
    spec: Object = {"selector": {"matchLabels": {APP_LABEL: trunc63(name)}}}
    if extension.min_available is not None:
        spec["minAvailable"] = extension.min_available
    else:
        spec["maxUnavailable"] = 1 if extension.max_unavailable is None else extension.max_unavailable
    return site.made(BUDGET, name, component.labels, component.annotations, spec=spec)
