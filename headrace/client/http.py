# SPDX-License-Identifier: Apache-2.0
"""The v2 protocol over HTTP/1.1, with a pool of connections.

The blocking and the asyncio client share this code: it only uses `sockets.Network`.
"""

from __future__ import annotations

import base64
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace.client.errors import connection_error, http_error, retry_after_seconds
from headrace.client.http1 import (
    ConnectionClosed,
    EventReader,
    Head,
    InvalidHttp,
    Response,
    compress,
    decompress,
    request_head,
)
from headrace.client.http_codec import (
    HEADER_LENGTH,
    decode_event,
    decode_result,
    encode_generation,
    encode_inference,
    from_json,
    to_json,
)
from headrace.client.inference import Inference, Result
from headrace.client.retries import AttemptFailed, Deadline, Failure
from headrace.client.sockets import Address, Connection, Network
from headrace.client.transport import Call, Options
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, Unimplemented
from headrace.core.names import REQUEST_ID_FIELD
from headrace.core.tensors import Buffer

_BINARY = (("content-type", "application/octet-stream"),)
_JSON = (("content-type", "application/json"),)


@dataclass(frozen=True, slots=True)
class _CompleteResponse:
    head: Head
    body: Buffer


class HttpTransport:
    """Sends requests over HTTP/1.1. Methods raise `AttemptFailed`, or a `HeadraceError` that is final."""

    def __init__(self, address: Address, network: Network, options: Options) -> None:
        self._connections = ConnectionPool(address, network, options)
        self._address = address
        self._compression = options.compression

    async def infer(self, inference: Inference, call: Call) -> Result:
        """Run a request."""
        length, buffers = encode_inference(inference)
        path = model_path(inference.model, inference.version) + "/infer"
        fields = (*_BINARY, (HEADER_LENGTH, str(length)))
        response = await self._send("POST", path, call, fields, buffers)
        return decode_result(response.head.fields, response.body, inference.id or call.id)

    async def stream(self, inference: Inference, call: Call) -> HttpStream:
        """Run a request with any number of results."""
        if any(output.classes for output in inference.outputs):
            raise Unimplemented("a stream over HTTP carries no classes: use grpc://")
        metadata = await self.metadata(call, inference.model, inference.version)
        outputs = {str(output.get("name")): output for output in metadata.get("outputs") or ()}
        path = model_path(inference.model, inference.version) + "/generate_stream"
        connection, response, head = await self._start("POST", path, call, _JSON, [encode_generation(inference)])
        stream = HttpStream(self._connections, connection, response, head, outputs, inference, call)
        if head.status != 200:
            try:
                raise _status_error(
                    head, decompress(head.fields.get("content-encoding", ""), await response.body()), call
                )
            finally:
                stream.close()
        return stream

    async def live(self, call: Call) -> bool:
        """Return whether the server responds."""
        return await self._is_ok("/v2/health/live", call)

    async def ready(self, call: Call, model: str, version: str) -> bool:
        """Return whether the server, or a model, is ready."""
        return await self._is_ok(f"{model_path(model, version)}/ready" if model else "/v2/health/ready", call)

    async def metadata(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """Return the metadata of a model, or of the server."""
        metadata: dict[str, Any] = await self._json("GET", model_path(model, version) if model else "/v2", call)
        return metadata

    async def config(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """Return a model's configuration."""
        config: dict[str, Any] = await self._json("GET", f"{model_path(model, version)}/config", call)
        return config

    async def statistics(self, call: Call, model: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of each version."""
        path = f"{model_path(model, version)}/stats" if model else "/v2/models/stats"
        statistics: list[dict[str, Any]] = (await self._json("GET", path, call)).get("model_stats", [])
        return statistics

    async def index(self, call: Call, ready: bool) -> list[dict[str, str]]:
        """Return the models of the repository."""
        rows = await self._json("POST", "/v2/repository/index", call, {"ready": ready}, kind=list)
        return [{key: str(row.get(key, "")) for key in ("name", "version", "state", "reason")} for row in rows]

    async def load(self, call: Call, model: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model."""
        parameters: dict[str, str] = {} if config is None else {"config": config}
        parameters |= {f"file:{path}": base64.b64encode(content).decode() for path, content in files.items()}
        await self._send_json(
            "POST", f"/v2/repository/models/{_quote_segment(model)}/load", call, {"parameters": parameters}
        )

    async def unload(self, call: Call, model: str, dependents: bool) -> None:
        """Unload a model."""
        parameters = {"unload_dependents": dependents}
        await self._send_json(
            "POST", f"/v2/repository/models/{_quote_segment(model)}/unload", call, {"parameters": parameters}
        )

    async def close(self) -> None:
        """Close idle connections."""
        self._connections.close()

    async def _is_ok(self, path: str, call: Call) -> bool:
        connection, response, head = await self._start("GET", path, call, (), None)
        body = await self._read_body(connection, response, head, call)
        # 400 means "not ready" in the protocol; a proxy returns 503.
        if head.status in (200, 400, 503):
            return head.status == 200
        raise _status_error(head, body, call)

    async def _json(self, method: str, path: str, call: Call, document: Any = None, *, kind: type = dict) -> Any:
        response = await self._send_json(method, path, call, document)
        value = from_json(response.body)
        if not isinstance(value, kind):
            raise self._connections.protocol_error("answers with other JSON than v2 has")
        return value

    async def _send_json(self, method: str, path: str, call: Call, document: Any) -> _CompleteResponse:
        body = None if document is None else [to_json(document)]
        return await self._send(method, path, call, _JSON if body else (), body)

    async def _send(
        self, method: str, path: str, call: Call, fields: Sequence[tuple[str, str]], body: Sequence[Buffer] | None
    ) -> _CompleteResponse:
        connection, response, head = await self._start(method, path, call, fields, body)
        content = await self._read_body(connection, response, head, call)
        if head.status != 200:
            raise _status_error(head, content, call)
        return _CompleteResponse(head, content)

    async def _start(
        self, method: str, path: str, call: Call, fields: Sequence[tuple[str, str]], body: Sequence[Buffer] | None
    ) -> tuple[Connection, Response, Head]:
        headers = [("host", self._address.authority), *call.fields, (REQUEST_ID_FIELD, call.id), *fields]
        if self._compression:
            headers.append(("accept-encoding", self._compression))
            if body is not None:
                headers.append(("content-encoding", self._compression))
                body = compress(self._compression, body)
        buffers = list(body or ())
        length = -1 if body is None else sum(map(len, buffers))
        head = request_head(method, self._address.prefix + path, headers, length)
        return await self._connections.send([head, *buffers], call.deadline)

    async def _read_body(self, connection: Connection, response: Response, head: Head, call: Call) -> Buffer:
        body = await self._connections.read_body(connection, response, head)
        try:
            return decompress(head.fields.get("content-encoding", ""), body)
        except InvalidHttp as error:
            raise self._connections.protocol_error(str(error)) from None


class HttpStream:
    """The results of `generate_stream`, read from its events."""

    def __init__(
        self,
        connections: ConnectionPool,
        connection: Connection,
        response: Response,
        head: Head,
        outputs: Mapping[str, Mapping[str, Any]],
        inference: Inference,
        call: Call,
    ) -> None:
        self._connections = connections
        self._connection = connection
        self._response = response
        self._head = head
        self._outputs = outputs
        self._inference = inference
        self._call = call
        self._events = EventReader()
        self._open = True

    async def next(self) -> Result | None:
        """Return the next result; None at the end."""
        while self._open:
            data = self._events.take()
            if data is not None:
                return self._result(data)
            piece = await self._connections.piece(self._connection, self._response)
            if not piece:
                self._open = False
                self._connections.release(self._connection, self._response, self._head)
                break
            self._events.feed(piece)
        return None

    def close(self) -> None:
        """Close the connection; the server stops."""
        if self._open:
            self._open = False
            self._connection.close()

    def _result(self, data: bytes) -> Result:
        document = from_json(data)
        if isinstance(document, dict) and "error" in document and "error" not in self._outputs:
            raise http_error(500, str(document["error"]), self._call.id)
        return decode_event(document, self._outputs, self._inference, self._call.id)


def model_path(model: str, version: str) -> str:
    """Return the path of a model, or of one version."""
    path = f"/v2/models/{_quote_segment(model)}"
    return f"{path}/versions/{_quote_segment(version)}" if version else path


def _quote_segment(name: str) -> str:
    # A proxy that normalises paths would resolve "." and "..".
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def _status_error(head: Head, body: Buffer, call: Call) -> HeadraceError | AttemptFailed:
    """Return the error of a response: `AttemptFailed` if the request may be sent again."""
    text = f"the server answers with status {head.status}"
    try:
        document = from_json(body)
        if isinstance(document, dict) and document.get("error"):
            text = str(document["error"])
    except HeadraceError:
        pass
    retry_after = retry_after_seconds(head.fields.get("retry-after"))
    request_id = head.fields.get(REQUEST_ID_FIELD) or call.id
    error = http_error(head.status, text, request_id, retry_after)
    if head.status in (429, 503) and retry_after is not None:
        return AttemptFailed(error, Failure.RETRY_LATER)
    return error


_IDLE_SECONDS = 50.0
"""Servers close idle connections after a minute or two; no request is sent on one that is about to close."""
_MAX_IDLE = 64
_REFUSAL_SECONDS = 1.0


class ConnectionPool:
    """Idle connections, the newest last."""

    def __init__(self, address: Address, network: Network, options: Options) -> None:
        self._address = address
        self._network = network
        self._tls = tls_context(options) if address.secure else None
        self._idle: list[tuple[Connection, float]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    async def send(self, buffers: Sequence[Buffer], deadline: Deadline) -> tuple[Connection, Response, Head]:
        """Send a request and read the head of its response."""
        connection = self._acquire() or await self._connect(deadline)
        try:
            try:
                await connection.send(buffers, deadline)
            except OSError as error:
                return await self._read_refusal(connection, error)
            response = Response(connection, deadline)
            return connection, response, await response.head()
        except BaseException as error:
            connection.close()
            self._raise_for(error)
            raise

    async def read_body(self, connection: Connection, response: Response, head: Head) -> Buffer:
        """Read the body; then keep or close the connection."""
        try:
            body = await response.body()
        except BaseException as error:
            connection.close()
            self._raise_for(error)
            raise
        self.release(connection, response, head)
        return body

    async def piece(self, connection: Connection, response: Response) -> bytes:
        """Read a piece of the body."""
        try:
            return await response.piece()
        except BaseException as error:
            connection.close()
            self._raise_for(error)
            raise

    def release(self, connection: Connection, response: Response, head: Head) -> None:
        """Return the connection of a complete response to the pool, if both sides allow it."""
        surplus = [connection]
        with self._lock:
            if head.keeps_alive and response.is_reusable and not self._closed:
                self._idle.append((connection, time.monotonic()))
                surplus = [old for old, _ in self._idle[:-_MAX_IDLE]]
                del self._idle[:-_MAX_IDLE]
        for idle in surplus:
            idle.close()

    def close(self) -> None:
        """Close idle connections; those in use are closed when they are released."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def protocol_error(self, what: str) -> HeadraceError:
        """Return the error for a server that does not speak the protocol."""
        other = "is it a gRPC port? Then use grpc://" if not self._address.secure else "is it an inference server?"
        if not self._address.secure:
            other += ", or does it speak TLS? Then use https://"
        return connection_error(self._address, f"{what}: {other}")

    def _acquire(self) -> Connection | None:
        closing: list[Connection] = []
        usable: Connection | None = None
        with self._lock:
            if self._closed:
                raise FailedPrecondition("this client is closed: make a new one")
            if self._process != os.getpid():
                # After a fork, parent and child would read each other's responses.
                closing = [connection for connection, _ in self._idle]
                self._idle, self._process = [], os.getpid()
            earliest = time.monotonic() - _IDLE_SECONDS
            while self._idle and usable is None:
                connection, since = self._idle.pop()
                if since < earliest or connection.is_stale():
                    closing.append(connection)
                else:
                    usable = connection
        for connection in closing:
            connection.close()
        return usable

    async def _connect(self, deadline: Deadline) -> Connection:
        try:
            return await self._network.connect(self._address, self._tls, deadline)
        except OSError as error:
            final = isinstance(error, ssl.SSLError) or (
                isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
            )
            failure = Failure.FINAL if final else Failure.UNSENT
            raise AttemptFailed(connection_error(self._address, error, connecting=True), failure) from None

    async def _read_refusal(self, connection: Connection, error: OSError) -> tuple[Connection, Response, Head]:
        """Read the error response of a server that closed the connection before the whole body was sent."""
        response = Response(connection, Deadline(_REFUSAL_SECONDS, ""))
        try:
            head = await response.head()
        except (OSError, ConnectionClosed, InvalidHttp, HeadraceError):
            raise AttemptFailed(connection_error(self._address, error, unsent=True), Failure.UNSENT) from None
        return connection, response, Head(head.status, head.fields, keeps_alive=False)

    def _raise_for(self, error: BaseException) -> None:
        """Raise the error for a broken connection; do nothing for other exceptions."""
        if isinstance(error, InvalidHttp):
            raise self.protocol_error(str(error)) from None
        if isinstance(error, ConnectionClosed):
            lost = ConnectionResetError("the server closed it")
            raise AttemptFailed(connection_error(self._address, lost), Failure.LOST) from None
        if isinstance(error, OSError):
            raise AttemptFailed(connection_error(self._address, error), Failure.LOST) from None


def tls_context(options: Options) -> ssl.SSLContext:
    """Return the TLS context for a client's options."""
    if isinstance(options.verify, ssl.SSLContext):
        return options.verify
    try:
        context = ssl.create_default_context(cafile=options.verify if isinstance(options.verify, str) else None)
        if options.verify is False:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if options.cert is not None:
            files = (options.cert,) if isinstance(options.cert, str) else options.cert
            context.load_cert_chain(*files)
    except OSError as error:
        options_text = f"verify={options.verify!r}, cert={options.cert!r}"
        raise InvalidArgument(f"the TLS files cannot be used ({options_text}): {error}") from None
    context.set_alpn_protocols(["http/1.1"])
    return context
