# SPDX-License-Identifier: Apache-2.0
"""One replica of a service: starts a server, forwards requests to it, and ends with it. `application` gives it to Ray Serve.

If the server ends by itself, open requests get an error and the replica's process ends. Ray notices that at once; a health
check would have to fail three times. A replica of several servers starts the leader of the group, and `workers` the others;
it ends with any of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from starlette.responses import Response, StreamingResponse

from headrace.core.errors import DeadlineExceeded, FailedPrecondition, HeadraceError
from headrace.fleet.ray_serve.forwarding import Forwarder, ForwardRequest, ForwardResponse, target_of
from headrace.fleet.ray_serve.replica_spec import GroupMember, ReplicaSpec, parse_spec
from headrace.fleet.ray_serve.server_process import ServerProcess, start_server
from headrace.fleet.ray_serve.workers import STOP_SECONDS, LaunchWorkers, Workers, launch_workers, leader_address

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

log = logging.getLogger("headrace.ray")

_LAST_ERRORS_SECONDS = 1.0
"""Delay before the process exits, so that the errors of open requests are sent."""


class ReplicaServer:
    """A replica. Used in one event loop."""

    def __init__(
        self,
        spec: ReplicaSpec,
        server: ServerProcess,
        end_process: Callable[[int], Any] = os._exit,
        workers: Workers | None = None,
    ) -> None:
        """server: it is ready. end_process: ends this process at once, whatever Ray does in it."""
        self._server = server
        self._workers = workers
        self._end_process = end_process
        self._forwarder = Forwarder(server.port, spec.request_seconds)
        self._watch = asyncio.ensure_future(self._end_with_server())

    @classmethod
    async def start(
        cls,
        content: Mapping[str, Any],
        launch: Callable[[ReplicaSpec, GroupMember | None], Awaitable[ServerProcess]] = start_server,
        end_process: Callable[[int], Any] = os._exit,
        launch_others: LaunchWorkers = launch_workers,
        address: Callable[[], str] = leader_address,
    ) -> Self:
        """Start the server and wait until it is ready. content: a `ReplicaSpec` as JSON. Raises HeadraceError."""
        spec = parse_spec(content)
        member = None if spec.worker is None else GroupMember(spec.worker.size + 1, 0, address(), secrets.token_hex(32))
        server = await launch(spec, member)
        workers: Workers | None = None
        try:
            if member is not None and member.size > 1:
                workers = await launch_others(spec, member, server.ports)
            await _wait_ready(server, workers)
        except BaseException:
            await _stop(server, workers)
            raise
        return cls(spec, server, end_process, workers)

    async def answer(self, request: Request) -> Response:
        """Answer one HTTP request."""
        body = request.stream() if has_body(request.headers) else None
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
        try:
            response = await self._forwarder.send(
                ForwardRequest(request.method, target_of(request.scope), headers, body)
            )
        except HeadraceError as error:
            return error_response(error)
        return _ForwardedResponse(response)

    async def check(self) -> None:
        """Raise Unavailable if the server has ended or is not ready."""
        await self._server.check()

    async def watched(self) -> None:
        """Wait until the server has exited by itself and the exit of the replica's process was requested."""
        await self._watch

    async def stop(self) -> None:
        """Stop the server."""
        self._watch.cancel()
        await _stop(self._server, self._workers)
        await self._forwarder.close()

    async def _end_with_server(self) -> None:
        log.error("%s", await _first_end(self._server, self._workers))
        await asyncio.sleep(_LAST_ERRORS_SECONDS)
        self._end_process(1)


async def _first_end(server: ServerProcess, workers: Workers | None) -> str:
    """Wait until the server or a worker ends by itself; return which, and how."""
    ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(server.wait())]
    if workers is not None:
        ends.append(asyncio.ensure_future(workers.ended()))
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return server.end_message(ends[0].result()) if ends[0].done() else str(ends[1].result())
    finally:
        for end in ends:
            end.cancel()


async def _wait_ready(server: ServerProcess, workers: Workers | None) -> None:
    """Wait until the server is ready, which a leader is with all its workers. Raises FailedPrecondition."""
    if workers is None:
        await server.wait_ready()
        return
    ready, ended = asyncio.ensure_future(server.wait_ready()), asyncio.ensure_future(workers.ended())
    try:
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise FailedPrecondition(f"{ended.result()}; it ended before the group was ready")
        ready.result()
    finally:
        ready.cancel()
        ended.cancel()
        await asyncio.gather(ready, ended, return_exceptions=True)


async def _stop(server: ServerProcess, workers: Workers | None) -> None:
    """Stop the leader first: requests that it still answers need the workers."""
    await server.stop(STOP_SECONDS)
    if workers is not None:
        await workers.stop()


class _ForwardedResponse(StreamingResponse):
    """A response of the server; closes its connection at the end, whether or not it was sent."""

    def __init__(self, response: ForwardResponse) -> None:
        super().__init__(response.body, response.status)
        self.raw_headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in response.headers
        ]
        self._body = response.body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._body.close()


def has_body(headers: Mapping[str, str]) -> bool:
    """Whether a request has a body; one of unknown length is chunked."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def error_response(error: HeadraceError) -> Response:
    """Return the response for an error of the replica itself, in the form of the server's own errors."""
    status = 504 if isinstance(error, DeadlineExceeded) else 503
    headers = {} if error.retry_after_seconds is None else {"retry-after": f"{error.retry_after_seconds:g}"}
    content = json.dumps({"error": error.message})
    return Response(content, status, headers, "application/json")
