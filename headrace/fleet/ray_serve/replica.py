# SPDX-License-Identifier: Apache-2.0
"""One replica of a service: starts a server, forwards requests to it, and ends with it. `application` gives it to Ray Serve.

If the server ends by itself, open requests get an error and the replica's process ends. Ray notices that at once; a health
check would have to fail three times.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from starlette.responses import Response, StreamingResponse

from headrace.core.errors import DeadlineExceeded, FailedPrecondition, HeadraceError
from headrace.fleet.ray_serve.forwarding import Forwarder, ForwardRequest, ForwardResponse, target_of
from headrace.fleet.ray_serve.replica_spec import ReplicaSpec
from headrace.fleet.ray_serve.server_process import ServerProcess, start_server
from headrace.version import __version__

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

log = logging.getLogger("headrace.ray")

_LAST_ERRORS_SECONDS = 1.0
"""Delay before the process exits, so that the errors of open requests are sent."""
_STOP_SECONDS = 10.0
"""Time for a server without open requests to exit after SIGTERM."""


class ReplicaServer:
    """A replica. Used in one event loop."""

    def __init__(self, spec: ReplicaSpec, server: ServerProcess, end_process: Callable[[int], Any] = os._exit) -> None:
        """server: it is ready. end_process: ends this process at once, whatever Ray does in it."""
        self._server = server
        self._end_process = end_process
        self._forwarder = Forwarder(server.port, spec.request_seconds)
        self._watch = asyncio.ensure_future(self._end_with_server())

    @classmethod
    async def start(
        cls,
        content: Mapping[str, Any],
        launch: Callable[[ReplicaSpec], Awaitable[ServerProcess]] = start_server,
        end_process: Callable[[int], Any] = os._exit,
    ) -> Self:
        """Start the server and wait until it is ready. content: a `ReplicaSpec` as JSON. Raises HeadraceError."""
        spec = parse_spec(content)
        server = await launch(spec)
        try:
            await server.wait_ready()
        except BaseException:
            await server.stop(_STOP_SECONDS)
            raise
        return cls(spec, server, end_process)

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
        await self._server.stop(_STOP_SECONDS)
        await self._forwarder.close()

    async def _end_with_server(self) -> None:
        code = await self._server.wait()
        log.error("%s", self._server.end_message(code))
        await asyncio.sleep(_LAST_ERRORS_SECONDS)
        self._end_process(1)


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


def parse_spec(content: Mapping[str, Any]) -> ReplicaSpec:
    """Return the spec of a replica. Raises FailedPrecondition if another version of Headrace wrote it."""
    version = content.get("version")
    if version != __version__:
        raise FailedPrecondition(
            f"the service was deployed by Headrace {version}, and this node has {__version__}: install the same on all nodes"
        )
    return ReplicaSpec.from_json(content)


def has_body(headers: Mapping[str, str]) -> bool:
    """Whether a request has a body; one of unknown length is chunked."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def error_response(error: HeadraceError) -> Response:
    """Return the response for an error of the replica itself, in the form of the server's own errors."""
    status = 504 if isinstance(error, DeadlineExceeded) else 503
    headers = {} if error.retry_after_seconds is None else {"retry-after": f"{error.retry_after_seconds:g}"}
    content = json.dumps({"error": error.message})
    return Response(content, status, headers, "application/json")
