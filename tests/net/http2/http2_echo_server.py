# SPDX-License-Identifier: Apache-2.0
"""The server of the HTTP/2 tests: real, with echo handlers; `no_failures` fails a test for logged exceptions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from adversary import Client

from headrace.core.limits import Limits
from headrace.net.http2.connection import Http2Connection
from support.serving import EchoCalls, EchoHandlers, Serving, echo_site, serving
from support.waiting import eventually


class Http2EchoServer:
    """A running server with its handlers, and how to connect to it."""

    def __init__(self, server: Serving, handlers: EchoHandlers, calls: EchoCalls) -> None:
        self.server = server
        self.handlers = handlers
        self.calls = calls
        self._stack = ExitStack()

    def connect(self, own: dict[int, int] | None = None, *, handshake: bool = True) -> Client:
        return self._stack.enter_context(Client(self.server.port, own, handshake=handshake))

    def check_alive(self) -> None:
        """A new connection is served."""
        with Client(self.server.port) as client:
            client.request(1)
            client.expect_ok(1, b"hello")

    def connection(self) -> Http2Connection:
        """The server's side of the only connection there is."""
        (found,) = self.server.call(lambda: list(self.server.site.connections))
        assert isinstance(found, Http2Connection)
        return found

    def disconnect(self) -> None:
        """Close every client and wait until the server has noticed."""
        self._stack.close()
        self.until(lambda: not self.server.site.connections)
        for record in (self.handlers.held, self.handlers.events, self.calls.held, self.calls.events):
            record.clear()

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait for something in the server's thread to become true."""
        return eventually(lambda: self.server.call(condition))


class _Failures(logging.Handler):
    """Keeps what no input may cause: an exception that reached the event loop, or the log as one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []
        self._format = logging.Formatter("%(name)s: %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self._format.format(record))


@contextmanager
def no_failures() -> Iterator[None]:
    failures = _Failures()
    logging.getLogger().addHandler(failures)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(failures)
    assert not failures.records, "\n".join(failures.records)


@contextmanager
def http2_echo_server(
    limits: Limits | None = None, *, add_to: Callable[[Any], None] | None = None
) -> Iterator[Http2EchoServer]:
    """Start a server; `add_to` may add routes and services of a test's own to its site."""
    handlers, calls = EchoHandlers(), EchoCalls()
    build = echo_site(limits, handlers, calls)

    def built() -> Any:
        site = build()
        if add_to is not None:
            add_to(site)
        return site

    with serving(built) as server:
        yield Http2EchoServer(server, handlers, calls)
