# SPDX-License-Identifier: Apache-2.0
"""Measure a server with a limit on requests in flight at three times its peak rate.

First the most that it can do, by connections that wait for their answers; then requests at three times that rate, which
wait for nothing (openloop.py). The server is held on one core, the client on the others.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.cpu import machine_cpu, server_cpu_seconds
from bench.dialects import Request, request_for
from bench.errors import BenchError
from bench.load import GRACE_SECONDS, put_load
from bench.machine import REPOSITORY
from bench.pinning import client_cores, pinned, refuse_unless_pinned
from bench.running import RunningServer
from bench.verify import verified_response_bytes
from bench.workloads import OVERLOADING

TIMES_CAPACITY = 3
# What a client would give one request before it turns away, were there no others; see README.md.
TIMEOUT_BUDGET_MS = 100.0
WARM_UP_SECONDS = 1


@dataclass(frozen=True)
class OverloadSample:
    """One overload, as it is written to the results file."""

    server: str
    round: int
    # Answers a second: the most that there can be, those asked for, and the right ones among them.
    peak: float
    offered: float
    goodput: float
    accepted_p50_ms: float
    accepted_p99_ms: float
    rejected: int
    rejected_p50_ms: float
    rejected_p99_ms: float
    failed: int
    # How late the client was with its own requests.
    late_p99_ms: float
    server_cores: float
    other_cores: float


def measure_overload(target: RunningServer, round_number: int, seconds: int) -> OverloadSample:
    """Verify, find the peak, overload, verify again."""
    request, port, cores = request_for(OVERLOADING, target.server.dialect), target.ports.http, client_cores()
    verified_response_bytes(OVERLOADING, request, port)
    put_load(OVERLOADING, request, port, WARM_UP_SECONDS, cores)
    peak = put_load(OVERLOADING, request, port, seconds, cores)
    if peak.errors:
        raise BenchError(f"{peak.errors} of {peak.requests} requests failed before there was an overload")
    offered = TIMES_CAPACITY * peak.requests_per_second
    machine_before, server_before, clock_before = machine_cpu(), server_cpu_seconds(target.pid), time.monotonic()
    result, client_cpu = _ask_at(offered, request, port, 2 * seconds, cores)
    machine_after, server_after, elapsed = (
        machine_cpu(),
        server_cpu_seconds(target.pid),
        time.monotonic() - clock_before,
    )
    verified_response_bytes(OVERLOADING, request, port)
    refuse_unless_pinned(target.pid)
    used = server_after - server_before
    return OverloadSample(
        server=target.server.name,
        round=round_number,
        peak=peak.requests_per_second,
        offered=offered,
        goodput=result.pop("accepted") / (2 * seconds),
        server_cores=used / elapsed,
        other_cores=max(0.0, (machine_after.busy_seconds - machine_before.busy_seconds - used - client_cpu) / elapsed),
        rejected=int(result.pop("rejected")),
        failed=int(result.pop("failed")),
        **result,
    )


def _ask_at(rate: float, request: Request, port: int, seconds: int, cores: set[int]) -> tuple[dict[str, float], float]:
    """What openloop.py saw, and the CPU seconds that it took."""
    lines = [f"POST {request.path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(request.body)}"]
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        file = Path(folder, "request")
        file.write_bytes("\r\n".join([*lines, "", ""]).encode() + request.body)
        command = [sys.executable, "-m", "bench.openloop", str(port), f"{rate:.3f}", str(seconds), str(file)]
        try:
            finished = subprocess.run(
                pinned(command, cores), cwd=REPOSITORY, capture_output=True, text=True, check=False,
                timeout=seconds + GRACE_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise BenchError("the open loop did not end: the server stopped answering") from error
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if finished.returncode != 0:
        raise BenchError(f"the open loop failed: {finished.stderr[-500:]}")
    result: dict[str, float] = json.loads(finished.stdout)
    return result, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
