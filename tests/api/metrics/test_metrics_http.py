# SPDX-License-Identifier: Apache-2.0
"""Scrapes over HTTP: formats, compression, several at once, and others who are served meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from metrics_scrape import QUIET, Scraped, metrics_of, scrape

from headrace.api.metrics.collector import TURN_SECONDS
from headrace.core.clock import SystemClock
from headrace.core.telemetry.exposition import Format
from headrace.core.telemetry.metrics import Registry
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.directory import Directory, ServedModel
from headrace.engine.statistics import VersionStatistics
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.engines import ask, builtin_plane, config_of
from support.serving import Serving, serving

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""What Debian's Prometheus sends."""


async def _site() -> Site:
    routes = Routes()
    metrics_of(await builtin_plane(), QUIET).add_to(routes)
    return Site(routes)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(_site) as running:
        yield running


def get(server: Serving, method: str = "GET", path: str = "/metrics", **fields: str) -> tuple[Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in fields.items()})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def test_text_by_default(server: Serving) -> None:
    response, body = get(server)
    assert response.status == 200
    assert response.getheader("content-type") == "text/plain; version=0.0.4; charset=utf-8"
    assert Scraped(body)("nv_inference_count", model="identity", version="1") == 0


def test_openmetrics_if_the_client_accepts_it(server: Serving) -> None:
    response, body = get(server, accept=PROMETHEUS)
    assert response.getheader("content-type") == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert body.endswith(b"\n# EOF\n")
    assert Scraped(body, Format.OPENMETRICS)("nv_inference_count", model="identity") == 0


@pytest.mark.parametrize("accept", ["", PROMETHEUS])
def test_compression_if_the_client_accepts_it(server: Serving, accept: str) -> None:
    response, body = get(server, accept=accept, accept_encoding="gzip")
    assert response.getheader("content-encoding") == "gzip"
    assert response.getheader("vary") == "accept-encoding"
    metrics = Scraped(gzip.decompress(body), Format.OPENMETRICS if accept else Format.TEXT)
    assert metrics("nv_inference_count", model="identity") == 0
    assert len(body) < len(metrics.text) / 5


def test_head_and_wrong_methods(server: Serving) -> None:
    response, body = get(server, "HEAD")
    assert (response.status, body) == (200, b"")
    assert int(response.getheader("content-length")) > 1000
    assert get(server, "POST")[0].status == 405
    assert get(server, path="/metric")[0].status == 404


def test_concurrent_scrapes_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        metrics = metrics_of(await builtin_plane())
        collector = metrics._collector
        began = 0
        collect = collector.collect

        async def counting() -> Any:
            nonlocal began
            began += 1
            return await collect()

        monkeypatch.setattr(collector, "collect", counting)
        texts = await asyncio.gather(*(metrics.text(Format.TEXT) for _ in range(20)))
        assert began == 1
        assert len(set(texts)) == 1
        assert await metrics.text() != b""
        assert began == 2

    asyncio.run(main())


def test_a_client_that_disconnects_does_not_end_the_scrape_of_others() -> None:
    async def main() -> None:
        metrics = metrics_of(await builtin_plane())
        first = asyncio.create_task(metrics.text())
        second = asyncio.create_task(metrics.text())
        await asyncio.sleep(0)
        first.cancel()
        assert b"nv_inference_count" in await second

    asyncio.run(main())


class BusyVersion:
    """A version with something in every bucket."""

    waiting = 0
    caches_responses = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.version, self.version_text = 1, "1"
        self.config = config_of(name, metric_tags={"team": "vision"})
        self.statistics = VersionStatistics()
        for exponent in range(10, 36):
            for rows in (1, 2, 4, 8):
                self.statistics.received += 1
                self.statistics.answered_single(rows, 0, 1 << exponent, 2 << exponent, 3 << exponent)


def thousand() -> DataPlane:
    directory = Directory()
    for number in range(1000):
        version: Any = BusyVersion(f"model_{number}")
        directory.put(ServedModel(version.name), {1: version})
    return DataPlane(directory)


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape's own sense of time: a turn is over at every tenth look, however quick the machine is."""
    looks = itertools.count()
    monkeypatch.setattr("headrace.api.metrics.collector.perf_counter", lambda: next(looks) * TURN_SECONDS / 10)


@pytest.mark.usefixtures("slow_clock")
def test_a_thousand_versions_take_many_turns() -> None:
    async def main() -> None:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        text = await metrics_of(thousand()).text()
        task.cancel()
        # Each turn of the scrape is a millisecond and what was begun in it: nobody waits for all of it.
        assert turns > 1000 / 11
        assert text.count(b"\nnv_inference_count{") == 1000
        assert text.count(b"\n") > 80_000

    asyncio.run(main())


@pytest.mark.usefixtures("slow_clock")
def test_inference_continues_during_a_scrape() -> None:
    async def main() -> None:
        plane = thousand()
        own = await builtin_plane()
        scraping = asyncio.create_task(metrics_of(plane).text())
        answered = 0
        while not scraping.done():
            await ask(own, "identity", INPUT0=np.zeros((1, 1), np.float32))
            answered += 1
        assert answered > 20

    asyncio.run(main())


def test_a_metric_that_cannot_be_read_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        registry = Registry(SystemClock())
        registry.callback("broken", "Fails.", lambda: 1 // 0)
        registry.callback("whole", "Works.", lambda: 5)
        metrics = await scrape(metrics_of(await builtin_plane(), registry=registry))
        assert metrics("whole") == 5
        assert "broken" not in metrics.types

    asyncio.run(main())
    assert "metric broken cannot be read" in caplog.text


def test_a_failed_scrape_is_an_error_without_internal_text() -> None:
    class Broken:
        def statistics(self) -> Any:
            raise RuntimeError("a secret")

    async def site() -> Site:
        routes = Routes()
        metrics_of(Broken(), QUIET).add_to(routes)  # type: ignore[arg-type]
        return Site(routes)

    with serving(site) as server:
        response, body = get(server)
        assert response.status == 500
        assert b"secret" not in body
        assert get(server)[0].status == 500
