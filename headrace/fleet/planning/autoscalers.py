# SPDX-License-Identifier: Apache-2.0
"""The autoscaler of a component: a HorizontalPodAutoscaler or a KEDA ScaledObject."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from headrace.fleet.documents import Problem
from headrace.fleet.merging import Component
from headrace.fleet.names import (
    AUTOSCALER_CLASS,
    AUTOSCALER_METRICS,
    KEDA_OPERATOR,
    KEDA_QUERY,
    KEDA_SERVER_ADDRESS,
    KEDA_THRESHOLD,
    MULTI_NODE,
    RAW,
    ROUTER,
    TARGET_UTILIZATION,
    scaled_object_name,
    trunc63,
)
from headrace.fleet.planning.context import Object, PlanContext, full_name
from headrace.fleet.planning.latency_metrics import CALM_SCALE_DOWN, external_metrics, prometheus_triggers
from headrace.platforms.kubernetes_client.objects import annotations_of, get_list, get_mapping, get_str

HPA = ("autoscaling/v2", "HorizontalPodAutoscaler")
DEFAULT_UTILIZATION = 80
REQUEST_METRICS = ("concurrency", "rps")
"""Metrics that only Knative or our router can count."""
REQUEST_TARGETS = {"concurrency": 100, "rps": 200}
COUNTS_REQUESTS = "requests"
"""Capability of a cluster that provides `REQUEST_METRICS` to autoscalers; a local fleet has it."""

Scaler = Literal["hpa", "keda", "front", "external", "none"]
_CLASSES: dict[str, Scaler] = {"HPA": "hpa", "KEDA": "keda", "External": "external", "None": "none"}
"""The classes of a component's `autoscaler`."""
_KEDA_SETTINGS = ("pollingInterval", "cooldownPeriod", "idleReplicaCount", "fallback", "advanced")


def scales_to_zero(component: Component, mode: str) -> bool:
    """Whether a component scales to zero without Knative: our router holds requests and scales it up."""
    return component.extension.min_replicas == 0 and mode in (RAW, MULTI_NODE)


def scaler_of(context: PlanContext, component: Component, mode: str) -> Scaler:
    """Return what scales a component's Deployment or LeaderWorkerSet."""
    declared = get_str(component.extension.autoscaler, "class")
    if declared in _CLASSES:
        return _CLASSES[declared]
    autoscaler_class = component.annotations.get(AUTOSCALER_CLASS) or context.annotations.get(AUTOSCALER_CLASS, "")
    if component.extension.slo and autoscaler_class != "external":
        # The local fleet measures latencies itself. A cluster without KEDA needs an adapter for external metrics.
        by_keda = autoscaler_class == "keda" or (autoscaler_class != "hpa" and context.has("keda"))
        return "keda" if by_keda and not context.has(COUNTS_REQUESTS) else "hpa"
    if _uses_keda(context, component, autoscaler_class):
        return "keda"
    if autoscaler_class == "external":
        return "external"
    if scales_to_zero(component, mode) and request_metric(component):
        return "front"
    if mode == MULTI_NODE and autoscaler_class != "hpa" and not component.extension.scale_metric:
        # The CPU of a leader says little about a group of GPU nodes: an HPA only on request.
        return "front" if scales_to_zero(component, mode) else "none"
    return "hpa"


def request_metric(component: Component) -> str:
    """Return `concurrency` or `rps` for a component scaled by requests. Default with scale to zero: concurrency."""
    if component.extension.slo:
        return ""
    metric = component.extension.scale_metric or ("concurrency" if component.extension.min_replicas == 0 else "")
    return metric if metric in REQUEST_METRICS else ""


