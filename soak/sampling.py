# SPDX-License-Identifier: Apache-2.0
"""Sample the memory, descriptors and threads of the server's processes, and the latency of requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import psutil

from soak.traffic import Traffic

MEASURES = {"RSS": "MiB", "descriptors": "", "threads": "", "p99 of v2": "ms"}
"""What is measured, and its unit."""


@dataclass(slots=True)
class Samples:
    """One list for each measure, and when."""

    seconds: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})


async def sample(
    traffic: Traffic, every_seconds: float, seconds: float, on_sample: Callable[[Samples], None]
) -> Samples:
    """Sample every few seconds until the time is over; `told` is called with all samples so far."""
    samples, start = Samples(), time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        processes = await asyncio.to_thread(_tree, traffic.server.process)
        took, traffic.took_seconds = traffic.took_seconds, []
        row = (*processes, float(np.percentile(took, 99)) * 1000 if took else math.nan)
        samples.seconds.append(now)
        for name, value in zip(MEASURES, row, strict=True):
            samples.values[name].append(value)
        on_sample(samples)
        await asyncio.sleep(max(0.0, min(every_seconds, seconds - now)))
    return samples


def _tree(process: psutil.Process) -> tuple[float, float, float]:
    """MiB, descriptors and threads of a process and all that it started."""
    resident = descriptors = threads = 0.0
    for child in (process, *process.children(recursive=True)):
        try:
            with child.oneshot():
                resident += child.memory_info().rss / (1 << 20)
                descriptors += child.num_fds()
                threads += child.num_threads()
        except psutil.NoSuchProcess:
            continue
    return resident, descriptors, threads
