# SPDX-License-Identifier: Apache-2.0
"""Autoscalers for latency targets (`slo`): external metrics of a HorizontalPodAutoscaler, or queries for KEDA.

The latency is that of the service's front router (`measure_streams`). In the local fleet, the daemon reads it from the
router and decides by `fleet.autoscaling.latency_target`. In a cluster, an autoscaler knows only the percentile and its
target: it adds replicas by their ratio, and removes one at a time, after some minutes, while the percentile is below half of
the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.fleet.merging import Component
from headrace.fleet.merging.latency_targets import FIRST_TOKEN, NEXT_TOKEN, PERCENTILE
from headrace.fleet.names import trunc63
from headrace.fleet.planning.context import Object, PlanContext

FIRST_TOKEN_METRIC, TOKEN_METRIC = "headrace_first_token_latency", "headrace_token_latency"
"""External metrics, in seconds."""
_HISTOGRAMS = {
    FIRST_TOKEN_METRIC: "headrace_router_first_token_seconds_bucket",
    TOKEN_METRIC: "headrace_router_token_seconds_bucket",
}
_FIELDS = {FIRST_TOKEN_METRIC: FIRST_TOKEN, TOKEN_METRIC: NEXT_TOKEN}
SERVICE_LABEL, PERCENTILE_LABEL = "inferenceservice", "percentile"
CALM_SCALE_DOWN: Object = {
    "scaleDown": {
        "stabilizationWindowSeconds": 300,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
    }
}
"""One replica at a time: the effect on the latency is not known in advance."""


def external_metrics(context: PlanContext, component: Component) -> list[Any]:
    """Return the metrics of the HorizontalPodAutoscaler of a component with targets."""
    return [
        {
            "type": "External",
            "external": {
                "metric": {"name": metric, "selector": {"matchLabels": _labels(context, component)}},
                "target": {"type": "Value", "value": f"{milliseconds:g}m"},
            },
        }
        for metric, milliseconds in _targets(component)
    ]


def prometheus_triggers(context: PlanContext, component: Component, address: str) -> list[Any]:
    """Return the triggers of the ScaledObject of a component with targets."""
    return [
        {
            "type": "prometheus",
            "metricType": "Value",
            "metadata": {
                "serverAddress": address,
                "query": latency_query(context, component, metric, milliseconds / 1000),
                "threshold": f"{milliseconds / 1000:g}",
            },
        }
        for metric, milliseconds in _targets(component)
    ]


def latency_query(context: PlanContext, component: Component, metric: str, target: float) -> str:
    """Return the query of a percentile. From half of the target to all of it, the value is the target: nothing changes.

    No value without requests: KEDA takes it for 0.
    """
    labels = f'namespace="{context.namespace}",ome_io_inferenceservice="{trunc63(context.name)}"'
    share = float(component.extension.slo[PERCENTILE]) / 100
    value = f"histogram_quantile({share:g}, sum by (le) (rate({_HISTOGRAMS[metric]}{{{labels}}}[1m])))"
    return f"clamp_min({value} > {target / 2:g}, {target:g}) or {value} > 0"


def _targets(component: Component) -> Iterator[tuple[str, float]]:
    for metric, field in _FIELDS.items():
        milliseconds = component.extension.slo.get(field)
        if isinstance(milliseconds, int | float) and milliseconds > 0:
            yield metric, milliseconds


def _labels(context: PlanContext, component: Component) -> dict[str, str]:
    percentile = f"{float(component.extension.slo[PERCENTILE]):g}"
    return {"namespace": context.namespace, SERVICE_LABEL: trunc63(context.name), PERCENTILE_LABEL: percentile}
