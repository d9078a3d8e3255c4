# SPDX-License-Identifier: Apache-2.0
"""Deletion of a service of a simulated machine, step by step: nothing is left, whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from local_site import document, runtime, service
from simulated_fleet import SERVICE, SimulatedFleet, Traffic

from headrace.core.errors import FailedPrecondition, NotFound
from headrace.platforms.kubernetes_client.objects import get_str

DOCUMENT = document("InferenceService", "going", {})


def going(**engine: Any) -> dict[str, Any]:
    """Two replicas that take ten seconds to stop."""
    runner = {"name": "ome-container", "args": ["--port=8080", "--text=going", "--stop=10"]}
    document = service("going", "patient", runner=runner, minReplicas=2, **engine)
    document["metadata"]["labels"] = {"team": "a"}
    return document


def patient() -> dict[str, Any]:
    created = runtime("patient")
    created["spec"]["engineConfig"]["terminationGracePeriodSeconds"] = 60
    return created


async def began(fleet: SimulatedFleet) -> str:
    """The URL of the service, whose deletion has begun."""
    await fleet.apply(patient(), going())
    url = await fleet.ready("going", 2)
    await fleet.fleet.delete(DOCUMENT)
    return url


async def is_gone(fleet: SimulatedFleet) -> bool:
    return await fleet.fleet.get(SERVICE, "default", "going") is None


async def assert_nothing_is_left(fleet: SimulatedFleet, url: str) -> None:
    """No process, no file, no port, no name: as if it had never been."""
    assert not fleet.living
    assert fleet.left_on_disk() == []
    with pytest.raises(ConnectionRefusedError):
        await fleet.ask(url)
    with pytest.raises(NotFound):
        await fleet.fleet.logs("default", "going")
    with pytest.raises(NotFound):
        await fleet.scale("going", 1)
    assert await fleet.pods("going") == []
    assert fleet.daemon is not None
    key = ("default", "going")
    assert not fleet.daemon.objects.of(key) and not fleet.daemon.routers.routers_of(key)
    assert key not in fleet.daemon.controller._ready and not fleet.daemon.controller._workloads._progress
    assert not fleet.daemon.kubelet.start_times


async def test_its_document_stays_until_everything_of_it_has_ended(fleet: SimulatedFleet) -> None:
    url = await began(fleet)
    processes = fleet.processes("going")
    await asyncio.sleep(5)
    live = await fleet.get("going")
    assert get_str(live, "metadata", "deletionTimestamp")
    assert all(process.is_alive for process in processes) and len(processes) == 2, "they have their grace"
    assert all("deletionTimestamp" in pod["metadata"] for pod in await fleet.pods("going"))
    with pytest.raises(FailedPrecondition, match="is being deleted: apply it when it is gone"):
        await fleet.apply(going(maxReplicas=4))
    await fleet.until(lambda: is_gone(fleet))
    assert all(process.how is not None and process.how.code == 0 for process in processes), "none was killed"
    await assert_nothing_is_left(fleet, url)


async def test_requests_that_are_under_way_are_answered_before_it_ends(fleet: SimulatedFleet) -> None:
    await fleet.apply(patient(), going())
    url = await fleet.ready("going", 2)
    asking = [asyncio.ensure_future(fleet.ask(url, "/slow?20")) for _ in range(4)]
    await asyncio.sleep(1)
    await fleet.delete("going")
    assert [(await item).status for item in asking] == [200] * 4
    await assert_nothing_is_left(fleet, url)


async def test_its_document_stays_until_its_router_has_ended_too(fleet: SimulatedFleet) -> None:
    """A request is held for a service that sleeps and never wakes: its router takes its time."""
    never = {"httpGet": {"path": "/never", "port": 8080}, "periodSeconds": 10}
    document = service("going", minReplicas=0, runner={"name": "ome-container", "readinessProbe": never})
    document["metadata"]["annotations"] = {"ome.io/scale-to-zero-idle-seconds": "3600"}
    await fleet.apply(document)
    url = await fleet.url("going")
    router = fleet.router("going")
    asking = asyncio.ensure_future(fleet.ask(url))
    await asyncio.sleep(1)
    await fleet.fleet.delete(DOCUMENT)
    await fleet.until(lambda: not fleet.processes("going"))
    await asyncio.sleep(1)
    assert router.is_alive and not await is_gone(fleet)
    assert (await asking).status == 503
    await fleet.until(lambda: is_gone(fleet))
    assert not router.is_alive
    await assert_nothing_is_left(fleet, url)


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(fleet: SimulatedFleet) -> None:
    stubborn = {"name": "ome-container", "args": ["--port=8080", "--text=going", "--stop=1e9"]}
    await fleet.apply(service("going", runner=stubborn))
    url = await fleet.ready("going")
    process = fleet.process("going")
    before = fleet.machine.loop.time()
    await fleet.delete("going")
    assert process.how is not None and process.how.code == -9
    assert 2 <= process.ended_at - before < 5, "the grace of the runtime is two seconds"
    await assert_nothing_is_left(fleet, url)


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.06, 0.2, 1.0, 9.95, 10.1])
async def test_deletion_continues_after_the_daemon_was_killed(fleet: SimulatedFleet, seconds: float) -> None:
    url = await began(fleet)
    await asyncio.sleep(seconds)
    await fleet.kill()
    await fleet.up()
    await fleet.until(lambda: is_gone(fleet))
    await assert_nothing_is_left(fleet, url)


async def test_a_service_deleted_and_created_again_is_a_new_one(fleet: SimulatedFleet) -> None:
    await began(fleet)
    first = get_str(await fleet.get("going"), "metadata", "uid")
    await fleet.until(lambda: is_gone(fleet))
    await fleet.apply(going())
    url = await fleet.ready("going", 2)
    live = await fleet.get("going")
    assert get_str(live, "metadata", "uid") != first and live["metadata"]["generation"] == 1
    async with Traffic(fleet, url) as traffic:
        await traffic.more()
    assert not traffic.failures


async def test_deleting_an_older_object_of_the_same_name_does_nothing(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("kept"))
    await fleet.ready("kept")
    await fleet.fleet.delete(document("InferenceService", "kept", {}, uid="another"))
    await fleet.fleet.delete(document("InferenceService", "nobody", {}))
    await asyncio.sleep(10)
    assert not get_str(await fleet.get("kept"), "metadata", "deletionTimestamp")


async def test_a_router_that_is_wanted_again_while_it_ends_is_a_new_one_at_its_place(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("again"))
    url = await fleet.ready("again")
    asking = asyncio.ensure_future(fleet.ask(url, "/slow?10"))  # so that the router takes its time to end
    await asyncio.sleep(0.1)
    before = fleet.router("again")
    daemon = fleet.daemon
    assert daemon is not None
    daemon.routers.ensure(("default", "again"), [])
    assert daemon.routers.get("default", "again") is None and daemon.routers.is_stopping(("default", "again"))
    daemon.controller.enqueue(("default", "again"))
    await asyncio.sleep(1)
    assert before.is_alive and daemon.routers.get("default", "again") is None, (
        "what ends is not taken for what is wanted"
    )
    await fleet.until(lambda: fleet.has_router("again") and fleet.router("again") is not before)
    assert (await asking).status == 200 and not before.is_alive
    await fleet.until(lambda: daemon.routers.get("default", "again"))
    assert (fleet.root / "routers" / "default" / "again" / "router.json").exists(), "the next daemon finds it"
    await fleet.ready("again")


@pytest.mark.parametrize("fleet", [{"ephemeral": True}], indirect=True)
async def test_an_ephemeral_fleet_ends_everything_and_keeps_its_documents(fleet: SimulatedFleet) -> None:
    await fleet.apply(patient(), going())
    await fleet.ready("going", 2)
    await fleet.stop()
    assert not fleet.living and not list(fleet.root.glob("pods/*")) and not list(fleet.root.glob("routers/*/*"))
    await fleet.up()
    await fleet.ready("going", 2)
