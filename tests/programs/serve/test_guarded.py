# SPDX-License-Identifier: Apache-2.0
"""Guards before real handlers on real sockets: keys, rates, and what is in flight, over HTTP and WebSocket."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headrace.api.access.api_keys import create_key
from headrace.api.access.settings import AccessSettings, Concurrency, RateLimit, RateLimits
from headrace.core.clock import ManualClock, SystemClock
from headrace.core.telemetry.metrics import Registry
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_EMPTY, OK_JSON
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from headrace.net.websocket.handshake import accept
from headrace.programs.serve.access_guard import Guard, Middleware, open_guard
from support.serving import Serving, serving

INFER = "/v2/models/m/infer"
HOLD = "/v2/models/hold/infer"
RATE_FIELDS = {
    f"{prefix}ratelimit-{what}" for prefix in ("", "x-") for what in ("limit", "remaining", "reset")
}  # fmt: skip


class Handlers:
    """A model that answers at once, one that is answered when the test says so, and one that streams."""

    def __init__(self) -> None:
        self.called = 0
        self.held: list[Exchange] = []

    def add_to(self, routes: Any) -> None:
        routes.add("GET", "/v2/health/live", lambda exchange: exchange.respond(OK_EMPTY), scope=None)
        routes.add("GET", "/v2/models/m", lambda exchange: exchange.respond(OK_JSON, b"{}"), scope="read")
        routes.add("POST", INFER, self.infer, scope="infer")
        routes.add("POST", HOLD, self.hold, scope="infer")
        routes.add("POST", "/v2/models/broken/infer", self.broken, scope="infer")
        routes.add("POST", "/v2/models/m/generate_stream", self.stream, scope="infer")
        routes.add("POST", "/v2/repository/models/m/load", lambda exchange: exchange.respond(OK_EMPTY))
        routes.add("GET", "/predict/stream", self.socket, scope="infer")

    def infer(self, exchange: Exchange) -> None:
        self.called += 1
        exchange.respond(OK_JSON, exchange.body)

    def hold(self, exchange: Exchange) -> None:
        exchange.on_disconnect = lambda: None  # as what cancels a computation
        self.held.append(exchange)

    def broken(self, exchange: Exchange) -> None:
        raise RuntimeError("a secret of the handler")

    def stream(self, exchange: Exchange) -> None:
        exchange.start(OK_JSON)
        self.hold(exchange)

    def socket(self, exchange: Exchange) -> None:
        accept(exchange, lambda connection: connection.close())


class Guarded:
    """A guarded site on a socket."""

    def __init__(self, server: Serving, guard: Guard, handlers: Handlers, registry: Registry) -> None:
        self.server, self.guard, self.handlers = server, guard, handlers
        self._registry = registry

    def ask(self, method: str, path: str, **fields: str) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        named = {name.replace("_", "-"): value for name, value in fields.items()}
        connection.request(method, path, b"{}" if method == "POST" else None, named)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, json.loads(body or b"{}")

    def hold(self, path: str = HOLD) -> socket.socket:
        """Ask for what is not answered yet."""
        before = len(self.handlers.held)
        client = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        client.sendall(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}" % path.encode())
        self.wait_for(lambda: len(self.handlers.held) > before)
        return client

    def wait_for(self, condition: Any) -> None:
        while not self.server.call(condition):  # the test's own time-out is the limit
            pass

    def counted(self) -> dict[str, float]:
        return {
            f"{family.name} {' '.join(labels)}": getattr(series, "value", series)
            for family in self._registry.families
            for labels, series in family.collect()
            if getattr(series, "value", series)
        }


@contextmanager
def guarded(settings: AccessSettings, folder: str | Path = "", clock: Any = None) -> Iterator[Guarded]:
    handlers = Handlers()
    registry = Registry(SystemClock())
    guard = open_guard(settings, registry, folder, clock)
    assert guard is not None

    def build() -> Site:
        routes = Routes(Middleware(guard).http)
        handlers.add_to(routes)
        guard.start()
        return Site(routes, access_log=guard.access_log)

    with serving(build) as server:
        yield Guarded(server, guard, handlers, registry)
        server.call(guard.close)


def keys_in(folder: Path) -> tuple[Path, dict[str, str]]:
    path = folder / "keys.yaml"
    scopes: dict[str, list[Any]] = {"alice": ["infer"], "bob": ["read"], "root": ["admin"]}
    return path, {name: create_key(path, name, item, created=0) for name, item in scopes.items()}


def test_without_settings_there_is_no_guard() -> None:
    assert open_guard(AccessSettings(), Registry(SystemClock())) is None


def test_what_needs_no_guard_is_not_wrapped(tmp_path: Path) -> None:
    def handler(exchange: Exchange) -> None: ...

    path, _ = keys_in(tmp_path)
    limited = Guard(AccessSettings(rates=RateLimits((RateLimit(1),))), Registry(SystemClock()))
    assert limited.http("read", handler) is handler
    assert limited.http("infer", handler) is not handler
    keyed = Guard(AccessSettings(keys_file=path), Registry(SystemClock()))
    assert keyed.http(None, handler) is handler
    assert keyed.http("read", handler) is not handler


@contextmanager
def capture_logger(caplog: pytest.LogCaptureFixture, name: str) -> Iterator[None]:
    """A logger's records, whatever other tests have made of the loggers above it."""
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)
    before, logger.propagate = logger.propagate, False
    try:
        with caplog.at_level(logging.INFO, name):
            yield
    finally:
        logger.propagate = before
        logger.removeHandler(caplog.handler)


