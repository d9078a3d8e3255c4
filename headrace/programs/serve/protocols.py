# SPDX-License-Identifier: Apache-2.0
"""Put every protocol on one data plane: the routes and services of a server and of its metrics port."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace.api.admin import Admin, admin_table
from headrace.api.metrics.http import Metrics
from headrace.api.openai.http import OpenAiHttp
from headrace.api.openai.response_store import ResponseStore, open_store
from headrace.api.openapi.http import OpenApi, OpenApiSettings
from headrace.api.openapi.openai_routes import batch_table, openai_table
from headrace.api.openapi.predict_routes import predict_table
from headrace.api.predict.grpc import PredictGrpc, predict_schema
from headrace.api.predict.http import PredictHttp
from headrace.api.v1.grpc import V1Grpc
from headrace.api.v1.http import V1Http
from headrace.api.v1.messages import nvidia_schema
from headrace.api.v1.status import V1Statistics
from headrace.api.v2.grpc import V2Grpc
from headrace.api.v2.grpc_messages import inference_schema
from headrace.api.v2.http import V2Http
from headrace.api.v2.shared_state import DecodeTimes, V2State
from headrace.core.telemetry.logs import log_access
from headrace.core.telemetry.metrics import Registry
from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.engine.dataplane import DataPlane
from headrace.engine.engine import Engine
from headrace.engine.traffic.splits import TrafficSplits
from headrace.models.media.reader import MediaReader
from headrace.net.grpc.services import Services
from headrace.net.grpc.standard_services import HealthService, ReflectionService
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.console.http import Console, console_table
from headrace.programs.console.live_data import Addresses
from headrace.programs.console.request_timelines import RequestWatcher
from headrace.programs.serve.access_guard import Guard, Middleware, open_guard
from headrace.programs.serve.openai_batches import OpenAiBatches, open_batches
from headrace.programs.serve.settings import ServerSettings
from headrace.programs.serve.worker import Worker, WorkersV1Statistics


class BuiltSite(NamedTuple):
    """A site, and its parts that drain before it closes."""

    site: Site
    health: HealthService
    streams: tuple[V2Grpc | PredictGrpc, ...]
    decode_times: DecodeTimes

    def drain(self) -> None:
        """Report unhealthy, and end idle streams, so that new work goes to other servers."""
        self.health.shut_down()
        for streams in self.streams:
            streams.drain()


@dataclass(frozen=True, slots=True)
class Protocols:
    """The parts of a server, besides its models and ports."""

    plane: DataPlane
    built: BuiltSite
    traffic: TrafficSplits
    guard: Guard | None
    metrics_site: Site | None
    metrics: Metrics | None
    media: MediaReader | None
    responses: ResponseStore | None
    batches: OpenAiBatches | None
    console: Console | None

    @property
    def site(self) -> Site:
        """The protocols for models."""
        return self.built.site

    def start(self, addresses: Addresses = dict) -> None:
        """Start background tasks. `addresses`: returns the URLs of the ports, for the console."""
        if self.console is not None:
            self.console.start(addresses)
        if self.metrics is not None:
            self.metrics.start()
        if self.guard is not None:
            self.guard.start()
        if self.batches is not None:
            self.batches.start()

    def drain(self) -> None:
        """Start no new work."""
        self.built.drain()
        if self.batches is not None:
            self.batches.drain()

    async def close(self) -> None:
        """Stop background tasks."""
        if self.batches is not None:
            await self.batches.close()
        if self.console is not None:
            self.console.close()
        if self.metrics is not None:
            self.metrics.close()
        if self.guard is not None:
            await self.guard.close()
        if self.media is not None:
            self.media.close()
        if self.responses is not None:
            self.responses.close()


def build_protocols(
    engine: Engine, settings: ServerSettings, tracer: Tracer, worker: Worker | None, folder: str = ""
) -> Protocols:
    """Return all protocols that the settings allow; one of several workers answers for all."""
    plane = engine.plane if worker is None else worker.plane
    traffic = TrafficSplits(engine.plane, engine.metrics, settings.traffic)
    guard = open_guard(settings.access, engine.metrics, folder)
    media = MediaReader(settings.media) if settings.openai is not None else None
    batches = open_batches(plane, settings.openai, media) if not settings.v2.http_restrictions else None
    responses = open_store(settings.openai) if settings.openai is not None else None
    built = build_site(plane, settings, tracer, worker, traffic, guard, media, batches, responses, engine.metrics)
    metrics: Metrics | None = None
    metrics_site: Site | None = None
    if settings.metrics_settings is not None:
        make = Metrics if worker is None else worker.metrics
        metrics = make(engine.plane, engine.metrics, settings.metrics_settings)
        metrics.add_to(built.site.routes)
        metrics_site = Site(Routes(Middleware(guard).http), limits=settings.limits)
        metrics.add_to(metrics_site.routes)
    console: Console | None = None
    if settings.allow_console and not settings.v2.http_restrictions:
        console = _console(engine, settings, metrics, worker, built.decode_times)
        console.add_to(built.site.routes)
    return Protocols(plane, built, traffic, guard, metrics_site, metrics, media, responses, batches, console)


def build_site(
    plane: DataPlane,
    settings: ServerSettings,
    tracer: Tracer = NO_TRACING,
    worker: Worker | None = None,
    traffic: TrafficSplits | None = None,
    guard: Guard | None = None,
    media: MediaReader | None = None,
    batches: OpenAiBatches | None = None,
    responses: ResponseStore | None = None,
    metrics: Registry | None = None,
) -> BuiltSite:
    """Return the protocols for models over one data plane."""
    middleware = Middleware(guard, worker.policies if worker is not None else None)
    routes, services = Routes(middleware.http), Services(middleware)
    v2 = V2State(plane, settings.v2, tracer)
    memory = v2.memory if settings.v2.allow_client_shm else None
    v1_statistics = V1Statistics(settings.v1)
    if worker is not None:
        v1_statistics = WorkersV1Statistics(settings.v1, worker.stats, worker.started)
    V2Http(plane, tracer, v2).add_to(routes)
    key_of, sticky_fields = (traffic.key_of, traffic.sticky_fields) if traffic is not None else (None, ())
    predict = PredictHttp(plane, settings.predict, key_of, more_fields=sticky_fields) if settings.predict else None
    if predict is not None:
        predict.health.add_to(routes)
    # The other protocols offer the same operations: they would bypass restrictions of v2.
    if not settings.v2.http_restrictions:
        V1Http(plane, v1_statistics, memory).add_to(routes)
        if predict is not None:
            predict.add_to(routes)
        if settings.openai is not None:
            kv_transfer = settings.engine.kv_transfer
            OpenAiHttp(plane, settings.openai, media, kv_transfer, responses, metrics).add_to(routes)
            if batches is not None:
                batches.add_to(routes)
        if traffic is not None and settings.allow_admin:
            _admin(traffic, worker).add_to(routes)
    tables = [predict_table(), admin_table(), openai_table(), batch_table(), console_table()]
    OpenApi(plane, routes, _openapi_settings(settings), tables).add_to(routes)
    v2_grpc = V2Grpc(plane, tracer, v2)
    v2_grpc.add_to(services)
    streams: tuple[V2Grpc | PredictGrpc, ...] = (v2_grpc,)
    if not settings.v2.grpc_restrictions:
        V1Grpc(plane, v1_statistics, memory).add_to(services)
        if settings.predict is not None:
            predict_grpc = PredictGrpc(plane, settings.predict, key_of)
            predict_grpc.add_to(services)
            streams = (v2_grpc, predict_grpc)
    health = HealthService()
    health.add_to(services)
    ReflectionService(services, [inference_schema(), nvidia_schema(), predict_schema()]).add_to(services)
    for name in services.names:
        health.set(name, True)
    site = Site(
        routes if settings.http is not None else None,
        services=services if settings.grpc is not None else None,
        limits=settings.limits,
        access_log=None if not settings.access_log else log_access if guard is None else guard.access_log,
    )
    return BuiltSite(site, health, streams, v2.decode_times)


def _admin(traffic: TrafficSplits, worker: Worker | None) -> Admin:
    if worker is None:
        return Admin(traffic)
    stats = worker.stats
    stats.add_source("traffic", traffic.numbers)
    traffic.on_rollback = worker.policies.rolled_back
    return Admin(traffic, lambda: stats.others("traffic"))


def _console(
    engine: Engine, settings: ServerSettings, metrics: Metrics | None, worker: Worker | None, times: DecodeTimes
) -> Console:
    machine = metrics.hardware_samples if metrics is not None else tuple
    control = bool(settings.engine.repositories) and settings.engine.repository.mode in ("explicit", "on-demand")
    watcher = RequestWatcher(engine.plane, times.received_ns, times.switch)
    tasks, seconds = settings.running.tasks, settings.console_history_seconds
    if worker is None:
        return Console(
            engine.plane,
            engine.metrics,
            machine,
            control=control,
            tasks=tasks,
            watcher=watcher,
            history_seconds=seconds,
        )
    stats = worker.stats
    console = Console(
        engine.plane,
        engine.metrics,
        machine,
        lambda: stats.others("console"),
        control=control,
        tasks=tasks,
        watcher=watcher,
        others_requests=lambda: stats.others("requests"),
        gather=stats.gather,
        history_seconds=seconds,
        started=time.time() - (time.monotonic() - worker.started),
    )
    stats.add_source("console", console.numbers)
    stats.add_source("requests", console.timelines)
    return console


def _openapi_settings(settings: ServerSettings) -> OpenApiSettings:
    """Return the server's address for the OpenAPI document, and whether it may list models."""
    restricted = {api for restriction in settings.v2.http_restrictions for api in restriction.apis}
    defaults = OpenApiSettings(show_models=not restricted & {"metadata", "model-config"})
    address = settings.http or settings.grpc
    if address is None or not address.port:
        return defaults
    scheme = "https" if settings.listening.tls is not None else "http"
    anywhere = address.host in ("0.0.0.0", "::")  # noqa: S104  # what a client cannot connect to
    return replace(
        defaults, server_url=f"{scheme}://{Address('localhost' if anywhere else address.host, address.port)}"
    )
