# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU and memory of a server with loaded models and no requests."""

import time
import urllib.request
from dataclasses import dataclass

from bench.cpu import machine_cpu, memory_of, server_cpu_seconds, server_processes
from bench.errors import BenchError
from bench.models import IDLE_MODELS
from bench.running import RunningServer

# /proc counts in hundredths of a second, so an idle server is watched longer than a busy one: 20 s for the usual 5.
TIMES_LONGER = 4


@dataclass(frozen=True)
class IdleSample:
    """One watch over an idle server, as it is written to the results file."""

    server: str
    round: int
    models: int
    seconds: float
    percent_of_core: float
    other_cores: float
    pss_mb: float
    processes: int


def measure_idle(target: RunningServer, round_number: int, seconds: int) -> IdleSample:
    """User and system time of the whole process tree while nobody asks for anything."""
    _refuse_unless_loaded(target)
    machine_before, server_before, clock_before = machine_cpu(), server_cpu_seconds(target.pid), time.monotonic()
    time.sleep(seconds * TIMES_LONGER)
    machine_after, server_after, clock_after = machine_cpu(), server_cpu_seconds(target.pid), time.monotonic()
    elapsed, used = clock_after - clock_before, server_after - server_before
    pids = list(server_processes(target.pid))
    return IdleSample(
        server=target.server.name,
        round=round_number,
        models=len(IDLE_MODELS),
        seconds=elapsed,
        percent_of_core=100 * used / elapsed,
        other_cores=max(0.0, (machine_after.busy_seconds - machine_before.busy_seconds - used) / elapsed),
        pss_mb=memory_of(pids).pss_mb,
        processes=len(pids),
    )


def _refuse_unless_loaded(target: RunningServer) -> None:
    # A server that never loaded them would be idle too.
    for name in IDLE_MODELS:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{target.ports.http}/v2/models/{name}/ready", timeout=5):
                pass
        except OSError as error:
            raise BenchError(f"model {name} is not ready: {error}") from error