def test_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, keys = keys_in(tmp_path)
    with guarded(AccessSettings(keys_file=path)) as site, capture_logger(caplog, "headrace.access"):
        status, fields, body = site.ask("POST", INFER)
        assert (status, fields["www-authenticate"]) == (401, "Bearer")
        assert "needs an API key" in body["error"]
        status, fields, body = site.ask("POST", INFER, authorization="Bearer hr_wrong")
        assert (status, fields["www-authenticate"]) == (401, "Bearer")
        assert "not known here" in body["error"]
        assert site.handlers.called == 0
        status, fields, _ = site.ask("POST", INFER, authorization=f"Bearer {keys['alice']}")
        assert status == 200
        assert not {"www-authenticate", *RATE_FIELDS} & set(fields)
        assert site.ask("POST", INFER, x_api_key=keys["alice"])[0] == 200
        status, fields, body = site.ask("GET", "/v2/models/m", x_api_key=keys["alice"])
        assert (status, "www-authenticate" in fields) == (403, False)
        assert body == {"error": "the API key 'alice' has no scope 'read': ask for one that has"}
        assert site.ask("GET", "/v2/models/m", x_api_key=keys["bob"])[0] == 200
        assert site.ask("POST", INFER, x_api_key=keys["bob"])[0] == 403
        assert site.ask("POST", "/v2/repository/models/m/load", x_api_key=keys["bob"])[0] == 403
        for method, path_of in (("POST", INFER), ("GET", "/v2/models/m"), ("POST", "/v2/repository/models/m/load")):
            assert site.ask(method, path_of, x_api_key=keys["root"])[0] == 200
        assert site.ask("GET", "/v2/health/live")[0] == 200
        assert site.counted() == {
            "headrace_unauthorized_total missing": 1,
            "headrace_unauthorized_total wrong": 1,
            "headrace_unauthorized_total scope": 3,
        }
    names = [record.__dict__.get("key_name") for record in caplog.records if record.getMessage() == "answered"]
    assert names[:4] == [None, None, "alice", "alice"]
    logged = " ".join(str(record.__dict__) for record in caplog.records)
    assert not any(key in logged for key in (*keys.values(), "hr_wrong"))


def test_rates() -> None:
    clock = ManualClock()
    with guarded(AccessSettings(rates=RateLimits((RateLimit(2, 60.0),))), clock=clock) as site:
        status, fields, _ = site.ask("POST", INFER)
        assert status == 200
        assert fields.keys() >= RATE_FIELDS
        assert (fields["ratelimit-limit"], fields["ratelimit-remaining"], fields["ratelimit-reset"]) == ("2", "1", "30")
        assert site.ask("POST", INFER)[1]["x-ratelimit-remaining"] == "0"
        status, fields, body = site.ask("POST", INFER)
        assert (status, fields["retry-after"], fields["ratelimit-remaining"]) == (429, "30", "0")
        assert body == {"error": "this address may send 2 requests in 60 seconds: wait 30 s"}
        assert site.ask("GET", "/v2/models/m")[0] == 200  # not inference
        assert site.handlers.called == 2
        clock.advance(30.0)
        assert site.ask("POST", INFER)[0] == 200
        assert site.counted() == {"headrace_rate_limited_total address": 1}


def test_rates_by_key_and_for_other_scopes(tmp_path: Path) -> None:
    path, keys = keys_in(tmp_path)
    rates = RateLimits((RateLimit(1, 3600.0, "key"),), scopes=("infer", "read"))
    with guarded(AccessSettings(path, rates)) as site:
        assert site.ask("POST", INFER, x_api_key=keys["alice"])[0] == 200
        assert site.ask("POST", INFER, x_api_key=keys["alice"])[0] == 429
        assert site.ask("POST", INFER, x_api_key=keys["root"])[0] == 200
        assert site.ask("GET", "/v2/models/m", x_api_key=keys["root"])[0] == 429
        assert site.ask("GET", "/v2/health/live")[0] == 200
        assert site.counted() == {"headrace_rate_limited_total key": 2}


def test_a_made_up_address_does_not_help() -> None:
    settings = AccessSettings(rates=RateLimits((RateLimit(1, 3600.0),)))
    with guarded(settings) as site:
        answers = [site.ask("POST", INFER, x_forwarded_for=f"1.1.1.{number}")[0] for number in range(3)]
        assert answers == [200, 429, 429]


