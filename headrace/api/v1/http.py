# SPDX-License-Identifier: Apache-2.0
"""Both generations over HTTP: health, status, profile, and the way of an infer request to the data plane and back.

Whatever fails is 400 here, and the field NV-Status tells why; a path that does not exist is a 400 without it.
"""

from __future__ import annotations

from headrace.api.v1.accounts import V1Accounts
from headrace.api.v1.data import Body
from headrace.api.v1.decoding import Accepted, Ticket, decode_request
from headrace.api.v1.encoding import empty_header, encode_response
from headrace.api.v1.headers import NO_HEADER, Header, header_from_text
from headrace.api.v1.http_control import V1HttpControl
from headrace.api.v1.questions import health, profile
from headrace.api.v1.replies import BAD, BAD_BINARY, OK_BINARY, STATUS_FIELD, answer_empty, answer_message, query_value
from headrace.api.v1.shared_memory import SharedMemory
from headrace.api.v1.status import server_status
from headrace.api.v1.texts import response_field, response_lines
from headrace.core.messages import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Buffer, Exchange
from headrace.net.http.heads import ResponseHead
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


class V1Http:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, accounts: V1Accounts, memory: SharedMemory | None = None) -> None:
        self._plane = plane
        self._accounts = accounts
        self._memory = memory
        self._control = V1HttpControl(plane, accounts, memory)

    def add_to(self, routes: Routes) -> None:
        """Serve everything under `/api`."""
        routes.add("GET", "/api/health", self.health)
        routes.add("GET", "/api/health/live", self.health)
        routes.add("GET", "/api/health/ready", self.health)
        for path in ("/api/status", "/api/status/", "/api/status/{model}"):
            routes.add("GET", path, self.status)
        for path in ("/api/profile", "/api/profile/"):
            routes.add("GET", path, self.profile)
        routes.add("POST", "/api/infer/{model}", self.infer)
        routes.add("POST", "/api/infer/{model}/{version}", self.infer)
        self._control.add_to(routes)
        routes.mount("/api", self.unknown)

    def unknown(self, exchange: Exchange) -> None:
        """A path that does not exist, or a method that one does not have."""
        parts = exchange.head.path.split(b"/")
        methods = _METHODS.get(parts[2]) if len(parts) > 2 else None
        if parts[2:4] == [b"sharedmemorycontrol", b"status"]:
            methods = (b"GET", b"HEAD")
        wrong_method = methods is not None and exchange.head.method not in methods
        exchange.respond(_WRONG_METHOD if wrong_method else BAD)

    def health(self, exchange: Exchange) -> None:
        """200 for yes, 400 for no."""
        since = self._accounts.now()
        number = self._accounts.next_id()
        mode = exchange.head.path.removeprefix(b"/api/health").removeprefix(b"/").decode()
        try:
            good = health(self._plane, mode)
        except Exception as error:
            answer_empty(exchange, self._accounts.status_text(number, error), good=False)
            return
        self._accounts.succeeded("health", since)
        answer_empty(exchange, self._accounts.status_text(number), good=good)

    def status(self, exchange: Exchange) -> None:
        """What the server is and has done; of one model, or of all."""
        since = self._accounts.now()
        number = self._accounts.next_id()
        try:
            message = server_status(self._plane, self._accounts, exchange.params[0] if exchange.params else "")
        except Exception as error:
            answer_empty(exchange, self._accounts.status_text(number, error), good=False)
            return
        self._accounts.succeeded("status", since)
        answer_message(exchange, self._accounts.status_text(number), message)

    def profile(self, exchange: Exchange) -> None:
        """Begin or end profiling."""
        since = self._accounts.now()
        number = self._accounts.next_id()
        try:
            profile(self._accounts.settings, query_value(exchange, "cmd"))
        except Exception as error:
            answer_empty(exchange, self._accounts.status_text(number, error), good=False)
            return
        self._accounts.succeeded("profile", since)
        answer_empty(exchange, self._accounts.status_text(number), good=True)

    def infer(self, exchange: Exchange) -> None:
        """Compute one request."""
        name, *versions = exchange.params
        version = versions[0] if versions else ""
        if version and not (version.isascii() and version.isdigit()):
            exchange.respond(BAD)
            return
        text = exchange.head.get(_REQUEST_FIELD)
        header = NO_HEADER if text is None else header_from_text(text)
        body = Body(exchange.body)
        exchange.body = b""
        ticket = Ticket(self._accounts)
        try:
            number = version.lstrip("0") or version[:1]  # 07 is 7, and 00 is 0
            accepted = decode_request(self._plane, ticket, name, number, header, body, self._memory)

            def done(result: InferResponse | BaseException) -> None:
                if isinstance(result, BaseException):
                    self._fail(exchange, ticket, header, result)
                else:
                    self._answer(exchange, ticket, accepted, result)

            pending = self._plane.infer(accepted.request, done)
        except Exception as error:
            self._fail(exchange, ticket, header, error)
        else:
            exchange.on_disconnect = pending.cancel

    def _answer(self, exchange: Exchange, ticket: Ticket, accepted: Accepted, result: InferResponse) -> None:
        try:
            encoded = encode_response(accepted, result)
            binary = query_value(exchange, "format") == "binary"
            end: Buffer = encoded.header.SerializeToString() if binary else response_lines(encoded.header)
            status = self._accounts.status_text(ticket.number)
            extra = ((STATUS_FIELD, status), (_RESPONSE_FIELD, response_field(encoded.header)))
        except Exception as error:
            self._fail(exchange, ticket, accepted.header, error)
            return
        exchange.respond(OK_BINARY, [*(piece for piece in encoded.raw if len(piece)), end], extra)

    def _fail(self, exchange: Exchange, ticket: Ticket, header: Header | None, error: BaseException) -> None:
        status = self._accounts.status_text(ticket.number, error)
        extra = ((STATUS_FIELD, status), (_RESPONSE_FIELD, response_field(empty_header(header))))
        exchange.respond(BAD_BINARY, b"", extra)
