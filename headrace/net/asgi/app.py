# SPDX-License-Identifier: Apache-2.0
"""An ASGI application as a handler of the wire. Made by composition roots, mounted on `Routes`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from headrace.net.asgi.cycle import HttpCycle
from headrace.net.asgi.lifespan import Lifespan
from headrace.net.asgi.scope import Application, http_scope, websocket_scope
from headrace.net.asgi.session import WebSocketSession
from headrace.net.websocket.accept import refuse
from headrace.net.websocket.handshake import HandshakeRefused, asks_for_websocket, negotiate

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange


class AsgiApp:
    """`routes.mount(root_path, AsgiApp(app, root_path).handle)`, between `startup` and `shutdown`."""

    def __init__(self, app: Application, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")
        self._lifespan = Lifespan(app)
        self._state: dict[str, Any] | None = None
        # The loop keeps only weak references to tasks: without this, a waiting one could be collected.
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self) -> None:
        """Run the application's start-up; raises `lifespan.LifespanFailed` if it says that it cannot start."""
        await self._lifespan.startup()
        self._state = self._lifespan.state

    async def shutdown(self) -> None:
        """Wait for running requests and their background tasks, then run the application's shutdown."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        await self._lifespan.shutdown()

    def abort(self) -> None:
        """Cancel everything that still runs. For a shutdown whose time is over."""
        for task in self._tasks:
            task.cancel()

    def handle(self, exchange: Exchange) -> None:
        """Answer a request by the application. A route that uses this must stream its body, as mounts do."""
        if asks_for_websocket(exchange.head):
            try:
                negotiate(exchange.head)
            except HandshakeRefused as refused:
                refuse(exchange, refused)
                return
            session = WebSocketSession(exchange)
            self._start(session.run(self._app, websocket_scope(exchange, self._root_path, self._state)))
        else:
            cycle = HttpCycle(exchange)
            self._start(cycle.run(self._app, http_scope(exchange, self._root_path, self._state)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
