# SPDX-License-Identifier: Apache-2.0
"""What an autoscaler of a plan asks for: a HorizontalPodAutoscaler or a ScaledObject becomes an aim. Pure.

Knative's annotations say how long the windows are, where the service has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.errors import InvalidArgument
from headrace.fleet.autoscaling.deciding import KNATIVE, UTILISATION, Aim, Windows
from headrace.fleet.autoscaling.meter import CONCURRENCY, RPS
from headrace.fleet.autoscaling.queries import Expression, duration, read_query
from headrace.fleet.local.machine import asked_by
from headrace.fleet.local.workloads import KEDA, bounds_of, scaler_of, templates_of
from headrace.fleet.names import COMPONENT_LABEL
from headrace.fleet.words import Document, annotations_of, items, kind_of, labels_of, name_of, part, text, whole

CPU, MEMORY, QUERY = "cpu", "memory", "query"
WINDOW, PANIC_WINDOW, PANIC_THRESHOLD, SHARE = (
    f"autoscaling.knative.dev/{each}"
    for each in (
        "window",
        "panic-window-percentage",
        "panic-threshold-percentage",
        "target-utilization-percentage",
    )
)
_TOLERANCE = 0.1
"""That of HorizontalPodAutoscalers."""
_WINDOW_SECONDS = (1.0, 3600.0)
_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Aimed:
    """A workload, and what it is to be held at."""

    workload: str
    component: str
    metric: str
    aim: Aim
    query: Expression | None = None
    ratio: bool = False
    """The value is what there is too little of, not a load to be shared: KEDA's metricType Value."""

    def says(self, average: float, seconds: float) -> str:
        """The load beside its target, for people."""
        target, over = self.aim.target, f"over {seconds:g} s"
        if self.metric == CPU:
            return f"cpu {average:.2f} cores {over}, target {target:.2f} for each"
        if self.metric == MEMORY:
            return f"memory {average / _MEBIBYTE:.0f} MiB {over}, target {target / _MEBIBYTE:.0f} MiB for each"
        if self.metric == QUERY:
            return f"query {average:.4g} {over}, target {target:g}"
        name = "concurrency" if self.metric == CONCURRENCY else "requests/s"
        return f"{name} {average:.1f} {over}, target {target:g} at {self.aim.utilisation:.0%}"


@dataclass(frozen=True)
class Unaimed:
    """A workload that cannot be scaled by load, and why."""

    workload: str
    component: str
    reason: str
    message: str


def aim_of(workload: Document, objects: Sequence[Document]) -> Aimed | Unaimed | None:
    """What a workload is held at; None where its number is always the same, or somebody else's."""
    scaler = scaler_of(workload, objects)
    if scaler is None or len(set(bounds_of(scaler))) == 1:
        return None
    name, component = name_of(workload), labels_of(workload).get(COMPONENT_LABEL, "")
    try:
        notes = annotations_of(scaler)
        windows, share = windows_of(notes), _percent(notes, SHARE, 100 * UTILISATION, (1.0, 100.0)) / 100
    except InvalidArgument as error:
        return Unaimed(name, component, "InvalidAnnotation", error.message)
    least, most = bounds_of(scaler)
    if kind_of(scaler) == KEDA:
        return _by_query(scaler, name, component, Aim(1.0, most, least, 1.0, _TOLERANCE, windows))
    measured: Document = next(iter(items(scaler, "spec", "metrics")), {})
    if text(measured, "type") == "Pods":
        target = float(text(measured, "pods", "target", "averageValue"))
        metric = CONCURRENCY if text(measured, "pods", "metric", "name") == CONCURRENCY else RPS
        return Aimed(name, component, metric, Aim(target, most, least, share, 0.0, windows))
    metric = MEMORY if text(measured, "resource", "name") == MEMORY else CPU
    asked = [asked_by(each) for each in templates_of(workload)]
    requested = sum(each.memory if metric == MEMORY else each.cores for each in asked)
    if not requested:
        return Unaimed(
            name,
            component,
            "NoResourceRequest",
            f"{metric} is held at a share of what the container asks for, and it asks for none: write "
            f"resources.requests.{metric}, or another scaleMetric",
        )
    part_ = (whole(measured, "resource", "target", "averageUtilization") or 100) / 100
    return Aimed(name, component, metric, Aim(requested * part_, most, least, 1.0, _TOLERANCE, windows))


def _by_query(scaler: Document, name: str, component: str, aim: Aim) -> Aimed | Unaimed:
    trigger: Document = next(
        (each for each in items(scaler, "spec", "triggers") if text(each, "type") == "prometheus"), {}
    )
    said = part(trigger, "metadata")
    try:
        query = read_query(text(said, "query"))
        target = float(text(said, "threshold"))
    except InvalidArgument as error:
        return Unaimed(name, component, "UnsupportedQuery", error.message)
    except ValueError:
        return Unaimed(name, component, "UnsupportedQuery", "scalingThreshold is no number")
    held = Aim(target, aim.most, aim.least, 1.0, aim.tolerance, aim.windows)
    return Aimed(name, component, QUERY, held, query, text(trigger, "metricType") == "Value")


def windows_of(annotations: Mapping[str, str]) -> Windows:
    """Knative's windows, as annotations have them. Raises InvalidArgument."""
    said = annotations.get(WINDOW, "")
    stable = duration(said) if said else KNATIVE.stable_seconds
    few, many = _WINDOW_SECONDS
    if stable is None or not few <= stable <= many:
        raise InvalidArgument(f"{WINDOW} takes a time from 1s to 1h, not {said[:40]!a}")
    share = _percent(annotations, PANIC_WINDOW, 10.0, (1.0, 100.0))
    threshold = _percent(annotations, PANIC_THRESHOLD, 100 * KNATIVE.panic_threshold, (110.0, 1000.0))
    return Windows(stable, stable * share / 100, threshold / 100)


def _percent(annotations: Mapping[str, str], name: str, usual: float, bounds: tuple[float, float]) -> float:
    said = annotations.get(name)
    try:
        found = usual if said is None else float(said)
    except ValueError:
        found = math.nan
    if not bounds[0] <= found <= bounds[1]:
        raise InvalidArgument(f"{name} takes percent from {bounds[0]:g} to {bounds[1]:g}, not {(said or '')[:40]!a}")
    return found
