# SPDX-License-Identifier: Apache-2.0
"""The admin API of several workers: what one is told all do, and what one tells is of all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from split_planes import SplitPlane, echo, fail

from headrace.api.admin import Admin
from headrace.core.errors import HeadraceError
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import RequestHead, ResponseHead
from headrace.net.http.routes import Routes
from headrace.programs.serve.access_guard import Middleware
from headrace.programs.serve.broadcast import Broadcaster
from headrace.programs.serve.worker import WorkerPolicies
from headrace.programs.serve.worker_channel import WorkerChannel
from headrace.programs.serve.worker_stats import WorkerStats
from support.async_tests import async_test
from support.waiting import eventually_async


class RecordedExchange(Exchange):
    """A request and the answer to it, without a wire."""

    on_disconnect = None
    peer = "test"
    started = False

    def __init__(self, method: str, path: str, document: Any) -> None:
        self.head = RequestHead(method.encode(), path.encode(), (), version="1.1")
        self.body = b"" if document is None else json.dumps(document).encode()
        self.answer: asyncio.Future[tuple[int, Any]] = asyncio.get_running_loop().create_future()

    def respond(self, head: ResponseHead, body: Any = b"", extra: Any = ()) -> None:
        self.answer.set_result((head.status, json.loads(body)))


class InProcessWorker:
    """A worker in this very process."""

    def __init__(self, folder: Path, index: int) -> None:
        self.channel = WorkerChannel(folder, index, 2)
        self.split_plane = SplitPlane(seed=index)

    async def start(self, candidate: Any) -> None:
        await self.split_plane.load(1)
        await self.split_plane.load(2, candidate)
        stats = WorkerStats(self.channel, self.split_plane.plane)
        self.broadcaster = Broadcaster(self.channel)
        policies = WorkerPolicies(stats, self.broadcaster)
        self.routes = Routes(Middleware(None, policies).http)
        traffic = self.split_plane.traffic
        stats.add_source("traffic", traffic.numbers)
        traffic.on_rollback = policies.rolled_back
        Admin(traffic, lambda: stats.others("traffic")).add_to(self.routes)
        stats.start()
        self.broadcaster.start()
        await self.channel.start()

    async def ask(self, method: str, path: str, document: Any = None) -> tuple[int, Any]:
        exchange = RecordedExchange(method, path, document)
        route, exchange.params = self.routes.find(method.encode(), path.encode())
        try:
            route.handler(exchange)
        except HeadraceError as error:
            exchange.fail(error)
        return await asyncio.wait_for(exchange.answer, 30)

    async def close(self) -> None:
        await self.channel.close()
        await self.split_plane.close()


async def workers(folder: Path, candidate: Any = echo) -> tuple[InProcessWorker, InProcessWorker]:
    first, second = InProcessWorker(folder, 0), InProcessWorker(folder, 1)
    await first.start(candidate)
    await second.start(candidate)
    return first, second


@async_test
async def test_a_change_in_one_worker_reaches_all(tmp_path: Path) -> None:
    first, second = await workers(tmp_path)
    assert (await first.ask("PUT", "/admin/traffic/m", {"weights": {"1": 0, "2": 1}}))[0] == 200
    assert (await second.ask("GET", "/admin/traffic/m"))[1]["split"]["weights"] == {"1": 0, "2": 1}
    assert (await second.ask("PUT", "/admin/traffic/m", {"weights": {"1": 3, "2": 1}}))[0] == 400
    assert (await second.ask("DELETE", "/admin/traffic/m"))[0] == 200
    assert (await first.ask("GET", "/admin/traffic/m"))[0] == 404
    # Asked at once, they agree afterwards.
    for _ in range(5):
        weights = [{"weights": {"1": share, "2": 100 - share}} for share in (10, 20, 30, 40)]
        await asyncio.gather(
            *((first, second)[place % 2].ask("PUT", "/admin/traffic/m", weight) for place, weight in enumerate(weights))
        )
        assert first.split_plane.traffic.splits() == second.split_plane.traffic.splits()
    # One that starts later does what the others were asked to, the wrong requests among them.
    wanted = {"1": 0.25, "2": 0.75}
    await first.ask("PUT", "/admin/traffic/m", {"weights": wanted})
    await first.ask("POST", "/admin/traffic/m/rollback", {"version": "1", "reason": "test"})
    await first.ask("PUT", "/admin/traffic/m", {"weights": {"7": 1}})
    await second.close()
    successor = InProcessWorker(tmp_path, 1)
    await successor.start(echo)
    await successor.broadcaster.catch_up()
    state = (await successor.ask("GET", "/admin/traffic/m"))[1]
    assert state["split"]["weights"] == wanted and state["versions"][0]["state"] == "rolled_back"
    await first.close()
    await successor.close()


@async_test
async def test_a_report_is_of_all(tmp_path: Path) -> None:
    first, second = await workers(tmp_path)
    split = {"weights": {"1": 0.5, "2": 0.5}, "shadows": {}}
    await first.ask("PUT", "/admin/traffic/m", split)
    for _ in range(30):
        await first.split_plane.ask()
    for _ in range(20):
        await second.split_plane.ask()
    for party in (first, second, first):
        versions = (await party.ask("GET", "/admin/traffic/m/report"))[1]["versions"]
        assert sum(version["answered"] for version in versions) == 50
        assert sum(count for version in versions for _, count in version["histogram"]) == 50
    # A split of other weights begins at nothing, in all of them.
    await second.ask("PUT", "/admin/traffic/m", {"weights": {"1": 0.6, "2": 0.4}})
    versions = (await first.ask("GET", "/admin/traffic/m/report"))[1]["versions"]
    assert [version["requests"] for version in versions] == [0, 0]
    await first.close()
    await second.close()


@async_test
async def test_what_one_finds_bad_all_roll_back(tmp_path: Path) -> None:
    first, second = await workers(tmp_path, fail)
    rollback = {"error_rate": 0.1, "least_requests": 5}
    await first.ask("PUT", "/admin/traffic/m", {"weights": {"1": 0.5, "2": 0.5}, "rollback": rollback})
    failed = 0
    for _ in range(100):
        try:
            await second.split_plane.ask()
        except HeadraceError:
            failed += 1
    assert failed == 5
    await eventually_async(lambda: first.split_plane.of("2")["state"] == "rolled_back")
    assert first.split_plane.of("2")["reason"] == second.split_plane.of("2")["reason"]
    assert {await first.split_plane.ask() for _ in range(50)} == {"1"}
    # Counted where it was found, once.
    metric = "headrace_traffic_rollbacks_total"
    assert [party.split_plane.metric(metric, version="2") for party in (first, second)] == [0, 1]
    await first.close()
    await second.close()