def scaling_problems(context: PlanContext, component: Component, scaler: Scaler) -> Iterator[Problem]:
    """Yield what this cluster cannot scale by."""
    declared, extension = bool(component.extension.autoscaler), component.extension
    if extension.slo and scaler in ("hpa", "keda") and extension.max_replicas <= max(1, extension.min_replicas):
        message = "scales between minReplicas and maxReplicas, and maxReplicas is not above minReplicas"
        yield Problem(f"spec.{component.name}.slo", message, f"raise spec.{component.name}.maxReplicas")
    if scaler == "hpa" and not declared and request_metric(component) and not context.has(COUNTS_REQUESTS):
        message = f"a HorizontalPodAutoscaler cannot count {component.extension.scale_metric}"
        fix = "write cpu or memory, kedaConfig.enableKeda: true, or minReplicas: 0, with which a router counts"
        yield Problem(f"spec.{component.name}.scaleMetric", message, fix)
    if scaler == "keda" and not context.has("keda"):
        message = "KEDA is not installed in this cluster"
        place, fix = ("autoscaler.class", "write HPA") if declared else ("kedaConfig", "set enableKeda: false")
        yield Problem(f"spec.{component.name}.{place}", message, f"install KEDA, or {fix}")


def horizontal_pod_autoscaler(
    context: PlanContext,
    component: Component,
    name: str,
    target: tuple[str, str, str],
    min_replicas: int,
    max_replicas: int,
) -> Object:
    """Return the HorizontalPodAutoscaler of a workload (API version, kind, name). Its minimum is at least 1."""
    extension = component.extension
    metric = extension.scale_metric or component.annotations.get(AUTOSCALER_METRICS) or "cpu"
    value = component.annotations.get(TARGET_UTILIZATION, "")
    share = int(value) if value.isdecimal() and value.isascii() else extension.scale_target or DEFAULT_UTILIZATION
    min_replicas = max(1, min_replicas)
    measured: Object = {
        "type": "Resource",
        "resource": {"name": metric, "target": {"type": "Utilization", "averageUtilization": share}},
    }
    if metric in REQUEST_METRICS:
        held = {"type": "AverageValue", "averageValue": str(extension.scale_target or REQUEST_TARGETS[metric])}
        measured = {"type": "Pods", "pods": {"metric": {"name": metric}, "target": held}}
    declared = get_mapping(extension.autoscaler, "hpa")
    by_latency = external_metrics(context, component)
    spec: Object = {
        "scaleTargetRef": {"apiVersion": target[0], "kind": target[1], "name": target[2]},
        "minReplicas": min_replicas,
        "maxReplicas": max(min_replicas, max_replicas),
        "metrics": get_list(declared, "metrics") or by_latency or [measured],
    }
    if get_mapping(declared, "behavior"):
        spec["behavior"] = declared["behavior"]
    elif by_latency and not get_list(declared, "metrics"):
        spec["behavior"] = CALM_SCALE_DOWN
    return context.new_object(HPA, name, component.labels, component.annotations, spec=spec)


def _uses_keda(context: PlanContext, component: Component, autoscaler_class: str) -> bool:
    own = get_mapping(context.service, "spec", component.name)
    if annotations_of({"metadata": own}).get(AUTOSCALER_CLASS) == "keda":
        return True
    if component.name == ROUTER and not get_mapping(own, "kedaConfig") and not _query_names_component(context):
        return False  # the service's query counts tokens, which a router does not have
    return autoscaler_class == "keda" or component.extension.keda.get("enableKeda") is True


def _query_names_component(context: PlanContext) -> bool:
    """Whether the service's query contains the component's name."""
    return "%s" in get_str(context.service, "spec", "kedaConfig", "customPromQuery")


SCALED_OBJECT = ("keda.sh/v1alpha1", "ScaledObject")
DEFAULT_THRESHOLD = "10"
_PENDING_METRICS = (
    "vllm:num_requests_(running|waiting)|sglang:num_(running|queue)_reqs|nv_inference_pending_request_count"
)
"""Running and queued requests, as vLLM, SGLang and Triton or Headrace count them."""
_MAX_RATIO = 1000


