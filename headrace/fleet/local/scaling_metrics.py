# SPDX-License-Identifier: Apache-2.0
"""Metrics for the autoscaler: requests that the routers of this machine count, and series that pods expose to Prometheus."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.fleet.autoscaling.promql import Series, parse_exposition
from headrace.fleet.local.container_command import ADDRESS
from headrace.fleet.local.pod import Pod
from headrace.fleet.local.service_proxy import fetch
from headrace.fleet.planning.pod_templates import main_container
from headrace.platforms.kubernetes_client.objects import (
    annotations_of,
    get_int,
    get_list,
    get_mapping,
    get_str,
    labels_of,
    name_of,
)

_PORT, _PATH = "prometheus.io/port", "prometheus.io/path"
_PATH_FORM = re.compile(r"/[\x21-\x7e]*")
_BackendKey = tuple[str, str]
"""A router and the URL of one of its backends."""


@dataclass(frozen=True)
class RequestLoad:
    """The load of one workload at one moment."""

    concurrent: int
    total: int
    """Requests since the counting started; never decreases."""
    routed: bool
    """Whether a router has any of its pods as a backend."""


class RequestCounter:
    """Counts the requests of a workload across restarts of pods and routers."""

    def __init__(self) -> None:
        self._known: dict[_BackendKey, int] = {}
        self._total = 0
        self._begun = False

    def update(self, statuses: Mapping[str, Mapping[str, Any] | None], ports: Collection[int]) -> RequestLoad:
        """Return the load. statuses: of routers, by name; None if one does not answer. ports: of the pods."""
        urls = {f"http://{ADDRESS}:{port}" for port in ports}
        concurrent, routed = 0, False
        counts: dict[_BackendKey, int] = {}
        for router, status in statuses.items():
            if status is None:
                counts |= {key: count for key, count in self._known.items() if key[0] == router}
                continue
            backends = _mappings(status.get("backends"))
            own = [backend for backend in backends if backend.get("url") in urls]
            routed = routed or bool(own)
            for backend in own:
                count = _number(backend, "requests") - _number(backend, "retries")
                key = (router, str(backend["url"]))
                # A new backend counts from 0; a counter that decreased was restarted.
                previous = self._known.get(key, 0 if self._begun else count)
                self._total += count - previous if count >= previous else count
                counts[key] = count
                concurrent += _number(backend, "outstanding")
            leaving = [backend for backend in _mappings(status.get("leaving")) if backend.get("url") in urls]
            concurrent += sum(_number(backend, "outstanding") for backend in leaving)
            if own:
                # Queued requests wait for any backend of the router.
                concurrent += round(_number(status, "queued") * len(own) / len(backends))
        self._known, self._begun = counts, True
        return RequestLoad(concurrent, self._total, routed)


def backend_counts(statuses: Sequence[Mapping[str, Any] | None], ports: Collection[int]) -> dict[str, Any]:
    """Return the requests that routers sent to one pod, and how they ended. Empty if no router has it as a backend."""
    urls = {f"http://{ADDRESS}:{port}" for port in ports}
    own = [
        backend
        for status in statuses
        if status is not None
        for backend in _mappings(status.get("backends"))
        if backend.get("url") in urls
    ]
    if not own:
        return {}
    errors = sum(_number(backend, outcome) for backend in own for outcome in ("erred", "refused", "failed"))
    return {
        "requests": sum(_number(backend, "requests") for backend in own),
        "errors": errors,
        "outstanding": sum(_number(backend, "outstanding") for backend in own),
        "state": str(own[0].get("state", "")),
    }


def _mappings(items: Any) -> Sequence[Mapping[str, Any]]:
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []


def _number(mapping: Mapping[str, Any], name: str) -> int:
    value = mapping.get(name)
    return value if isinstance(value, int) else 0


async def scrape_metrics(pods: Sequence[Pod], is_wanted: Callable[[str], bool]) -> Series:
    """Return the series of all pods, with the labels that Prometheus adds; a pod that does not answer has none."""
    results = await asyncio.gather(*(_scrape(pod, is_wanted) for pod in pods))
    return {labels: value for series in results for labels, value in series.items()}


async def _scrape(pod: Pod, is_wanted: Callable[[str], bool]) -> Series:
    port, path = _metrics_address(pod)
    answer = await fetch(port, path) if port else None
    if answer is None:
        return {}
    document = pod.record.document
    labels = {re.sub(r"[^a-zA-Z0-9_]", "_", name): value for name, value in labels_of(document).items()}
    target = {"namespace": get_str(document, "metadata", "namespace"), "pod": name_of(document)}
    return parse_exposition(
        answer.decode("utf-8", "replace"), is_wanted, {**labels, **target, "instance": f"{ADDRESS}:{port}"}
    )


def _metrics_address(pod: Pod) -> tuple[int | None, str]:
    """Return the port and path of its metrics: from its annotations, else its first port."""
    annotations = annotations_of(pod.record.document)
    port_text, path = annotations.get(_PORT, ""), annotations.get(_PATH, "")
    container = main_container(get_mapping(pod.record.document, "spec"))
    number = int(port_text) if port_text.isdecimal() and port_text.isascii() and len(port_text) < 6 else None
    if number is None:
        number = next(
            (port for port_spec in get_list(container, "ports") if (port := get_int(port_spec, "containerPort"))), None
        )
    return pod.port(number) if number else None, path if _PATH_FORM.fullmatch(path) else "/metrics"
