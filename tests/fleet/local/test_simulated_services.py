# SPDX-License-Identifier: Apache-2.0
"""Services of a simulated machine: they start, answer, scale, say what is wrong, and leave nothing when they are deleted."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from local_site import document, runtime, service
from simulated_fleet import SERVICE, SimulatedFleet, Traffic, is_ready

import headrace.fleet
from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.fleet import yaml_documents
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str
from support.ports import free_port

RUNTIMES = Path(headrace.fleet.__file__).parent / "runtimes"


def stub(name: str, *args: str, uses: str = "stub", **engine: Any) -> dict[str, Any]:
    """A service whose stub server has more options."""
    runner = {"name": "ome-container", "args": ["--host=0.0.0.0", "--port=8080", f"--text={name}", *args]}
    return service(name, uses, runner=runner, **engine)


async def test_a_service_becomes_ready_answers_scales_and_leaves_nothing_behind(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("first"))
    url = await fleet.ready("first")
    assert (await fleet.ask(url)).by == "first"
    await fleet.scale("first", 2)
    assert await fleet.ready("first", 2) == url
    pids = {process.pid for process in fleet.processes("first")}
    await fleet.until(lambda: _answered_by(fleet, url, pids))
    logs = await fleet.fleet.logs("default", "first")
    assert len(logs) == 2 and all("first begins on" in log for _, log in logs)
    await fleet.scale("first", 1)
    assert await fleet.ready("first", 1) == url
    await fleet.delete("first")
    assert not fleet.living and fleet.left_on_disk() == []
    with pytest.raises(ConnectionRefusedError):
        await fleet.ask(url)


async def _answered_by(fleet: SimulatedFleet, url: str, pids: set[int]) -> bool:
    return {(await fleet.ask(url)).pid for _ in range(20)} == pids


async def test_it_is_ready_when_its_container_is_and_not_before(fleet: SimulatedFleet) -> None:
    await fleet.apply(stub("late", "--start=40"))
    began = fleet.machine.loop.time()
    result = await fleet.wait_for_message("late", "runs and is not ready yet", "EngineReady")
    assert (result["status"], result["reason"]) == ("False", "ContainersNotReady")
    url = await fleet.url("late")
    assert (await fleet.ask(url)).status == 503
    await asyncio.sleep(began + 39.5 - fleet.machine.loop.time())
    assert (await fleet.condition("late"))["status"] == "False"
    assert await fleet.ready("late") == url
    assert fleet.machine.loop.time() - began < 41.0, "it is seen soon after it is ready"
    assert (await fleet.ask(url)).by == "late"
    reasons = [event["reason"] for event in await fleet.events(await fleet.get("late"))]
    assert reasons.count("InferenceServiceReady") == 1


async def test_one_that_stops_being_ready_gets_no_requests_until_it_is_again(
    fleet: SimulatedFleet, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    probe = {"exec": {"command": ["test", "-e", str(gate)]}, "periodSeconds": 5, "failureThreshold": 2}
    await fleet.apply(runtime("gated", readinessProbe=probe), service("moody", "gated"))
    url = await fleet.ready("moody")
    gate.unlink()
    await fleet.wait_for_message("moody", "not ready", "EngineReady")
    await fleet.until(lambda: _refused(fleet, url))
    events = [event["reason"] for event in await fleet.events(await fleet.get("moody"))]
    gate.touch()
    assert await fleet.ready("moody") == url
    assert (await fleet.ask(url)).by == "moody"
    assert "ContainersNotReady" in events, "that it is not ready any more is news"
    pod = (await fleet.pods("moody"))[0]
    assert get_list(pod, "status", "containerStatuses")[0]["restartCount"] == 0


async def _refused(fleet: SimulatedFleet, url: str) -> bool:
    return (await fleet.ask(url)).status == 503


async def test_a_replica_that_is_never_ready_is_reported_and_gets_no_requests(fleet: SimulatedFleet) -> None:
    probe = {"httpGet": {"path": "/never", "port": 8080}, "periodSeconds": 1}
    await fleet.apply(runtime("unready", readinessProbe=probe), service("waits", "unready"))
    result = await fleet.wait_for_message("waits", "runs and is not ready yet", "EngineReady")
    assert result["reason"] == "ContainersNotReady"
    assert (await fleet.ask(await fleet.url("waits"))).status == 503


async def test_a_stalled_update_is_reported_after_ten_minutes(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("stalled"))
    url = await fleet.ready("stalled")
    never = {"httpGet": {"path": "/never", "port": 8080}, "periodSeconds": 10}
    runner = {"name": "ome-container", "args": ["--port=8080", "--text=new"], "readinessProbe": never}
    await fleet.apply(service("stalled", runner=runner))
    await fleet.until(lambda: len(fleet.processes("stalled")) == 2)
    began = fleet.machine.loop.time()
    for seconds, status in ((598, "Unknown"), (602, "False")):
        await asyncio.sleep(began + seconds - fleet.machine.loop.time())
        await fleet.apply(runtime(f"other-{seconds}"))  # something happens, so that services are looked at
        await asyncio.sleep(1)
        condition = await fleet.condition("stalled", "LatestDeploymentReady")
        assert condition["status"] == status
    assert (
        condition["reason"] == "ProgressDeadlineExceeded" and "has made no progress for 600 s" in condition["message"]
    )
    assert (await fleet.condition("stalled"))["status"] == "True", "the old one serves on"
    assert (await fleet.ask(url)).by == "stalled"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"nvidia.com/gpu": "64"}, "it requests 64 GPU(s)"),
        ({"cpu": "4096"}, "it requests 4096 cores, and this machine has 64"),
        ({"memory": "900Ti"}, "of memory; of 256.0 GiB here"),
    ],
)
async def test_resources_missing_on_this_machine_are_reported(
    fleet: SimulatedFleet, asked: dict[str, str], words: str
) -> None:
    await fleet.apply(
        service("large", runner={"name": "ome-container", "resources": {"requests": asked, "limits": asked}})
    )
    result = await fleet.wait_for_message("large", words, "EngineReady")
    assert result["reason"] == "Unschedulable"
    await fleet.delete("large")
    assert fleet.left_on_disk() == []


async def test_a_replica_waiting_for_memory_starts_when_another_ends(fleet: SimulatedFleet) -> None:
    body = {"memory": "200Gi"}
    both = [service(name, runner={"name": "ome-container", "resources": {"requests": body}}) for name in ("one", "two")]
    await fleet.apply(both[0])
    await fleet.ready("one")
    await fleet.apply(both[1])
    await fleet.wait_for_message("two", "other pods have requested 200.0", "EngineReady")
    await fleet.delete("one")
    await fleet.ready("two")


async def test_a_missing_image_is_reported(fleet: SimulatedFleet) -> None:
    foreign = runtime("foreign")
    del foreign["spec"]["engineConfig"]["runner"]["command"]
    await fleet.apply(foreign, service("docker", "foreign"))
    result = await fleet.wait_for_message(
        "docker", "image example/stub:1 needs Docker: run `headrace up --driver docker`"
    )
    assert result["reason"] == "ErrImageNeverPull"


async def test_a_container_that_cannot_be_created_is_reported_and_retried(fleet: SimulatedFleet) -> None:
    fleet.driver.refuses = OSError(12, "Cannot allocate memory")
    await fleet.apply(service("unlucky"))
    result = await fleet.wait_for_message("unlucky", "Cannot allocate memory; its folder is")
    assert result["reason"] == "CreateContainerError"
    await asyncio.sleep(300)
    pods = await fleet.pods("unlucky")
    (failed,) = (event for event in await fleet.events(*pods) if event["reason"] == "Failed")
    assert failed["count"] == 1, "the same is told once"
    fleet.driver.refuses = None
    await fleet.ready("unlucky")


async def test_a_fixed_port_that_is_taken_is_reported(fleet: SimulatedFleet) -> None:
    port = free_port()  # and not one that somebody who connects may have next
    with socket.create_server(("127.0.0.1", port)):
        ports = [{"name": "http", "containerPort": port, "protocol": "TCP"}]
        await fleet.apply(runtime("fixed", args=[f"--por={port}"], ports=ports), service("stuck", "fixed"))
        result = await fleet.wait_for_message("stuck", f"port {port} is in use on this machine", "EngineReady")
        assert result["reason"] == "Unschedulable"
    await fleet.ready("stuck")


async def test_a_missing_model_is_reported_and_waited_for(fleet: SimulatedFleet, tmp_path: Path) -> None:
    absent = tmp_path / "later"
    storage = {"storageUri": f"local://{absent}", "path": "/mnt/models/absent"}
    service_document = service("patient")
    service_document["spec"]["model"]["name"] = "absent"
    model = document("ClusterBaseModel", "absent", {"modelFormat": {"name": "stub"}, "storage": storage})
    await fleet.apply(model, service_document)
    await fleet.wait_for_message("patient", "put the model's files there", "EngineReady")
    last_failure_info = (await fleet.get("patient"))["status"]["modelStatus"]["lastFailureInfo"]
    assert last_failure_info["reason"] == "BaseModelNotReady"
    absent.mkdir()
    await fleet.ready("patient")


async def test_a_group_is_a_leader_and_its_workers(fleet: SimulatedFleet) -> None:
    leader = runtime("group")
    runner = leader["spec"]["engineConfig"].pop("runner")
    worker = {"name": "ome-container", "image": "example/stub:1", "command": ["task"]}
    worker["args"] = ["--say=joins $(LWS_LEADER_ADDRESS):8080 $(LWS_GROUP_SIZE)", "--seconds=1e9"]  # type: ignore[assignment]
    leader["spec"]["engineConfig"] |= {"leader": {"runner": runner}, "worker": {"size": 2, "runner": worker}}
    await fleet.apply(leader, service("many", "group", worker={"size": 2}))
    await fleet.until(lambda: _is_true(fleet, "many"))
    url = await fleet.url("many")
    answer = await fleet.ask(url)
    assert answer.by == "many" and answer.text.endswith(" 0")
    assert len(await fleet.pods("many")) == 3
    logs = [log for _, log in await fleet.fleet.logs("default", "many")]
    joined = [log for log in logs if log.startswith("joins")]
    port = next(process.words for process in fleet.processes("many") if process.pid == answer.pid)
    (own,) = (word.removeprefix("--port=") for word in port if word.startswith("--port="))
    assert joined == [f"joins 127.0.0.1:{own} 3"] * 2 and own != "8080"
    # One of them ends: all begin anew.
    before = fleet.processes("many")
    next(process for process in before if process.pid != answer.pid).kill()
    await fleet.until(lambda: len(fleet.processes("many") - before) == 3)
    await fleet.until(lambda: _is_true(fleet, "many"))
    assert not any(process.is_alive for process in before)
    counts = [
        container_status["restartCount"]
        for pod in await fleet.pods("many")
        for container_status in get_list(pod, "status", "containerStatuses")
    ]
    assert counts == [1, 1, 1]


async def _is_true(fleet: SimulatedFleet, name: str) -> bool:
    return (await fleet.condition(name)).get("status") == "True"


async def test_a_router_component_reaches_its_engines_by_their_service(fleet: SimulatedFleet) -> None:
    document = service("routed", minReplicas=2)
    document["spec"]["router"] = {"minReplicas": 1, "config": {"routing_strategy": "round_robin"}}
    await fleet.apply(document)
    url = await fleet.ready("routed", 3, engines=2)
    assert (await fleet.condition("routed", "RouterReady"))["status"] == "True"
    pids = {process.pid for process in fleet.processes("routed", "ome-container")}
    await fleet.until(lambda: _answered_by(fleet, url, pids))
    # The service, and the engines behind their own Service.
    assert {path.name for path in (fleet.root / "routers" / "default").iterdir()} >= {"routed", "routed-engine"}
    components = (await fleet.get("routed"))["status"]["components"]
    assert components["router"]["url"] == url and components["engine"]["url"] != url
    assert (await fleet.ask(components["engine"]["url"])).by == "routed"
    await fleet.delete("routed")
    assert not fleet.living and fleet.left_on_disk() == []


async def test_prefill_and_decode_apart_are_three_components_behind_one_router(fleet: SimulatedFleet) -> None:
    """With our own runtime: its router finds the pods of both roles, and all three come back when they are killed."""
    [apart] = yaml_documents.read([RUNTIMES / "headrace-prefill-decode.yaml"]).documents
    spec = {
        "modelFormat": {"name": "safetensors", "version": "1.0.0"},
        "modelFramework": {"name": "transformers", "version": "4.51.0"},
        "modelArchitecture": "LlamaForCausalLM",
        "modelParameterSize": "135M",
        "storage": fleet.model["spec"]["storage"],
    }
    one = {"minReplicas": 1, "maxReplicas": 1}
    roles = {"engine": one, "decoder": one, "router": one}
    made = {"model": {"name": "tiny"}, "runtime": {"name": "headrace-prefill-decode"}, **roles}
    await fleet.apply(document("ClusterBaseModel", "tiny", spec), apart, document("InferenceService", "apart", made))
    url = await fleet.ready("apart", 3, engines=1)
    components = (await fleet.get("apart"))["status"]["components"]
    assert set(components) == {"engine", "decoder", "router"} and components["router"]["url"] == url
    assert (await fleet.ask(url)).by == "serve"
    before = fleet.processes("apart")
    for process in before:
        process.kill()
    await fleet.until(lambda: len(fleet.processes("apart") - before) == 3)
    assert await fleet.ready("apart", 3, engines=1) == url
    await fleet.until(lambda: _served(fleet, url))
    await fleet.delete("apart")
    assert not fleet.living and fleet.left_on_disk() == []


async def _served(fleet: SimulatedFleet, url: str) -> bool:
    return (await fleet.ask(url)).status == 200


async def test_a_rolling_update_loses_no_request(fleet: SimulatedFleet) -> None:
    await fleet.apply(stub("rolled", "--start=5", "--stop=3", minReplicas=3))
    url = await fleet.ready("rolled", 3)
    before = fleet.processes("rolled")
    counts: list[tuple[int, int]] = []

    async def count() -> None:
        while True:
            pods = await fleet.pods("rolled")
            there = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
            counts.append((len(there), sum(map(is_ready, there))))
            await asyncio.sleep(0.1)

    counting = asyncio.ensure_future(count())
    async with Traffic(fleet, url, path="/slow?0.3") as traffic:
        await traffic.more()
        newer = {"name": "ome-container", "args": ["--port=8080", "--text=newer", "--start=5"]}
        await fleet.apply(service("rolled", minReplicas=3, runner=newer))
        assert await fleet.ready("rolled", 3) == url
        await traffic.more()
    counting.cancel()
    assert traffic.failures == []
    assert traffic.answers[0].by == "rolled" and {answer.by for answer in traffic.answers[-15:]} == {"newer"}
    assert max(pods for pods, _ in counts) == 4 and min(ready for _, ready in counts) == 3
    await fleet.until(lambda: not any(process.is_alive for process in before))


async def test_recreate_ends_the_old_pods_before_the_new_ones_begin(fleet: SimulatedFleet) -> None:
    patient = runtime("patient")
    patient["spec"]["engineConfig"]["terminationGracePeriodSeconds"] = 30
    strategy = {"deploymentStrategy": {"type": "Recreate"}}
    await fleet.apply(patient, stub("anew", "--stop=10", uses="patient", **strategy))
    await fleet.ready("anew")
    old = fleet.process("anew")
    await fleet.apply(stub("anew", "--delay=0.01", uses="patient", **strategy))
    await fleet.until(lambda: not old.is_alive)
    await fleet.ready("anew")
    new = fleet.process("anew")
    assert old.how is not None and old.how.code == 0, "it had its grace"
    assert new.started >= old.ended_at


async def test_a_canary_gets_its_share_is_rolled_back_and_promoted(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("birds"))
    url = await fleet.ready("birds")
    newer = {"name": "ome-container", "args": ["--port=8080", "--text=canary"]}

    async def share() -> float:
        answers = [(await fleet.ask(url)).by for _ in range(20)]
        return answers.count("canary") / len(answers)

    async def has_share(wanted: float) -> bool:
        return await share() == wanted

    await fleet.apply(service("birds", runner=newer, canaryTrafficPercent=25))
    await fleet.until(lambda: has_share(0.25))
    # Undone, its pods go; the same revision once more has some again.
    await fleet.apply(service("birds", runner=newer, canaryTrafficPercent=0))
    await fleet.until(lambda: has_share(0.0))
    await fleet.until(lambda: len(fleet.processes("birds")) == 1)
    await fleet.apply(service("birds", runner=newer, canaryTrafficPercent=50))
    await fleet.until(lambda: has_share(0.5))
    await fleet.apply(service("birds", runner=newer, canaryTrafficPercent=100))
    await fleet.until(lambda: has_share(1.0))
    await fleet.ready("birds")
    await fleet.until(lambda: len(fleet.processes("birds")) == 1)
    assert await share() == 1.0


async def test_a_write_based_on_an_old_version_is_refused(fleet: SimulatedFleet) -> None:
    """Or `rollout promote` would promote what its user has not seen."""
    await fleet.apply(service("edited"))
    await fleet.ready("edited")
    live = await fleet.get("edited")
    change = {"metadata": dict(live["metadata"]), "spec": {"engine": {"canaryTrafficPercent": 100}}}
    await fleet.apply(service("edited", maxReplicas=4))
    with pytest.raises(FailedPrecondition, match="was changed meanwhile"):
        await fleet.fleet.patch(SERVICE, "default", "edited", change)
    change["metadata"] = dict((await fleet.get("edited"))["metadata"])
    patched = await fleet.fleet.patch(SERVICE, "default", "edited", change)
    assert patched["spec"]["engine"] == {"minReplicas": 1, "maxReplicas": 4, "canaryTrafficPercent": 100}


async def test_replicas_are_kept_within_the_bounds_of_the_service(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("bounded", minReplicas=2, maxReplicas=3))
    await fleet.ready("bounded", 2)
    assert await fleet.scale("bounded", 9) == {
        "name": "bounded-engine", "kind": "Deployment", "asked": 9, "replicas": 3, "min": 2, "max": 3,
    }  # fmt: skip
    await fleet.ready("bounded", 3)
    assert (await fleet.scale("bounded", 1))["replicas"] == 2
    for wrong, error in ((-1, InvalidArgument), (1001, InvalidArgument), ("two", InvalidArgument)):
        with pytest.raises(error):
            await fleet.scale("bounded", wrong)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="has no engine that runs"):
        await fleet.scale("nobody", 1)


async def test_a_new_revision_has_low_priority_until_it_is_ready_and_more_replicas_do_not(
    fleet: SimulatedFleet,
) -> None:
    """Who takes another's place gets the CPU that the others leave; who is needed does not wait."""
    await fleet.apply(stub("s"))
    await fleet.ready("s")
    assert not any(spec.low_priority for spec in fleet.driver.started), (
        "nobody else serves: whoever waits, waits for it"
    )
    await fleet.apply(stub("s", "--start=20"))
    await fleet.until(lambda: len(fleet.processes("s")) == 2)
    (newer,) = (process for process in fleet.processes("s") if process.pid in fleet.driver.low_priority)
    await fleet.ready("s")
    await fleet.until(lambda: fleet.processes("s") == {newer})
    assert not fleet.driver.low_priority
    started = len(fleet.driver.started)
    await fleet.scale("s", 2)
    await fleet.ready("s", 2)
    newer.kill()
    await fleet.until(lambda: newer not in fleet.processes("s") and len(fleet.processes("s")) == 2)
    assert not any(spec.low_priority for spec in fleet.driver.started[started:])