def test_workers_of_one_server_share_their_counts(tmp_path: Path) -> None:
    settings = AccessSettings(rates=RateLimits((RateLimit(3, 3600.0),)))
    with guarded(settings, tmp_path) as one, guarded(settings, tmp_path) as two:
        answers = [site.ask("POST", INFER)[0] for site in (one, two, one, two, one, two)]
        assert answers == [200, 200, 200, 429, 429, 429]


def test_in_flight() -> None:
    with guarded(AccessSettings(concurrency=Concurrency(2))) as site:
        one, two = site.hold(), site.hold()
        assert site.guard.in_flight == 2
        status, fields, body = site.ask("POST", INFER)
        assert (status, fields["retry-after"]) == (429, "1")
        assert body == {"error": "2 requests are in flight, the limit of this server"}
        assert site.ask("GET", "/v2/models/m")[0] == 200
        site.server.call(lambda: site.handlers.held[0].respond(OK_JSON, b"{}"))
        assert site.guard.in_flight == 1
        assert site.ask("POST", INFER)[0] == 200
        two.close()  # the client has gone
        site.wait_for(lambda: site.guard.in_flight == 0)
        # An answer for who has gone is none, and is not counted twice.
        site.server.call(lambda: site.handlers.held[1].respond(OK_JSON, b"{}"))
        assert site.guard.in_flight == 0
        one.close()
        assert site.counted() == {"headrace_shed_total full": 1}


def test_every_end_is_counted_once() -> None:
    with guarded(AccessSettings(concurrency=Concurrency(1))) as site:
        assert site.ask("POST", "/v2/models/broken/infer")[0] == 500
        assert site.guard.in_flight == 0
        for end in ("finish", "abort"):
            client = site.hold("/v2/models/m/generate_stream")
            assert site.guard.in_flight == 1
            exchange = site.handlers.held[-1]
            site.server.call(exchange.send, b"[1]")
            assert site.guard.in_flight == 1
            site.server.call(getattr(exchange, end))
            assert site.guard.in_flight == 0
            site.server.call(exchange.finish)
            client.close()
            assert site.guard.in_flight == 0
        client = site.hold()
        client.close()
        site.wait_for(lambda: site.guard.in_flight == 0)
        with connect(f"ws://127.0.0.1:{site.server.port}/predict/stream"):
            assert site.guard.in_flight == 0  # the connection is no HTTP any more


def test_what_a_rate_refuses_is_not_in_flight() -> None:
    settings = AccessSettings(rates=RateLimits((RateLimit(1, 3600.0),)), concurrency=Concurrency(1))
    with guarded(settings) as site:
        assert [site.ask("POST", INFER)[0] for _ in range(3)] == [200, 429, 429]
        assert site.guard.in_flight == 0
        assert site.counted() == {"headrace_rate_limited_total address": 2}


def test_who_would_wait_too_long_is_refused() -> None:
    clock = ManualClock()
    settings = AccessSettings(concurrency=Concurrency(timeout_seconds=0.5))
    with guarded(settings, clock=clock) as site:
        clients = [site.hold() for _ in range(10)]
        for number in range(8):
            # One in a tenth of a second; after the eighth it is known.
            clock.advance(0.1)
            site.server.call(site.handlers.held[number].respond, OK_JSON, b"{}")
            if number < 7:
                clients.append(site.hold())
        status, fields, body = site.ask("POST", INFER)
        assert (status, fields["retry-after"]) == (429, "1")
        assert body["error"].startswith("9 requests are queued, which takes ")
        assert body["error"].endswith("this one has 0.5 s")
        assert site.counted() == {"headrace_shed_total late": 1}
        for client in clients:
            client.close()


def test_a_websockets_key_is_checked_and_the_request_counted_when_it_opens(tmp_path: Path) -> None:
    path, keys = keys_in(tmp_path)
    settings = AccessSettings(path, RateLimits((RateLimit(1, 3600.0, "key"),)))
    with guarded(settings) as site:
        url = f"ws://127.0.0.1:{site.server.port}/predict/stream"
        for fields, status in (({}, 401), ({"x-api-key": keys["bob"]}, 403)):
            with pytest.raises(InvalidStatus) as refused:
                connect(url, additional_headers=fields)
            assert refused.value.response.status_code == status
        with connect(url, additional_headers={"x-api-key": keys["alice"]}):
            pass
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers={"x-api-key": keys["alice"]})
        assert refused.value.response.status_code == 429
        assert "retry-after" in refused.value.response.headers


def test_without_redis_requests_are_counted_locally() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        settings = AccessSettings(rates=RateLimits((RateLimit(1, 3600.0),), redis_url=url), concurrency=Concurrency(1))
        with guarded(settings) as site:
            assert [site.ask("POST", INFER)[0] for _ in range(3)] == [200, 429, 429]
            assert site.ask("POST", INFER)[1].keys() >= RATE_FIELDS
            assert site.guard.in_flight == 0
