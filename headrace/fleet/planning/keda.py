# SPDX-License-Identifier: Apache-2.0
"""KEDA's ScaledObject: every field of `kedaConfig`, and a query that finds the pods where none is given.

KEDA adds replicas while a query's value per replica is above the threshold. `scalingOperator: LessThan...` asks for the
opposite: then the query becomes threshold / value, which KEDA holds at 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace.fleet.merging import Component
from headrace.fleet.names import (
    KEDA_OPERATOR,
    KEDA_QUERY,
    KEDA_SERVER_ADDRESS,
    KEDA_THRESHOLD,
    scaled_object_name,
    trunc63,
)
from headrace.fleet.planning.site import Object, Site, full_name
from headrace.fleet.words import Problem, part, text

SCALED_OBJECT = ("keda.sh/v1alpha1", "ScaledObject")
DEFAULT_THRESHOLD = "10"
_PENDING = "vllm:num_requests_(running|waiting)|sglang:num_(running|queue)_reqs|nv_inference_pending_request_count"
"""Requests in an engine and before it, as vLLM, SGLang and Triton or Headrace count them."""
_MOST_RATIO = 1000


def scaled_object(
    site: Site, component: Component, target: tuple[str, str, str], counted: Mapping[str, str] | None = None
) -> Object:
    """The ScaledObject of a workload (API version, kind, name). `counted`: where our router tells whether it is in use."""
    keda, extension = component.extension.keda, component.extension
    metadata = {"serverAddress": server_of(site, component), "query": query_of(site, component)}
    metadata["threshold"] = threshold_of(component)
    trigger: Object = {"type": "prometheus", "metadata": metadata}
    if _operator(component).startswith("Less"):
        threshold = metadata["threshold"]
        floor = f"({threshold} / {_MOST_RATIO})"
        metadata["query"] = f"{threshold} / clamp_min(({metadata['query']}), {floor})"
        metadata["threshold"] = "1"
        trigger["metricType"] = "Value"
    if text(keda, "authModes"):
        metadata["authModes"] = text(keda, "authModes")
    reference = part(keda, "authenticationRef")
    if text(reference, "name"):
        kind = text(reference, "kind") or "TriggerAuthentication"
        trigger["authenticationRef"] = {"name": text(reference, "name"), "kind": kind}
    triggers = [trigger]
    if counted:
        triggers.append({"type": "metrics-api", "metadata": dict(counted)})
    spec = {
        "scaleTargetRef": {"apiVersion": target[0], "kind": target[1], "name": target[2]},
        "minReplicaCount": extension.min_replicas,
        "maxReplicaCount": max(extension.min_replicas, extension.max_replicas, 1),
        "triggers": triggers,
    }
    name = scaled_object_name(full_name(site, component))
    return site.made(SCALED_OBJECT, name, component.labels, component.annotations, spec=spec)


def keda_problems(component: Component) -> Iterator[Problem]:
    """What KEDA cannot compute with."""
    try:
        positive = float(threshold_of(component)) > 0
    except ValueError:
        positive = False
    if not positive:
        said = f"KEDA divides by the threshold, and it is {threshold_of(component)}"
        yield Problem(f"spec.{component.name}.kedaConfig.scalingThreshold", said, "write a number above 0")


def server_of(site: Site, component: Component) -> str:
    """Which Prometheus is asked."""
    said = component.annotations.get(KEDA_SERVER_ADDRESS) or text(component.extension.keda, "promServerAddress")
    return said or site.facts.settings.prometheus_address


def threshold_of(component: Component) -> str:
    """What the query is compared with, for each replica."""
    said = component.annotations.get(KEDA_THRESHOLD) or text(component.extension.keda, "scalingThreshold")
    return said or DEFAULT_THRESHOLD


def query_of(site: Site, component: Component) -> str:
    """The query. `%s` in one of the user's becomes the component's full name; any other percent sign stays."""
    said = component.annotations.get(KEDA_QUERY) or text(component.extension.keda, "customPromQuery")
    if said:
        return said.replace("%s", full_name(site, component))
    labels = {
        "__name__": _PENDING,
        "namespace": site.namespace,
        "ome_io_inferenceservice": trunc63(site.name),
        "component": component.name,
    }
    chosen = ",".join(f'{name}{"=~" if name == "__name__" else "="}"{value}"' for name, value in labels.items())
    return f"sum({{{chosen}}})"


def _operator(component: Component) -> str:
    return component.annotations.get(KEDA_OPERATOR) or text(component.extension.keda, "scalingOperator")
