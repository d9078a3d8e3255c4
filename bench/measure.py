# SPDX-License-Identifier: Apache-2.0
"""Measure one workload on one running server, or refuse to."""

import time
from dataclasses import dataclass

from bench.cpu import machine_cpu, memory_of, server_cpu_seconds, server_processes
from bench.dialects import Request, request_for
from bench.errors import BenchError
from bench.load import LoadFigures, put_load
from bench.pinning import client_cores, refuse_unless_pinned
from bench.running import RunningServer
from bench.steady import put_steady_load
from bench.verify import verified_response_bytes, verify_crowd
from bench.workloads import Workload

WARM_UP_SECONDS = 1
# Refused answers are far smaller than right ones; a little slack for requests cut off at the end of the run.
LEAST_SHARE_OF_BYTES = 0.98


@dataclass(frozen=True)
class Sample:
    """The figures of one measurement, as they are written to the results file."""

    server: str
    workload: str
    round: int
    seconds: float
    requests: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    errors: int
    bytes_per_response: float
    server_cpu_ms_per_1000: float
    server_cores: float
    client_cpu_ms_per_1000: float
    other_cores: float
    stolen_cores: float
    rss_mb: float
    pss_mb: float
    processes: int


def measure(target: RunningServer, workload: Workload, round_number: int, seconds: int) -> Sample:
    """Verify, warm up, measure, verify again."""
    request = request_for(workload, target.server.dialect)
    port = _port(target, workload)
    response_bytes = verified_response_bytes(workload, request, port)
    if workload.checks_crowd:
        verify_crowd(workload, target.server.dialect, port)
    cores = client_cores() if target.server.one_core else None
    _put_load(target, workload, request, WARM_UP_SECONDS, cores)

    machine_before, server_before, clock_before = machine_cpu(), server_cpu_seconds(target.pid), time.monotonic()
    behind_before = _cpu_behind(target)
    figures = _put_load(target, workload, request, seconds * workload.times_longer, cores)
    machine_after, server_after, clock_after = machine_cpu(), server_cpu_seconds(target.pid), time.monotonic()
    behind = _cpu_behind(target) - behind_before

    verified_response_bytes(workload, request, port)
    if target.server.one_core:
        refuse_unless_pinned(target.pid)
    if figures.requests == 0:
        raise BenchError("no request was answered")
    if figures.bytes_per_response < LEAST_SHARE_OF_BYTES * response_bytes:
        raise BenchError(
            f"answers under load had {figures.bytes_per_response:.0f} bytes on average where a right one has "
            f"{response_bytes}: some were refusals"
        )
    pids = list(server_processes(target.pid))
    memory = memory_of(pids)
    elapsed = clock_after - clock_before
    server_cpu = server_after - server_before
    machine_busy = machine_after.busy_seconds - machine_before.busy_seconds
    return Sample(
        server=target.server.name,
        workload=workload.name,
        round=round_number,
        seconds=elapsed,
        requests=figures.requests,
        requests_per_second=figures.requests_per_second,
        p50_ms=figures.p50_ms,
        p99_ms=figures.p99_ms,
        errors=figures.errors,
        bytes_per_response=figures.bytes_per_response,
        server_cpu_ms_per_1000=server_cpu * 1e6 / figures.requests,
        server_cores=server_cpu / elapsed,
        client_cpu_ms_per_1000=figures.client_cpu_seconds * 1e6 / figures.requests,
        other_cores=max(0.0, (machine_busy - server_cpu - behind - figures.client_cpu_seconds) / elapsed),
        stolen_cores=(machine_after.stolen_seconds - machine_before.stolen_seconds) / elapsed,
        rss_mb=memory.rss_mb,
        pss_mb=memory.pss_mb,
        processes=len(pids),
    )


def _put_load(
    target: RunningServer, workload: Workload, request: Request, seconds: int, cores: set[int] | None
) -> LoadFigures:
    port = _port(target, workload)
    if workload.is_slow:
        return put_steady_load(workload, request, port, seconds, cores, target.server.dialect)
    return put_load(workload, request, port, seconds, cores)


def _port(target: RunningServer, workload: Workload) -> int:
    return target.ports.grpc if workload.transport == "grpc" else target.ports.http


def _cpu_behind(target: RunningServer) -> float:
    return server_cpu_seconds(target.behind_pid) if target.behind_pid is not None else 0.0
