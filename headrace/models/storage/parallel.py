# SPDX-License-Identifier: Apache-2.0
"""Run several downloads in parallel; the first failure stops the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

from headrace.core.errors import Cancelled

Stopped = Callable[[], bool]


def run_parallel(jobs: Iterable[Callable[[Stopped], None]], at_once: int, cancelled: Stopped) -> None:
    """Run all jobs and wait for them. Each gets a function that returns whether to stop."""
    stop = threading.Event()

    def stopped() -> bool:
        return stop.is_set() or cancelled()

    def run(job: Callable[[Stopped], None]) -> None:
        try:
            job(stopped)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(at_once, thread_name_prefix="storage") as pool:
        try:
            tasks = [pool.submit(run, job) for job in jobs]
            wait(tasks)
        except BaseException:
            stop.set()  # A keyboard interrupt must not wait for queued jobs.
            raise
    failures = [failure for task in tasks if (failure := task.exception()) is not None]
    # Prefer the original failure: the other jobs were cancelled because of it.
    first = next((failure for failure in failures if not isinstance(failure, Cancelled)), None)
    if first is not None or failures:
        raise first or failures[0]
