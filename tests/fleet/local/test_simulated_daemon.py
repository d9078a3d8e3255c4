# SPDX-License-Identifier: Apache-2.0
"""The daemon of a simulated machine is killed, stopped and started again: what runs goes on, and is found."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from local_site import runtime, service
from simulated_fleet import SimulatedFleet, Traffic

from headrace.core.errors import FailedPrecondition
from headrace.fleet.local.settings import LocalSettings
from headrace.platforms.kubernetes_client.objects import Document, get_list
from headrace.programs.fleet_daemon import Daemon


async def container_of(fleet: SimulatedFleet, name: str) -> Document:
    result: Document = get_list((await fleet.pods(name))[0], "status", "containerStatuses")[0]
    return result


@pytest.mark.parametrize("killed", [True, False])
async def test_the_next_daemon_finds_everything_and_no_request_fails(fleet: SimulatedFleet, killed: bool) -> None:
    await fleet.apply(service("kept", minReplicas=2))
    url = await fleet.ready("kept", 2)
    before = {*fleet.processes("kept"), fleet.router("kept")}
    events = [event["reason"] for event in await fleet.events(await fleet.get("kept"))]
    async with Traffic(fleet, url) as traffic:
        await (fleet.kill() if killed else fleet.stop())
        with pytest.raises(FailedPrecondition, match="no fleet runs on this machine"):
            await fleet.get("kept")
        await traffic.more(50)
        await fleet.up()
        assert await fleet.ready("kept", 2) == url
        await traffic.more(50)
    assert traffic.failures == []
    assert {*fleet.processes("kept"), fleet.router("kept")} == before
    if not killed:
        assert [event["reason"] for event in await fleet.events(await fleet.get("kept"))][: len(events)] == events
    # It is followed as well: one that dies is replaced, and so is the router.
    victim, router = min(fleet.processes("kept"), key=lambda process: process.pid), fleet.router("kept")
    victim.kill()
    router.kill()
    await fleet.until(lambda: len(fleet.processes("kept") - {victim}) == 2 and fleet.has_router("kept"))
    assert await fleet.ready("kept", 2) == url
    await fleet.delete("kept")
    assert not fleet.living and fleet.left_on_disk() == []


async def test_a_process_that_died_while_the_daemon_was_down_is_restarted(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("lost"))
    url = await fleet.ready("lost")
    victim = fleet.process("lost")
    await fleet.kill()
    victim.kill()
    await fleet.up()
    await fleet.until(lambda: fleet.processes("lost"))
    assert await fleet.ready("lost") == url
    reported = await container_of(fleet, "lost")
    assert reported["restartCount"] == 1 and reported["lastState"]["terminated"]["reason"] == "ContainerStatusUnknown"


async def test_the_exit_code_of_one_that_another_daemon_started_is_not_known(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("adopted"))
    await fleet.ready("adopted")
    await fleet.kill()
    await fleet.up()
    await fleet.ready("adopted")
    fleet.process("adopted").exit(3)
    await fleet.until(lambda: fleet.processes("adopted"))
    await fleet.ready("adopted")
    last = (await container_of(fleet, "adopted"))["lastState"]["terminated"]
    assert last["reason"] == "ContainerStatusUnknown"


async def test_one_that_starts_is_not_started_twice(fleet: SimulatedFleet) -> None:
    """Killed again and again while a container starts, the daemon goes on with that very one."""
    slow = {"name": "ome-container", "args": ["--port=8080", "--text=slow", "--start=30"]}
    await fleet.apply(service("slow", runner=slow))
    await fleet.until(lambda: fleet.processes("slow"))
    for _ in range(5):
        await fleet.kill()
        await asyncio.sleep(3)
        await fleet.up()
        await asyncio.sleep(1)
    await fleet.ready("slow")
    assert len(fleet.driver.started) == 1
    assert (await container_of(fleet, "slow"))["restartCount"] == 0


@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.07, 0.15, 4.0])
async def test_a_start_continues_whenever_the_daemon_is_killed(fleet: SimulatedFleet, seconds: float) -> None:
    slow = {"name": "ome-container", "args": ["--port=8080", "--text=slow", "--start=3"]}
    await fleet.apply(service("slow", runner=slow, minReplicas=2))
    await asyncio.sleep(seconds)
    await fleet.kill()
    await fleet.up()
    url = await fleet.ready("slow", 2)
    assert (await fleet.ask(url)).by == "slow" and len(fleet.living) == 3


async def test_a_manually_set_replica_count_is_kept(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("set"))
    await fleet.ready("set")
    await fleet.scale("set", 3)
    await fleet.kill()
    await fleet.up()
    await fleet.ready("set", 3)


async def test_a_back_off_continues_from_where_it_was(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("ill", runner={"name": "ome-container", "args": ["--text=crash"]}))

    def starts() -> list[float]:
        return [process.started for process in fleet.machine.processes.values() if "--text=crash" in process.words]

    await fleet.until(lambda: len(starts()) == 5)
    await fleet.kill()
    await fleet.up()
    await asyncio.sleep(1)
    before = len(starts())
    assert before <= 6, "it is tried once at a new start"
    await fleet.until(lambda: len(starts()) > before)
    moments = starts()
    assert moments[-1] - moments[-2] > 60, "and waits as long as before after that"


async def test_a_second_daemon_in_the_same_folder_is_refused(fleet: SimulatedFleet) -> None:
    second = Daemon(fleet.settings)
    with pytest.raises(FailedPrecondition, match="a fleet runs in .* already"):
        await second.start()
    await second.close()


async def test_pods_that_run_by_another_driver_are_refused(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("process"))
    await fleet.ready("process")
    await fleet.stop()
    settings: dict[str, Any] = {"root": fleet.root, "port": fleet.settings.port, "driver": "docker"}
    other = Daemon(LocalSettings(**settings), runtime=fleet.driver)
    with pytest.raises(FailedPrecondition, match="started with --driver process: use that"):
        await other.start()
    await other.close()


async def test_incomplete_folders_are_removed(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("whole"))
    url = await fleet.ready("whole")
    await fleet.kill()
    for place in ("pods/cut", "routers/default/cut", "benchmarks/default/cut"):
        (fleet.root / place).mkdir(parents=True)
    strange = fleet.root / "pods" / "strange" / "pod.json"
    strange.parent.mkdir()
    strange.write_text('{"uid": "strange"}')
    await fleet.up()
    assert await fleet.ready("whole") == url
    assert not any(
        (fleet.root / place).exists() for place in ("pods/cut", "routers/default/cut", "benchmarks/default/cut")
    )
    assert strange.exists(), "what cannot be understood is left where it is"


async def test_a_new_revision_still_has_low_priority_for_the_next_daemon(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("s"))
    await fleet.ready("s")
    slow = {"name": "ome-container", "args": ["--port=8080", "--text=new", "--start=20"]}
    await fleet.apply(service("s", runner=slow))
    await fleet.until(lambda: fleet.driver.low_priority)
    await fleet.kill()
    await fleet.up()
    assert fleet.driver.low_priority
    await fleet.ready("s")
    assert not fleet.driver.low_priority


async def test_an_edit_made_while_the_daemon_was_down_is_applied(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("edited"))
    await fleet.ready("edited")
    await fleet.apply(service("edited", minReplicas=2), runtime("other"))
    await fleet.kill()
    await fleet.up()
    await fleet.ready("edited", 2)
