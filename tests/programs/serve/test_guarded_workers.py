# SPDX-License-Identifier: Apache-2.0
"""Guards in one of several workers: what is refused here reaches no other worker."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

from headrace.api.access.api_keys import create_key
from headrace.api.access.settings import AccessSettings
from headrace.core.clock import SystemClock
from headrace.core.telemetry.metrics import Registry
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_EMPTY
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from headrace.programs.serve.access_guard import Middleware, open_guard
from headrace.programs.serve.broadcast import Broadcaster
from headrace.programs.serve.worker import WorkerPolicies
from headrace.programs.serve.worker_channel import WorkerChannel
from support.serving import serving


def ask(port: int, **fields: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v2/logging", b"{}", {name.replace("_", "-"): value for name, value in fields.items()})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def test_only_permitted_requests_are_broadcast(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    root = create_key(path, "root", ["admin"], created=0)
    bob = create_key(path, "bob", ["read"], created=0)
    guard = open_guard(AccessSettings(keys_file=path), Registry(SystemClock()))
    assert guard is not None
    broadcaster = Broadcaster(WorkerChannel(tmp_path, 0, 2))
    no_statistics: Any = None
    middleware = Middleware(guard, WorkerPolicies(no_statistics, broadcaster))
    changed: list[Exchange] = []

    def change(exchange: Exchange) -> None:
        changed.append(exchange)
        exchange.respond(OK_EMPTY)

    def build() -> Site:
        routes = Routes(middleware.http)
        routes.add("POST", "/v2/logging", change, scope="admin", workers="all")
        return Site(routes)

    with serving(build) as server:
        assert ask(server.port) == 401
        assert ask(server.port, x_api_key=bob) == 403
        assert (changed, broadcaster._history) == ([], {})
        assert ask(server.port, x_api_key=root) == 200
        assert (len(changed), len(broadcaster._history)) == (1, 1)
    # What is repeated here for another worker has passed that worker's guard.
    assert broadcaster._handlers["POST /v2/logging"] is change
