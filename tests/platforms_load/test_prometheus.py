# SPDX-License-Identifier: Apache-2.0
"""Debian's Prometheus scrapes a server under load, and a query returns the request rate."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.api.metrics.http import Metrics
from headrace.api.v2.http import V2Http
from headrace.core.clock import SystemClock
from headrace.core.telemetry.metrics import Registry
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.engines import builtin_plane
from support.ports import free_port
from support.serving import serving

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

PATIENCE_SECONDS = 90.0
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()
RATE = 'sum(rate(nv_inference_request_success{model="identity"}[10s]))'
P99 = 'histogram_quantile(0.99, sum by (le) (rate(nv_inference_request_histogram_us_bucket{model="identity"}[10s])))'
MEAN = 'rate(nv_inference_request_duration_us{model="identity"}[10s]) / rate(nv_inference_request_success[10s])'


class Prometheus:
    """A Prometheus that scrapes one port every half second."""

    def __init__(self, folder: Path, target: int) -> None:
        program = shutil.which("prometheus")
        assert program, "prometheus is not installed: run 'make test-platforms', which installs it"
        config = folder / "prometheus.yml"
        config.write_text(
            "scrape_configs:\n- job_name: headrace\n  scrape_interval: 500ms\n  scrape_timeout: 500ms\n"
            f"  static_configs: [{{targets: ['127.0.0.1:{target}']}}]\n"
        )
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
            )

    def ask(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=30) as response:
            return json.load(response)["data"]

    def target(self) -> tuple[str, str]:
        """How the last scrape went, and what was wrong with it."""
        (found,) = self.ask("/api/v1/targets")["activeTargets"]
        return found["health"], found["lastError"]

    def value(self, query: str) -> float | None:
        """The one number a query returns; None while there is none."""
        try:
            result = self.ask("/api/v1/query", query=query)["result"]
        except OSError:  # it is still starting
            return None
        return float(result[0]["value"][1]) if result else None

    def wait_for(self, query: str, above: float = 0.0) -> float:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            value = self.value(query)
            if value is not None and value > above:
                return value
            time.sleep(0.2)
        raise AssertionError(f"{query} has no value: {self.log.read_text()}")


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[Prometheus]:
    running = Prometheus(folder, target)
    try:
        yield running
    finally:
        running.process.terminate()
        running.process.wait(90)


@contextmanager
def load(port: int) -> Iterator[None]:
    """About a hundred requests a second."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        url = f"http://127.0.0.1:{port}/v2/models/identity/infer"
        try:
            while not stop.wait(0.01):
                with urllib.request.urlopen(urllib.request.Request(url, BODY), timeout=30) as response:
                    response.read()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
    assert not failures


def check(folder: Path, http: int, metrics: int) -> None:
    with load(http), prometheus(folder, metrics) as scraper:
        # The window fills from its beginning: the first rates are a part of the real one.
        assert scraper.wait_for(RATE, above=1) < 150
        assert 0 < scraper.wait_for(P99) <= 30e6
        assert 0 < scraper.wait_for(MEAN) < 30e6
        assert scraper.wait_for("process_resident_memory_bytes") > 1e7
        assert scraper.wait_for("nv_cpu_memory_total_bytes") > 1e8
        # A scrape of this moment may have come too late: the one before, or the next, has not.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (result := scraper.target()) != ("up", ""):
            assert time.monotonic() < deadline, result
            time.sleep(0.2)


def test_prometheus_reads_the_rate_in_process(tmp_path: Path) -> None:
    held: list[Metrics] = []

    async def site() -> Site:
        plane = await builtin_plane()
        routes = Routes()
        V2Http(plane).add_to(routes)
        held.append(Metrics(plane, Registry(SystemClock())))
        held[0].add_to(routes)
        held[0].start()
        return Site(routes)

    try:
        with serving(site) as server:
            check(tmp_path, server.port, server.port)
    finally:
        held[0].close()


def test_prometheus_reads_the_rate_from_the_metrics_port(tmp_path: Path) -> None:
    http, grpc, metrics = free_port(), free_port(), free_port()
    program = Path(sys.executable).with_name("headrace")
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    log = tmp_path / "headrace.log"
    with log.open("wb") as writer, subprocess.Popen([program, "serve", *ports], stderr=writer) as process:
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while "ready: " not in log.read_text():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            check(tmp_path, http, metrics)
        finally:
            process.terminate()
