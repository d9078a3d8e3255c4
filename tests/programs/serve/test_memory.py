# SPDX-License-Identifier: Apache-2.0
"""Memory goes back to the system once a process has grown, and is not asked for again and again."""

from __future__ import annotations

import asyncio

import pytest

from headrace.programs.serve.server import HeapTrimmer, resident_bytes
from support.waiting import eventually_async


def test_the_size_is_that_of_this_process() -> None:
    assert 10 << 20 < resident_bytes() < 64 << 30


def test_a_process_that_has_grown_gives_back_once() -> None:
    sizes = iter([100, 100, 500, 300, 300, 300, 300])
    requests: list[int] = []

    def trim(padding: int) -> int:
        requests.append(padding)
        return 1

    async def main() -> None:
        returner = HeapTrimmer(trim, size, 0.002)
        returner.start()
        while next_size_left():
            await asyncio.sleep(0.005)
        returner.close()

    left = 7

    def next_size_left() -> bool:
        return left > 1

    def size() -> int:
        nonlocal left
        left -= 1
        return next(sizes) << 20

    asyncio.run(main())
    assert requests == [0]


def test_a_process_out_of_descriptors_continues_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    trims: list[int] = []
    readings = iter([0, OSError(24, "Too many open files"), OSError(24, "Too many open files"), 1 << 30])

    def size() -> int:
        reading = next(readings, 1 << 30)
        if isinstance(reading, OSError):
            raise reading
        return reading

    def trim(padding: int) -> int:
        trims.append(padding)
        return 1

    async def run() -> None:
        trimmer = HeapTrimmer(trim, size, 0.002)
        trimmer.start()
        await eventually_async(lambda: trims)
        trimmer.close()

    asyncio.run(run())
    assert trims == [0]
    assert caplog.text.count("Too many open files") == 1 and "Traceback" not in caplog.text
