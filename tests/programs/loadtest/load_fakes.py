# SPDX-License-Identifier: Apache-2.0
"""Lanes without a network, a clock that tests move, and runs made of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.programs.loadtest.connections import TIMED_OUT, Done
from headrace.programs.loadtest.results import ClientCpu, RunResults


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeConnection:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.done: Done | None = None
        self.sent = 0

    def send(self, done: Done) -> None:
        assert self.done is None, "one request at a time"
        self.done = done
        self.sent += 1

    def answer(self, kind: str = "", text: str = "") -> None:
        done, self.done = self.done, None
        assert done is not None
        done(kind, text)

    def expire(self, before: float) -> None:
        if self.done is not None:
            self.answer(TIMED_OUT, "")

    def close(self) -> None:
        self.done = None


class FakeTarget:
    def __init__(self) -> None:
        self.connections: list[FakeConnection] = []

    def new_connection(self) -> FakeConnection:
        self.connections.append(FakeConnection())
        return self.connections[-1]

    async def close(self) -> None:
        pass


def run_of(
    latencies_ms: Sequence[float],
    *,
    throughput: float = 100.0,
    errors: dict[str, int] | None = None,
    late_ms: Sequence[float] = (),
    thread: float = 0.1,
    load: float = 4,
    waiting: int = 0,
) -> RunResults:
    return RunResults(
        mode="open" if len(late_ms) else "closed",
        load=load,
        rows=1,
        seconds=1.0,
        finished=int(throughput),
        latencies_ms=np.array(latencies_ms, np.float64),
        late_ms=np.array(late_ms, np.float64),
        errors=errors or {},
        examples=dict.fromkeys(errors or {}, "why"),
        most_waiting=waiting,
        cpu=ClientCpu(thread, thread),
    )
