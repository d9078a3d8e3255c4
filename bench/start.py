# SPDX-License-Identifier: Apache-2.0
"""Measure the time from the start of a server's process to its first response.

The file of every model and library is in the page cache, since the server was started once without counting.
"""

import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from bench.cpu import machine_cpu, server_cpu_seconds
from bench.errors import BenchError
from bench.running import READY_SECONDS, Started, refuse_if_ended, started, tail
from bench.server import Server

STARTS_IN_A_ROUND = 3
# Short beside what is measured; an attempt costs the machine some 0.3 ms.
POLL_SECONDS = 0.005
TIMEOUT_SECONDS = 10
MODEL = "simple"
ROW, ONES = list(range(16)), [1] * 16
SUMS = [number + 1 for number in ROW]


@dataclass(frozen=True)
class StartSample:
    """Some starts of one server, as they are written to the results file."""

    server: str
    round: int
    each_seconds: list[float]
    median_seconds: float
    # Until it calls itself ready, which it does when every model is.
    median_ready_seconds: float
    cpu_seconds: float
    other_cores: float


def measure_start(server: Server, round_number: int) -> StartSample:
    """Start, ask until there is an answer, wait until it is ready, stop; once for the page cache, then some times."""
    _one_start(server)
    starts = [_one_start(server) for _ in range(STARTS_IN_A_ROUND)]
    return StartSample(
        server=server.name,
        round=round_number,
        each_seconds=[start.answered for start in starts],
        median_seconds=median(start.answered for start in starts),
        median_ready_seconds=median(start.ready for start in starts),
        cpu_seconds=median(start.cpu_seconds for start in starts),
        other_cores=median(start.other_cores for start in starts),
    )


@dataclass(frozen=True)
class _Start:
    answered: float
    ready: float
    cpu_seconds: float
    other_cores: float


def _one_start(server: Server) -> _Start:
    with started(server) as target:
        machine_before, bench_before = machine_cpu().busy_seconds, time.process_time()
        answered = _wait_for(target, _is_answered)
        ready = _wait_for(target, _is_ready)
        used = server_cpu_seconds(target.process.pid)
        others = machine_cpu().busy_seconds - machine_before - used - (time.process_time() - bench_before)
        return _Start(answered, ready, used, max(0.0, others / ready))


def _wait_for(target: Started, holds: Callable[[int], bool]) -> float:
    """Seconds from the start of the process until this holds."""
    deadline = target.at + READY_SECONDS
    while (now := time.monotonic()) < deadline:
        refuse_if_ended(target)
        if holds(target.ports.http):
            return time.monotonic() - target.at
        time.sleep(POLL_SECONDS)
    raise BenchError(f"no answer {now - target.at:.0f} seconds after its start:\n{tail(target.log)}")


def _is_answered(port: int) -> bool:
    rows = {"INPUT0": ROW, "INPUT1": ONES}
    tensors = [{"name": name, "shape": [1, 16], "datatype": "INT32", "data": data} for name, data in rows.items()]
    body = json.dumps({"inputs": tensors}).encode()
    url = f"http://127.0.0.1:{port}/v2/models/{MODEL}/infer"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, method="POST"), timeout=TIMEOUT_SECONDS) as reply:
            outputs = {output["name"]: output["data"] for output in json.load(reply)["outputs"]}
    except OSError:
        # Nobody listens yet, or the model is still loading.
        return False
    if outputs["OUTPUT0"] != SUMS:
        raise BenchError(f"the answer has wrong numbers: {outputs['OUTPUT0']}")
    return True


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=TIMEOUT_SECONDS):
            return True
    except OSError:
        return False
