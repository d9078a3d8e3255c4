# SPDX-License-Identifier: Apache-2.0
"""One of two backends dies under load."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections import Counter

import pytest
from routing import Routing, routing

from headrace.fleet.router.settings import HealthSettings, OutlierSettings, RetrySettings
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON, OK_PLAIN
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.serving import Serving, serving
from support.waiting import eventually

CLIENTS = 16
LONG_OUT = OutlierSettings(ejection_seconds=300)
"""Whoever is ejected does not come back while it is looked at, however long that takes."""
BODY = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}'


def _model_site() -> Site:
    """Answers inference after a moment, so that there is always something in flight."""

    def infer(exchange: Exchange) -> None:
        asyncio.get_running_loop().call_later(0.002, exchange.respond, OK_JSON, b'{"outputs": []}')

    routes = Routes()
    routes.add("POST", "/v2/models/m/infer", infer)
    routes.add("POST", "/v2/repository/models/m/load", infer)
    routes.add("GET", "/v2/health/ready", lambda exchange: exchange.respond(OK_PLAIN, b""))
    return Site(routes)


class _Load:
    """Clients that ask until they are told to stop."""

    def __init__(self, router: Routing, path: str) -> None:
        self._router = router
        self._path = path
        self._stop = threading.Event()
        self.statuses: Counter[int] = Counter()
        self.errors: list[str] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]

    def __enter__(self) -> _Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for(self, count: int) -> None:
        eventually(lambda: sum(self.statuses.values()) >= count, message=f"{count} answers")

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._router.port, timeout=60)
        while not self._stop.is_set():
            try:
                connection.request("POST", self._path, BODY)
                response = connection.getresponse()
                response.read()
            except (OSError, http.client.HTTPException) as error:
                with self._lock:
                    self.errors.append(repr(error))
                connection.close()
            else:
                with self._lock:
                    self.statuses[response.status] += 1
        connection.close()


def _kill(server: Serving) -> None:
    server.call(server.server.abort)


@pytest.mark.parametrize("policy", ["p2c", "round-robin"])
def test_with_retries_of_inference_nothing_is_lost(policy: str) -> None:
    with serving(_model_site) as one, serving(_model_site) as two:
        retries = RetrySettings(inference=True)
        with routing(one.port, two.port, policy=policy, retries=retries, outliers=LONG_OUT) as router:
            with _Load(router, "/v2/models/m/infer") as load:
                load.wait_for(300)
                _kill(one)
                load.wait_for(1200)
            assert load.errors == []
            assert set(load.statuses) == {200}
            assert router.stats(0).ok > 50 and router.stats(1).ok > 500
            assert router.proxy.backends.all[0].state == "ejected"


def test_without_them_only_what_was_in_flight_there_is_lost() -> None:
    with (
        serving(_model_site) as one,
        serving(_model_site) as two,
        routing(one.port, two.port, outliers=LONG_OUT) as router,
    ):
        with _Load(router, "/v2/repository/models/m/load") as load:
            load.wait_for(300)
            _kill(one)
            load.wait_for(1200)
        assert load.errors == []
        assert set(load.statuses) <= {200, 502} and load.statuses[502] <= CLIENTS


def test_a_backend_that_drains_loses_nothing() -> None:
    """A rolling restart: the backend finishes what it has and closes. A request may cross with the close."""
    with serving(_model_site) as one, serving(_model_site) as two:
        checks, retries = HealthSettings(interval_seconds=0.05), RetrySettings(inference=True)
        with routing(one.port, two.port, health=checks, retries=retries) as router:
            with _Load(router, "/v2/models/m/infer") as load:
                load.wait_for(300)
                one.call(one.server.drain, 10.0)
                load.wait_for(1200)
            assert load.errors == [] and set(load.statuses) == {200}
