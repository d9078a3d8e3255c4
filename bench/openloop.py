# SPDX-License-Identifier: Apache-2.0
"""An open-loop load generator: `python -m bench.openloop PORT RATE SECONDS FILE` sends requests at a fixed rate.

Requests are due at even distances, and the time of each counts from when it was due, not from when it was sent: a client
that waits for a slow server before it asks again would hide the waiting. A request takes a connection that is free, or
opens one. FILE is a whole HTTP/1.1 request. Prints one JSON object.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop

HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length:"
# Above this many requests without an answer, asking goes on in vain: the rest counts as failed.
MOST_CONNECTIONS = 4000
LAST_ANSWERS_SECONDS = 10.0
TICK_SECONDS = 0.001


@dataclass
class Tally:
    """What came back, and when; times in seconds from when a request was due."""

    accepted: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)
    failed: int = 0
    # How much later than due requests were sent: the client's own fault.
    late: list[float] = field(default_factory=list)
    in_flight: int = 0


class Connection(asyncio.Protocol):
    """One request at a time; goes back to the free ones with its answer."""

    def __init__(self, tally: Tally, free: "list[Connection]", connected: "set[Connection]") -> None:
        self._tally, self._free, self._open = tally, free, connected
        self._due = 0.0
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._open.add(self)

    def ask(self, message: bytes, due: float) -> None:
        self._due, self._data = due, b""
        if self._transport is not None:
            self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(HEAD_END)
        if not end:
            return
        lowered = head.lower()
        at = lowered.find(LENGTH)
        if at < 0 or len(body) < int(lowered[at + len(LENGTH) :].split(b"\r\n", 1)[0]):
            return
        took, status = time.perf_counter() - self._due, head[9:12]
        if status == b"200":
            self._tally.accepted.append(took)
        elif status == b"429":
            self._tally.rejected.append(took)
        else:
            self._tally.failed += 1
        self._due = 0.0
        self._tally.in_flight -= 1
        if b"\r\nconnection: close" in lowered:
            return
        self._free.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._due:
            self._due = 0.0
            self._tally.failed += 1
            self._tally.in_flight -= 1
        if self in self._free:
            self._free.remove(self)
        self._open.discard(self)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def ask_at(port: int, rate: float, seconds: float, message: bytes) -> Tally:
    """Ask for so long, then wait for the last answers."""
    loop, tally = asyncio.get_running_loop(), Tally()
    free: list[Connection] = []
    connected: set[Connection] = set()
    opening: set[asyncio.Task[None]] = set()

    async def ask_on_new(due: float) -> None:
        try:
            _, connection = await loop.create_connection(lambda: Connection(tally, free, connected), "127.0.0.1", port)
        except OSError:
            tally.failed += 1
            tally.in_flight -= 1
            return
        connection.ask(message, due)

    begun, sent, count = time.perf_counter(), 0, int(rate * seconds)
    while sent < count:
        now = time.perf_counter()
        while sent < count and (due := begun + sent / rate) <= now:
            sent += 1
            if tally.in_flight >= MOST_CONNECTIONS:
                tally.failed += 1
                continue
            tally.in_flight += 1
            tally.late.append(now - due)
            if free:
                free.pop().ask(message, due)
            else:
                task = loop.create_task(ask_on_new(due))
                opening.add(task)
                task.add_done_callback(opening.discard)
        await asyncio.sleep(TICK_SECONDS)
    end = time.perf_counter() + LAST_ANSWERS_SECONDS
    while tally.in_flight and time.perf_counter() < end:  # noqa: ASYNC110  once a run, and exact to a millisecond
        await asyncio.sleep(TICK_SECONDS)
    tally.failed += tally.in_flight
    warmup = replace(tally)
    for connection in connected:
        connection.close()
    # For the transports to notice.
    await asyncio.sleep(TICK_SECONDS)
    return warmup


def main(port: str, rate: str, seconds: str, file: str) -> None:
    tally = uvloop.run(ask_at(int(port), float(rate), float(seconds), Path(file).read_bytes()))
    json.dump(
        {
            "accepted": len(tally.accepted),
            "rejected": len(tally.rejected),
            "failed": tally.failed,
            "accepted_p50_ms": percentile(tally.accepted, 0.50),
            "accepted_p99_ms": percentile(tally.accepted, 0.99),
            "rejected_p50_ms": percentile(tally.rejected, 0.50),
            "rejected_p99_ms": percentile(tally.rejected, 0.99),
            "late_p99_ms": percentile(tally.late, 0.99),
        },
        sys.stdout,
    )


def percentile(seconds: list[float], share: float) -> float:
    """In milliseconds; 0 of nothing."""
    ordered = sorted(seconds)
    return ordered[int(len(ordered) * share)] * 1e3 if ordered else 0.0


if __name__ == "__main__":
    main(*sys.argv[1:])
