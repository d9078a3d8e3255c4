# SPDX-License-Identifier: Apache-2.0
"""From the values of all options to the settings of a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from headrace.api.metrics.settings import MetricsSettings, metrics_settings
from headrace.api.v1.accounts import V1Settings
from headrace.api.v2.restrictions import Restriction
from headrace.api.v2.settings import TraceDefaults, V2Settings
from headrace.apps.settings import ServerSettings
from headrace.cli.flags import Given
from headrace.cli.repositories import engine_settings
from headrace.cli.serve_logs import trace_settings
from headrace.cli.serve_ports import ports_of
from headrace.core.limits import Limits
from headrace.telemetry.progress import Progress
from headrace.version import __version__


def server_settings(given: Given, folders: Sequence[str], progress: Progress) -> ServerSettings:
    """The server that the options ask for."""
    ports, engine, measuring = ports_of(given), engine_settings(given, folders), _measuring(given)
    endpoint, trace = trace_settings(given)
    return ServerSettings(
        http=ports.http,
        grpc=ports.grpc,
        metrics=ports.metrics,
        listening=ports.listening,
        workers=given.whole("workers"),
        grace_seconds=given.number("grace-seconds"),
        access_log=given.truth("access-log"),
        trace_endpoint=endpoint,
        v1=_v1(given),
        v2=_v2(given, trace),
        measuring=measuring,
        limits=_limits(given),
        engine=replace(engine, summary_quantiles=measuring.engine_quantiles if measuring else ()),
        progress=progress,
    )


def _measuring(given: Given) -> MetricsSettings | None:
    settings = metrics_settings(
        given.texts("metrics-config"),
        interval_ms=math.ceil(given.number("metrics-interval-ms")),
        gpu=given.truth("allow-gpu-metrics"),
        cpu=given.truth("allow-cpu-metrics"),
    )
    return settings if given.truth("allow-metrics") else None


def _limits(given: Given) -> Limits:
    both = given.whole("max-body-bytes")
    http = given.whole("http-max-input-size") if given.has("http-max-input-size") else both
    return Limits(body_bytes=http, message_bytes=both)


def _v1(given: Given) -> V1Settings:
    usual = V1Settings(version=__version__, allow_profiling=given.truth("allow-profiling"))
    return replace(usual, server_id=given.text("id")) if given.has("id") else usual


def _v2(given: Given, trace: TraceDefaults | None) -> V2Settings:
    usual = V2Settings(
        allow_client_shm=given.truth("allow-client-shm"),
        http_header_forward_pattern=given.text("http-header-forward-pattern"),
        grpc_header_forward_pattern=given.text("grpc-header-forward-pattern"),
        http_restrictions=tuple(map(Restriction.parse, given.texts("http-restricted-api"))),
        grpc_restrictions=tuple(map(Restriction.parse, given.texts("grpc-restricted-protocol"))),
        trace=trace,
    )
    return replace(usual, server_id=given.text("id")) if given.has("id") else usual
