# SPDX-License-Identifier: Apache-2.0
"""`Microservice`: one model with its lifecycle, idle timeout and statuses. `routes` calls it in the loop's thread.

Turns the JSON of a request into the JSON of its response; knows nothing of HTTP but the status codes of the lifecycle.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.api.metrics.http import Metrics
from headrace.api.metrics.settings import MetricsSettings
from headrace.core.clock import Clock
from headrace.core.errors import InvalidArgument, Unavailable
from headrace.engine.engine import Engine
from headrace.jobs.concurrency import run_in_thread
from headrace.jobs.microservice.chat import chat_body, read_chat
from headrace.jobs.microservice.idle import IdleTimer, Reason, post_status_update, status_update_body
from headrace.jobs.microservice.lifecycle import Lifecycle, NotReady, Phase, StateFile, not_ready
from headrace.jobs.microservice.model_kinds.contract import Begin, ModelKind, StreamingKind
from headrace.jobs.microservice.model_loader import display_name
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.jobs.microservice.startup import BeforeLoad, Startup
from headrace.jobs.records import iso

if TYPE_CHECKING:
    from headrace.backends.llm.tensor_parallel.node_pool import NodePool

log = logging.getLogger("headrace.microservice")

_METRICS_INTERVAL_MS = 30_000
"""Interval of machine metrics: long, because there are many services and few scrapes."""


def stop_by_signal() -> None:
    """Send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


