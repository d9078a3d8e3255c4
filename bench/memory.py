# SPDX-License-Identifier: Apache-2.0
"""Measure the memory of an idle server that has loaded no backend."""

import time
from dataclasses import dataclass

from bench.cpu import memory_of, server_processes
from bench.running import RunningServer

# What a start needs for a moment has been given back by then, or never will be.
REST_SECONDS = 2


@dataclass(frozen=True)
class MemorySample:
    """One look at an idle server, as it is written to the results file."""

    server: str
    round: int
    rss_mb: float
    pss_mb: float
    processes: int


def measure_memory(target: RunningServer, round_number: int) -> MemorySample:
    """Memory of the whole process tree, a little after its start."""
    time.sleep(REST_SECONDS)
    pids = list(server_processes(target.pid))
    memory = memory_of(pids)
    return MemorySample(target.server.name, round_number, memory.rss_mb, memory.pss_mb, len(pids))
