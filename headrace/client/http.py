# SPDX-License-Identifier: Apache-2.0
"""v2 over HTTP/1.1, with connections that are kept. Made by the clients, called by `session`.

Speaks through a `lines.Lines`, so that it neither knows nor cares whether there is a loop.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace.client.addresses import Address
from headrace.client.events import EventReader
from headrace.client.failures import http_error
from headrace.client.http1 import Answer, Head, NotHttp, compressed, inflated, request_head
from headrace.client.http_connections import Connections
from headrace.client.http_messages import (
    HEADER_LENGTH,
    decode_event,
    decode_result,
    encode_generation,
    encode_inference,
    from_json,
    to_json,
)
from headrace.client.lines import Line, Lines
from headrace.client.requests import Inference
from headrace.client.results import Result
from headrace.client.retrying import Failed, Fate
from headrace.client.transport import Call, Options
from headrace.core.errors import HeadraceError, Unimplemented
from headrace.core.ids import REQUEST_ID_FIELD
from headrace.core.tensors import Buffer

_OCTETS = (("content-type", "application/octet-stream"),)
_JSON = (("content-type", "application/json"),)


@dataclass(frozen=True, slots=True)
class _Whole:
    head: Head
    body: Buffer


class HttpTransport:
    """See `transport.Transport`."""

    def __init__(self, address: Address, lines: Lines, options: Options) -> None:
        self._connections = Connections(address, lines, options)
        self._address = address
        self._compression = options.compression

    async def infer(self, inference: Inference, call: Call) -> Result:
        """See `Transport.infer`."""
        length, buffers = encode_inference(inference)
        path = model_path(inference.model, inference.version) + "/infer"
        fields = (*_OCTETS, (HEADER_LENGTH, str(length)))
        answer = await self._ask("POST", path, call, fields, buffers)
        return decode_result(answer.head.fields, answer.body, inference.id or call.id)

    async def stream(self, inference: Inference, call: Call) -> HttpStream:
        """See `Transport.stream`."""
        if any(output.classes for output in inference.outputs):
            raise Unimplemented("a stream over HTTP carries no classes: use grpc://")
        described = await self.metadata(call, inference.model, inference.version)
        outputs = {str(output.get("name")): output for output in described.get("outputs") or ()}
        path = model_path(inference.model, inference.version) + "/generate_stream"
        line, answer, head = await self._begin("POST", path, call, _JSON, [encode_generation(inference)])
        stream = HttpStream(self._connections, line, answer, head, outputs, inference, call)
        if head.status != 200:
            try:
                raise _refused(head, inflated(head.fields.get("content-encoding", ""), await answer.body()), call)
            finally:
                stream.close()
        return stream

    async def live(self, call: Call) -> bool:
        """See `Transport.live`."""
        return await self._is("/v2/health/live", call)

    async def ready(self, call: Call, model: str, version: str) -> bool:
        """See `Transport.ready`."""
        return await self._is(f"{model_path(model, version)}/ready" if model else "/v2/health/ready", call)

    async def metadata(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """See `Transport.metadata`."""
        found: dict[str, Any] = await self._json("GET", model_path(model, version) if model else "/v2", call)
        return found

    async def config(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """See `Transport.config`."""
        found: dict[str, Any] = await self._json("GET", f"{model_path(model, version)}/config", call)
        return found

    async def statistics(self, call: Call, model: str, version: str) -> list[dict[str, Any]]:
        """See `Transport.statistics`."""
        path = f"{model_path(model, version)}/stats" if model else "/v2/models/stats"
        found: list[dict[str, Any]] = (await self._json("GET", path, call)).get("model_stats", [])
        return found

    async def index(self, call: Call, ready: bool) -> list[dict[str, str]]:
        """See `Transport.index`."""
        rows = await self._json("POST", "/v2/repository/index", call, {"ready": ready}, kind=list)
        return [{key: str(row.get(key, "")) for key in ("name", "version", "state", "reason")} for row in rows]

    async def load(self, call: Call, model: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """See `Transport.load`."""
        said: dict[str, str] = {} if config is None else {"config": config}
        said |= {f"file:{path}": base64.b64encode(content).decode() for path, content in files.items()}
        await self._ask_json("POST", f"/v2/repository/models/{_part(model)}/load", call, {"parameters": said})

    async def unload(self, call: Call, model: str, dependents: bool) -> None:
        """See `Transport.unload`."""
        said = {"unload_dependents": dependents}
        await self._ask_json("POST", f"/v2/repository/models/{_part(model)}/unload", call, {"parameters": said})

    async def close(self) -> None:
        """See `Transport.close`."""
        self._connections.close()

    async def _is(self, path: str, call: Call) -> bool:
        line, answer, head = await self._begin("GET", path, call, (), None)
        body = await self._finish(line, answer, head, call)
        # 400 is the protocol's way to say no; a proxy says 503.
        if head.status in (200, 400, 503):
            return head.status == 200
        raise _refused(head, body, call)

    async def _json(self, method: str, path: str, call: Call, document: Any = None, *, kind: type = dict) -> Any:
        answer = await self._ask_json(method, path, call, document)
        found = from_json(answer.body)
        if not isinstance(found, kind):
            raise self._connections.no_http("answers with other JSON than v2 has")
        return found

    async def _ask_json(self, method: str, path: str, call: Call, document: Any) -> _Whole:
        body = None if document is None else [to_json(document)]
        return await self._ask(method, path, call, _JSON if body else (), body)

    async def _ask(
        self, method: str, path: str, call: Call, fields: Sequence[tuple[str, str]], body: Sequence[Buffer] | None
    ) -> _Whole:
        line, answer, head = await self._begin(method, path, call, fields, body)
        content = await self._finish(line, answer, head, call)
        if head.status != 200:
            raise _refused(head, content, call)
        return _Whole(head, content)

    async def _begin(
        self, method: str, path: str, call: Call, fields: Sequence[tuple[str, str]], body: Sequence[Buffer] | None
    ) -> tuple[Line, Answer, Head]:
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

    async def _finish(self, line: Line, answer: Answer, head: Head, call: Call) -> Buffer:
        body = await self._connections.finish(line, answer, head)
        try:
            return inflated(head.fields.get("content-encoding", ""), body)
        except NotHttp as error:
            raise self._connections.no_http(str(error)) from None


class HttpStream:
    """See `transport.Stream`: the events of `generate_stream`."""

    def __init__(
        self,
        connections: Connections,
        line: Line,
        answer: Answer,
        head: Head,
        outputs: Mapping[str, Mapping[str, Any]],
        inference: Inference,
        call: Call,
    ) -> None:
        self._connections = connections
        self._line = line
        self._answer = answer
        self._head = head
        self._outputs = outputs
        self._inference = inference
        self._call = call
        self._events = EventReader()
        self._open = True

    async def next(self) -> Result | None:
        """See `Stream.next`."""
        while self._open:
            data = self._events.take()
            if data is not None:
                return self._result(data)
            piece = await self._connections.piece(self._line, self._answer)
            if not piece:
                self._open = False
                self._connections.give(self._line, self._answer, self._head)
                break
            self._events.feed(piece)
        return None

    def close(self) -> None:
        """See `Stream.close`."""
        if self._open:
            self._open = False
            self._line.close()

    def _result(self, data: bytes) -> Result:
        document = from_json(data)
        if isinstance(document, dict) and "error" in document and "error" not in self._outputs:
            raise http_error(500, str(document["error"]), self._call.id)
        return decode_event(document, self._outputs, self._inference, self._call.id)


def model_path(model: str, version: str) -> str:
    """The path of a model, or of a version of it."""
    path = f"/v2/models/{_part(model)}"
    return f"{path}/versions/{_part(version)}" if version else path


def _part(name: str) -> str:
    # A part that is "." or ".." would be taken for a step in the path by whoever normalises it.
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def _refused(head: Head, body: Buffer, call: Call) -> HeadraceError | Failed:
    """The error that a server answered with; `Failed` where it may be sent again."""
    text = f"the server answers with status {head.status}"
    try:
        document = from_json(body)
        if isinstance(document, dict) and document.get("error"):
            text = str(document["error"])
    except HeadraceError:
        pass
    after = head.fields.get("retry-after", "")
    patience = float(after) if after.isdigit() and len(after) < 8 else None
    found_by = head.fields.get(REQUEST_ID_FIELD) or call.id
    error = http_error(head.status, text, found_by, patience)
    if head.status in (429, 503) and patience is not None:
        return Failed(error, Fate.REFUSED_FOR_NOW)
    return error