async def test_mistakes_in_a_document_are_reported_and_nothing_is_stored(fleet: SimulatedFleet) -> None:
    with pytest.raises(InvalidArgument, match="is not supported by the local fleet"):
        await fleet.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}})
    with pytest.raises(InvalidArgument, match="spec"):
        await fleet.apply(document("InferenceService", "wrong", {"engine": {"minReplicas": "many"}}))
    assert await fleet.fleet.get(SERVICE, "default", "wrong") is None
    with pytest.raises(NotFound, match="has no pods"):
        await fleet.fleet.logs("default", "nobody")
    await fleet.apply(service("lost", "no-such-runtime"))
    result = await fleet.until(lambda: _condition(fleet, "lost"))
    assert result["status"] == "False" and "no-such-runtime" in result["message"]


async def _condition(fleet: SimulatedFleet, name: str) -> Document:
    condition = await fleet.condition(name)
    return condition if get_str(condition, "message") else {}


async def test_documents_are_listed_patched_watched_and_dry_run(fleet: SimulatedFleet) -> None:
    applied = await fleet.fleet.apply(service("dry"), dry_run=True)
    assert applied.change == "created" and await fleet.fleet.get(SERVICE, "default", "dry") is None
    await fleet.apply(service("one"))
    assert (await fleet.fleet.apply(service("one"))).change == "unchanged"
    assert [document["metadata"]["name"] for document in await fleet.fleet.list(SERVICE)] == ["one"]
    assert await fleet.fleet.list(SERVICE, selector="team=b") == []
    seen: list[str] = []

    async def watch() -> None:
        async for event, found in fleet.fleet.watch(SERVICE):
            seen.append(f"{event} {get_mapping(found, 'metadata').get('name')}")

    watching = asyncio.ensure_future(watch())
    await fleet.ready("one")
    await fleet.until(lambda: "MODIFIED one" in seen)
    await fleet.delete("one")
    await fleet.until(lambda: "DELETED one" in seen)
    watching.cancel()
    assert seen[0] == "ADDED one" and set(seen[1:-1]) == {"MODIFIED one"}
