# SPDX-License-Identifier: Apache-2.0
"""Both generations over gRPC: the methods of `nvidia.inferenceserver.GRPCService`.

A call that reaches its method ends with gRPC's OK; whether it succeeded is in the `request_status` of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError

from headrace.api.v1.accounts import V1Accounts
from headrace.api.v1.data import Pieces
from headrace.api.v1.decoding import Ticket, decode_request
from headrace.api.v1.encoding import empty_header, encode_response
from headrace.api.v1.envelopes import close_envelope, open_envelope
from headrace.api.v1.http_control import repository_index
from headrace.api.v1.questions import health, profile
from headrace.api.v1.schema import SERVICE, message_class
from headrace.api.v1.shared_memory import SharedMemory, control
from headrace.api.v1.status import server_status
from headrace.api.v1.streams import InferStream
from headrace.core.errors import InvalidArgument, Unavailable
from headrace.core.messages import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Buffer

_LOAD = 1


class V1Grpc:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, accounts: V1Accounts, memory: SharedMemory | None = None) -> None:
        self._plane = plane
        self._accounts = accounts
        self._memory = memory
        # A task nobody refers to may be collected while it runs.
        self._tasks: set[asyncio.Task[Any]] = set()

    def add_to(self, services: Services) -> None:
        """Serve the methods."""
        services.unary(SERVICE, "Status", self.status)
        services.unary(SERVICE, "Profile", self.profile)
        services.unary(SERVICE, "Health", self.health)
        services.unary(SERVICE, "Infer", self.infer)
        services.streaming(SERVICE, "StreamInfer", self.stream_infer)
        services.unary(SERVICE, "ModelControl", self.model_control)
        services.unary(SERVICE, "SharedMemoryControl", self.shared_memory_control)
        services.unary(SERVICE, "Repository", self.repository)

    def status(self, call: GrpcCall, message: Buffer) -> None:
        """What the server is and has done; of one model, or of all."""
        request = _parse("StatusRequest", message)

        def work() -> dict[str, Any]:
            return {"server_status": server_status(self._plane, self._accounts, request.model_name)}

        self._reply(call, "StatusResponse", "status", work)

    def profile(self, call: GrpcCall, message: Buffer) -> None:
        """Begin or end profiling."""
        request = _parse("ProfileRequest", message)

        def work() -> dict[str, Any]:
            profile(self._accounts.settings, request.cmd)
            return {}

        self._reply(call, "ProfileResponse", "profile", work)

    def health(self, call: GrpcCall, message: Buffer) -> None:
        """Whether the server is live, or ready."""
        request = _parse("HealthRequest", message)
        self._reply(call, "HealthResponse", "health", lambda: {"health": health(self._plane, request.mode)})

    def shared_memory_control(self, call: GrpcCall, message: Buffer) -> None:
        """Register regions of shared memory, let go of them, list them."""
        request = _parse("SharedMemoryControlRequest", message)

        def work() -> dict[str, Any]:
            status = control(self._memory, request)
            return {} if status is None else {"shared_memory_status": status}

        self._reply(call, "SharedMemoryControlResponse", "shm", work)

    def model_control(self, call: GrpcCall, message: Buffer) -> None:
        """Load or unload a model."""
        request = _parse("ModelControlRequest", message)
        deed = self._plane.load if request.type == _LOAD else self._plane.unload

        async def work() -> dict[str, Any]:
            await deed(request.model_name)
            return {}

        self._reply_later(call, "ModelControlResponse", "model_control", work())

    def repository(self, call: GrpcCall, message: Buffer) -> None:
        """The names of all models in the repository."""
        _parse("RepositoryRequest", message)

        async def work() -> dict[str, Any]:
            return {"index": await repository_index(self._plane)}

        self._reply_later(call, "RepositoryResponse", "repository", work())

    def infer(self, call: GrpcCall, message: Buffer) -> None:
        """Compute one request."""
        envelope = open_envelope(message, self._plane)
        header = envelope.header
        ticket = Ticket(self._accounts)

        def fail(error: BaseException) -> None:
            call.reply(close_envelope(self._accounts.status(ticket.number, error), empty_header(header), []))

        def done(result: InferResponse | BaseException) -> None:
            if isinstance(result, BaseException):
                fail(result)
                return
            try:
                encoded = encode_response(accepted, result)
                reply = close_envelope(self._accounts.status(ticket.number), encoded.header, encoded.raw)
            except Exception as error:
                fail(error)
            else:
                call.reply(reply)

        try:
            pieces = Pieces(envelope.pieces)
            name, version = envelope.model_name, envelope.version
            accepted = decode_request(self._plane, ticket, name, version, header, pieces, self._memory)
            pending = self._plane.infer(accepted.request, done)
        except Exception as error:
            fail(error)
        else:
            call.on_cancel = pending.cancel

    def stream_infer(self, call: GrpcCall) -> None:
        """Compute requests as they come, and answer them in their order."""
        InferStream(call, self._plane, self._accounts, self._memory)

    def _reply(self, call: GrpcCall, answer: str, kind: str, work: Callable[[], dict[str, Any]]) -> None:
        since = self._accounts.now()
        number = self._accounts.next_id()
        try:
            fields = work()
        except Exception as error:
            self._fail(call, answer, number, error)
            return
        self._accounts.succeeded(kind, since)
        made = message_class(answer)(request_status=self._accounts.status(number), **fields)
        call.reply(made.SerializeToString())

    def _reply_later(self, call: GrpcCall, answer: str, kind: str, work: Awaitable[dict[str, Any]]) -> None:
        since = self._accounts.now()
        number = self._accounts.next_id()
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def done(task: asyncio.Future[dict[str, Any]]) -> None:
            self._tasks.discard(task)
            error = Unavailable("the server is stopping") if task.cancelled() else task.exception()
            if error is not None:
                self._fail(call, answer, number, error)
                return
            self._accounts.succeeded(kind, since)
            made = message_class(answer)(request_status=self._accounts.status(number), **task.result())
            call.reply(made.SerializeToString())

        task.add_done_callback(done)

    def _fail(self, call: GrpcCall, answer: str, number: int, error: BaseException) -> None:
        made = message_class(answer)(request_status=self._accounts.status(number, error))
        call.reply(made.SerializeToString())


def _parse(name: str, message: Buffer) -> Any:
    try:
        return message_class(name).FromString(message)
    except DecodeError:
        raise InvalidArgument(f"the message is not a {name}") from None
