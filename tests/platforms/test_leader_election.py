# SPDX-License-Identifier: Apache-2.0
"""Leader election in virtual time, over a real `ApiClient` whose transport keeps the Lease as an API server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import httpx2

from headrace.platforms.kubernetes_client.api import ApiClient
from headrace.platforms.kubernetes_client.leader_election import LeaderElector, LeaseSettings
from support.virtual_time import run_virtual

PATH = "/apis/coordination.k8s.io/v1/namespaces/headrace/leases"


class LeaseServer:
    """One Lease with versions: a write to an older version is a conflict."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.status = 0
        """Answer every call with this status, if set."""
        self.reachable = True

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        if not self.reachable:
            raise httpx2.ConnectError("refused", request=request)
        if self.status:
            return _failure(self.status)
        if request.method == "GET":
            return httpx2.Response(200, json=self.lease) if self.lease else _failure(404)
        body = json.loads(request.content)
        if request.method == "POST":
            assert request.url.path == PATH
            if self.lease is not None:
                return _failure(409)
        elif body["metadata"]["resourceVersion"] != str(self.version):
            return _failure(409)
        self.version += 1
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        return httpx2.Response(200, json=self.lease)

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec


def _failure(code: int) -> httpx2.Response:
    return httpx2.Response(code, json={"kind": "Status", "code": code, "message": "no"})


def run(scenario: Callable[[LeaseServer, Callable[[str], LeaderElector]], Awaitable[None]]) -> None:
    """Run a scenario with a server, and a function that returns the elector of a process."""
    server = LeaseServer()

    async def main() -> None:
        transport = httpx2.MockTransport(server.answer)
        async with httpx2.AsyncClient(transport=transport, base_url="http://cluster") as client:

            def elector(identity: str) -> LeaderElector:
                def now() -> datetime:
                    return datetime.fromtimestamp(asyncio.get_running_loop().time(), UTC)

                return LeaderElector(ApiClient(client), LeaseSettings("headrace", identity), now)

            await scenario(server, elector)

    run_virtual(main())


def now() -> float:
    return asyncio.get_running_loop().time()


def test_the_first_creates_the_lease_and_the_second_waits_until_it_is_released() -> None:
    async def scenario(server: LeaseServer, elector: Callable[[str], LeaderElector]) -> None:
        first, second = elector("one"), elector("two")
        await first.acquire()
        assert (server.spec["holderIdentity"], server.spec["leaseTransitions"]) == ("one", 1)
        waiting = asyncio.ensure_future(second.acquire())
        renewing = asyncio.ensure_future(first.renew())
        await asyncio.sleep(300)
        assert not waiting.done() and not renewing.done()
        renewing.cancel()
        released = now()
        await first.release()
        assert server.spec["holderIdentity"] == ""
        await waiting
        assert now() - released <= 2.0 and server.spec["holderIdentity"] == "two"
        await first.release()  # not the leader any more: nothing to release
        assert server.spec["holderIdentity"] == "two"

    run(scenario)


def test_a_leader_that_vanished_is_replaced_when_its_lease_expires() -> None:
    async def scenario(server: LeaseServer, elector: Callable[[str], LeaderElector]) -> None:
        await elector("one").acquire()
        began = now()
        await elector("two").acquire()
        assert 30 <= now() - began <= 33
        assert (server.spec["holderIdentity"], server.spec["leaseTransitions"]) == ("two", 2)

    run(scenario)


def test_a_leader_stops_before_its_lease_expires_if_it_cannot_renew() -> None:
    async def scenario(server: LeaseServer, elector: Callable[[str], LeaderElector]) -> None:
        first = elector("one")
        await first.acquire()
        renewing = asyncio.ensure_future(first.renew())
        await asyncio.sleep(15)
        server.reachable = False
        await asyncio.sleep(9)
        server.reachable = True  # a short outage is survived
        await asyncio.sleep(60)
        assert not renewing.done()
        server.status = 500
        began = now()
        await renewing
        assert now() - began <= 30, "another process may take the Lease after that"
        server.status = 0
        await first.release()
        assert server.spec["holderIdentity"] == "one", "it is not the leader, so it does not touch the Lease"

    run(scenario)


def test_a_leader_stops_immediately_when_another_holds_the_lease() -> None:
    async def scenario(server: LeaseServer, elector: Callable[[str], LeaderElector]) -> None:
        first = elector("one")
        await first.acquire()
        renewing = asyncio.ensure_future(first.renew())
        await asyncio.sleep(1)
        server.spec.update(holderIdentity="two", renewTime="2026-01-01T00:00:00.000000Z")
        began = now()
        await renewing
        assert now() - began <= 10

    run(scenario)


def test_of_two_concurrent_writers_one_leads() -> None:
    async def scenario(server: LeaseServer, elector: Callable[[str], LeaderElector]) -> None:
        await elector("gone").acquire()
        electors = [elector("one"), elector("two")]
        waiting = [asyncio.ensure_future(elector.acquire()) for elector in electors]
        await asyncio.sleep(60)
        assert [task.done() for task in waiting].count(True) == 1
        for task in waiting:
            task.cancel()

    run(scenario)


def test_a_release_that_fails_is_left_to_expire() -> None:
    async def scenario(server: LeaseServer, elector: Callable[[str], LeaderElector]) -> None:
        first = elector("one")
        await first.acquire()
        server.reachable = False
        await first.release()
        server.reachable = True
        began = now()
        await elector("two").acquire()
        assert now() - began >= 30

    run(scenario)
