# SPDX-License-Identifier: Apache-2.0
"""Containers of a simulated machine that end: restarts, back-off, probes, limits; and what the fleet says of it."""

from __future__ import annotations

import asyncio

import pytest
from local_site import runtime, service
from simulated_fleet import SimulatedFleet, Traffic

from headrace.platforms.kubernetes_client.objects import Document, get_list

CRASHES = {"name": "ome-container", "args": ["--text=crash"]}


async def container_of(fleet: SimulatedFleet, name: str) -> Document:
    result: Document = get_list((await fleet.pods(name))[0], "status", "containerStatuses")[0]
    return result


def starts(fleet: SimulatedFleet) -> list[float]:
    """When each container was started."""
    return [process.started for process in fleet.machine.processes.values() if "--text=crash" in process.words]


async def test_each_restart_waits_twice_as_long_up_to_five_minutes(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("ill", runner=CRASHES))
    await fleet.until(lambda: len(starts(fleet)) == 9, within=3600)
    moments = starts(fleet)
    pauses = [round(later - sooner) for sooner, later in zip(moments, moments[1:], strict=False)]
    assert pauses == [0, 10, 20, 40, 80, 160, 300, 300]
    pods = await fleet.pods("ill")
    received = [event["message"] for event in await fleet.events(*pods) if event["reason"] == "BackOff"]
    assert received[0] == "back-off 10 s restarting failed container ome-container" and len(received) == 6
    assert (await container_of(fleet, "ill"))["restartCount"] in (8, 9)


async def test_after_ten_minutes_of_running_a_restart_is_immediate_again(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("long"))
    await fleet.ready("long")
    for _ in range(3):
        fleet.process("long").kill()
        await fleet.until(lambda: len(fleet.processes("long")) == 1)
    await fleet.ready("long")
    await asyncio.sleep(601)
    before = fleet.process("long")
    before.kill()
    await fleet.until(lambda: fleet.processes("long") and fleet.process("long") is not before)
    assert fleet.process("long").started - before.ended_at < 0.1


