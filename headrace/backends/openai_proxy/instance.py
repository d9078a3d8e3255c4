# SPDX-License-Identifier: Apache-2.0
"""Forwards requests to the engine behind a model, and returns its responses as they arrive.

Opened and closed in loader threads, otherwise called in the loop's thread. A request is a `ProxiedRequest`, the handler of
one HTTP response. When its client is gone the connection is closed, so that the engine stops generating.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headrace.backends.contract import EngineServices, Placement, Work
from headrace.backends.openai_proxy.client import Call, EventReader, Headers
from headrace.backends.openai_proxy.engine import Engine
from headrace.backends.openai_proxy.protocol import (
    UpstreamRequest,
    UpstreamResponse,
    build_request,
    parse_error,
    response_error,
)
from headrace.backends.openai_proxy.settings import ProxySettings
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, Internal, Unavailable

log = logging.getLogger("headrace.backends.openai_proxy")

EVENT_BYTES = 16 << 20
ANSWER_BYTES = 256 << 20
_ERROR_BYTES = 1 << 20
_CHECK_SECONDS = 0.05
_LOOP_SECONDS = 30.0
_DONE = b"[DONE]"

Finished = Callable[[], None]


class ProxiedRequest:
    """One request at the engine. Implements `client.ResponseHandler`."""

    def __init__(self, instance: ProxyInstance, work: Work, upstream_request: UpstreamRequest) -> None:
        self._instance = instance
        self.work = work
        self._upstream_request = upstream_request
        self.call: Call | None = None
        self._status = 0
        self._headers: Headers = {}
        self._events: EventReader | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._finished = False
        self.answered = False
        """Whether the final reply was made."""

    def head_received(self, status: int, headers: Headers) -> None:
        """Choose how to read the body: as events, or as one document."""
        self._status = status
        self._headers = headers
        content_type = headers.get(b"content-type", b"").lower()
        if status == 200 and self._upstream_request.streams and content_type.startswith(b"text/event-stream"):
            self._events = EventReader(EVENT_BYTES)

    def body_received(self, data: bytes) -> None:
        """Reply with the events in the data, or collect it."""
        if self.answered:
            return
        events = self._events
        if events is None:
            self._size += len(data)
            if self._size <= (ANSWER_BYTES if self._status == 200 else _ERROR_BYTES):
                self._body.append(data)
            elif self._status == 200:
                self.finish(Unavailable(f"the engine sent a response of more than {ANSWER_BYTES} bytes"))
            return
        try:
            for name, event in events.feed(data):
                self._handle_event(name, event)
        except Exception as error:
            self.finish(_as_error(error))

    def completed(self) -> None:
        """Make the final reply at the end of the response."""
        try:
            if self._status != 200:
                self.finish(response_error(self._status, self._headers, b"".join(self._body)))
            elif self._events is None:
                self._handle_document(b"".join(self._body))
            else:
                for name, event in self._events.finish():
                    self._handle_event(name, event)
                if self._finished:
                    self.finish(None)
                else:
                    self.finish(Unavailable("the engine ended its stream before the response was complete"))
        except Exception as error:
            self.finish(_as_error(error))
        self._instance.request_ended(self)

    def failed(self, reason: str) -> None:
        """Reply with an error: there is no complete response."""
        self.finish(
            Unavailable(f"the engine of model '{self._instance.model_name}' {reason}: retry", retry_after_seconds=1.0)
        )
        self._instance.request_ended(self)

    def finish(self, error: HeadraceError | None) -> None:
        """Make the final reply, an error or nothing more, unless there was one."""
        if not self.answered:
            self.answered = True
            self.work.reply(error)
            if error is not None and self.call is not None:
                self.call.cancel()
                self._instance.request_ended(self)

    def _handle_event(self, name: bytes, data: bytes) -> None:
        if self.answered:
            return
        if data == _DONE:
            self.finish(None)
            return
        error = parse_error(data) if name != b"error" else parse_error(data) or response_error(500, {}, data)
        if error is not None:
            self.finish(error)
            return
        response = UpstreamResponse(data, verbatim=self._upstream_request.verbatim)
        self._finished = self._finished or response.finished
        self.work.reply(response.outputs, final=False, parameters=response.parameters)

    def _handle_document(self, body: bytes) -> None:
        error = parse_error(body)
        if error is not None:
            self.finish(error)
            return
        response = UpstreamResponse(body, verbatim=self._upstream_request.verbatim)
        if not self.answered:
            self.answered = True
            self.work.reply(response.outputs, parameters=response.parameters)


class ProxyInstance:
    """Implements `contract.RequestInstance`."""

    def __init__(self, settings: ProxySettings, placement: Placement, services: EngineServices) -> None:
        self._settings = settings
        self._placement = placement
        self._loop = services.loop
        self._engine: Engine | None = None
        self._requests: set[ProxiedRequest] = set()
        self._blocked: Finished | None = None
        """Called when another request can be sent."""
        self._check_timer: asyncio.TimerHandle | None = None
        self._abandoned = False
        self.model_name = settings.model_name

    # From loader threads

    def open(self) -> None:
        """Start the engine, or connect to it; returns when it is healthy."""
        self._wait(self._open(), self._settings.start_seconds + self._settings.stop_seconds + _LOOP_SECONDS)

    def close(self) -> None:
        """Stop the engine, if we started it, and close all connections."""
        if self._loop.is_running():
            try:
                self._wait(self._close(), self._settings.stop_seconds + _LOOP_SECONDS)
                return
            except Unavailable:
                pass
        if self._engine is not None:
            self._engine.kill_without_loop()

    def _wait(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            future.result(seconds)
        except TimeoutError:
            future.cancel()
            # The coroutine has a timeout of its own, so the loop has stopped.
            if self._engine is not None:
                self._engine.kill_without_loop()
            raise Unavailable("the server stopped while a model was being loaded or unloaded") from None

    async def _open(self) -> None:
        if self._abandoned:
            raise Unavailable("the server is closing")
        self._engine = Engine(self._settings, self._placement, self._loop, self._engine_lost)
        await self._engine.open()

    async def _close(self) -> None:
        for request in tuple(self._requests):
            request.finish(Unavailable(f"model '{self.model_name}' is being unloaded"))
        if self._check_timer is not None:
            self._check_timer.cancel()
        if self._engine is not None:
            await self._engine.close()

    # From the loop's thread

    def abandon(self) -> None:
        """Make `open` fail soon: the server is shutting down."""
        self._abandoned = True
        if self._engine is not None:
            self._engine.abandon()

    def execute(self, batch: Sequence[Work], finished: Finished) -> None:
        """Forward requests to the engine."""
        for work in batch:
            try:
                self._forward(work)
            except HeadraceError as error:
                work.reply(error)
            except Exception:
                log.exception("A request could not be forwarded to the engine of '%s'.", self._placement.name)
                work.reply(Internal(INTERNAL_TEXT))
        if len(self._requests) < self._settings.max_in_flight:
            # Not called directly: the server's engine may pass more work, and would recurse.
            self._loop.call_soon(finished)
        else:
            self._blocked = finished

    def request_ended(self, request: ProxiedRequest) -> None:
        """Remove a request whose connection is free or closed, and accept more work."""
        self._requests.discard(request)
        request.call = None
        if self._blocked is not None and len(self._requests) < self._settings.max_in_flight:
            finished, self._blocked = self._blocked, None
            self._loop.call_soon(finished)

    def _forward(self, work: Work) -> None:
        engine = self._engine
        if engine is None or engine.down is not None or engine.pool is None:
            # Not raised: the traceback of a shared error would grow with each request.
            down = engine.down if engine is not None else None
            work.reply(
                down or Unavailable(f"the engine of model '{self.model_name}' is not running", retry_after_seconds=1.0)
            )
            return
        upstream_request = build_request(work.request, engine.served_model)
        request = ProxiedRequest(self, work, upstream_request)
        self._requests.add(request)
        request.call = engine.pool.post(upstream_request.path, upstream_request.body, request)
        if self._check_timer is None:
            self._check_timer = self._loop.call_later(_CHECK_SECONDS, self._check_requests)

    def _check_requests(self) -> None:
        """Cancel requests that the client cancelled, or that the engine does not answer."""
        self._check_timer = None
        oldest = self._loop.time() - self._settings.idle_seconds
        for request in tuple(self._requests):
            call = request.call
            if call is None:
                continue
            if request.work.cancelled:
                request.finish(Unavailable("the client cancelled the request"))
                call.cancel()
                self.request_ended(request)
            elif call.last_activity < oldest:
                request.finish(
                    Unavailable(
                        f"the engine of model '{self.model_name}' was silent for {self._settings.idle_seconds:g} seconds"
                    )
                )
        if self._requests:
            self._check_timer = self._loop.call_later(_CHECK_SECONDS, self._check_requests)

    def _engine_lost(self, error: Unavailable) -> None:
        """Fail all requests: the engine died."""
        for request in tuple(self._requests):
            request.finish(error)


def _as_error(error: Exception) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return error.with_traceback(None)
    log.error("A response of the engine could not be returned.", exc_info=error)
    return Internal(INTERNAL_TEXT)
