# SPDX-License-Identifier: Apache-2.0
"""Measure what each test costs.

`pytest --costs FILE` writes a JSON line for each test, and `python tests/support/costs.py FILE...` prints a table of them.
A row of the table is a folder. `setup` is what its fixtures take (starting servers, making models), `waiting` the time in
`time.sleep`, `own CPU` that of the test's process (importing and computing), `programs' CPU` that of the programs it starts.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

_COLUMNS = ("seconds", "setup", "waiting", "cpu", "programs_cpu", "programs")
_HEAD = "| folder | tests | seconds | setup | waiting | own CPU | programs' CPU | programs started |"


class Costs:
    """A plugin of pytest that writes the costs of each test."""

    def __init__(self, file: Path) -> None:
        self._writer = file.open("a", buffering=1)
        self._slept = 0.0
        self._programs = 0
        self._setup = 0.0
        self._sleep, self._open = time.sleep, subprocess.Popen.__init__

    def pytest_sessionstart(self) -> None:
        costs, sleep, start = self, self._sleep, self._open

        def counted_sleep(seconds: float) -> None:
            if threading.current_thread() is threading.main_thread():
                costs._slept += seconds
            sleep(seconds)

        def counted_start(process: Any, *args: Any, **kwargs: Any) -> None:
            costs._programs += 1
            start(process, *args, **kwargs)

        time.sleep = counted_sleep
        subprocess.Popen.__init__ = counted_start  # type: ignore[method-assign]

    def pytest_sessionfinish(self) -> None:
        time.sleep = self._sleep
        subprocess.Popen.__init__ = self._open  # type: ignore[method-assign]
        self._writer.close()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before, self._setup = self._now(), 0.0
        yield
        spent = [round(later - earlier, 4) for earlier, later in zip(before, self._now(), strict=True)]
        seconds, waiting, cpu, programs_cpu, programs = spent
        row = dict(zip(_COLUMNS, (seconds, self._setup, waiting, cpu, programs_cpu, programs), strict=True))
        self._writer.write(json.dumps({"test": item.nodeid, **row}) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._setup = report.duration

    def _now(self) -> tuple[float, ...]:
        own, programs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        used = [usage.ru_utime + usage.ru_stime for usage in (own, programs)]
        return time.monotonic(), self._slept, *used, self._programs


def table(files: Iterable[Path]) -> str:
    """The costs by folder, the most expensive first."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            for folder in (row["test"].split("/")[1], "all"):
                sums[folder].update({"tests": 1} | {name: row[name] for name in _COLUMNS})
    rows = sorted(sums.items(), key=lambda entry: -entry[1]["seconds"])
    cells = [(folder, *(f"{costs[name]:,.0f}" for name in ("tests", *_COLUMNS))) for folder, costs in rows]
    rule = "| --- |" + " ---: |" * (len(_COLUMNS) + 1)
    return "\n".join([_HEAD, rule, *("| " + " | ".join(row) + " |" for row in cells)])


if __name__ == "__main__":
    print(table(map(Path, sys.argv[1:])))
