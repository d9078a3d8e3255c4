# SPDX-License-Identifier: Apache-2.0
"""`grpc.health.v1.Health`: Check and Watch, for probes and load balancers.

The composition root says what is healthy through `HealthService.set`; the empty name is the server as a whole.
"""

from __future__ import annotations

import asyncio

from google.protobuf.message import DecodeError

from headrace.core.errors import InvalidArgument, NotFound, Unavailable, Unimplemented
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.schema import grpc_schema
from headrace.net.grpc.services import Services
from headrace.net.grpc.streaming import CoroutineCalls, MessageStream
from headrace.net.http.exchange import Buffer

SERVICE = "grpc.health.v1.Health"
SERVING = 1
NOT_SERVING = 2
SERVICE_UNKNOWN = 3


class HealthService:
    """Keeps the status of each service and tells those who watch."""

    def __init__(self) -> None:
        schema = grpc_schema()
        self._request = schema.message("grpc.health.v1.HealthCheckRequest")
        self._response = schema.message("grpc.health.v1.HealthCheckResponse")
        self._status: dict[str, int] = {"": SERVING}
        self._changed = asyncio.Event()
        self._ending = False
        self._calls = CoroutineCalls()

    def add_to(self, services: Services) -> None:
        """Serve both methods."""
        services.unary(SERVICE, "Check", self._check)
        services.streaming(SERVICE, "Watch", self._calls.serve(self._watch))

    def set(self, name: str, healthy: bool) -> None:
        """Say whether a service (or, with an empty name, the server) can be used."""
        self._status[name] = SERVING if healthy else NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    def shut_down(self) -> None:
        """Say that nothing can be used any more, and end the watches: they would hold up a drain."""
        self._ending = True
        for name in self._status:
            self.set(name, False)

    def _name(self, message: Buffer) -> str:
        try:
            name: str = self._request.FromString(message).service
        except DecodeError:
            raise InvalidArgument("the message is not a HealthCheckRequest") from None
        return name

    def _check(self, call: GrpcCall, message: Buffer) -> None:
        name = self._name(message)
        status = self._status.get(name)
        if status is None:
            raise NotFound(f"unknown service {name[:256]!r}")
        call.reply(self._response(status=status).SerializeToString())

    async def _watch(self, stream: MessageStream) -> None:
        message = await stream.receive()
        if message is None:
            raise Unimplemented("Watch takes one message, not none")
        name = self._name(message)
        last = None
        while True:
            changed = self._changed
            status = self._status.get(name, SERVICE_UNKNOWN)
            if status != last:
                last = status
                await stream.send(self._response(status=status).SerializeToString())
            if self._ending:
                raise Unavailable("the server is shutting down")
            await changed.wait()
