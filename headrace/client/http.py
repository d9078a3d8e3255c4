# SPDX-License-Identifier: Apache-2.0
"""The v2 protocol over HTTP/1.1, with a pool of connections.

The same code serves the blocking and the asyncio client: it only uses `sockets.Network`.
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
from headrace.client.http1 import Answer, ConnectionCut, EventReader, Head, NotHttp, compressed, inflated, request_head
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

_OCTETS = (("content-type", "application/octet-stream"),)
_JSON = (("content-type", "application/json"),)


@dataclass(frozen=True, slots=True)
class _Whole:
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
        fields = (*_OCTETS, (HEADER_LENGTH, str(length)))
        answer = await self._ask("POST", path, call, fields, buffers)
        return decode_result(answer.head.fields, answer.body, inference.id or call.id)

    async def stream(self, inference: Inference, call: Call) -> HttpStream:
        """Run a request with any number of results."""
        if any(output.classes for output in inference.outputs):
            raise Unimplemented("a stream over HTTP carries no classes: use grpc://")
        described = await self.metadata(call, inference.model, inference.version)
        outputs = {str(output.get("name")): output for output in described.get("outputs") or ()}
        path = model_path(inference.model, inference.version) + "/generate_stream"
        connection, answer, head = await self._begin("POST", path, call, _JSON, [encode_generation(inference)])
        stream = HttpStream(self._connections, connection, answer, head, outputs, inference, call)
        if head.status != 200:
            try:
                raise _refused(head, inflated(head.fields.get("content-encoding", ""), await answer.body()), call)
            finally:
                stream.close()
        return stream

    async def live(self, call: Call) -> bool:
        """Return whether the server answers."""
        return await self._is_ok("/v2/health/live", call)

    async def ready(self, call: Call, model: str, version: str) -> bool:
        """Return whether the server, or a model, is ready."""
        return await self._is_ok(f"{model_path(model, version)}/ready" if model else "/v2/health/ready", call)

    async def metadata(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """Return the metadata of a model, or of the server."""
        found: dict[str, Any] = await self._json("GET", model_path(model, version) if model else "/v2", call)
        return found

    async def config(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """Return a model's configuration."""
        found: dict[str, Any] = await self._json("GET", f"{model_path(model, version)}/config", call)
        return found

    async def statistics(self, call: Call, model: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of each version."""
        path = f"{model_path(model, version)}/stats" if model else "/v2/models/stats"
        found: list[dict[str, Any]] = (await self._json("GET", path, call)).get("model_stats", [])
        return found

    async def index(self, call: Call, ready: bool) -> list[dict[str, str]]:
        """Return the models of the repository."""
        rows = await self._json("POST", "/v2/repository/index", call, {"ready": ready}, kind=list)
        return [{key: str(row.get(key, "")) for key in ("name", "version", "state", "reason")} for row in rows]

    async def load(self, call: Call, model: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model."""
        said: dict[str, str] = {} if config is None else {"config": config}
        said |= {f"file:{path}": base64.b64encode(content).decode() for path, content in files.items()}
        await self._ask_json("POST", f"/v2/repository/models/{_part(model)}/load", call, {"parameters": said})

    async def unload(self, call: Call, model: str, dependents: bool) -> None:
        """Unload a model."""
        said = {"unload_dependents": dependents}
        await self._ask_json("POST", f"/v2/repository/models/{_part(model)}/unload", call, {"parameters": said})

    async def close(self) -> None:
        """Close idle connections."""
        self._connections.close()

    async def _is_ok(self, path: str, call: Call) -> bool:
        connection, answer, head = await self._begin("GET", path, call, (), None)
        body = await self._finish(connection, answer, head, call)
        # 400 is the protocol's "not ready"; a proxy answers 503.
        if head.status in (200, 400, 503):
            return head.status == 200
        raise _refused(head, body, call)

    async def _json(self, method: str, path: str, call: Call, document: Any = None, *, kind: type = dict) -> Any:
        answer = await self._ask_json(method, path, call, document)
        found = from_json(answer.body)
        if not isinstance(found, kind):
            raise self._connections.protocol_error("answers with other JSON than v2 has")
        return found

    async def _ask_json(self, method: str, path: str, call: Call, document: Any) -> _Whole:
        body = None if document is None else [to_json(document)]
        return await self._ask(method, path, call, _JSON if body else (), body)

    async def _ask(
        self, method: str, path: str, call: Call, fields: Sequence[tuple[str, str]], body: Sequence[Buffer] | None
    ) -> _Whole:
        connection, answer, head = await self._begin(method, path, call, fields, body)
        content = await self._finish(connection, answer, head, call)
        if head.status != 200:
            raise _refused(head, content, call)
        return _Whole(head, content)

    async def _begin(
        self, method: str, path: str, call: Call, fields: Sequence[tuple[str, str]], body: Sequence[Buffer] | None
    ) -> tuple[Connection, Answer, Head]:
        own = [("host", self._address.authority), *call.fields, (REQUEST_ID_FIELD, call.id), *fields]
        if self._compression:
            own.append(("accept-encoding", self._compression))
            if body is not None:
                own.append(("content-encoding", self._compression))
                body = compressed(self._compression, body)
        buffers = list(body or ())
        length = -1 if body is None else sum(map(len, buffers))
        head = request_head(method, self._address.prefix + path, own, length)
        return await self._connections.begin([head, *buffers], call.deadline)

    async def _finish(self, connection: Connection, answer: Answer, head: Head, call: Call) -> Buffer:
        body = await self._connections.finish(connection, answer, head)
        try:
            return inflated(head.fields.get("content-encoding", ""), body)
        except NotHttp as error:
            raise self._connections.protocol_error(str(error)) from None


class HttpStream:
    """The results of `generate_stream`, read from its events."""

    def __init__(
        self,
        connections: ConnectionPool,
        connection: Connection,
        answer: Answer,
        head: Head,
        outputs: Mapping[str, Mapping[str, Any]],
        inference: Inference,
        call: Call,
    ) -> None:
        self._connections = connections
        self._connection = connection
        self._answer = answer
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
            piece = await self._connections.piece(self._connection, self._answer)
            if not piece:
                self._open = False
                self._connections.give(self._connection, self._answer, self._head)
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
    path = f"/v2/models/{_part(model)}"
    return f"{path}/versions/{_part(version)}" if version else path


def _part(name: str) -> str:
    # A proxy that normalises paths would resolve "." and "..".
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def _refused(head: Head, body: Buffer, call: Call) -> HeadraceError | AttemptFailed:
    """Return the error that a server answered with: `AttemptFailed` if the request may be sent again."""
    text = f"the server answers with status {head.status}"
    try:
        document = from_json(body)
        if isinstance(document, dict) and document.get("error"):
            text = str(document["error"])
    except HeadraceError:
        pass
    patience = retry_after_seconds(head.fields.get("retry-after"))
    found_by = head.fields.get(REQUEST_ID_FIELD) or call.id
    error = http_error(head.status, text, found_by, patience)
    if head.status in (429, 503) and patience is not None:
        return AttemptFailed(error, Failure.RETRY_LATER)
    return error


_IDLE_SECONDS = 50.0
"""Below the minute or two after which servers close idle connections, so that no request meets a closing one."""
_MOST_IDLE = 64
_LAST_WORDS_SECONDS = 1.0


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

    async def begin(self, buffers: Sequence[Buffer], deadline: Deadline) -> tuple[Connection, Answer, Head]:
        """Send a request and read the head of its answer."""
        connection = self._take() or await self._connect(deadline)
        try:
            try:
                await connection.send(buffers, deadline)
            except OSError as error:
                return await self._last_words(connection, error)
            answer = Answer(connection, deadline)
            return connection, answer, await answer.head()
        except BaseException as error:
            connection.close()
            self._tell(error)
            raise

    async def finish(self, connection: Connection, answer: Answer, head: Head) -> Buffer:
        """Read the body; then keep or close the connection."""
        try:
            body = await answer.body()
        except BaseException as error:
            connection.close()
            self._tell(error)
            raise
        self.give(connection, answer, head)
        return body

    async def piece(self, connection: Connection, answer: Answer) -> bytes:
        """Read a piece of the body."""
        try:
            return await answer.piece()
        except BaseException as error:
            connection.close()
            self._tell(error)
            raise

    def give(self, connection: Connection, answer: Answer, head: Head) -> None:
        """Keep the connection of a complete answer, if both sides allow it."""
        dropped = [connection]
        with self._lock:
            if head.keeps_alive and answer.is_reusable and not self._closed:
                self._idle.append((connection, time.monotonic()))
                dropped = [each for each, _ in self._idle[:-_MOST_IDLE]]
                del self._idle[:-_MOST_IDLE]
        for each in dropped:
            each.close()

    def close(self) -> None:
        """Close idle connections; one that is in use is closed afterwards."""
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

    def _take(self) -> Connection | None:
        old: list[Connection] = []
        found: Connection | None = None
        with self._lock:
            if self._closed:
                raise FailedPrecondition("this client is closed: make a new one")
            if self._process != os.getpid():
                # After a fork, parent and child would read each other's answers.
                old = [connection for connection, _ in self._idle]
                self._idle, self._process = [], os.getpid()
            oldest = time.monotonic() - _IDLE_SECONDS
            while self._idle and found is None:
                connection, since = self._idle.pop()
                if since < oldest or connection.is_stale():
                    old.append(connection)
                else:
                    found = connection
        for connection in old:
            connection.close()
        return found

    async def _connect(self, deadline: Deadline) -> Connection:
        try:
            return await self._network.connect(self._address, self._tls, deadline)
        except OSError as error:
            final = isinstance(error, ssl.SSLError) or (
                isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
            )
            failure = Failure.FINAL if final else Failure.UNSENT
            raise AttemptFailed(connection_error(self._address, error, connecting=True), failure) from None

    async def _last_words(self, connection: Connection, error: OSError) -> tuple[Connection, Answer, Head]:
        """Read the answer of a server that refused the body and closed: it says why."""
        answer = Answer(connection, Deadline(_LAST_WORDS_SECONDS, ""))
        try:
            head = await answer.head()
        except (OSError, ConnectionCut, NotHttp, HeadraceError):
            raise AttemptFailed(connection_error(self._address, error, unsent=True), Failure.UNSENT) from None
        return connection, answer, Head(head.status, head.fields, keeps_alive=False)

    def _tell(self, error: BaseException) -> None:
        """Raise the error for a broken connection; do nothing for other exceptions."""
        if isinstance(error, NotHttp):
            raise self.protocol_error(str(error)) from None
        if isinstance(error, ConnectionCut):
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
        files_given = f"verify={options.verify!r}, cert={options.cert!r}"
        raise InvalidArgument(f"the TLS files cannot be used ({files_given}): {error}") from None
    context.set_alpn_protocols(["http/1.1"])
    return context
