# SPDX-License-Identifier: Apache-2.0
"""Who changes the number of replicas of a component, and the HorizontalPodAutoscaler that does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from headrace.fleet.merging import Component
from headrace.fleet.names import AUTOSCALER_CLASS, AUTOSCALER_METRICS, MULTI_NODE, RAW, ROUTER, TARGET_UTILIZATION
from headrace.fleet.planning.site import Object, Site
from headrace.fleet.words import Problem, annotations_of, part, text

HPA = ("autoscaling/v2", "HorizontalPodAutoscaler")
DEFAULT_UTILIZATION = 80
REQUEST_METRICS = ("concurrency", "rps")
"""What only someone who sees the requests can count: Knative, or our router."""
REQUEST_TARGETS = {"concurrency": 100, "rps": 200}
COUNTS_REQUESTS = "requests"
"""The capability of who gives autoscalers the numbers of `REQUEST_METRICS`: no cluster by itself."""

Scaler = Literal["hpa", "keda", "front", "external", "none"]


def wakes(component: Component, mode: str) -> bool:
    """Whether a component goes down to zero without Knative: our router holds requests and wakes it."""
    return component.extension.min_replicas == 0 and mode in (RAW, MULTI_NODE)


def scaler_of(site: Site, component: Component, mode: str) -> Scaler:
    """Who scales a component of a Deployment or a LeaderWorkerSet."""
    chosen = component.annotations.get(AUTOSCALER_CLASS) or site.annotations.get(AUTOSCALER_CLASS, "")
    if _keda_asked(site, component, chosen):
        return "keda"
    if chosen == "external":
        return "external"
    if wakes(component, mode) and request_metric(component):
        return "front"
    if mode == MULTI_NODE and chosen != "hpa" and not component.extension.scale_metric:
        # The CPU of a leader says little of a group of GPU nodes, so only who asks for it gets it.
        return "front" if wakes(component, mode) else "none"
    return "hpa"


def request_metric(component: Component) -> str:
    """`concurrency` or `rps` where the component is scaled by its requests. With zero it is concurrency, as Knative's."""
    metric = component.extension.scale_metric or ("concurrency" if component.extension.min_replicas == 0 else "")
    return metric if metric in REQUEST_METRICS else ""


def scaling_problems(site: Site, component: Component, scaler: Scaler) -> Iterator[Problem]:
    """What nobody here can do."""
    if scaler == "hpa" and request_metric(component) and not site.has(COUNTS_REQUESTS):
        said = f"a HorizontalPodAutoscaler cannot count {component.extension.scale_metric}"
        fix = "write cpu or memory, kedaConfig.enableKeda: true, or minReplicas: 0, which has a router count"
        yield Problem(f"spec.{component.name}.scaleMetric", said, fix)
    if scaler == "keda" and not site.has("keda"):
        said = "KEDA is not installed in this cluster"
        yield Problem(f"spec.{component.name}.kedaConfig", said, "install KEDA, or set enableKeda: false")


def autoscaler(
    site: Site, component: Component, name: str, target: tuple[str, str, str], least: int, most: int
) -> Object:
    """The HorizontalPodAutoscaler of a workload (API version, kind, name). It never sees zero: it rests there."""
    extension = component.extension
    metric = extension.scale_metric or component.annotations.get(AUTOSCALER_METRICS) or "cpu"
    said = component.annotations.get(TARGET_UTILIZATION, "")
    share = int(said) if said.isdecimal() and said.isascii() else extension.scale_target or DEFAULT_UTILIZATION
    least = max(1, least)
    measured: Object = {
        "type": "Resource",
        "resource": {"name": metric, "target": {"type": "Utilization", "averageUtilization": share}},
    }
    if metric in REQUEST_METRICS:
        held = {"type": "AverageValue", "averageValue": str(extension.scale_target or REQUEST_TARGETS[metric])}
        measured = {"type": "Pods", "pods": {"metric": {"name": metric}, "target": held}}
    spec = {
        "scaleTargetRef": {"apiVersion": target[0], "kind": target[1], "name": target[2]},
        "minReplicas": least,
        "maxReplicas": max(least, most),
        "metrics": [measured],
    }
    return site.made(HPA, name, component.labels, component.annotations, spec=spec)


def _keda_asked(site: Site, component: Component, chosen: str) -> bool:
    own = part(site.service, "spec", component.name)
    if annotations_of({"metadata": own}).get(AUTOSCALER_CLASS) == "keda":
        return True
    if component.name == ROUTER and not part(own, "kedaConfig") and not _asks_routers(site):
        return False  # what is told for the whole service counts tokens, and a router makes none
    return chosen == "keda" or component.extension.keda.get("enableKeda") is True


def _asks_routers(site: Site) -> bool:
    """Whether the query for all is about each component by name."""
    return "%s" in text(site.service, "spec", "kedaConfig", "customPromQuery")
