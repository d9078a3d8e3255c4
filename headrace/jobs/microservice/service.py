# SPDX-License-Identifier: Apache-2.0
"""One service: its state, its model, its rest. Asked by `routes`, in the loop's thread; made by `app`.

Turns the JSON of a request into the JSON of its answer. Knows nothing of HTTP but the codes that states have.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from headrace.api.metrics.http import Metrics
from headrace.api.metrics.settings import MetricsSettings
from headrace.core.clock import Clock
from headrace.core.errors import InvalidArgument, Unavailable
from headrace.engine.engine import Engine
from headrace.jobs.microservice.callbacks import Reason, post, status_update
from headrace.jobs.microservice.chat import chat_body, read_chat
from headrace.jobs.microservice.idle import IdleWatch
from headrace.jobs.microservice.kinds.contract import Begin, Kind, Streaming
from headrace.jobs.microservice.model_folder import shown_name
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.jobs.microservice.state_file import StateFile
from headrace.jobs.microservice.states import Lifecycle, NotReady, Phase, not_ready
from headrace.jobs.microservice.steps import BeforeLoad, Steps
from headrace.jobs.microservice.threads import in_thread
from headrace.jobs.microservice.times import iso

log = logging.getLogger("headrace.microservice")

_MACHINE_MS = 30_000
"""Between two looks at the machine for metrics: services are many, and most of the time nobody asks them."""


def stop_by_signal() -> None:
    """End this process as whoever started it would."""
    os.kill(os.getpid(), signal.SIGTERM)


class Microservice:
    """`start` it, ask it, `close` it."""

    def __init__(
        self,
        settings: MicroserviceSettings,
        clock: Clock,
        *,
        stop: Callable[[], None] = stop_by_signal,
        before_load: BeforeLoad | None = None,
    ) -> None:
        self.settings = settings
        self.lifecycle = Lifecycle(iso(clock.wall()))
        self.idle = IdleWatch(settings.idle, clock)
        self.port = settings.address.port
        self._clock = clock
        self._stop = stop
        self.metrics: Metrics | None = None
        """Of the model; None until there is an engine."""
        self._steps = Steps(settings, self.lifecycle, clock, self._moved, opened=self._measure, before_load=before_load)
        self._kind: Kind | None = None
        self.model = shown_name(settings.model_path) if settings.model_path else settings.pipeline.model_key
        """What answers call the model."""
        self._loaded_at = 0.0
        self._state_file = StateFile(settings.folder, settings.job_id)
        self._tasks: list[asyncio.Task[Any]] = []
        self._stopping = False

    def start(self) -> None:
        """Begin both steps in the background; requests are answered from now on."""
        self._moved()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._watch())]

    def stop_being_ready(self) -> None:
        """The process has been told to end: what is in flight is answered, and nothing is brought any more."""
        self._stopping = True
        self._steps.cancel()

    async def close(self, grace_seconds: float) -> None:
        """Let go of everything."""
        self.stop_being_ready()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.metrics is not None:
            self.metrics.close()
        if self._kind is not None:
            await self._kind.close()
        await self._steps.close(grace_seconds)
        self._state_file.remove()

    # What requests ask

    def gate(self) -> NotReady | None:
        """What to tell a request now; None if the model can be asked."""
        return not_ready(self.lifecycle.flags)

    @property
    def model_type(self) -> str:
        """What kind of model it is; "" while that is not known."""
        return self._kind.model_type if self._kind is not None else ""

    async def infer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to an inference request that came through the gate."""
        kind = self._ready_kind()
        began = self._clock.monotonic()
        self.idle.began()
        try:
            results = await kind.infer(body)
        finally:
            self.idle.ended()
        results["inference_time"] = round(self._clock.monotonic() - began, 6)
        results["timestamp"] = self.now()
        results["model_type"] = kind.model_type
        return {
            "status": "completed",
            "results": results,
            "job_id": self.settings.job_id,
            "message": "Inference completed successfully",
        }

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a chat request that came through the gate."""
        kind = self._ready_kind()
        self.idle.began()
        try:
            answer = await kind.chat(read_chat(body))
        finally:
            self.idle.ended()
        return chat_body(answer, self.model, self._clock.wall())

    async def stream(self, body: Mapping[str, Any], begin: Begin) -> None:
        """Answer a chat request that came through the gate in pieces."""
        kind = self._ready_kind()
        self.idle.began()
        try:
            if not isinstance(kind, Streaming):
                raise InvalidArgument(
                    "'stream' is true, and what this model makes comes whole: leave it out, or send false"
                )
            await kind.stream(read_chat(body), begin)
        finally:
            self.idle.ended()

    def status(self) -> dict[str, Any]:
        """Everything there is to know."""
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
            **self._rest(),
            "health_monitor_active": any(not task.done() for task in self._tasks[1:]),
            "progress": self.lifecycle.progress.to_json(),
            "parameters": [each.describe() for each in self._kind.parameters if not each.ignored] if self._kind else [],
            "timestamp": self.now(),
        }

    def liveness(self) -> dict[str, Any]:
        """Always well: it answers."""
        flags = self.lifecycle.flags
        return {
            "status": "healthy",
            "model_loaded": flags.model_loaded,
            "model_loading": flags.model_loading,
            "server_initializing": flags.server_initializing,
            "job_id": self.settings.job_id,
            "model_type": self.model_type,
            **self._rest(),
            "progress": self.lifecycle.progress.to_json(),
            "timestamp": self.now(),
        }

    def models(self) -> dict[str, Any]:
        """As OpenAI's clients list them."""
        listed = []
        if self.lifecycle.phase is Phase.READY:
            created = int(self._loaded_at)
            listed = [{"id": self.model, "object": "model", "created": created, "owned_by": "headrace"}]
        return {"object": "list", "data": listed}

    def wall(self) -> float:
        """The time, in seconds since 1970."""
        return self._clock.wall()

    def now(self) -> str:
        """The time, as answers write it."""
        return iso(self._clock.wall())

    def _rest(self) -> dict[str, Any]:
        last = self.idle.last_request_wall
        return {
            "last_request_time": iso(last) if last is not None else None,
            "idle_time_minutes": round(self.idle.minutes, 3),
            "idle_timeout_minutes": self.settings.idle.timeout_minutes,
            "auto_deletion_enabled": self.settings.idle.enabled,
        }

    def _ready_kind(self) -> Kind:
        if self._kind is None:
            raise Unavailable("the model is not loaded: try again later")
        return self._kind

    # What goes on in the background

    async def _run(self) -> None:
        kind = await self._steps.run()
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
        self._moved()
        log.info("the model is ready", extra={"job": self.settings.job_id, "model_type": kind.model_type})

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(max(self.settings.idle.period_seconds, self.idle.least_seconds))
            await self.look()

    async def look(self) -> None:
        """Act if nobody has asked anything for too long."""
        if not self.idle.expired():
            return
        minutes = self.settings.idle.timeout_minutes
        if self.settings.callback is not None:
            log.info("idle for %g minutes: asking to be deleted", minutes)
            if not await self._ask_for_deletion("idle_timeout_exceeded") and not self.settings.idle.exits:
                self.idle.again()
        if self.settings.idle.exits:
            log.info("idle for %g minutes: ending", minutes)
            self._stop()
        elif self.settings.callback is None:
            log.info("idle for %g minutes; --exit-when-idle would end the service now", minutes)

    async def _ask_for_deletion(self, reason: Reason, error: str | None = None) -> bool:
        callback = self.settings.callback
        # A service that was told to end has broken its download off itself.
        if callback is None or not self.settings.idle.enabled or self._stopping:
            return False
        rest = self._rest()
        told = {name: rest[name] for name in ("idle_time_minutes", "idle_timeout_minutes", "last_request_time")}
        told["timestamp"] = self.now()
        if error is not None:
            told["error"] = error
        body = status_update(callback, reason, told)
        return await in_thread(lambda: post(callback, body), "headrace-status-update")

    def _measure(self, engine: Engine) -> None:
        self.metrics = Metrics(engine.plane, engine.metrics, MetricsSettings(interval_ms=_MACHINE_MS))
        self.metrics.start()

    def _moved(self) -> None:
        secrets = self.settings.secrets
        state = self.status() | {"pid": os.getpid(), "model_params": dict(self.settings.specs)}
        self._state_file.write(secrets.hide_tree(state))
