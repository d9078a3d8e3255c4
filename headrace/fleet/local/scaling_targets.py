# SPDX-License-Identifier: Apache-2.0
"""Scaling targets: the metric, value and windows of a HorizontalPodAutoscaler or a ScaledObject. Pure.

Knative's annotations set the windows, if the service has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.errors import InvalidArgument
from headrace.fleet.autoscaling.autoscaler import CONCURRENCY, KNATIVE, RPS, UTILISATION, AutoscalerSpec, Windows
from headrace.fleet.autoscaling.latency_target import LatencySpec
from headrace.fleet.autoscaling.promql import Expression, parse_duration, parse_query
from headrace.fleet.local.scheduler import pod_requests
from headrace.fleet.local.workloads import KEDA, autoscaler_of, pod_templates, replica_bounds
from headrace.fleet.names import COMPONENT_LABEL
from headrace.fleet.planning.latency_metrics import FIRST_TOKEN_METRIC, PERCENTILE_LABEL, TOKEN_METRIC
from headrace.fleet.selection.model_match import parse_quantity
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    labels_of,
    name_of,
)

CPU, MEMORY, QUERY, LATENCY = "cpu", "memory", "query", "latency"
WINDOW, PANIC_WINDOW, PANIC_THRESHOLD, TARGET_UTILIZATION = (
    f"autoscaling.knative.dev/{name}"
    for name in (
        "window",
        "panic-window-percentage",
        "panic-threshold-percentage",
        "target-utilization-percentage",
    )
)
_TOLERANCE = 0.1
"""The tolerance of HorizontalPodAutoscalers."""
_WINDOW_SECONDS = (1.0, 3600.0)
_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class ScalingTarget:
    """A workload, and the metric that its replicas follow."""

    workload: str
    component: str
    metric: str
    spec: AutoscalerSpec
    query: Expression | None = None
    ratio: bool = False
    """Whether the value is a ratio for the whole workload, not a load that its replicas share: KEDA's metricType Value."""
    latency: LatencySpec | None = None
    """Latency targets, for the metric `latency`."""

    def describe(self, average: float, seconds: float) -> str:
        """Return the load and its target as a text."""
        target, over = self.spec.target, f"over {seconds:g} s"
        if self.metric == CPU:
            return f"cpu {average:.2f} cores {over}, target {target:.2f} per replica"
        if self.metric == MEMORY:
            return f"memory {average / _MEBIBYTE:.0f} MiB {over}, target {target / _MEBIBYTE:.0f} MiB per replica"
        if self.metric == QUERY:
            return f"query {average:.4g} {over}, target {target:g}"
        name = "concurrency" if self.metric == CONCURRENCY else "requests/s"
        return f"{name} {average:.1f} {over}, target {target:g} at {self.spec.utilisation:.0%}"


@dataclass(frozen=True)
class InvalidTarget:
    """A workload that cannot be scaled by load, and the reason."""

    workload: str
    component: str
    reason: str
    message: str


def scaling_target(workload: Document, objects: Sequence[Document]) -> ScalingTarget | InvalidTarget | None:
    """Return the target of a workload; None if its replicas are fixed, or not scaled here."""
    autoscaler = autoscaler_of(workload, objects)
    if autoscaler is None or len(set(replica_bounds(autoscaler))) == 1:
        return None
    name, component = name_of(workload), labels_of(workload).get(COMPONENT_LABEL, "")
    try:
        annotations = annotations_of(autoscaler)
        windows, utilization_target = (
            parse_windows(annotations),
            _percent(annotations, TARGET_UTILIZATION, 100 * UTILISATION, (1.0, 100.0)) / 100,
        )
    except InvalidArgument as error:
        return InvalidTarget(name, component, "InvalidAnnotation", error.message)
    minimum, maximum = replica_bounds(autoscaler)
    if kind_of(autoscaler) == KEDA:
        return _by_query(autoscaler, name, component, AutoscalerSpec(1.0, maximum, minimum, 1.0, _TOLERANCE, windows))
    metric_specs = get_list(autoscaler, "spec", "metrics")
    latency = _latency_spec(metric_specs, minimum, maximum, windows)
    if latency is not None:
        spec = AutoscalerSpec(1.0, maximum, minimum, 1.0, 0.0, windows)
        return ScalingTarget(name, component, LATENCY, spec, latency=latency)
    if len(metric_specs) > 1:
        return InvalidTarget(
            name, component, "UnsupportedMetric", "on one machine one metric can be scaled by: keep one"
        )
    return _by_metric(
        metric_specs[0] if metric_specs else {}, workload, component, (minimum, maximum), utilization_target, windows
    )


