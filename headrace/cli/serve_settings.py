# SPDX-License-Identifier: Apache-2.0
"""From the values of all options and of the configuration to the settings of a server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from headrace.api.metrics.settings import MetricsSettings, metrics_settings
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.predict.settings import PredictSettings
from headrace.api.v1.accounts import V1Settings
from headrace.api.v2.restrictions import Restriction
from headrace.api.v2.settings import TraceDefaults, V2Settings
from headrace.cli.flags import Given
from headrace.cli.handing import handing_settings
from headrace.cli.repositories import engine_settings
from headrace.cli.serve_configuration import Configured
from headrace.cli.serve_logs import trace_settings
from headrace.cli.serve_ports import ports_of
from headrace.core.limits import Limits
from headrace.core.telemetry.progress import Progress, Running
from headrace.engine.traffic.settings import Split, TrafficSettings
from headrace.models.staging import Staging, staged
from headrace.programs.configuration.merging import Configuration
from headrace.programs.configuration.serving import access_settings, media_settings, predict_settings, traffic_settings
from headrace.programs.configuration.single_model import single_model
from headrace.programs.serve.ports import only_this_machine
from headrace.programs.serve.settings import ServerSettings
from headrace.version import __version__


def server_settings(configured: Configured, progress: Progress, staging: Staging | None = None) -> ServerSettings:
    """The server that the options and the configuration ask for. `staging`: a model served straight from its path."""
    given, configuration = configured.given, configured.configuration
    running = Running(progress)
    ports, engine = ports_of(given), engine_settings(given, configured.folders, staging, running)
    measuring = _measuring(given)
    endpoint, trace = trace_settings(given)
    access = access_settings(configuration)
    no_strangers = access.keys_file is not None or only_this_machine((ports.http, ports.grpc))
    return ServerSettings(
        http=ports.http,
        grpc=ports.grpc,
        metrics=ports.metrics,
        listening=ports.listening,
        workers=given.whole("workers"),
        worker_timeout_seconds=given.number("worker-timeout-seconds"),
        grace_seconds=given.number("grace-seconds"),
        access_log=given.truth("access-log"),
        trace_endpoint=endpoint,
        v1=_v1(given),
        v2=_v2(given, trace),
        predict=_predict(configuration, staging),
        openai=OpenAiSettings() if configuration.truth("openai.enabled") else None,
        media=media_settings(configuration),
        access=access,
        allow_admin=no_strangers,
        allow_console=given.truth("console") if given.has("console") else no_strangers,
        traffic=_traffic(configuration, staging),
        traffic_again=(lambda: _traffic(configured.again(), staging)) if configuration.file else None,
        traffic_file=configuration.file,
        measuring=measuring,
        limits=_limits(given),
        engine=replace(
            engine,
            summary_quantiles=measuring.engine_quantiles if measuring else (),
            handing=handing_settings(given),
        ),
        progress=progress,
        running=running,
    )


@contextmanager
def open_settings(configured: Configured, progress: Progress) -> Iterator[ServerSettings]:
    """The same with the folder of a model that is served straight from its path, which is there as long as this is open."""
    single = single_model(configured.configuration, traffic_settings(configured.configuration).splits)
    with ExitStack() as opened:
        staging = None if single is None else opened.enter_context(staged(single))
        yield server_settings(configured, progress, staging)


def _predict(configuration: Configuration, staging: Staging | None) -> PredictSettings | None:
    settings = predict_settings(configuration)
    if settings is None or settings.model or staging is None:
        return settings
    return replace(settings, model=staging.name)


def _traffic(configuration: Configuration, staging: Staging | None) -> TrafficSettings:
    settings = traffic_settings(configuration)
    if staging is None or staging.name in settings.splits or not staging.preferred:
        return settings
    return TrafficSettings({**settings.splits, staging.name: Split({staging.preferred: 1.0})})


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
