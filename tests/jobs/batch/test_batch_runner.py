# SPDX-License-Identifier: Apache-2.0
"""The runner of a batch job, over a source and a client that are none: when it stops, and what counts as failed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.core.clock import SystemClock
from headrace.jobs.batch.ledger import FailedOutput, Ledger, open_ledger
from headrace.jobs.batch.runner import BatchRunner
from headrace.jobs.batch.settings import BatchSettings, Shard
from headrace.jobs.batch.sources import Item


class Numbers:
    """A source of numbers."""

    skipped = 0
    fingerprint = ""

    def __init__(self, total: int) -> None:
        self.total = total

    def entries(self) -> Iterator[tuple[int, int]]:
        yield from enumerate(range(self.total))

    def id_of(self, entry: int) -> str:
        return str(entry)

    def item(self, index: int, entry: int) -> Item:
        return Item(index, str(entry), {})


class Endless:
    """A model that answers even numbers by a failure, and never answers those from 4 on."""

    max_batch = 1
    in_flight = 2

    def __init__(self) -> None:
        self.waiting = 0
        self.cancelled = 0

    def prepare(self, item: Item) -> tuple[None, Item]:
        return None, item

    async def infer(self, prepared: Sequence[Item]) -> list[Any]:
        (item,) = prepared
        if item.index >= 4:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return [{"fine": item.index} if item.index % 2 else FailedOutput(status=item.index)]


def ledger_in(folder: Path) -> Ledger:
    return open_ledger(folder / "results.jsonl", {"job": 1}, 100, Shard())


def test_a_job_whose_requests_never_end_can_be_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        client, ledger = Endless(), ledger_in(tmp_path)
        settings = BatchSettings(model="", input="", output="", grace_seconds=0.01)
        runner = BatchRunner(settings, Numbers(100), client, ledger, SystemClock(), lambda _done, _failed: None)
        running = asyncio.create_task(runner.run())
        while client.waiting < 2:
            await asyncio.sleep(0.001)
        runner.stop()
        await asyncio.wait_for(running, 60)
        assert (client.waiting, client.cancelled) == (2, 2), "no other item was begun"
        assert (ledger.marks.finished, ledger.marks.failed) == (4, 2)
        ledger.close()

    asyncio.run(main())
    again = ledger_in(tmp_path)
    assert (again.marks.finished, again.marks.failed) == (4, 2), "failed outputs count as failed after a restart, too"
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted(lines, key=lambda line: line["index"]) == [
        {"index": 0, "id": "0", "error": {"status": 0}},
        {"index": 1, "id": "1", "output": {"fine": 1}},
        {"index": 2, "id": "2", "error": {"status": 2}},
        {"index": 3, "id": "3", "output": {"fine": 3}},
    ]
