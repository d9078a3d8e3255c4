# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping an application by the ASGI lifespan protocol. Owned by `app.AsgiApp`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from headrace.net.asgi.scope import Application, Message, lifespan_scope

log = logging.getLogger("headrace.net.asgi")


class LifespanFailed(RuntimeError):
    """The application says that it could not start; the server should not either."""


class Lifespan:
    """One call of the application that lives as long as the server. An application may decline it by raising."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._task: asyncio.Task[None] | None = None
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._answer: asyncio.Future[Message] | None = None
        self.state: dict[str, Any] = {}
        """What the application wants its requests to see; each gets a copy."""

    async def startup(self) -> None:
        """Ask the application to start; raises `LifespanFailed` if it says it cannot."""
        self._task = asyncio.create_task(self._run(), name="asgi lifespan")
        answer = await self._ask("lifespan.startup")
        if answer is None:
            self._task = None
        elif answer["type"] == "lifespan.startup.failed":
            await self._end()
            raise LifespanFailed(f"the application did not start: {answer.get('message') or 'it gave no reason'}")

    async def shutdown(self) -> None:
        """Ask the application to stop, if it was started, and wait until it has."""
        if self._task is None:
            return
        answer = await self._ask("lifespan.shutdown")
        await self._end()
        if answer is not None and answer["type"] == "lifespan.shutdown.failed":
            log.error("the application did not stop well: %s", answer.get("message", ""))

    async def _run(self) -> None:
        try:
            await self._app(lifespan_scope(self.state), self._inbox.get, self._send)
        except Exception:
            # The specification wants servers to go on: the application may simply not know this scope.
            log.info("the application takes no part in the lifespan protocol", exc_info=True)

    async def _ask(self, kind: str) -> Message | None:
        """Send a message and wait for its answer; None if the application ends without one."""
        if self._task is None:
            return None
        self._answer = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait({"type": kind})
        await asyncio.wait((self._answer, self._task), return_when=asyncio.FIRST_COMPLETED)
        return self._answer.result() if self._answer.done() else None

    async def _send(self, message: Message) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    async def _end(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait((task,))
