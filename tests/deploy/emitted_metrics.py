# SPDX-License-Identifier: Apache-2.0
"""Every series that Headrace can emit, with its labels, from the objects that register the metrics of each program.

emitted()["nv_inference_request_histogram_us_bucket"]      # {"model", "version", "gpu_uuid", "le", "job", "instance"}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any
from unittest.mock import MagicMock

from activation_router import TARGET, ScriptedScaler

from headrace.api.metrics.collector import _PINNED
from headrace.api.metrics.hardware import COLLECTIONS, CPU, GPU, PROCESS
from headrace.api.metrics.model_metrics import COLUMNS, LOAD_SECONDS, PENDING
from headrace.backends.llm.kv_transfer.connector import KVTransferMetrics
from headrace.backends.llm.metrics import LlmMetrics
from headrace.core.clock import SystemClock
from headrace.core.telemetry.metrics import Kind, Registry
from headrace.engine.cache import ResponseCache
from headrace.engine.residency_metrics import add_load_metrics, add_sleep_metrics
from headrace.engine.traffic.statistics import TrafficMetrics
from headrace.fleet.cluster.webhooks.server import WebhookMetrics
from headrace.fleet.metrics import AgentMetrics, OperatorMetrics
from headrace.fleet.router.proxy import RouterProxy
from headrace.fleet.router.settings import ActivationSettings, BackendAddress, FairnessSettings, RouterSettings
from headrace.jobs.api.routes import JobsApi
from headrace.programs.gateway import GatewayMetrics
from headrace.programs.serve.access_guard import Refusals

TARGET_LABELS = frozenset({"job", "instance"})
"""Prometheus adds these to every series."""
_SUFFIXES: dict[Kind, dict[str, frozenset[str]]] = {
    "counter": {"": frozenset()},
    "gauge": {"": frozenset()},
    "histogram": {"_bucket": frozenset({"le"}), "_sum": frozenset(), "_count": frozenset()},
    "summary": {"": frozenset({"quantile"}), "_sum": frozenset(), "_count": frozenset()},
}


@cache
def emitted() -> Mapping[str, frozenset[str]]:
    """Return the labels by the name of the series. `up` is Prometheus' own."""
    series: dict[str, frozenset[str]] = {"up": TARGET_LABELS}
    for kind, name, labels in (*_server_metrics(), *_registered_metrics()):
        for suffix, more in _SUFFIXES[kind].items():
            series[name + suffix] = frozenset(labels) | more | TARGET_LABELS
    return series


def _server_metrics() -> Iterator[tuple[Kind, str, set[str]]]:
    """What `headrace serve` writes without a registry."""
    columns: dict[str, tuple[Kind, set[str]]] = {}
    for column in (*COLUMNS, PENDING, LOAD_SECONDS):
        _, labels = columns.setdefault(column.name, (column.kind, {"model", "version", "gpu_uuid"}))
        labels |= {column.labels.partition("=")[0]} if column.labels else set()
    yield from ((kind, name, labels) for name, (kind, labels) in columns.items())
    yield from ((kind, name, {"gpu_uuid"}) for kind, name, _ in GPU)
    yield from ((kind, name, set()) for kind, name, _, _ in PROCESS)
    yield from (("gauge", name, set()) for name, *_ in (*CPU, *_PINNED))
    yield "counter", COLLECTIONS[0], {"generation"}


def _registered_metrics() -> Iterator[tuple[Kind, str, set[str]]]:
    """What each program registers. Nothing is called on the stand-ins: they are only kept."""
    nothing: Any = MagicMock(spec=())
    server = Registry(SystemClock())
    for register in (Refusals, TrafficMetrics, LlmMetrics, KVTransferMetrics, ResponseCache(0).add_to):
        register(server)
    add_sleep_metrics(server, nothing)
    add_load_metrics(server, nothing)
    operator = OperatorMetrics(nothing)
    WebhookMetrics(operator.registry, lambda: 0.0)
    gateway = GatewayMetrics(SystemClock(), logs=False)
    JobsApi(MagicMock(), MagicMock(), gateway.registry)
    router = RouterProxy(
        RouterSettings(
            (BackendAddress.parse("http://127.0.0.1:1"),),
            max_outstanding=1,
            fairness=FairnessSettings(tenant_header="x-tenant"),
            activation=ActivationSettings((TARGET,)),
        ),
        ScriptedScaler(),
    )
    for registry in (server, operator.registry, AgentMetrics(nothing).registry, gateway.registry, router.registry):
        for family in registry.families:
            yield family.kind, family.name, set(family.label_names)
