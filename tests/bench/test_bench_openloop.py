# SPDX-License-Identifier: Apache-2.0
"""The client that does not wait: what it counts, and from when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bench.openloop import ask_at, percentile

REQUEST = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
SERVED_SECONDS = 0.02


def _reply(status: bytes, body: bytes = b"{}", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status, more, len(body), body)


class Slow:
    """Answers one request at a time, after a while and not before it has refused one; it refuses the others at once."""

    def __init__(self) -> None:
        self.busy = False
        self.asked = 0
        self.refused = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readexactly(len(REQUEST))
                self.asked += 1
                if self.busy:
                    self.refused.set()
                    writer.write(_reply(b"429 Too Many Requests"))
                    continue
                self.busy = True
                await asyncio.sleep(SERVED_SECONDS)
                await self.refused.wait()
                self.busy = False
                # In two pieces, as large answers come.
                whole = _reply(b"200 OK", b'{"predictions": []}')
                writer.write(whole[:30])
                await writer.drain()
                writer.write(whole[30:])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def _asked(
    server: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], rate: float, seconds: float
) -> dict[str, list[float] | int]:
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    async with listening:
        tally = await ask_at(listening.sockets[0].getsockname()[1], rate, seconds, REQUEST)
        # The server's ends close when they hear of ours.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
    return {"accepted": tally.accepted, "rejected": tally.rejected, "failed": tally.failed}


def test_accepted_and_rejected_are_counted_apart() -> None:
    server = Slow()
    seen = asyncio.run(_asked(server, rate=400, seconds=0.5))
    accepted, rejected = seen["accepted"], seen["rejected"]
    assert isinstance(accepted, list)
    assert isinstance(rejected, list)
    assert len(accepted) + len(rejected) == server.asked == 200
    assert seen["failed"] == 0
    assert min(accepted) >= SERVED_SECONDS
    assert rejected


def test_a_server_that_hangs_up_fails_requests() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(REQUEST))
        writer.close()

    seen = asyncio.run(_asked(hang_up, rate=100, seconds=0.1))
    assert seen == {"accepted": [], "rejected": [], "failed": 10}


def test_another_status_is_a_failure() -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(REQUEST))
        writer.write(_reply(b"500 Internal Server Error", more=b"Connection: close\r\n"))
        writer.close()

    assert asyncio.run(_asked(broken, rate=100, seconds=0.1))["failed"] == 10


def test_percentiles_are_in_milliseconds() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([0.003, 0.001, 0.002], 0.5) == 2.0
