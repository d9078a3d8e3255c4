# SPDX-License-Identifier: Apache-2.0
"""Measure the time from the load request of a 100 MB model to its first response.

The framework is imported and has called a small model before; the file is in the page cache, since it was loaded once
without counting. The same holds for the framework's own load and first call (peers/own-call).
"""

import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from statistics import median

from bench.cpu import machine_cpu, server_cpu_seconds
from bench.dialects import OWN_CALL, Request, request_for
from bench.errors import BenchError
from bench.running import RunningServer
from bench.steady import told
from bench.verify import ask_http, check_answer
from bench.workloads import Workload

LOADS_IN_A_ROUND = 5
TIMEOUT_SECONDS = 120
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class LoadingSample:
    """Some loads by one process, as they are written to the results file."""

    server: str
    workload: str
    round: int
    each_seconds: list[float]
    median_seconds: float
    # Without the first answer, which is the larger part where the model computes much.
    median_load_seconds: float
    # The server's CPU for a load, an answer and an unload: hardly depends on what else the machine does.
    cpu_seconds: float
    other_cores: float


def measure_loading(target: RunningServer, workload: Workload, round_number: int) -> LoadingSample:
    """Load, ask once, unload; once for the page cache, then some times more."""
    request = request_for(workload, target.server.dialect)
    repeat = _own_loads if target.server.dialect == OWN_CALL else _loads
    repeat(target, workload, request, 1)
    machine_before, used_before, clock_before = machine_cpu(), server_cpu_seconds(target.pid), time.monotonic()
    bench_before = time.process_time()
    loads = repeat(target, workload, request, LOADS_IN_A_ROUND)
    machine_after, used_after, clock_after = machine_cpu(), server_cpu_seconds(target.pid), time.monotonic()
    used, of_bench = used_after - used_before, time.process_time() - bench_before
    others = machine_after.busy_seconds - machine_before.busy_seconds - used - of_bench
    return LoadingSample(
        server=target.server.name,
        workload=workload.name,
        round=round_number,
        each_seconds=[load + call for load, call in loads],
        median_seconds=median(load + call for load, call in loads),
        median_load_seconds=median(load for load, _ in loads),
        cpu_seconds=used / LOADS_IN_A_ROUND,
        other_cores=max(0.0, others / (clock_after - clock_before)),
    )


def _own_loads(target: RunningServer, workload: Workload, request: Request, count: int) -> list[tuple[float, float]]:
    took = told(target.ports.http, f"/loads/{count}", request.body, TIMEOUT_SECONDS, workload)
    return list(zip(took[::2], took[1::2], strict=True))


def _loads(target: RunningServer, workload: Workload, request: Request, count: int) -> list[tuple[float, float]]:
    took, port = [], target.ports.http
    for _ in range(count):
        before = time.perf_counter()
        _post(port, f"/v2/repository/models/{workload.model}/load")
        loaded = time.perf_counter()
        body, headers = ask_http(request, port)
        took.append((loaded - before, time.perf_counter() - loaded))
        check_answer(workload, request, body, headers)
        _post(port, f"/v2/repository/models/{workload.model}/unload")
        _wait_until_unloaded(port, workload.model)
    return took


def _wait_until_unloaded(port: int, model: str) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{model}/ready", timeout=TIMEOUT_SECONDS):
                time.sleep(POLL_SECONDS)
        except urllib.error.HTTPError:
            return
    raise BenchError(f"{model} was not unloaded after {TIMEOUT_SECONDS} seconds")


def _post(port: int, path: str) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=b"{}", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        raise BenchError(f"HTTP {error.code} for {path}: {error.read()[:300]!r}") from error
    except OSError as error:
        raise BenchError(f"no answer to {path}: {error}") from error
