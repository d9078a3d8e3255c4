# SPDX-License-Identifier: Apache-2.0
"""Guards over HTTP/2: the fields they add, and each way in which a stream can end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import h2.connection
import h2.events
import h2.settings

from headrace.api.access.api_keys import create_key
from headrace.api.access.settings import AccessSettings, Concurrency, RateLimit, RateLimits
from headrace.core.clock import SystemClock
from headrace.core.telemetry.metrics import Registry
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from headrace.programs.serve.access_guard import Guard, Middleware, open_guard
from support.serving import Serving, serving

PATH = "/v2/models/m/infer"


class Client:
    """One connection by hand."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._wire = h2.connection.H2Connection()
        self._wire.initiate_connection()
        self._flush()

    def ask(self, *fields: tuple[str, str]) -> int:
        stream = self._wire.get_next_available_stream_id()
        pseudo = [(":method", "POST"), (":path", PATH), (":scheme", "http"), (":authority", "a")]
        self._wire.send_headers(stream, [*pseudo, *fields], end_stream=True)
        self._flush()
        return int(stream)

    def narrow(self) -> None:
        """Take no body, until more is granted."""
        self._wire.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        self._flush()

    def reset(self, stream: int) -> None:
        self._wire.reset_stream(stream)
        self._flush()

    def answer(self, stream: int) -> dict[str, str]:
        """The head of a response."""
        while True:
            for event in self._wire.receive_data(self._socket.recv(65536)):
                if isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream:
                    return {_text(name): _text(value) for name, value in event.headers or ()}
            self._flush()

    def close(self) -> None:
        self._socket.close()

    def _flush(self) -> None:
        self._socket.sendall(self._wire.data_to_send())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class Guarded:
    """A guarded route whose requests are held."""

    def __init__(self, server: Serving, guard: Guard, held: list[Exchange]) -> None:
        self.server, self.guard, self.held = server, guard, held

    def wait_for(self, condition: Callable[[], bool]) -> None:
        while not self.server.call(condition):  # the test's own time-out is the limit
            pass


@contextmanager
def guarded(settings: AccessSettings) -> Iterator[tuple[Guarded, Client]]:
    held: list[Exchange] = []
    guard = open_guard(settings, Registry(SystemClock()))
    assert guard is not None

    def build() -> Site:
        routes = Routes(Middleware(guard).http)
        routes.add("POST", PATH, held.append, scope="infer")
        return Site(routes)

    with serving(build) as server:
        client = Client(server.port)
        yield Guarded(server, guard, held), client
        client.close()


def test_fields(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = create_key(path, "alice", ["infer"], created=0)
    with guarded(AccessSettings(path, RateLimits((RateLimit(1, 3600.0, "key"),)))) as (site, client):
        answer = client.answer(client.ask())
        assert (answer[":status"], answer["www-authenticate"]) == ("401", "Bearer")
        stream = client.ask(("authorization", f"Bearer {key}"))
        site.wait_for(lambda: len(site.held) == 1)
        site.server.call(site.held[0].respond, OK_JSON, b"{}")
        answer = client.answer(stream)
        assert (answer[":status"], answer["ratelimit-remaining"], answer["x-ratelimit-limit"]) == ("200", "0", "1")
        answer = client.answer(client.ask(("x-api-key", key)))
        assert (answer[":status"], answer["retry-after"], answer["ratelimit-reset"]) == ("429", "3600", "3600")


def test_a_streamed_answer_has_the_fields_too() -> None:
    with guarded(AccessSettings(rates=RateLimits((RateLimit(5, 3600.0),)))) as (site, client):
        stream = client.ask()
        site.wait_for(lambda: len(site.held) == 1)
        site.server.call(site.held[0].start, OK_JSON)
        assert client.answer(stream)["ratelimit-remaining"] == "4"


def test_every_end_is_counted_once() -> None:
    with guarded(AccessSettings(concurrency=Concurrency(1))) as (site, client):
        ends: list[Callable[[Exchange, int], None]] = [
            lambda exchange, _stream: site.server.call(exchange.respond, OK_JSON, b"{}"),
            lambda exchange, _stream: site.server.call(exchange.fail, RuntimeError("x")),
            lambda exchange, _stream: site.server.call(exchange.abort),
            lambda _exchange, stream: client.reset(stream),
        ]
        for number, end in enumerate(ends):
            stream = client.ask()
            site.wait_for(lambda number=number: len(site.held) == number + 1)  # type: ignore[misc]
            assert site.guard.in_flight == 1
            end(site.held[-1], stream)
            site.wait_for(lambda: site.guard.in_flight == 0)
        stream = client.ask()
        site.wait_for(lambda: len(site.held) == 5)
        site.server.call(site.held[-1].start, OK_JSON)
        site.server.call(site.held[-1].finish)
        assert site.guard.in_flight == 0


def test_an_answer_that_is_not_read_and_then_given_up_is_one_end() -> None:
    with guarded(AccessSettings(concurrency=Concurrency(3))) as (site, client):
        client.narrow()
        streams = [client.ask() for _ in range(3)]
        site.wait_for(lambda: len(site.held) == 3)
        site.server.call(site.held[0].respond, OK_JSON, b"[1, 2, 3]")
        assert site.guard.in_flight == 2  # computed: that it is not read is no matter of the model
        client.answer(streams[0])
        client.reset(streams[0])
        client.ask()  # comes after the reset
        site.wait_for(lambda: len(site.held) == 4)
        assert site.guard.in_flight == 3
        client.close()
        site.wait_for(lambda: site.guard.in_flight == 0)
