# SPDX-License-Identifier: Apache-2.0
"""Scale to zero on a simulated machine: idle services stop, a request starts them and waits; no request is lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from local_site import service
from simulated_fleet import SimulatedFleet

from headrace.fleet.router.activation import PARTS
from headrace.platforms.kubernetes_client.objects import Document


def idle_service(name: str, idle_seconds: int = 60, start_seconds: float = 3.0) -> dict[str, Any]:
    """A service that stops when nobody asks, and takes a while to start."""
    runner = {"name": "ome-container", "args": ["--port=8080", f"--text={name}", f"--start={start_seconds}"]}
    document = service(name, minReplicas=0, runner=runner)
    document["metadata"]["annotations"] = {"ome.io/scale-to-zero-idle-seconds": str(idle_seconds)}
    return document


async def asleep(fleet: SimulatedFleet, name: str) -> str:
    """Its URL, when it has been idle for so long that it has no process."""
    url = await fleet.url(name)
    await fleet.until(lambda: fleet.processes(name))
    await fleet.until(lambda: not fleet.processes(name))
    return url


async def test_it_sleeps_when_idle_and_each_request_wakes_it(fleet: SimulatedFleet) -> None:
    await fleet.apply(idle_service("sleeper"))
    url = await asleep(fleet, "sleeper")
    seen: set[int] = set()
    for _ in range(3):
        before = fleet.machine.loop.time()
        answer = await fleet.ask(url)
        assert answer.by == "sleeper" and 3.0 <= fleet.machine.loop.time() - before <= 3.5
        assert answer.pid not in seen
        seen.add(answer.pid)
        await asyncio.sleep(55)
        assert fleet.processes("sleeper"), "it stays for as long as it was told"
        await fleet.until(lambda: not fleet.processes("sleeper"), within=30)
    assert fleet.has_router("sleeper")
    await fleet.delete("sleeper")
    assert not fleet.living and fleet.left_on_disk() == []


async def test_many_concurrent_requests_wake_it_once_and_all_are_answered(fleet: SimulatedFleet) -> None:
    await fleet.apply(idle_service("crowd"))
    url = await asleep(fleet, "crowd")
    started = len(fleet.driver.started)
    answers = await asyncio.gather(*(fleet.ask(url) for _ in range(50)))
    assert {answer.status for answer in answers} == {200} and len({answer.pid for answer in answers}) == 1
    assert len(fleet.driver.started) == started + 1


async def test_requests_keep_it_awake(fleet: SimulatedFleet) -> None:
    await fleet.apply(idle_service("kept", idle_seconds=20))
    url = await asleep(fleet, "kept")
    first = (await fleet.ask(url)).pid
    for _ in range(5):
        await asyncio.sleep(15)
        assert (await fleet.ask(url)).pid == first
    # One that is under way does, too.
    assert (await fleet.ask(url, "/slow?60")).pid == first


async def test_a_cold_start_is_reported_in_phases(fleet: SimulatedFleet) -> None:
    await fleet.apply(idle_service("told", idle_seconds=30))
    url = await asleep(fleet, "told")
    assert (await fleet.ask(url)).by == "told"

    async def last_wake() -> dict[str, float]:
        return dict(json.loads((await fleet.ask(url, "/router/status")).text)["waking"]["last_wake"] or {})

    parts = await fleet.until(last_wake)
    assert tuple(parts) == PARTS and parts["loading"] >= 2.9, "it takes three seconds to start"

    async def event() -> Document | None:
        described = (await fleet.described("told")).as_json()
        return next((event for event in described["events"] if event["reason"] == "ColdStart"), None)

    message = (await fleet.until(event))["message"]
    assert message.startswith("first byte after ") and all(part.replace("_", " ") in message for part in PARTS)
    await fleet.until(lambda: not fleet.processes("told"))
    await fleet.ask(url)
    await fleet.until(lambda: _counted_twice(event))  # the last one is kept, and all are counted


async def _counted_twice(event: Any) -> bool:
    return bool((await event())["count"] == 2)


async def test_one_that_crashes_on_the_way_is_waited_for(fleet: SimulatedFleet) -> None:
    await fleet.apply(idle_service("unlucky"))
    url = await asleep(fleet, "unlucky")
    asking = asyncio.ensure_future(fleet.ask(url))
    await fleet.until(lambda: fleet.processes("unlucky"))
    fleet.process("unlucky").kill()
    assert (await asking).by == "unlucky"


async def test_the_daemon_may_die_while_it_sleeps(fleet: SimulatedFleet) -> None:
    await fleet.apply(idle_service("patient"))
    url = await asleep(fleet, "patient")
    await fleet.kill()
    asking = asyncio.ensure_future(fleet.ask(url))
    await asyncio.sleep(20)
    assert not asking.done()
    await fleet.up()
    assert (await asking).by == "patient"


async def test_it_sleeps_on_over_a_restart_of_the_daemon(fleet: SimulatedFleet) -> None:
    await fleet.apply(idle_service("tired"))
    await asleep(fleet, "tired")
    await fleet.stop()
    await fleet.up()
    await asyncio.sleep(60)
    assert not fleet.processes("tired")


async def test_a_service_that_may_not_sleep_any_more_stays_up_and_back(fleet: SimulatedFleet) -> None:
    await fleet.apply(idle_service("awake", idle_seconds=30))
    url = await asleep(fleet, "awake")
    router = fleet.router("awake")
    await fleet.apply(service("awake", minReplicas=1))
    assert await fleet.ready("awake") == url
    await asyncio.sleep(300)
    assert (await fleet.ask(url)).by == "awake" and len(fleet.processes("awake")) == 1
    # And back: the same router hears of both.
    await fleet.apply(idle_service("awake", idle_seconds=30))
    await fleet.until(lambda: not fleet.processes("awake"))
    assert (await fleet.ask(url)).by == "awake"
    assert fleet.router("awake") is router


async def test_a_service_that_never_slept_may_sleep_from_now_on(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("tired", minReplicas=1))
    url = await fleet.ready("tired")
    router = fleet.router("tired")
    await fleet.apply(idle_service("tired", idle_seconds=30))
    await fleet.until(lambda: not fleet.processes("tired"))
    assert (await fleet.ask(url)).by == "tired"
    assert fleet.router("tired") is router


async def test_a_service_scaled_to_zero_by_hand_is_woken_by_hand_or_by_a_request(fleet: SimulatedFleet) -> None:
    await fleet.apply(idle_service("hand", idle_seconds=3600))
    url = await fleet.url("hand")
    await fleet.ready("hand")
    await fleet.scale("hand", 0)
    await fleet.until(lambda: not fleet.processes("hand"))
    await fleet.scale("hand", 1)
    await fleet.ready("hand")
    await fleet.scale("hand", 0)
    await fleet.until(lambda: not fleet.processes("hand"))
    assert (await fleet.ask(url)).by == "hand"
