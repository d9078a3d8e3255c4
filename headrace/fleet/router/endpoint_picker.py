# SPDX-License-Identifier: Apache-2.0
"""An endpoint picker for gateways: Envoy asks over gRPC which backend a request should go to, and sends it there itself.

This is the endpoint picker protocol of the Gateway API Inference Extension, on Envoy's external processing service. The
choice is that of the router's policy, with its health checks, limits, queue and fairness. If the gateway also sends the
response, the router counts the request as load until its end, and learns from its latency.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from math import ceil
from typing import TYPE_CHECKING, Any

import orjson
from google.protobuf.message import DecodeError

from headrace.core.errors import HeadraceError, InvalidArgument, ResourceExhausted
from headrace.core.protobuf import Schema
from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.kv_events import TokenizeRequest
from headrace.fleet.router.policies import RequestView
from headrace.fleet.router.predicted_latency import LatencyTimer
from headrace.fleet.router.request_queue import TRACEPARENT, OnResponse
from headrace.net.grpc.services import CoroutineCalls, MessageStream, Services
from headrace.net.grpc.standard_services import HealthService
from headrace.net.http.heads import HTTP_STATUS, RequestHead

if TYPE_CHECKING:
    from headrace.fleet.router.fairness import TokenUsage
    from headrace.fleet.router.proxy import RouterProxy

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
"""The header, and the key of the metadata, that name the chosen backend."""
_SUBSET_NAMESPACE, _SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_DESTINATION_NAMESPACE = "envoy.lb"
_HEALTH_NAMES = ("liveness", "readiness", SERVICE)
_BUFFERED, _BUFFERED_PARTIAL, _DUPLEX, _GRPC = 2, 3, 4, 5
"""Modes in which a gateway sends bodies. 0: not at all. 1: streamed, with the headers already forwarded."""
_READ_BYTES = 1 << 20
"""Maximum bytes of a body to wait for before the choice."""
_OVERWRITE = 2
_REFUSED_STATUSES = (502, 503, 504)


class EndpointPicker:
    """Serves the external processing service with the parts of a router."""

    def __init__(self, proxy: RouterProxy) -> None:
        self.proxy = proxy
        self.health = HealthService()
        self.counts: Counter[str] = Counter()
        """Requests by outcome: picked, refused (429), unavailable (503) or failed."""
        self.schema = ext_proc_schema()
        self.request_class = self.schema.message("envoy.service.ext_proc.v3.ProcessingRequest")
        self.response_class = self.schema.message("envoy.service.ext_proc.v3.ProcessingResponse")
        self._calls = CoroutineCalls()
        for name in _HEALTH_NAMES:
            self.health.set(name, True)
        proxy.registry.callback(
            "headrace_router_picks_total",
            "Requests of gateways: a backend was picked, or the answer was 429 (refused), 503 (unavailable) or another "
            "error (failed).",
            lambda: {(outcome,): count for outcome, count in self.counts.items()},
            ["outcome"],
            kind="counter",
        )

    def add_to(self, services: Services) -> None:
        """Register the service, and health checking for it."""
        services.streaming(SERVICE, "Process", self._calls.serve(self._process), scope=None)
        self.health.add_to(services)

    def drain(self) -> None:
        """Report not ready: the router stops."""
        self.health.shut_down()

    async def _process(self, stream: MessageStream) -> None:
        request = GatewayRequest(self, stream)
        try:
            async for message in stream:
                for response in await request.receive(message):
                    await stream.send(response.SerializeToString())
                if request.over:
                    return
        finally:
            request.end(Outcome.CANCELLED)


class GatewayRequest:
    """One HTTP request of a gateway. Implements `request_queue.QueuedRequest`."""

    queued_since = 0.0

    def __init__(self, picker: EndpointPicker, stream: MessageStream) -> None:
        self.usage: TokenUsage | None = None
        self.over = False
        """Whether no more responses are to be sent."""
        self._picker = picker
        self._proxy = picker.proxy
        self._stream = stream
        self._timer = LatencyTimer(picker.proxy.latency) if picker.proxy.latency is not None else None
        self._head: RequestHead | None = None
        self._body = bytearray()
        self._chunks: list[tuple[bytes, bool]] = []
        """Parts of the body that arrived before the choice, to be passed on in duplex mode."""
        self._body_mode = self._response_mode = _DUPLEX
        self._subset: frozenset[str] | None = None
        """Endpoints that the gateway allows; None: all."""
        self._view: RequestView | None = None
        self._set_cookie = b""
        self._backend: Backend | None = None
        self._picked = False
        self._outcome = Outcome.OK
        self._waiting: asyncio.Future[None] | None = None
        self._on_response: OnResponse | None = None

    async def receive(self, message: Any) -> list[Any]:
        """Return the responses to a message."""
        try:
            request = self._picker.request_class.FromString(message)
        except DecodeError:
            raise InvalidArgument("the message is not a ProcessingRequest of ext_proc v3") from None
        self._read_metadata(request)
        try:
            responses = await self._respond(request.WhichOneof("request"), request)
        except _NotPickedError as refusal:
            self.over = True
            self._picker.counts[_outcome_name(refusal.error)] += 1
            responses = [self._immediate(refusal.error)]
        return [] if request.observability_mode else responses

    async def _respond(self, kind: str | None, request: Any) -> list[Any]:
        if kind == "request_headers":
            return await self._request_headers(request)
        if self._head is None:
            raise InvalidArgument("the headers of a request come first")
        if kind == "request_body":
            return await self._request_body(request.request_body)
        if kind == "request_trailers":
            picked = [] if self._picked else await self._pick_with_body()
            return [*picked, self._response(request_trailers={})]
        if kind == "response_headers":
            return [self._response_headers(request.response_headers)]
        if kind == "response_body":
            body = request.response_body
            self._count(body.body)
            if body.end_of_stream:
                self.end(self._outcome)
            return [self._body_response("response_body", body.body, body.end_of_stream, self._response_mode)]
        if kind == "response_trailers":
            self.end(self._outcome)
            return [self._response(response_trailers={})]
        raise InvalidArgument("a ProcessingRequest has headers, a body or trailers")

    async def _request_headers(self, request: Any) -> list[Any]:
        if self._head is not None:
            raise InvalidArgument("a stream of the endpoint picker is for one request")
        if request.HasField("protocol_config"):
            # Without it, the gateway uses the mode that the endpoint picker protocol requires.
            self._body_mode = request.protocol_config.request_body_mode
            self._response_mode = request.protocol_config.response_body_mode
        self._head = _parse_head(request.request_headers.headers)
        waits = self._body_mode in (_BUFFERED, _BUFFERED_PARTIAL, _DUPLEX)
        if request.request_headers.end_of_stream or not waits:
            return [self._destination("request_headers", await self._pick())]
        return [] if self._body_mode == _DUPLEX else [self._response(request_headers={})]

    async def _request_body(self, body: Any) -> list[Any]:
        if self._picked:
            self._count_prompt(len(body.body))
            return [self._body_response("request_body", body.body, body.end_of_stream, self._body_mode)]
        self._body += body.body
        if self._body_mode != _DUPLEX:
            return [self._destination("request_body", await self._pick())]
        self._chunks.append((body.body, body.end_of_stream))
        if body.end_of_stream or len(self._body) >= _READ_BYTES:
            return await self._pick_with_body()
        return []

    async def _pick_with_body(self) -> list[Any]:
        """Choose a backend, and pass on the body so far."""
        responses = [self._destination("request_headers", await self._pick())]
        chunks, self._chunks = self._chunks, []
        return [*responses, *(self._body_response("request_body", body, end, _DUPLEX) for body, end in chunks)]

    def _response_headers(self, headers: Any) -> Any:
        on_response, self._on_response = self._on_response, None
        if on_response is not None:
            on_response(self)
        status = next((_value(field) for field in headers.headers.headers if field.key == ":status"), b"")
        code = int(status) if status.isdigit() else 200
        self._outcome = Outcome.OK
        if code >= 500:
            self._outcome = Outcome.REFUSED if code in _REFUSED_STATUSES else Outcome.ERRED
        if headers.end_of_stream or self._response_mode == 0:
            self.end(self._outcome)
        fields = [("set-cookie", self._set_cookie, 0)] if self._set_cookie else []
        return self._response(response_headers={"response": {"header_mutation": _mutation(fields)}})

    # Choosing.

    async def _pick(self) -> Backend:
        """Choose a backend, after a wait if necessary. Raises _NotPickedError."""
        self._picked = True
        try:
            return await self._pick_for(self._head)
        except HeadraceError as error:
            raise _NotPickedError(error) from error

    async def _pick_for(self, head: RequestHead | None) -> Backend:
        proxy = self._proxy
        if head is None:
            raise InvalidArgument("the headers of a request come first")
        if proxy.fairness is not None:
            self.usage = proxy.fairness.admit(head, len(self._body))
        view = self._view = RequestView(head, bytes(self._body))
        self._read_session(view)
        await self._find_tokens(view)
        if self._timer is not None:
            self._timer.check(view, self._candidates())
        backend = self._choose(view) or await self._wait()
        self._picker.counts["picked"] += 1
        return backend

    def _choose(self, view: RequestView) -> Backend | None:
        """Choose a backend that can take the request now, and count the request as sent to it."""
        proxy, excluded = self._proxy, self._excluded()
        chooser = proxy.chooser
        backend = chooser.pick(view, excluded) if chooser is not None else proxy.backends.pick(excluded)
        if backend is None:
            return None
        self._backend = backend
        proxy.backends.begin(backend)
        if self.usage is not None:
            self.usage.begin()
        if self._timer is not None:
            self._timer.sent(backend, view)
        return backend

    async def _wait(self) -> Backend:
        """Wait in the router's queue, or until the service has started."""
        proxy = self._proxy
        excluded = self._excluded()
        allowed = any(backend not in excluded for backend in proxy.backends.live)
        self._waiting = asyncio.get_running_loop().create_future()
        if allowed and proxy.queue is not None:
            proxy.queue.add(self)
        elif not allowed and self._subset is None and proxy.activator is not None:
            proxy.activator.hold(self)
        else:
            raise proxy.backends.unavailable()
        await self._waiting
        if self._backend is None:
            raise proxy.backends.unavailable()
        return self._backend

    def _excluded(self) -> tuple[Backend, ...]:
        subset = self._subset
        if subset is None:
            return ()
        return tuple(backend for backend in self._proxy.backends.all if _endpoint(backend) not in subset)

    def _candidates(self) -> list[Backend]:
        chooser, excluded = self._proxy.chooser, self._excluded()
        live = chooser.candidates(excluded) if chooser is not None else self._proxy.backends.live
        return [backend for backend in live if backend not in excluded]

    def _read_session(self, view: RequestView) -> None:
        sessions = self._proxy.chooser.sessions if self._proxy.chooser is not None else None
        if sessions is not None:
            view.session, line = sessions.cookie_for(view)
            self._set_cookie = line.partition(b": ")[2].strip()

    async def _find_tokens(self, view: RequestView) -> None:
        """Request the tokens of the prompt from a backend, if the choice may depend on them."""
        tokens, live = self._proxy.prompt_tokens, self._candidates()
        body = tokens.body_for(view) if tokens is not None and live else b""
        if tokens is None or not body:
            return
        tokens.asked += 1
        answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        question = TokenizeRequest(
            self._proxy.forwarder, view, body, lambda found: None if answer.done() else answer.set_result(found)
        )
        question.send(self._proxy.backends.pick_by_load(live), tokens.settings.tokenize_seconds)
        try:
            view.tokens = await answer
        except asyncio.CancelledError:
            question.cancel()
            raise
        tokens.failed += view.tokens is None

    def _read_metadata(self, request: Any) -> None:
        """Read which endpoints the gateway allows."""
        metadata = request.metadata_context.filter_metadata
        if _SUBSET_NAMESPACE not in metadata:
            return
        fields = metadata[_SUBSET_NAMESPACE].fields
        if _SUBSET in fields:
            value = fields[_SUBSET]
            texts = [item.string_value for item in value.list_value.values] or value.string_value.split(",")
            self._subset = frozenset(text.strip() for text in texts if text.strip())

    # Called by queues.

    def is_gone(self) -> bool:
        """Return whether the gateway has cancelled the request."""
        return self._stream.call.over

    def queued_bytes(self) -> int:
        """Return the bytes of the body that are kept."""
        return len(self._body)

    def enter_queue(self) -> None:
        """Do nothing: the gateway waits for the answer."""

    def traceparent(self) -> bytes:
        """Return the client's trace context; empty if there is none."""
        return (self._head.get(TRACEPARENT) if self._head is not None else None) or b""

    def leave_queue(self, on_response: OnResponse | None = None) -> None:
        """Choose a backend; call `on_response` when the response starts."""
        self._on_response = on_response
        if self._view is None or self._choose(self._view) is None:
            self.refuse(ResourceExhausted("every backend is busy: try again later", retry_after_seconds=1))
        elif self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def refuse(self, error: HeadraceError) -> None:
        """Fail the request."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    # The outcome of the request.

    def end(self, outcome: int) -> None:
        """Report the outcome of the request, once."""
        backend, self._backend = self._backend, None
        if backend is not None:
            self._proxy.backends.end(backend, outcome, self._proxy.clock.now)
            if self._timer is not None:
                self._timer.ended()

    def _count_prompt(self, size: int) -> None:
        if self.usage is not None:
            self.usage.add_prompt_bytes(size)

    def _count(self, data: bytes) -> None:
        if self.usage is not None:
            self.usage.add(data)
        if self._timer is not None:
            self._timer.piece(data)

    # Messages.

    def _response(self, **fields: Any) -> Any:
        return self._picker.response_class(**fields)

    def _destination(self, kind: str, backend: Backend) -> Any:
        """Return the response that names the backend, in a header and in the metadata."""
        endpoint = _endpoint(backend)
        common = {
            "header_mutation": _mutation([(DESTINATION, endpoint.encode(), _OVERWRITE)]),
            "clear_route_cache": True,
        }
        response = self._response(**{kind: {"response": common}})
        metadata = response.dynamic_metadata.fields[_DESTINATION_NAMESPACE].struct_value
        metadata.fields[DESTINATION].string_value = endpoint
        return response

    def _body_response(self, kind: str, body: bytes, end: bool, mode: int) -> Any:
        """Return the response to a piece of a body, which is passed on as it is."""
        if mode not in (_DUPLEX, _GRPC):
            return self._response(**{kind: {}})
        streamed = {"streamed_response": {"body": body, "end_of_stream": end}}
        return self._response(**{kind: {"response": {"body_mutation": streamed}}})

    def _immediate(self, error: HeadraceError) -> Any:
        """Return the response that makes the gateway answer with an error."""
        fields = [("content-type", b"application/json", _OVERWRITE)]
        if error.retry_after_seconds is not None:
            fields.append(("retry-after", b"%d" % ceil(error.retry_after_seconds), _OVERWRITE))
        return self._response(
            immediate_response={
                "status": {"code": HTTP_STATUS[error.code]},
                "headers": _mutation(fields),
                "body": orjson.dumps({"error": error.message}),
                "details": "headrace_endpoint_picker",
            }
        )


class _NotPickedError(Exception):
    """No backend was chosen: the gateway answers with this error."""

    def __init__(self, error: HeadraceError) -> None:
        super().__init__(error.message)
        self.error = error


@cache
def ext_proc_schema() -> Schema:
    """Return the messages of the service."""
    return Schema((files("headrace.fleet.router") / "_generated" / "ext_proc.binpb").read_bytes())


def _outcome_name(error: HeadraceError) -> str:
    return {429: "refused", 503: "unavailable"}.get(HTTP_STATUS[error.code], "failed")


def _endpoint(backend: Backend) -> str:
    """Return the backend as gateways name it."""
    host, port = backend.address.host, backend.address.port
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _mutation(fields: list[tuple[str, bytes, int]]) -> dict[str, Any]:
    """Return a HeaderMutation; each field with its append action."""
    return {
        "set_headers": [
            {"header": {"key": name, "raw_value": value}, "append_action": action} for name, value, action in fields
        ]
    }


def _parse_head(headers: Any) -> RequestHead:
    method, target, authority = b"POST", b"/", b""
    fields: list[tuple[bytes, bytes]] = []
    for name, value in _fields(headers):
        if name == b":method":
            method = value
        elif name == b":path":
            target = value
        elif name == b":authority":
            fields.append((b"host", value))
            authority = value
        elif not name.startswith(b":"):
            fields.append((name, value))
    return RequestHead(method, target, fields, version="1.1", authority=authority)


def _fields(headers: Any) -> Iterator[tuple[bytes, bytes]]:
    for field in headers.headers:
        yield field.key.lower().encode(), _value(field)


def _value(field: Any) -> bytes:
    raw: bytes = field.raw_value
    return raw or str(field.value).encode()
