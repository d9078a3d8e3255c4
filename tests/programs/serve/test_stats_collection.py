# SPDX-License-Identifier: Apache-2.0
"""What workers tell each other: numbers that never fall, and models that all of them have."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from headrace.core.errors import InvalidArgument
from headrace.engine.dataplane import DataPlane
from headrace.programs.serve.broadcast import LoadBroadcaster
from headrace.programs.serve.worker import WorkersPlane
from headrace.programs.serve.worker_channel import WorkerChannel
from headrace.programs.serve.worker_stats import WorkerStats
from support.async_tests import async_test
from support.engines import ask, builtin_plane

ONE = np.ones((1, 4), np.float32)


class InProcessWorker:
    """A worker with the built-in models, in this very process."""

    def __init__(self, folder: Path, index: int, own: DataPlane) -> None:
        self.channel = WorkerChannel(folder, index, 2)
        self.own = own
        self.stats = WorkerStats(self.channel, own)
        self.stats.start()
        self.plane = WorkersPlane(own, self.stats, LoadBroadcaster(self.channel, own))

    async def infer(self, times: int) -> None:
        for _ in range(times):
            await ask(self.own, "identity", INPUT0=ONE)

    async def total(self) -> int:
        await self.stats.gather()
        (version,) = self.plane.statistics("identity")
        return version.statistics.total().success

    async def die(self) -> None:
        """Without a last word."""
        assert self.channel._server is not None
        self.channel._server.close()


async def worker(folder: Path, index: int) -> InProcessWorker:
    worker = InProcessWorker(folder, index, await builtin_plane())
    await worker.channel.start()
    return worker


@async_test
async def test_totals_never_decrease(tmp_path: Path) -> None:
    first, second = await worker(tmp_path, 0), await worker(tmp_path, 1)
    await first.infer(3)
    await second.infer(4)
    assert await first.total() == await second.total() == 7
    await second.infer(5)
    await second.die()
    # What it did after it was last asked is lost, and nobody had been told of it.
    assert await first.total() == 7
    successor = await worker(tmp_path, 1)
    assert await successor.total() == await first.total() == 7
    await successor.infer(2)
    assert await first.total() == 9
    await successor.die()
    third = await worker(tmp_path, 1)
    assert await first.total() == await third.total() == 9
    await third.stats.save()
    await first.channel.close()
    await third.channel.close()


@async_test
async def test_only_a_metrics_request_collects_those_of_all_workers(tmp_path: Path) -> None:
    first, second = await worker(tmp_path, 0), await worker(tmp_path, 1)
    await second.infer(2)
    await first.stats.gather()
    own = first.plane.find("identity")
    assert own is first.own.find("identity")  # who serves a request counts here
    seen: list[int] = []

    def record_successes() -> None:
        result = first.plane.find("identity")
        assert result is not None and result.config.name == "identity"
        seen.append(result.statistics.total().success)

    first.stats.show(record_successes)
    assert seen == [2]
    with pytest.raises(ZeroDivisionError):
        first.stats.show(lambda: cast("None", 1 / 0))
    assert first.plane.find("identity") is own
    await first.channel.close()
    await second.channel.close()


@async_test
async def test_concurrent_callers_share_a_collection_started_after_they_arrived(tmp_path: Path) -> None:
    first, second = await worker(tmp_path, 0), await worker(tmp_path, 1)
    asked = 0
    answer = second.channel._handlers["numbers"]

    async def counting(arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return await answer(arguments)

    second.channel.register_handler("numbers", counting)
    await asyncio.gather(*(first.stats.gather() for _ in range(10)))
    assert asked == 2  # the one that had begun, and one for all who came meanwhile
    await first.channel.close()
    await second.channel.close()


class Models:
    """What a data plane does with models, told in words."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.refuses = ""

    async def load(self, name: str, config_json: str | None, files: Mapping[str, bytes] | None) -> None:
        await asyncio.sleep(0)
        if name == self.refuses:
            raise InvalidArgument(f"failed to load '{name}'")
        self.done.append(f"load {name} {config_json} {files}")

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.done.append(f"unload {name} {unload_dependents}")


async def loading(folder: Path, index: int, models: Models) -> tuple[WorkerChannel, LoadBroadcaster]:
    channel = WorkerChannel(folder, index, 2)
    broadcaster = LoadBroadcaster(channel, cast("DataPlane", models))
    broadcaster.start()
    await channel.start()
    await broadcaster.catch_up()
    return channel, broadcaster


@async_test
async def test_models_everywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other, late = Models(), Models(), Models()
    one_end, broadcaster = await loading(tmp_path, 0, one)
    name = "n" * 255
    await broadcaster.load("alone", None, None)
    assert "Worker 1 is unavailable" in caplog.text
    other_end, _ = await loading(tmp_path, 1, other)
    assert other.done == ["load alone None None"]
    await broadcaster.load(name, "{}", {"file:1/m": b"\0\xff"})
    await broadcaster.unload("alone", unload_dependents=True)
    assert one.done == other.done
    assert one.done[1:] == [f"load {name} {{}} {{'file:1/m': b'\\x00\\xff'}}", "unload alone True"]
    # What fails in the asked one is told to nobody; what fails in another is told with its number.
    one.refuses = "wrong"
    with pytest.raises(InvalidArgument, match="failed to load 'wrong'$"):
        await broadcaster.load("wrong", None, None)
    other.refuses = "half"
    with pytest.raises(InvalidArgument, match=r"failed to load 'half' \(in worker 1; "):
        await broadcaster.load("half", None, None)
    assert len(other.done) == 3
    await other_end.close()
    late_end, _ = await loading(tmp_path, 1, late)
    assert sorted(request[:9] for request in late.done) == ["load half", "load nnnn", "unload al"]
    await one_end.close()
    await late_end.close()


def test_a_name_that_is_a_path_is_refused(tmp_path: Path) -> None:
    broadcaster = LoadBroadcaster(WorkerChannel(tmp_path, 0, 2), cast("DataPlane", Models()))
    with pytest.raises(InvalidArgument):
        asyncio.run(broadcaster.load("../up", None, None))
    assert not list(tmp_path.iterdir())