def _latency_spec(metric_specs: Sequence[Document], minimum: int, maximum: int, windows: Windows) -> LatencySpec | None:
    """Return the latency targets, if all metrics are those of `planning.latency_metrics`."""
    targets, percentile = {FIRST_TOKEN_METRIC: 0.0, TOKEN_METRIC: 0.0}, 95.0
    for metric_spec in metric_specs:
        metric = get_mapping(metric_spec, "external", "metric")
        seconds = parse_quantity(get_mapping(metric_spec, "external", "target").get("value"))
        if get_str(metric, "name") not in targets or not seconds:
            return None
        targets[get_str(metric, "name")] = seconds
        text = get_str(metric, "selector", "matchLabels", PERCENTILE_LABEL)
        percentile = float(text) if re.fullmatch(r"[0-9]{2}(\.[0-9]{1,6})?", text) else percentile
    if not metric_specs:
        return None
    return LatencySpec(maximum, minimum, targets[FIRST_TOKEN_METRIC], targets[TOKEN_METRIC], percentile, windows)


def _by_metric(
    metric_spec: Document,
    workload: Document,
    component: str,
    bounds: tuple[int, int],
    utilization_target: float,
    windows: Windows,
) -> ScalingTarget | InvalidTarget:
    """Return the target of a HorizontalPodAutoscaler's metric."""
    name, source = name_of(workload), get_str(metric_spec, "type") or "Resource"
    field = source.lower()
    metric = get_str(metric_spec, field, "metric", "name") or get_str(metric_spec, field, "name") or CPU
    measured = {"Pods": (CONCURRENCY, RPS), "Resource": (CPU, MEMORY)}.get(source, ())
    if metric not in measured:
        message = (
            f"{source} metrics named {metric} are not measured on one machine: write cpu, memory, concurrency or rps"
        )
        return InvalidTarget(name, component, "UnsupportedMetric", message)
    minimum, maximum = bounds
    average = parse_quantity(get_mapping(metric_spec, field, "target").get("averageValue"))
    if source == "Pods":
        if average is None:
            message = "a Pods metric needs target.averageValue, a number for each replica"
            return InvalidTarget(name, component, "UnsupportedMetric", message)
        return ScalingTarget(
            name, component, metric, AutoscalerSpec(average, maximum, minimum, utilization_target, 0.0, windows)
        )
    if average is None:
        requests = [pod_requests(template) for template in pod_templates(workload)]
        requested = sum(request.memory if metric == MEMORY else request.cores for request in requests)
        if not requested:
            message = f"{metric} is scaled by a share of the container's request, and it has none: set "
            message += f"resources.requests.{metric}, or another scaleMetric"
            return InvalidTarget(name, component, "NoResourceRequest", message)
        average = requested * (get_int(metric_spec, field, "target", "averageUtilization") or 100) / 100
    return ScalingTarget(name, component, metric, AutoscalerSpec(average, maximum, minimum, 1.0, _TOLERANCE, windows))


def _by_query(autoscaler: Document, name: str, component: str, spec: AutoscalerSpec) -> ScalingTarget | InvalidTarget:
    triggers = [item for item in get_list(autoscaler, "spec", "triggers") if get_str(item, "type") != "metrics-api"]
    kinds = [get_str(item, "type") for item in triggers]
    if kinds != ["prometheus"]:
        message = f"on one machine one trigger of type prometheus can be scaled by, not {', '.join(kinds) or 'none'}"
        return InvalidTarget(name, component, "UnsupportedTrigger", message)
    trigger = triggers[0]
    metadata = get_mapping(trigger, "metadata")
    try:
        query = parse_query(get_str(metadata, "query"))
        target = float(get_str(metadata, "threshold"))
    except InvalidArgument as error:
        return InvalidTarget(name, component, "UnsupportedQuery", error.message)
    except ValueError:
        return InvalidTarget(name, component, "UnsupportedQuery", "scalingThreshold is not a number")
    query_spec = AutoscalerSpec(target, spec.max_replicas, spec.min_replicas, 1.0, spec.tolerance, spec.windows)
    return ScalingTarget(name, component, QUERY, query_spec, query, get_str(trigger, "metricType") == "Value")


def parse_windows(annotations: Mapping[str, str]) -> Windows:
    """Return Knative's windows from annotations. Raises InvalidArgument."""
    text = annotations.get(WINDOW, "")
    stable = parse_duration(text) if text else KNATIVE.stable_seconds
    shortest, longest = _WINDOW_SECONDS
    if stable is None or not shortest <= stable <= longest:
        raise InvalidArgument(f"{WINDOW} takes a time from 1s to 1h, not {text[:40]!a}")
    share = _percent(annotations, PANIC_WINDOW, 10.0, (1.0, 100.0))
    threshold = _percent(annotations, PANIC_THRESHOLD, 100 * KNATIVE.panic_threshold, (110.0, 1000.0))
    return Windows(stable, stable * share / 100, threshold / 100)


def _percent(annotations: Mapping[str, str], name: str, default: float, bounds: tuple[float, float]) -> float:
    text = annotations.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not bounds[0] <= value <= bounds[1]:
        raise InvalidArgument(f"{name} takes percent from {bounds[0]:g} to {bounds[1]:g}, not {(text or '')[:40]!a}")
    return value
