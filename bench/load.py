# SPDX-License-Identifier: Apache-2.0
"""The load generators wrk (HTTP/1.1) and h2load (gRPC, and the time of single requests), and parsers of their output.

Both keep one request in flight per connection and start the next as soon as the answer is in.
"""

import re
import resource
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.dialects import Request
from bench.errors import BenchError
from bench.pinning import pinned
from bench.workloads import Workload

LUA_SCRIPT = Path(__file__).with_name("post.lua")
LATENCY_PERCENTILES = (0.50, 0.99)
GRACE_SECONDS = 60  # for the last answers, beyond the time asked for


@dataclass(frozen=True)
class LoadFigures:
    """What the load generator saw, and what it cost."""

    requests: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    errors: int
    bytes_per_response: float
    client_cpu_seconds: float


def put_load(
    workload: Workload, request: Request, port: int, seconds: int, cores: set[int] | None = None
) -> LoadFigures:
    """Load the server on this port of 127.0.0.1, from these cores (None: any), and return what came back."""
    generator = _wrk if workload.transport == "http" and not workload.is_timed else _h2load
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        body = Path(folder, "body")
        body.write_bytes(request.body)
        return generator(workload, request, f"http://127.0.0.1:{port}{request.path}", body, _Run(seconds, cores))


@dataclass(frozen=True)
class _Run:
    seconds: int
    cores: set[int] | None


def _wrk(workload: Workload, request: Request, url: str, body: Path, run: _Run) -> LoadFigures:
    headers = [part for header in request.headers.items() for part in header]
    output, cpu_seconds = _run([
        "wrk", f"-t{workload.client_threads}", f"-c{workload.connections}", f"-d{run.seconds}s",
        "--timeout", "10s", "-s", str(LUA_SCRIPT), url, "--", str(body), *headers,
    ], run)  # fmt: skip
    match = re.search(r"^@@ (.+)$", output, re.MULTILINE)
    if match is None:
        raise BenchError(f"wrk said something unexpected:\n{output[-500:]}")
    requests, microseconds, errors, size, p50_us, p99_us = (float(part) for part in match[1].split())
    return LoadFigures(
        requests=int(requests),
        requests_per_second=requests / (microseconds / 1e6),
        p50_ms=p50_us / 1e3,
        p99_ms=p99_us / 1e3,
        errors=int(errors),
        bytes_per_response=size / max(requests, 1),
        client_cpu_seconds=cpu_seconds,
    )


def _h2load(workload: Workload, request: Request, url: str, body: Path, run: _Run) -> LoadFigures:
    log = body.with_name("requests.tsv")
    headers = [part for name, value in request.headers.items() for part in ("-H", f"{name}: {value}")]
    protocol = ["--h1"] if workload.transport == "http" else []
    output, cpu_seconds = _run([
        "h2load", *protocol, f"-t{workload.client_threads}", f"-c{workload.connections}", "-m1", f"-D{run.seconds}",
        # Wide flow-control windows, as gRPC clients open them, so that the server never waits for us.
        "-w24", "-W24", f"--log-file={log}", "-d", str(body), *headers, url,
    ], run)  # fmt: skip
    rate = re.search(r"finished in [\d.]+\w+, ([\d.]+) req/s", output)
    counts = re.search(r"requests: .* (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", output)
    traffic = re.search(r"\((\d+)\) data", output)
    if rate is None or counts is None or traffic is None:
        raise BenchError(f"h2load said something unexpected:\n{output[-500:]}")
    succeeded, failed, errored, timed_out = (int(count) for count in counts.groups())
    microseconds = sorted(int(line.split("\t")[2]) for line in log.read_text().splitlines())
    p50_ms, p99_ms = (microseconds[int(len(microseconds) * share)] / 1e3 if microseconds else 0.0
                      for share in LATENCY_PERCENTILES)  # fmt: skip
    return LoadFigures(
        requests=succeeded,
        requests_per_second=float(rate[1]),
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        errors=failed + errored + timed_out,
        bytes_per_response=int(traffic[1]) / max(succeeded, 1),
        client_cpu_seconds=cpu_seconds,
    )


def _run(command: list[str], run: _Run) -> tuple[str, float]:
    # Servers are never reaped while a load runs, so the children's time is the load generator's alone.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    placed = command if run.cores is None else pinned(command, run.cores)
    limit = run.seconds + GRACE_SECONDS
    try:
        finished = subprocess.run(placed, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{command[0]} did not end: the server stopped answering") from error
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if finished.returncode != 0:
        raise BenchError(f"{command[0]} failed: {(finished.stderr or finished.stdout)[-500:]}")
    return finished.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
