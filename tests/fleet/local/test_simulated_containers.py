# SPDX-License-Identifier: Apache-2.0
"""Pods of several containers on a simulated machine: init containers, sidecars, each restarted and told for itself."""

from __future__ import annotations

from typing import Any

import pytest
from local_site import runtime, service
from simulated_fleet import SimulatedFleet

from headrace.core.errors import NotFound
from headrace.platforms.kubernetes_client.objects import Document, get_list

PROBE = {"exec": {"command": ["test", "-e", "/flag/up"]}, "periodSeconds": 1, "failureThreshold": 1}
FLAG = {"volumeMounts": [{"name": "flag", "mountPath": "/flag"}]}
VOLUMES = [{"name": "flag", "emptyDir": {}}]


def container(name: str, *words: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "example/python:1", "command": [*words], **more}


def pod(name: str, **spec: Any) -> dict[str, Any]:
    """A runtime of the stub server with more in its pod."""
    created = runtime(name)
    created["spec"]["engineConfig"] |= spec
    return created


async def told(fleet: SimulatedFleet, name: str, place: str = "containerStatuses") -> dict[str, Document]:
    """By container: what the first pod of a service says of it."""
    return {status["name"]: status for pod in (await fleet.pods(name))[:1] for status in get_list(pod, "status", place)}


async def restarts(fleet: SimulatedFleet, name: str, of: str, place: str = "containerStatuses") -> int:
    return int((await told(fleet, name, place))[of]["restartCount"])


def raise_flag(fleet: SimulatedFleet) -> None:
    (volume,) = fleet.root.glob("pods/*/volumes/flag")
    (volume / "up").touch()


async def test_init_containers_run_in_order_and_share_a_volume(fleet: SimulatedFleet) -> None:
    first = container("one", "task", "--say=one", "--append=/flag/said", "--seconds=5", **FLAG)
    second = container("two", "task", "--say=two", "--append=/flag/said", "--seconds=5", **FLAG)
    await fleet.apply(pod("ordered", initContainers=[first, second], volumes=VOLUMES), service("ordered", "ordered"))
    await fleet.ready("ordered")
    one, two, main = (fleet.machine.processes[pid] for pid in sorted(fleet.machine.processes)[-3:])
    started = {spec.name: spec for spec in fleet.driver.started}
    assert list(started) == ["one", "two", "ome-container"]
    assert one.ended_at <= two.started and two.ended_at <= main.started
    (volume,) = fleet.root.glob("pods/*/volumes/flag")
    assert (volume / "said").read_text() == "onetwo"
    init = await told(fleet, "ordered", "initContainerStatuses")
    assert [array["state"]["terminated"]["reason"] for array in init.values()] == ["Completed", "Completed"]
    assert [array["ready"] for array in init.values()] == [True, True]
    conditions = get_list((await fleet.pods("ordered"))[0], "status", "conditions")
    assert {condition["type"]: condition["status"] for condition in conditions}["Initialized"] == "True"
    ((_, log),) = await fleet.fleet.logs("default", "ordered", container="two")
    assert log == "two"
    every = await fleet.fleet.logs("default", "ordered", every=True)
    assert {name.rpartition("/")[2] for name, _ in every} == {"one", "two", "ome-container"}
    with pytest.raises(NotFound, match="has no container three; it has one, two, ome-container"):
        await fleet.fleet.logs("default", "ordered", container="three")


async def test_a_failing_init_container_is_reported_and_retried_and_nothing_else_starts(
    fleet: SimulatedFleet,
) -> None:
    fetch = container("fetch", "task", "--say=no tokenizer here", "--exit=1", "--unless=/flag/up", **FLAG)
    await fleet.apply(pod("failing", initContainers=[fetch], volumes=VOLUMES), service("unfetched", "failing"))
    result = await fleet.wait_for_message("unfetched", "no tokenizer here")
    assert result["status"] == "False" and "container fetch ended with exit code 1" in result["message"]
    assert (await told(fleet, "unfetched"))["ome-container"]["state"]["waiting"]["reason"] == "PodInitializing"
    await fleet.until(lambda: _more_than_one(fleet))
    assert {spec.name for spec in fleet.driver.started} == {"fetch"}
    raise_flag(fleet)
    await fleet.ready("unfetched")


async def _more_than_one(fleet: SimulatedFleet) -> bool:
    return await restarts(fleet, "unfetched", "fetch", "initContainerStatuses") > 1