class Microservice:
    """One microservice: `start` it, then send requests, then `close` it."""

    def __init__(
        self,
        settings: MicroserviceSettings,
        clock: Clock,
        *,
        stop: Callable[[], None] = stop_by_signal,
        before_load: BeforeLoad | None = None,
        nodes: NodePool | None = None,
    ) -> None:
        self.settings = settings
        self.lifecycle = Lifecycle(iso(clock.wall()))
        self.idle = IdleTimer(settings.idle, clock)
        self.port = settings.address.port
        self._clock = clock
        self._stop = stop
        self.metrics: Metrics | None = None
        """Metrics of the model; None until there is an engine."""
        self._startup = Startup(
            settings,
            self.lifecycle,
            clock,
            self._write_state,
            on_engine=self._start_metrics,
            before_load=before_load,
            nodes=nodes,
        )
        self._kind: ModelKind | None = None
        self.model = display_name(settings.model_path) if settings.model_path else settings.pipeline.model_key
        """The model's name in responses."""
        self._loaded_at = 0.0
        self._state_file = StateFile(settings.folder, settings.job_id)
        self._tasks: list[asyncio.Task[Any]] = []
        self._stopping = False

    def start(self) -> None:
        """Start downloading and loading in the background."""
        self._write_state()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._watch_idle())]

    def drain(self) -> None:
        """Start draining: finish requests in flight, and cancel downloads."""
        self._stopping = True
        self._startup.cancel()

    async def close(self, grace_seconds: float) -> None:
        """Stop all tasks, the model and the engine."""
        self.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.metrics is not None:
            self.metrics.close()
        if self._kind is not None:
            await self._kind.close()
        await self._startup.close(grace_seconds)
        self._state_file.remove()

    # Requests

    def not_ready_response(self) -> NotReady | None:
        """Return the response for a model that is not ready; None if it is ready."""
        return not_ready(self.lifecycle.flags)

    @property
    def model_type(self) -> str:
        """Return the model type; "" while it is unknown."""
        return self._kind.model_type if self._kind is not None else ""

    async def infer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Run an inference request; the model must be ready."""
        kind = self._ready_kind()
        started = self._clock.monotonic()
        self.idle.request_started()
        try:
            results = await kind.infer(body)
        finally:
            self.idle.request_ended()
        results["inference_time"] = round(self._clock.monotonic() - started, 6)
        results["timestamp"] = self.now()
        results["model_type"] = kind.model_type
        return {
            "status": "completed",
            "results": results,
            "job_id": self.settings.job_id,
            "message": "Inference completed successfully",
        }

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Run a chat request; the model must be ready."""
        kind = self._ready_kind()
        self.idle.request_started()
        try:
            response = await kind.chat(read_chat(body))
        finally:
            self.idle.request_ended()
        return chat_body(response, self.model, self._clock.wall())

    async def stream(self, body: Mapping[str, Any], begin: Begin) -> None:
        """Stream the response to a chat request; the model must be ready."""
        kind = self._ready_kind()
        self.idle.request_started()
        try:
            if not isinstance(kind, StreamingKind):
                raise InvalidArgument("'stream' is true, but this model does not stream: omit it, or send false")
            await kind.stream(read_chat(body), begin)
        finally:
            self.idle.request_ended()

    def status(self) -> dict[str, Any]:
        """Return the response of /api/v1/status."""
        flags = self.lifecycle.flags
        phase = self.lifecycle.phase
        return {
            "job_id": self.settings.job_id,
            "status": "unhealthy" if phase.failed else "healthy",
            "model_loaded": flags.model_loaded,
            "model_loading": flags.model_loading,
            "server_initializing": flags.server_initializing,
            "initialization_error": flags.initialization_error,
            "model_load_error": flags.model_load_error,
            "model_state": phase.value,
            "model_type": self.model_type,
            "model": self.model,
            "network_arch": self.settings.network_arch,
            "pod_name": os.environ.get("POD_NAME") or os.environ.get("HOSTNAME") or socket.gethostname(),
            "pod_status": "Terminating" if self._stopping else "Running",
            "server_port": self.port,
            **self._idle_fields(),
            "health_monitor_active": any(not task.done() for task in self._tasks[1:]),
            "progress": self.lifecycle.progress.to_json(),
            "parameters": [parameter.describe() for parameter in self._kind.parameters if not parameter.ignored]
            if self._kind
            else [],
            "timestamp": self.now(),
        }

    def liveness(self) -> dict[str, Any]:
        """Return the liveness response."""
        flags = self.lifecycle.flags
        return {
            "status": "healthy",
            "model_loaded": flags.model_loaded,
            "model_loading": flags.model_loading,
            "server_initializing": flags.server_initializing,
            "job_id": self.settings.job_id,
            "model_type": self.model_type,
            **self._idle_fields(),
            "progress": self.lifecycle.progress.to_json(),
            "timestamp": self.now(),
        }

    def models(self) -> dict[str, Any]:
        """Return the model list of OpenAI's API."""
        models = []
        if self.lifecycle.phase is Phase.READY:
            created = int(self._loaded_at)
            models = [{"id": self.model, "object": "model", "created": created, "owned_by": "headrace"}]
        return {"object": "list", "data": models}

    def wall(self) -> float:
        """Return the time in seconds since 1970."""
        return self._clock.wall()

    def now(self) -> str:
        """Return the time as ISO 8601."""
        return iso(self._clock.wall())

    def _idle_fields(self) -> dict[str, Any]:
        last = self.idle.last_request_wall
        return {
            "last_request_time": iso(last) if last is not None else None,
            "idle_time_minutes": round(self.idle.minutes, 3),
            "idle_timeout_minutes": self.settings.idle.timeout_minutes,
            "auto_deletion_enabled": self.settings.idle.enabled,
        }

    def _ready_kind(self) -> ModelKind:
        if self._kind is None:
            raise Unavailable("the model is not loaded: try again later")
        return self._kind

    # Background tasks

    async def _run(self) -> None:
        kind = await self._startup.run()
        if kind is None:
            flags = self.lifecycle.flags
            if flags.initialization_error is not None:
                await self._ask_for_deletion("initialization_failed", flags.initialization_error)
            else:
                await self._ask_for_deletion("model_loading_failed", flags.model_load_error)
            return
        self._kind = kind
        self._loaded_at = self._clock.wall()
        self.idle.loaded()
        self.lifecycle.loaded(self.now())
        self._write_state()
        log.info("The model is ready.", extra={"job": self.settings.job_id, "model_type": kind.model_type})

    async def _watch_idle(self) -> None:
        while True:
            await asyncio.sleep(max(self.settings.idle.period_seconds, self.idle.next_check_seconds))
            await self.check_idle()

    async def check_idle(self) -> None:
        """Ask for deletion, or exit, if the idle timeout has passed."""
        if not self.idle.expired():
            return
        minutes = self.settings.idle.timeout_minutes
        if self.settings.callback is not None:
            log.info("Idle for %g minutes: asking for deletion.", minutes)
            if not await self._ask_for_deletion("idle_timeout_exceeded") and not self.settings.idle.exit_when_idle:
                self.idle.report_again()
        if self.settings.idle.exit_when_idle:
            log.info("Idle for %g minutes: exiting.", minutes)
            self._stop()
        elif self.settings.callback is None:
            log.info("Idle for %g minutes; --exit-when-idle would stop the service now.", minutes)

    async def _ask_for_deletion(self, reason: Reason, error: str | None = None) -> bool:
        callback = self.settings.callback
        # A draining service has cancelled its download itself.
        if callback is None or not self.settings.idle.enabled or self._stopping:
            return False
        idle_fields = self._idle_fields()
        fields = {
            name: idle_fields[name] for name in ("idle_time_minutes", "idle_timeout_minutes", "last_request_time")
        }
        fields["timestamp"] = self.now()
        if error is not None:
            fields["error"] = error
        body = status_update_body(callback, reason, fields)
        return await run_in_thread(lambda: post_status_update(callback, body), "headrace-status-update")

    def _start_metrics(self, engine: Engine) -> None:
        self.metrics = Metrics(engine.plane, engine.metrics, MetricsSettings(interval_ms=_METRICS_INTERVAL_MS))
        self.metrics.start()

    def _write_state(self) -> None:
        secrets = self.settings.secrets
        state = self.status() | {"pid": os.getpid(), "model_params": dict(self.settings.specs)}
        self._state_file.write(secrets.redact_tree(state))
