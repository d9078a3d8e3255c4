# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for a model that loads on demand, in every protocol: wait, then handle the request again.

Most handlers need the model's configuration to read a request, so they raise `ModelNotLoaded` for a model that is not in
memory. The wrappers here load it and call the handler a second time with the same body. Handlers that can pass a request on
without the model (v2 inference, streams) get a `PendingRequest` that waits in the data plane instead. Both say in the header
`headrace-model-wait` how many seconds the request waited. The handlers of v2 inference and `/predict` are not wrapped: a
request to a loaded model pays nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic

from headrace.core.errors import HeadraceError
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.residency import Done, ModelNotLoaded
from headrace.engine.scheduling.pending_request import PendingRequest
from headrace.engine.waiting_requests import WaitingRequest, WaitingStream
from headrace.net.grpc.call import GrpcCall, UnaryHandler
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import Buffer

WAIT_HEADER = "headrace-model-wait"
_ATTEMPTS = 3
"""How often one request may find its model missing: between a load and the request there is no step in which to evict it,
but a request may name a second model."""

HttpFail = Callable[[Exchange, BaseException], None]
GrpcFail = Callable[[GrpcCall, Buffer, BaseException], None]


def waiting_http(plane: DataPlane, handler: Handler, fail: HttpFail = Exchange.fail) -> Handler:
    """Return a handler that waits for the model of its request; `fail` answers an error in the protocol's form."""
    if not plane.loads_on_demand:
        return handler

    def handle(exchange: Exchange) -> None:
        body = exchange.body
        try:
            handler(exchange)
        except ModelNotLoaded as missing:
            exchange.body = body
            _wait_http(plane, exchange, handler, fail, missing.model, monotonic(), _ATTEMPTS)

    return handle


def handle_when_loaded(plane: DataPlane, exchange: Exchange, handler: Handler, missing: ModelNotLoaded) -> None:
    """Load a model and call the handler again: for handlers of hot paths, which are not wrapped."""
    _wait_http(plane, exchange, handler, Exchange.fail, missing.model, monotonic(), _ATTEMPTS)


def _wait_http(
    plane: DataPlane,
    exchange: Exchange,
    handler: Handler,
    fail: HttpFail,
    model: str,
    since: float,
    attempts: int,
) -> None:
    body = exchange.body

    def loaded(problem: HeadraceError | None) -> None:
        exchange.on_disconnect = None
        if exchange.closed:
            return
        more_lines = exchange.more_lines
        add_wait_line(exchange, monotonic() - since)
        if problem is not None:
            fail(exchange, problem)
            return
        try:
            handler(exchange)
        except ModelNotLoaded as missing:
            if attempts <= 1:
                fail(exchange, missing)
                return
            exchange.body, exchange.more_lines = body, more_lines
            try:
                _wait_http(plane, exchange, handler, fail, missing.model, since, attempts - 1)
            except Exception as error:
                fail(exchange, error)
        except Exception as error:
            fail(exchange, error)

    exchange.on_disconnect = plane.when_loaded(model, loaded)


def waiting_unary(plane: DataPlane, handler: UnaryHandler, fail: GrpcFail | None = None) -> UnaryHandler:
    """Return a unary gRPC handler that waits for the model of its request."""
    if not plane.loads_on_demand:
        return handler

    def handle(call: GrpcCall, message: Buffer) -> None:
        try:
            handler(call, message)
        except ModelNotLoaded as missing:
            _wait_unary(plane, call, message, handler, fail or _fail_call, missing.model, monotonic(), _ATTEMPTS)

    return handle


def _wait_unary(
    plane: DataPlane,
    call: GrpcCall,
    message: Buffer,
    handler: UnaryHandler,
    fail: GrpcFail,
    model: str,
    since: float,
    attempts: int,
) -> None:
    def loaded(problem: HeadraceError | None) -> None:
        call.on_cancel = None
        if call.over:
            return
        add_wait_metadata(call, monotonic() - since)
        if problem is not None:
            fail(call, message, problem)
            return
        try:
            handler(call, message)
        except ModelNotLoaded as missing:
            if attempts <= 1:
                fail(call, message, missing)
                return
            try:
                _wait_unary(plane, call, message, handler, fail, missing.model, since, attempts - 1)
            except Exception as error:
                fail(call, message, error)
        except Exception as error:
            fail(call, message, error)

    try:
        call.on_cancel = plane.when_loaded(model, loaded)
    except HeadraceError as error:
        fail(call, message, error)


def _fail_call(call: GrpcCall, _: Buffer, error: BaseException) -> None:
    call.fail(error)


def wait_for_model(plane: DataPlane, missing: ModelNotLoaded, resume: Done) -> Callable[[], None]:
    """Call `resume` for a message of a stream when its model serves, or with the reason why not; return the cancellation."""
    try:
        return plane.when_loaded(missing.model, resume)
    except HeadraceError as error:
        resume(error)
        return _nothing


def _nothing() -> None:
    """The cancellation of a wait that is over."""


def report_wait_http(exchange: Exchange, pending: PendingRequest) -> None:
    """Say in the response how long a request waited in the data plane; call it for one with `waits_for_model`."""
    if isinstance(pending, WaitingRequest | WaitingStream):
        pending.on_loaded = partial(add_wait_line, exchange)


def report_wait_grpc(call: GrpcCall, pending: PendingRequest) -> None:
    """The same for a gRPC call."""
    if isinstance(pending, WaitingRequest | WaitingStream):
        pending.on_loaded = partial(add_wait_metadata, call)


def add_wait_line(exchange: Exchange, seconds: float) -> None:
    """Add the header field to an HTTP response."""
    exchange.more_lines += f"{WAIT_HEADER}: {seconds:.3f}\r\n".encode()


def add_wait_metadata(call: GrpcCall, seconds: float) -> None:
    """Add the field to the initial metadata of a gRPC call."""
    call.set_initial_metadata([(WAIT_HEADER, f"{seconds:.3f}")])
