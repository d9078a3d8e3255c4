# SPDX-License-Identifier: Apache-2.0
"""Compute a line of a batch: the handler of its endpoint answers an exchange that has no connection.

A line is retried while the server's queue is full or its model is being loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from headrace.core.names import REQUEST_ID_FIELD
from headrace.jobs.batch.inference import Outcome
from headrace.jobs.batch.ledger import FailedOutput
from headrace.jobs.batch.sources import Item
from headrace.net.http.exchange import Body, Exchange, Handler, buffer_list
from headrace.net.http.heads import CONTENT_TYPE, JSON, Fields, RequestHead, ResponseHead

_ATTEMPTS = 10
_FIRST_WAIT_SECONDS, _MOST_WAIT_SECONDS = 1.0, 60.0
"""Pauses between retries. Five minutes in total: a model may be replaced meanwhile."""
_AGAIN = (429, 503)
_RESPONSES = "/v1/responses"


class LineExchange(Exchange):
    """The exchange of one line."""

    on_body = on_body_end = on_writable = None
    peer = "a batch"
    started = False

    def __init__(self, endpoint: str, body: bytes, request_id: str, owner: str) -> None:
        fields = [(CONTENT_TYPE, JSON), (REQUEST_ID_FIELD.encode(), request_id.encode())]
        self.head = RequestHead(b"POST", endpoint.encode(), fields, version="1.1")
        self.body = body
        self.params = ()
        self.caller = owner
        self.on_disconnect: Callable[[], None] | None = None
        self.answered: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        """Status and body of the answer."""

    @property
    def closed(self) -> bool:
        """Whether it is answered or cancelled."""
        return self.answered.done()

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        """Store the response."""
        if not self.answered.done():
            self.answered.set_result((head.status, b"".join(buffer_list(body))))

    def cancel(self) -> None:
        """Cancel the computation, like the disconnect of a client."""
        self.answered.cancel()
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        if on_disconnect is not None:
            on_disconnect()


class LineClient:
    """Computes the lines of one batch; implements `jobs.batch.inference.InferenceClient`."""

    max_batch = 1

    def __init__(self, endpoint: str, handler: Handler, owner: str, slots: asyncio.Semaphore, in_flight: int) -> None:
        """`slots` bounds the lines of all batches in the engine."""
        self._endpoint = endpoint
        self._handler = handler
        self._owner = owner
        self._slots = slots
        self.in_flight = in_flight
        self._stopping = asyncio.Event()
        self._open: set[LineExchange] = set()

    def stop(self) -> None:
        """Stop retrying lines; those in the engine may finish."""
        self._stopping.set()

    def cancel(self) -> None:
        """Cancel the lines in the engine, too: their responses are not needed."""
        self._stopping.set()
        for exchange in list(self._open):
            exchange.cancel()

    def prepare(self, item: Item) -> tuple[Any, Item]:
        """Return the key and the prepared item."""
        return None, item

    async def infer(self, prepared: Sequence[Item]) -> list[Outcome]:
        """Return the response to each line."""
        return [await self._respond(item) for item in prepared]

    async def _respond(self, item: Item) -> Outcome:
        # Responses of a batch are in its output: they are not stored beside it.
        body = orjson.dumps({**item.body, "store": False} if self._endpoint == _RESPONSES else item.body)
        request_id = secrets.token_hex(16)
        wait_seconds = _FIRST_WAIT_SECONDS
        for _ in range(_ATTEMPTS - 1):
            status, answer = await self._ask(body, request_id)
            if status not in _AGAIN:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_seconds)
                raise asyncio.CancelledError  # the line is computed after the next start
            wait_seconds = min(2 * wait_seconds, _MOST_WAIT_SECONDS)
        else:
            status, answer = await self._ask(body, request_id)
        response = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(answer)}
        return FailedOutput(response) if status >= 400 else response

    async def _ask(self, body: bytes, request_id: str) -> tuple[int, bytes]:
        async with self._slots:
            exchange = LineExchange(self._endpoint, body, request_id, self._owner)
            self._open.add(exchange)
            try:
                self._handler(exchange)
                return await exchange.answered
            except asyncio.CancelledError:
                exchange.cancel()
                raise
            finally:
                self._open.discard(exchange)