async def test_a_second_container_is_restarted_alone_and_the_pod_is_ready_when_all_are(fleet: SimulatedFleet) -> None:
    beside = container("beside", "idle", readinessProbe=PROBE, **FLAG)
    await fleet.apply(pod("paired", containers=[beside], volumes=VOLUMES), service("paired", "paired"))
    await fleet.wait_for_message("paired", "container beside runs and is not ready yet", "EngineReady")
    await fleet.until(lambda: _main_is_ready(fleet))
    raise_flag(fleet)
    url = await fleet.ready("paired")
    main = (await fleet.ask(url)).pid
    fleet.process("paired", "beside").kill()
    await fleet.until(lambda: _restarted_beside(fleet))
    await fleet.ready("paired")
    result = await told(fleet, "paired")
    ended = result["beside"]["lastState"]["terminated"]
    assert (ended["exitCode"], ended["signal"]) == (137, 9)
    assert result["ome-container"]["restartCount"] == 0 and (await fleet.ask(url)).pid == main
    # What runs is found again by another daemon, each container for itself.
    before = fleet.processes("paired")
    assert len(before) == 2
    await fleet.kill()
    await fleet.up()
    assert await fleet.ready("paired") == url and fleet.processes("paired") == before
    await fleet.delete("paired")
    assert not any(process.is_alive for process in before)


async def _main_is_ready(fleet: SimulatedFleet) -> bool:
    return bool((await told(fleet, "paired"))["ome-container"]["ready"])


async def _restarted_beside(fleet: SimulatedFleet) -> bool:
    return await restarts(fleet, "paired", "beside") == 1


async def test_a_sidecar_begins_before_the_others_and_ends_after_them(fleet: SimulatedFleet) -> None:
    probe = {**PROBE, "failureThreshold": 600}
    sidecar = container("proxy", "idle", restartPolicy="Always", startupProbe=probe, **FLAG)
    await fleet.apply(pod("sided", initContainers=[sidecar], volumes=VOLUMES), service("sided", "sided"))
    await fleet.until(lambda: _proxy_runs(fleet))
    assert (await told(fleet, "sided"))["ome-container"]["state"]["waiting"]["reason"] == "PodInitializing"
    raise_flag(fleet)
    await fleet.ready("sided")
    fleet.process("sided", "proxy").kill()
    await fleet.until(lambda: _proxy_restarted(fleet))
    await fleet.ready("sided")
    assert await restarts(fleet, "sided", "ome-container") == 0
    main, proxy = fleet.process("sided", "ome-container"), fleet.process("sided", "proxy")
    asking = fleet.machine.loop.create_task(fleet.ask(await fleet.url("sided"), "/slow?1"))
    await fleet.delete("sided")
    assert (await asking).status == 200
    assert main.ended_at <= proxy.ended_at and not proxy.is_alive


async def _proxy_runs(fleet: SimulatedFleet) -> bool:
    result = await told(fleet, "sided", "initContainerStatuses")
    return "running" in result.get("proxy", {}).get("state", {})


async def _proxy_restarted(fleet: SimulatedFleet) -> bool:
    return await restarts(fleet, "sided", "proxy", "initContainerStatuses") == 1


async def test_ports_of_other_containers_are_given_for_each_replica(fleet: SimulatedFleet) -> None:
    stub = runtime()["spec"]["engineConfig"]["runner"]
    beside = {
        "name": "metrics",
        "image": "example/stub:1",
        "command": [*stub["command"], "--port=9100", "--text=beside"],
        "ports": [{"name": "metrics", "containerPort": 9100}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "metrics"}, "periodSeconds": 1},
    }
    await fleet.apply(pod("ported", containers=[beside]), service("ported", "ported", minReplicas=2))
    url = await fleet.ready("ported", 2)
    assert (await fleet.ask(url)).by == "ported"
    logs = [log for _, log in await fleet.fleet.logs("default", "ported", container="metrics")]
    assert len(set(logs)) == 2 and not any("9100" in log for log in logs)


async def test_a_group_restarts_when_any_of_its_containers_ends(fleet: SimulatedFleet) -> None:
    leader = runtime("grouped")
    config = leader["spec"]["engineConfig"]
    runner = config.pop("runner")
    worker, beside = container("ome-container", "idle"), container("watcher", "idle")
    config |= {"leader": {"runner": runner, "containers": [beside]}, "worker": {"size": 1, "runner": worker}}
    await fleet.apply(leader, service("grouped", "grouped", worker={"size": 1}))
    await fleet.until(lambda: _is_true(fleet, "grouped"))
    assert len(await fleet.pods("grouped")) == 2
    before = fleet.processes("grouped")
    assert len(before) == 3
    fleet.process("grouped", "watcher").kill()
    await fleet.until(lambda: len(fleet.processes("grouped") - before) == 3)
    await fleet.until(lambda: _is_true(fleet, "grouped"))
    counts = [
        container_status["restartCount"] for each_pod in await fleet.pods("grouped")
        for container_status in get_list(each_pod, "status", "containerStatuses")
    ]  # fmt: skip
    assert counts == [1, 1, 1]


async def _is_true(fleet: SimulatedFleet, name: str) -> bool:
    return (await fleet.condition(name)).get("status") == "True"


async def test_a_pod_that_requests_too_much_in_total_is_reported(fleet: SimulatedFleet) -> None:
    body = {"resources": {"requests": {"cpu": "2000"}}}
    await fleet.apply(pod("heavy", containers=[container("beside", "idle", **body)]), service("heavy", "heavy"))
    result = await fleet.wait_for_message("heavy", "it requests 2000 cores", "EngineReady")
    assert result["reason"] == "Unschedulable"
