# SPDX-License-Identifier: Apache-2.0
"""Both generations of the protocol over HTTP: the routes under `/api`.

Every error is a 400, with the reason in the field NV-Status; an unknown path is a 400 without it. Loading a model takes
long, so it runs as a task, which continues if the client disconnects.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable
from typing import Any
from urllib.parse import parse_qsl

from google.protobuf import json_format

from headrace.api.model_waits import waiting_http
from headrace.api.v1.headers import NO_HEADER, Header, header_from_text
from headrace.api.v1.messages import many_lines, message_class, response_field, response_lines
from headrace.api.v1.requests import AcceptedRequest, BodyData, RequestNumber, decode_request
from headrace.api.v1.responses import empty_header, encode_response
from headrace.api.v1.shared_memory import SharedMemory, control_shared_memory, region_messages, require_shared_memory
from headrace.api.v1.status import V1Statistics, health, leave_out_new_types, profile, repository_index, server_status
from headrace.core.errors import Unavailable
from headrace.core.requests import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.residency import ModelNotLoaded
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, OK_EMPTY, OK_JSON, OK_PLAIN, Buffer, ResponseHead
from headrace.net.http.routes import Routes

_REQUEST_FIELD = b"nv-inferrequest"
_RESPONSE_FIELD = b"nv-inferresponse"
_WRONG_METHOD = ResponseHead(405)
_METHODS = {
    b"health": (b"GET", b"HEAD"),
    b"status": (b"GET", b"HEAD"),
    b"profile": (b"GET", b"HEAD"),
    b"repository": (b"GET", b"HEAD"),
    b"infer": (b"POST",),
    b"modelcontrol": (b"POST",),
    b"sharedmemorycontrol": (b"POST",),
}


_SHM = "/api/sharedmemorycontrol"
_CUDA_HANDLE_BYTES = 64
_LARGEST = (1 << 63) - 1
STATUS_FIELD = b"nv-status"
OK_BINARY = ResponseHead(200, [(CONTENT_TYPE, b"application/octet-stream")])
BAD_BINARY = ResponseHead(400, [(CONTENT_TYPE, b"application/octet-stream")])
BAD = ResponseHead(400)
_SYNC_FORMAT_BYTES = 8 * 1024
"""A message of this size takes about 3 ms to format as text; a larger one is formatted in another thread."""


class V1Http:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, statistics: V1Statistics, memory: SharedMemory | None = None) -> None:
        self._plane = plane
        self._statistics = statistics
        self._memory = memory
        self._control = V1HttpControl(plane, statistics, memory)

    def add_to(self, routes: Routes) -> None:
        """Register the routes under `/api`."""
        routes.add("GET", "/api/health", self.health, scope=None)
        routes.add("GET", "/api/health/live", self.health, scope=None)
        routes.add("GET", "/api/health/ready", self.health, scope=None)
        for path in ("/api/status", "/api/status/", "/api/status/{model}"):
            routes.add("GET", path, self.status, scope="read", workers="gather")
        for path in ("/api/profile", "/api/profile/"):
            routes.add("GET", path, self.profile, scope="admin")
        infer = waiting_http(self._plane, self.infer, self._fail_waiting)
        routes.add("POST", "/api/infer/{model}", infer, scope="infer")
        routes.add("POST", "/api/infer/{model}/{version}", infer, scope="infer")
        self._control.add_to(routes)
        routes.mount("/api", self.unknown, scope="read")

    def unknown(self, exchange: Exchange) -> None:
        """Answer an unknown path, or an unknown method of a path."""
        parts = exchange.head.path.split(b"/")
        methods = _METHODS.get(parts[2]) if len(parts) > 2 else None
        if parts[2:4] == [b"sharedmemorycontrol", b"status"]:
            methods = (b"GET", b"HEAD")
        wrong_method = methods is not None and exchange.head.method not in methods
        exchange.respond(_WRONG_METHOD if wrong_method else BAD)

    def health(self, exchange: Exchange) -> None:
        """Answer a health check: 200 or 400."""
        since = self._statistics.now()
        number = self._statistics.next_id()
        mode = exchange.head.path.removeprefix(b"/api/health").removeprefix(b"/").decode()
        try:
            healthy = health(self._plane, mode)
        except Exception as error:
            respond_empty(exchange, self._statistics.status_text(number, error), success=False)
            return
        self._statistics.succeeded("health", since)
        respond_empty(exchange, self._statistics.status_text(number), success=healthy)

    def status(self, exchange: Exchange) -> None:
        """Return the status of the server, with one model or all."""
        since = self._statistics.now()
        number = self._statistics.next_id()
        try:
            message = server_status(self._plane, self._statistics, exchange.params[0] if exchange.params else "")
        except Exception as error:
            respond_empty(exchange, self._statistics.status_text(number, error), success=False)
            return
        self._statistics.succeeded("status", since)
        if query_value(exchange, "format") not in ("binary", "json"):
            leave_out_new_types(message)
        respond_message(exchange, self._statistics.status_text(number), message)

    def profile(self, exchange: Exchange) -> None:
        """Start or stop profiling."""
        since = self._statistics.now()
        number = self._statistics.next_id()
        try:
            profile(self._statistics.settings, query_value(exchange, "cmd"))
        except Exception as error:
            respond_empty(exchange, self._statistics.status_text(number, error), success=False)
            return
        self._statistics.succeeded("profile", since)
        respond_empty(exchange, self._statistics.status_text(number), success=True)

    def infer(self, exchange: Exchange) -> None:
        """Run inference."""
        name, *versions = exchange.params
        version = versions[0] if versions else ""
        if version and not (version.isascii() and version.isdigit()):
            exchange.respond(BAD)
            return
        text = exchange.head.get(_REQUEST_FIELD)
        header = NO_HEADER if text is None else header_from_text(text)
        body = BodyData(exchange.body)
        exchange.body = b""
        number = RequestNumber(self._statistics)
        try:
            version_number = version.lstrip("0") or version[:1]  # 07 is 7, and 00 is 0
            accepted = decode_request(self._plane, number, name, version_number, header, body, self._memory)

            def done(result: InferResponse | BaseException) -> None:
                if isinstance(result, BaseException):
                    self._fail(exchange, number, header, result)
                else:
                    self._respond(exchange, number, accepted, result)

            pending = self._plane.infer(accepted.request, done)
        except ModelNotLoaded:
            raise
        except Exception as error:
            self._fail(exchange, number, header, error)
        else:
            exchange.on_disconnect = pending.cancel

    def _fail_waiting(self, exchange: Exchange, error: BaseException) -> None:
        """Answer a request whose model could not be loaded."""
        text = exchange.head.get(_REQUEST_FIELD)
        self._fail(
            exchange, RequestNumber(self._statistics), NO_HEADER if text is None else header_from_text(text), error
        )

    def _respond(
        self, exchange: Exchange, number: RequestNumber, accepted: AcceptedRequest, result: InferResponse
    ) -> None:
        try:
            encoded = encode_response(accepted, result)
            binary = query_value(exchange, "format") == "binary"
            end: Buffer = encoded.header.SerializeToString() if binary else response_lines(encoded.header)
            status = self._statistics.status_text(number.value)
            extra = ((STATUS_FIELD, status), (_RESPONSE_FIELD, response_field(encoded.header)))
        except Exception as error:
            self._fail(exchange, number, accepted.header, error)
            return
        exchange.respond(OK_BINARY, [*(piece for piece in encoded.raw if len(piece)), end], extra)

    def _fail(self, exchange: Exchange, number: RequestNumber, header: Header | None, error: BaseException) -> None:
        status = self._statistics.status_text(number.value, error)
        extra = ((STATUS_FIELD, status), (_RESPONSE_FIELD, response_field(empty_header(header))))
        exchange.respond(BAD_BINARY, b"", extra)


class V1HttpControl:
    """Handlers for loading models, the repository index and shared memory."""

    def __init__(self, plane: DataPlane, statistics: V1Statistics, memory: SharedMemory | None) -> None:
        self._plane = plane
        self._statistics = statistics
        self._memory = memory
        # The event loop keeps only weak references to tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        routes.add("POST", "/api/modelcontrol/load/{model}", self.load, scope="admin")
        routes.add("POST", "/api/modelcontrol/unload/{model}", self.unload, scope="admin")
        routes.add("GET", "/api/repository/index", self.index, scope="read")
        # A key usually begins with a slash, which clients put into the path unescaped.
        changes = {
            "register/{name}/{key}/{offset}/{size}": self.register,
            "register/{name}//{key}/{offset}/{size}": self.register,
            "cudaregister/{name}/{device}/{size}": self.register_cuda,
            "unregister/{name}": self.unregister,
            "unregisterall": self.unregister_all,
            "status": self.memory_status,
        }
        for path, handler in changes.items():
            routes.add("POST", f"{_SHM}/{path}", handler, scope="admin", workers="all")
        routes.add("GET", f"{_SHM}/status", self.memory_status, scope="read")

    def load(self, exchange: Exchange) -> None:
        """Load or reload a model."""
        self._start(exchange, "model_control", self._plane.load(exchange.params[0]))

    def unload(self, exchange: Exchange) -> None:
        """Unload a model."""
        self._start(exchange, "model_control", self._plane.unload(exchange.params[0]))

    def index(self, exchange: Exchange) -> None:
        """Return the names of all models in the repository."""
        self._start(exchange, "repository", repository_index(self._plane))

    def register(self, exchange: Exchange) -> None:
        """Register POSIX shared memory."""
        name, key, offset, size = exchange.params
        slash = "/" if b"//" in exchange.head.path else ""
        if not (_is_number(offset) and _is_number(size)):
            exchange.respond(BAD)
            return
        request = message_class("SharedMemoryControlRequest")()
        request.register.name = name
        request.register.byte_size = int(size)
        request.register.system_shared_memory.shared_memory_key = slash + key
        request.register.system_shared_memory.offset = int(offset)
        self._control_memory(exchange, request)

    def register_cuda(self, exchange: Exchange) -> None:
        """Register GPU memory; the body is the handle, raw or in base64."""
        name, device, size = exchange.params
        if not (_is_number(device) and _is_number(size)):
            exchange.respond(BAD)
            return
        request = message_class("SharedMemoryControlRequest")()
        request.register.name = name
        request.register.byte_size = int(size)
        request.register.cuda_shared_memory.device_id = int(device)
        request.register.cuda_shared_memory.raw_handle = _handle(exchange.body)
        self._control_memory(exchange, request)

    def unregister(self, exchange: Exchange) -> None:
        """Unregister a region."""
        request = message_class("SharedMemoryControlRequest")()
        request.unregister.name = exchange.params[0]
        self._control_memory(exchange, request)

    def unregister_all(self, exchange: Exchange) -> None:
        """Unregister all regions."""
        request = message_class("SharedMemoryControlRequest")()
        request.unregister_all.SetInParent()
        self._control_memory(exchange, request)

    def memory_status(self, exchange: Exchange) -> None:
        """Return all regions."""
        since = self._statistics.now()
        number = self._statistics.next_id()
        try:
            regions = region_messages(require_shared_memory(self._memory))
        except Exception as error:
            respond_empty(exchange, self._statistics.status_text(number, error), success=False)
            return
        self._statistics.succeeded("shm", since)
        message = message_class("SharedMemoryStatus")(shared_memory_region=regions)
        respond_message(exchange, self._statistics.status_text(number), message)

    def _control_memory(self, exchange: Exchange, request: Any) -> None:
        since = self._statistics.now()
        number = self._statistics.next_id()
        try:
            control_shared_memory(self._memory, request)
        except Exception as error:
            respond_empty(exchange, self._statistics.status_text(number, error), success=False)
            return
        self._statistics.succeeded("shm", since)
        respond_empty(exchange, self._statistics.status_text(number), success=True)

    def _start(self, exchange: Exchange, kind: str, work: Awaitable[Any]) -> None:
        since = self._statistics.now()
        number = self._statistics.next_id()

        async def run() -> None:
            message = await work
            self._statistics.succeeded(kind, since)
            if message is None:
                respond_empty(exchange, self._statistics.status_text(number), success=True)
            else:
                respond_message(exchange, self._statistics.status_text(number), message)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = Unavailable("the server is stopping") if task.cancelled() else task.exception()
            if error is not None:
                respond_empty(exchange, self._statistics.status_text(number, error), success=False)

        task.add_done_callback(done)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _LARGEST


def _handle(body: Buffer) -> bytes:
    data = bytes(body)
    if len(data) == _CUDA_HANDLE_BYTES:
        return data
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return data  # opening it raises the error


def query_value(exchange: Exchange, name: str) -> str:
    """Return the first value of a name in the query; "" if it is missing."""
    pairs = parse_qsl(exchange.head.query.decode("latin-1"), keep_blank_values=True)
    return next((value for key, value in pairs if key == name), "")


def respond_empty(exchange: Exchange, status: bytes, *, success: bool) -> None:
    """Respond without a body; `status` is the text of NV-Status."""
    exchange.respond(OK_EMPTY if success else BAD, b"", ((STATUS_FIELD, status),))


def respond_message(exchange: Exchange, status: bytes, message: Any) -> None:
    """Respond with a message as text, or in the `format` of the query: `binary` or `json`."""
    form = query_value(exchange, "format")
    extra = ((STATUS_FIELD, status),)
    if form == "binary":
        exchange.respond(OK_BINARY, message.SerializeToString(), extra)
        return
    head, write = (OK_JSON, _json) if form == "json" else (OK_PLAIN, many_lines)
    if message.ByteSize() <= _SYNC_FORMAT_BYTES:
        exchange.respond(head, write(message), extra)
        return

    def respond(text: asyncio.Future[bytes]) -> None:
        if text.cancelled():
            exchange.fail(Unavailable("the server is stopping"))
        elif (error := text.exception()) is not None:
            exchange.fail(error)
        else:
            exchange.respond(head, text.result(), extra)

    asyncio.get_running_loop().run_in_executor(None, write, message).add_done_callback(respond)


def _json(message: Any) -> bytes:
    return json_format.MessageToJson(message, preserving_proto_field_name=True).encode()
