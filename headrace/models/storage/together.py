# SPDX-License-Identifier: Apache-2.0
"""Several downloads at once, of which the first that fails stops the others: `together`. Used by `objects` and `hub`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

from headrace.core.errors import Cancelled

Stopped = Callable[[], bool]


def together(works: Iterable[Callable[[Stopped], None]], at_once: int, cancelled: Stopped) -> None:
    """Run all, and wait for all. Each is given a function that says whether to stop, and raises Cancelled then."""
    stop = threading.Event()

    def stopped() -> bool:
        return stop.is_set() or cancelled()

    def one(work: Callable[[Stopped], None]) -> None:
        try:
            work(stopped)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(at_once, thread_name_prefix="storage") as pool:
        try:
            tasks = [pool.submit(one, work) for work in works]
            wait(tasks)
        except BaseException:
            stop.set()  # an interrupt from the keyboard must not wait for what is still queued
            raise
    failures = [failure for task in tasks if (failure := task.exception()) is not None]
    # Those that were stopped because another had failed say only that.
    first = next((failure for failure in failures if not isinstance(failure, Cancelled)), None)
    if first is not None or failures:
        raise first or failures[0]