async def test_a_crashing_replica_states_the_reason_and_the_others_continue(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("well"), service("ill", runner=CRASHES))
    url = await fleet.ready("well")
    result = await fleet.wait_for_message("ill", "this one crashes")
    assert result["status"] == "False" and "exit code 1" in result["message"]
    state = (await fleet.get("ill"))["status"]["modelStatus"]
    assert state["modelRevisionStates"]["targetModelState"] == "FailedToLoad"
    assert state["lastFailureInfo"]["exitCode"] == 1
    reported = await container_of(fleet, "ill")
    assert reported["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert (await fleet.ask(url)).by == "well"
    logs = await fleet.fleet.logs("default", "ill", previous=True)
    assert [log for _, log in logs] == ["this one crashes at its start"]
    # Put right, it comes without its back-off.
    await fleet.until(lambda: len(starts(fleet)) == 6)
    await fleet.apply(service("ill"))
    began = fleet.machine.loop.time()
    await fleet.ready("ill")
    assert fleet.machine.loop.time() - began < 5


async def test_after_an_edit_a_failed_container_is_retried_immediately(fleet: SimulatedFleet) -> None:
    """Its back-off is over as soon as something else is applied."""
    await fleet.apply(service("ill", runner=CRASHES))
    await fleet.until(lambda: len(starts(fleet)) == 6)
    assert (await container_of(fleet, "ill"))["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    await asyncio.sleep(1)
    before = len(starts(fleet))
    await fleet.apply(runtime("other"))
    await asyncio.sleep(1)
    assert len(starts(fleet)) == before + 1


async def test_a_killed_replica_is_restarted_and_the_other_answers_meanwhile(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("pair", minReplicas=2))
    url = await fleet.ready("pair", 2)
    victim = min(fleet.processes("pair"), key=lambda process: process.pid)
    async with Traffic(fleet, url, path="/slow?0.2", clients=4) as traffic:
        await traffic.more()
        victim.kill()
        await fleet.until(lambda: len(fleet.processes("pair") - {victim}) == 2)
        await fleet.ready("pair", 2)
        await traffic.more()
    assert traffic.failures == [], "GETs that were under way at the victim are tried again at the other"
    counts = [
        container_status["restartCount"]
        for pod in await fleet.pods("pair")
        for container_status in get_list(pod, "status", "containerStatuses")
    ]
    assert sorted(counts) == [0, 1]


async def test_an_exited_replica_is_restarted_and_its_code_is_reported(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("mortal"))
    url = await fleet.ready("mortal")
    assert (await fleet.ask(url, "/die")).status in (502, 503)
    await fleet.until(lambda: _restarted(fleet, "mortal"))
    await fleet.ready("mortal")
    last = (await container_of(fleet, "mortal"))["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"]) == (3, "Error")
    pods = await fleet.pods("mortal")
    assert "ome-container ended with 3" in [event["message"] for event in await fleet.events(*pods)]


async def _restarted(fleet: SimulatedFleet, name: str, count: int = 1) -> bool:
    return bool((await container_of(fleet, name))["restartCount"] == count)


async def test_one_that_hangs_is_restarted_by_its_liveness_probe(fleet: SimulatedFleet) -> None:
    body = {"httpGet": {"path": "/ready", "port": 8080}}
    liveness = {**body, "periodSeconds": 10, "failureThreshold": 3, "timeoutSeconds": 5}
    starting = {**body, "periodSeconds": 1, "failureThreshold": 600}
    await fleet.apply(runtime("watched", livenessProbe=liveness, startupProbe=starting), service("hung", "watched"))
    url = await fleet.ready("hung")
    before = fleet.process("hung")
    await fleet.ask(url, "/hang")
    hung = fleet.machine.loop.time()
    await fleet.until(lambda: not before.is_alive)
    assert 30 <= before.ended_at - hung <= 60, "three looks in a row, ten seconds apart, and its grace"
    await fleet.ready("hung")
    reported = await container_of(fleet, "hung")
    assert "liveness probe failed 3 times; it was stopped" in reported["lastState"]["terminated"]["message"]
    pods = await fleet.pods("hung")
    assert "Unhealthy" in {event["reason"] for event in await fleet.events(*pods)}


async def test_one_that_does_not_start_in_time_is_ended_and_tried_again(fleet: SimulatedFleet) -> None:
    starting = {"httpGet": {"path": "/ready", "port": 8080}, "periodSeconds": 5, "failureThreshold": 4}
    slow = runtime("slow", startupProbe=starting, args=["--port=8080", "--text=slow", "--start=30"])
    await fleet.apply(slow, service("slow", "slow"))
    result = await fleet.wait_for_message("slow", "startup probe failed 4 times")
    assert result["status"] == "False"
    first, *_ = fleet.machine.processes.values()
    ended = [process for process in fleet.machine.processes.values() if not process.is_alive]
    assert 20 <= ended[0].ended_at - ended[0].started <= 23
    assert first is not None


@pytest.mark.parametrize(
    ("probe", "listens"),
    [({"tcpSocket": {"port": 8080}}, True), ({"tcpSocket": {"port": 9999}}, False), ({"grpc": {"port": 8080}}, False)],
)
async def test_probes_of_other_kinds(fleet: SimulatedFleet, probe: dict[str, object], listens: bool) -> None:
    await fleet.apply(runtime("other", readinessProbe={**probe, "periodSeconds": 1}), service("probed", "other"))
    if listens:
        await fleet.ready("probed")
        return
    await asyncio.sleep(30)
    assert (await fleet.condition("probed", "EngineReady"))["reason"] == "ContainersNotReady"


async def test_one_that_uses_more_memory_than_its_limit_is_ended_as_kubernetes_would(fleet: SimulatedFleet) -> None:
    limited = {"name": "ome-container", "resources": {"limits": {"memory": "128Mi"}}}
    await fleet.apply(service("leaky", runner=limited), service("well"))
    url, other = await fleet.ready("leaky"), await fleet.ready("well")
    assert (await fleet.ask(url, "/leak?200")).status in (502, 503)
    await fleet.until(lambda: _restarted(fleet, "leaky"))
    last = (await container_of(fleet, "leaky"))["lastState"]["terminated"]
    assert (last["reason"], last["exitCode"]) == ("OOMKilled", 137) and "limit" in last["message"]
    assert (await fleet.ask(other)).by == "well"
    pods = await fleet.pods("leaky")
    assert any(event["reason"] == "Ended" and "OOMKilled" in event["message"] for event in await fleet.events(*pods))
    assert await fleet.ready("leaky") == url
    # One that never fits says so.
    for _ in range(2):
        await fleet.until(lambda: fleet.processes("leaky"))
        fleet.process("leaky").use_memory(1 << 30)
    result = await fleet.wait_for_message("leaky", "exit code 137 (OOMKilled)")
    assert result["status"] == "False"
    assert (await fleet.condition("leaky", "EngineReady"))["reason"] == "OOMKilled"
    assert (await fleet.get("leaky"))["status"]["modelStatus"]["lastFailureInfo"]["exitCode"] == 137


async def test_a_killed_router_is_restarted_on_its_port_and_new_connections_wait(
    fleet: SimulatedFleet,
) -> None:
    await fleet.apply(service("way"))
    url = await fleet.ready("way")
    before, pods = fleet.router("way"), fleet.processes("way")
    before.kill()
    answer = await fleet.ask(url)
    assert answer.status in (200, 503), "it was not refused"
    await fleet.until(lambda: fleet.has_router("way") and fleet.router("way") is not before)
    assert await fleet.ready("way") == url
    await fleet.until(lambda: _answers(fleet, url))
    assert fleet.processes("way") == pods


async def _answers(fleet: SimulatedFleet, url: str) -> bool:
    return (await fleet.ask(url)).status == 200