def scaled_object(
    context: PlanContext,
    component: Component,
    target: tuple[str, str, str],
    request_trigger: Mapping[str, str] | None = None,
) -> Object:
    """Return the ScaledObject of a workload (API version, kind, name). `counted`: the trigger of our router's activity."""
    extension = component.extension
    declared = get_mapping(extension.autoscaler, "keda")
    by_latency = prometheus_triggers(context, component, prometheus_address(context, component))
    triggers: list[Any] = (
        list(get_list(declared, "triggers")) or by_latency or [_prometheus_trigger(context, component)]
    )
    if request_trigger:
        triggers.append({"type": "metrics-api", "metadata": dict(request_trigger)})
    spec: Object = {
        "scaleTargetRef": {"apiVersion": target[0], "kind": target[1], "name": target[2]},
        "minReplicaCount": extension.min_replicas,
        "maxReplicaCount": max(extension.min_replicas, extension.max_replicas, 1),
        "triggers": triggers,
        **{name: declared[name] for name in _KEDA_SETTINGS if declared.get(name) is not None},
    }
    if by_latency and not declared:
        spec["advanced"] = {"horizontalPodAutoscalerConfig": {"behavior": CALM_SCALE_DOWN}}
    name = scaled_object_name(full_name(context, component))
    return context.new_object(SCALED_OBJECT, name, component.labels, component.annotations, spec=spec)


def _prometheus_trigger(context: PlanContext, component: Component) -> Object:
    """Return the trigger of `kedaConfig`."""
    keda = component.extension.keda
    metadata = {"serverAddress": prometheus_address(context, component), "query": keda_query(context, component)}
    metadata["threshold"] = keda_threshold(component)
    trigger: Object = {"type": "prometheus", "metadata": metadata}
    if _operator(component).startswith("Less"):
        threshold = metadata["threshold"]
        floor = f"({threshold} / {_MAX_RATIO})"
        metadata["query"] = f"{threshold} / clamp_min(({metadata['query']}), {floor})"
        metadata["threshold"] = "1"
        trigger["metricType"] = "Value"
    if get_str(keda, "authModes"):
        metadata["authModes"] = get_str(keda, "authModes")
    reference = get_mapping(keda, "authenticationRef")
    if get_str(reference, "name"):
        kind = get_str(reference, "kind") or "TriggerAuthentication"
        trigger["authenticationRef"] = {"name": get_str(reference, "name"), "kind": kind}
    return trigger


def keda_problems(component: Component) -> Iterator[Problem]:
    """Yield thresholds that KEDA cannot use."""
    try:
        positive = float(keda_threshold(component)) > 0
    except ValueError:
        positive = False
    if not positive:
        message = f"KEDA divides by the threshold, and it is {keda_threshold(component)}"
        yield Problem(f"spec.{component.name}.kedaConfig.scalingThreshold", message, "write a number above 0")


def prometheus_address(context: PlanContext, component: Component) -> str:
    """Return the address of the Prometheus to query."""
    value = component.annotations.get(KEDA_SERVER_ADDRESS) or get_str(component.extension.keda, "promServerAddress")
    return value or context.facts.settings.prometheus_address


def keda_threshold(component: Component) -> str:
    """Return the threshold of the query per replica."""
    value = component.annotations.get(KEDA_THRESHOLD) or get_str(component.extension.keda, "scalingThreshold")
    return value or DEFAULT_THRESHOLD


def keda_query(context: PlanContext, component: Component) -> str:
    """Return the query. `%s` in a user's query becomes the component's full name; other percent signs stay."""
    query = component.annotations.get(KEDA_QUERY) or get_str(component.extension.keda, "customPromQuery")
    if query:
        return query.replace("%s", full_name(context, component))
    labels = {
        "__name__": _PENDING_METRICS,
        "namespace": context.namespace,
        "ome_io_inferenceservice": trunc63(context.name),
        "component": component.name,
    }
    chosen = ",".join(f'{name}{"=~" if name == "__name__" else "="}"{value}"' for name, value in labels.items())
    return f"sum({{{chosen}}})"


def _operator(component: Component) -> str:
    return component.annotations.get(KEDA_OPERATOR) or get_str(component.extension.keda, "scalingOperator")
