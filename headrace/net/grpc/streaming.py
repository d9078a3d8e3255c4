# SPDX-License-Identifier: Apache-2.0
"""Serves a call with a coroutine: `async for` over what the client sends, `await send` for what goes back.

Used for methods that are not the hot path, and for all streaming ones that are easier to read so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from headrace.core.errors import Cancelled
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import StreamHandler
from headrace.net.grpc.status import Status
from headrace.net.http.exchange import Buffer

_WAITING_BYTES = 1024 * 1024
"""Received messages that wait for the coroutine before the client is held back, in bytes."""

_MESSAGE_COST = _WAITING_BYTES // 16
"""Counted for each message beside its bytes, so that many small ones hold the client back too."""


class MessageStream:
    """A call for a coroutine."""

    def __init__(self, call: GrpcCall) -> None:
        self.call = call
        self._messages: deque[Buffer] = deque()
        self._waiting = 0
        self._ended = False
        self._arrival = asyncio.Event()
        self._room = asyncio.Event()
        call.on_message = self._on_message
        call.on_half_close = self._on_half_close
        call.on_writable = self._room.set

    async def receive(self) -> Buffer | None:
        """The next message, or None after the last."""
        while not self._messages:
            if self._ended:
                return None
            self._arrival.clear()
            await self._arrival.wait()
        message = self._messages.popleft()
        self._waiting -= len(message) + _MESSAGE_COST
        if self._waiting <= _WAITING_BYTES // 2:
            self.call.resume()
        return message

    async def __aiter__(self) -> AsyncIterator[Buffer]:
        """Every message the client sends."""
        while (message := await self.receive()) is not None:
            yield message

    async def send(self, message: Buffer | list[Buffer]) -> None:
        """Send a message, and wait while the client does not take more."""
        if self.call.over:
            raise Cancelled("the call is over")
        self._room.clear()
        if not self.call.send(message):
            await self._room.wait()

    def _on_message(self, message: Buffer) -> None:
        self._messages.append(message)
        self._waiting += len(message) + _MESSAGE_COST
        if self._waiting >= _WAITING_BYTES:
            self.call.pause()
        self._arrival.set()

    def _on_half_close(self) -> None:
        self._ended = True
        self._arrival.set()


class CoroutineCalls:
    """Runs a coroutine per call and keeps hold of it: a task nobody refers to may be collected while it runs."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def serve(self, coroutine: Callable[[MessageStream], Awaitable[None]]) -> StreamHandler:
        """A handler for `Services.streaming`. The call ends when the coroutine does: OK, or its error's status."""

        def open_call(call: GrpcCall) -> None:
            stream = MessageStream(call)
            task = asyncio.ensure_future(self._run(coroutine, stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            call.on_cancel = task.cancel

        return open_call

    async def _run(self, coroutine: Callable[[MessageStream], Awaitable[None]], stream: MessageStream) -> None:
        call = stream.call
        try:
            await coroutine(stream)
        except asyncio.CancelledError:
            # Most often because the call is over; if not, something the coroutine awaited was cancelled.
            call.finish(Status.CANCELLED, "the call was cancelled by the server")
            raise
        except BaseException as error:
            call.fail(error)
        else:
            call.finish()
