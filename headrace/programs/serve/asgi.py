# SPDX-License-Identifier: Apache-2.0
"""The inference server as an ASGI application, without ports of its own.

Used by `headrace.asgi`. uvicorn or gunicorn has the sockets, processes and signals; each process loads all models and
is independent of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from headrace.core.errors import HeadraceError
from headrace.core.telemetry.tracing import NO_TRACING, open_tracing
from headrace.engine.engine import Engine, open_engine
from headrace.net.asgi_app import Receive, RoutesApp, Scope, Send
from headrace.programs.serve.protocols import Protocols, build_protocols
from headrace.programs.serve.settings import ServerSettings

log = logging.getLogger("headrace.apps")

OpenSettings = Callable[[], AbstractContextManager[ServerSettings]]


class HostedServer:
    """The ASGI application.

    Models are loaded at the lifespan's startup, or at the first request if the host does not support lifespans.
    """

    def __init__(self, open_settings: OpenSettings) -> None:
        self._open_settings = open_settings
        self._exit_stack: ExitStack | None = None
        self._settings: ServerSettings | None = None
        self._engine: Engine | None = None
        self._protocols: Protocols | None = None
        self._routes: RoutesApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a lifespan, a request or a WebSocket."""
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
            return
        if self._routes is None:
            await self.start()
        if self._routes is not None:
            await self._routes(scope, receive, send)

    async def start(self) -> None:
        """Open the engine and load its models."""
        if self._routes is not None:
            return
        self._exit_stack = ExitStack()
        settings = self._exit_stack.enter_context(self._open_settings())
        # The host decides which clients may connect.
        settings = self._settings = replace(settings, allow_admin=settings.access.keys_file is not None)
        engine = self._engine = open_engine(settings.engine)
        tracer = open_tracing(settings.trace_endpoint, "headrace") if settings.trace_endpoint else NO_TRACING
        self._exit_stack.callback(tracer.close)
        self._protocols = build_protocols(engine, settings, tracer, None)
        self._protocols.start()
        self._routes = RoutesApp(self._protocols.site.routes, settings.limits)
        await engine.start()
        self._protocols.traffic.settled()
        log.info("%d model(s): %s", len(engine.plane.model_names()), ", ".join(engine.plane.model_names()))

    async def close(self) -> None:
        """Finish requests in flight and close the engine."""
        if self._engine is None or self._protocols is None or self._settings is None or self._exit_stack is None:
            return
        self._engine.plane.accepting = False
        self._protocols.built.drain()
        self._protocols.traffic.close()
        await self._engine.close(self._settings.grace_seconds)
        await self._protocols.close()
        self._exit_stack.close()
        self._routes = self._engine = None

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        try:
            await self.start()
        except HeadraceError as error:
            # The host prints it; a wrong setting needs no traceback.
            await send({"type": "lifespan.startup.failed", "message": error.message})
            return
        except Exception as error:
            log.exception("Could not start the server")
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()  # lifespan.shutdown
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})
