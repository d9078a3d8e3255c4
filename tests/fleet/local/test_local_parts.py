# SPDX-License-Identifier: Apache-2.0
"""The parts of the local fleet that run nothing: replicas to make and end, documents on disk, room on the machine."""

from __future__ import annotations

import errno
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_site import document

from headrace.core.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from headrace.fleet.client.contract import Fleet
from headrace.fleet.local.api_client import LocalFleet
from headrace.fleet.local.api_server import parse_selector
from headrace.fleet.local.events import Events
from headrace.fleet.local.object_store import DocumentStore, ServiceObjects
from headrace.fleet.local.scheduler import Placement, Scheduler, pod_requests
from headrace.fleet.local.workloads import Replica, desired_replicas, plan_replicas, workload_status
from headrace.platforms.kubernetes_client.objects import Document
from headrace.platforms.node_resources import PortAllocator


@given(wanted=st.integers(0, 6), old=st.lists(st.booleans(), max_size=6), fails=st.booleans())
def test_an_update_finishes_without_fewer_ready_replicas(wanted: int, old: list[bool], fails: bool) -> None:
    """Each round: what `steps` says is done, and the new ones that were made become ready, unless they never do."""
    units = [Replica(f"old-{number}", "old", ready) for number, ready in enumerate(old)]
    least = min(wanted, sum(old))
    created = 0
    for _ in range(60):
        todo = plan_replicas(wanted, "new", units)
        units = [unit for unit in units if unit.name not in todo.delete]
        assert sum(unit.ready for unit in units) >= least
        for _ in range(todo.create):
            created += 1
            units.append(Replica(f"new-{created}", "new", False, f"{created:03}"))
        assert len(units) <= max(wanted + -(-wanted // 4), len(old))
        if not todo.create and not todo.delete and (fails or all(unit.ready for unit in units)):
            break
        if not fails:
            units = [Replica(unit.name, unit.hash, True, unit.created) for unit in units]
    else:
        pytest.fail("it never came to its end")
    if not fails:
        assert [unit.hash for unit in units] == ["new"] * wanted


def test_recreate_waits_for_the_old_ones_to_be_gone() -> None:
    old = [Replica("a", "old", True)]
    assert (
        plan_replicas(1, "new", old, recreate=True).delete == ("a",)
        and plan_replicas(1, "new", old, recreate=True).create == 0
    )
    assert plan_replicas(1, "new", [], terminating=1, recreate=True).create == 0
    assert plan_replicas(1, "new", [], recreate=True).create == 1


def test_scaling_down_removes_unready_replicas_first() -> None:
    units = [Replica("a", "h", True, "1"), Replica("b", "h", False, "2"), Replica("c", "h", True, "3")]
    assert plan_replicas(2, "h", units).delete == ("b",) and plan_replicas(1, "h", units).delete == ("b", "a")


def test_the_number_that_is_wanted_is_within_the_autoscalers_bounds() -> None:
    scaler = {"spec": {"minReplicas": 2, "maxReplicas": 4}}
    requests = [desired_replicas({"spec": {"replicas": index}}, scaler) for index in (0, 1, 3, 9)]
    assert (
        requests == [0, 2, 3, 4]
        and desired_replicas({"spec": {}}, scaler) == 2
        and desired_replicas({"spec": {}}, None) == 1
    )


def test_the_status_of_a_deployment() -> None:
    workload: Document = {"kind": "Deployment", "metadata": {"name": "d", "generation": 4}}
    reported = workload_status(
        workload, 2, "n", [Replica("a", "n", True), Replica("b", "o", True), Replica("c", "n", False)]
    )
    assert (
        reported["replicas"],
        reported["updatedReplicas"],
        reported["readyReplicas"],
        reported["observedGeneration"],
    ) == (
        3,
        2,
        2,
        4,
    )
    assert [(condition["type"], condition["status"]) for condition in reported["conditions"]] == [
        ("Available", "True"),
        ("Progressing", "True"),
    ]


def test_documents_are_found_again(tmp_path: Path) -> None:
    seen: list[Document] = []
    store = DocumentStore(tmp_path)
    store.on_change = seen.append
    store.load()
    one = document("BaseModel", "m", {"modelFormat": {"name": "onnx"}})
    made, change = store.apply(one)
    assert change == "created" and made["metadata"]["generation"] == 1 and seen == [made]
    assert store.apply(one)[1] == "unchanged" and len(seen) == 1
    store.update_status({**made, "status": {"state": "Ready"}})
    after, change = store.apply({**one, "spec": {"modelFormat": {"name": "pytorch"}}})
    assert change == "configured" and after["metadata"]["generation"] == 2 and after["status"] == {"state": "Ready"}
    assert after["metadata"]["uid"] == made["metadata"]["uid"]
    (tmp_path / "BaseModel" / "default" / "broken.json").write_text("{")
    again = DocumentStore(tmp_path)
    again.load()
    assert again.all() == [after] and again.get("BaseModel", "default", "m") == after
    (path,) = tmp_path.glob("*/*/m.json")
    assert path.stat().st_mode & 0o777 == 0o600
    again.remove(after)
    assert not path.exists()


def test_only_what_a_user_wrote_makes_a_version_old(tmp_path: Path) -> None:
    store = DocumentStore(tmp_path)
    one = document("BaseModel", "m", {"a": 1})
    seen = store.apply(one)[0]["metadata"]["resourceVersion"]
    store.update_status({**store.all()[0], "status": {"state": "Ready"}})
    assert not store.edited_since(one, seen), "the status is written all the time"
    store.apply({**one, "spec": {"a": 2}})
    assert store.edited_since(one, seen) and not store.edited_since(one, "")
    assert not store.edited_since(one, store.all()[0]["metadata"]["resourceVersion"])


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "A", "-a", "x" * 254])
def test_a_name_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="lower-case"):
        DocumentStore(tmp_path).apply(document("BaseModel", name, {}))
    with pytest.raises(InvalidArgument, match="lower-case"):
        DocumentStore(tmp_path).apply(document("BaseModel", "a", {}, namespace=name or "/"))


def test_a_full_disk_is_reported_and_existing_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DocumentStore(tmp_path)
    before, _ = store.apply(document("BaseModel", "m", {"a": 1}))
    objects = ServiceObjects(tmp_path / "objects")

    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FailedPrecondition, match="No space left on device; make room on its disk"):
        store.apply(document("BaseModel", "m", {"a": 2}))
    assert store.all() == [before]
    store.update_status({**before, "status": {"state": "Ready"}})
    assert store.all()[0]["status"] == {"state": "Ready"}
    with pytest.raises(FailedPrecondition, match="make room"):
        objects.apply(("default", "s"), [document("Deployment", "d", {})])
    assert not objects.services() and not list(tmp_path.rglob("*.new"))


def test_events_are_counted_and_bounded(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.json", 3)
    about = document("InferenceService", "s", {}, uid="u")
    for number in (1, 1, 2, 3, 4):
        events.record(about, "Warning", "Bad", f"{number}")
    events.flush()
    again = Events(tmp_path / "events.json", 3)
    again.load()
    assert [(event["message"], event["count"]) for event in again.about({"u"})] == [("2", 1), ("3", 1), ("4", 1)]


def test_gpus_and_memory_are_given_to_one(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    machine = Scheduler(
        PortAllocator(tmp_path / "ports", "127.0.0.1", 10_700, 10_799),
        environ={},
        devices=tmp_path,
        cores=2,
        memory=14 << 30,
    )
    body = {"requests": {"memory": "4Gi"}, "limits": {"nvidia.com/gpu": "1"}}
    pod = {"spec": {"containers": [{"name": "ome-container", "command": ["x", "--port=8080"], "resources": body}]}}
    first = machine.place("one", pod, [], ["one"], True)
    second = machine.place("two", pod, [first], ["one", "two"], True)
    assert (first.gpus, second.gpus) == (("0",), ("1",)) and first.ports[8080] != second.ports[8080]
    with pytest.raises(ResourceExhausted, match="of 2 on this machine 0 are free"):
        machine.place("three", pod, [first, second], ["one", "two"], True)
    with pytest.raises(ResourceExhausted, match="of memory"):
        machine.place("three", pod, [Placement({}, (), 11 << 30)], [], True)
    machine.release("one")
    machine.release("two")
    assert not list((tmp_path / "ports").glob("[0-9]*"))


def test_the_requested_resources_are_those_of_the_largest_moment() -> None:
    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"name": "c", "resources": {"requests": {"cpu": cpu, "memory": f"{cpu}Gi"}}, **more}

    pod = document("Pod", "p", {"containers": [container("1"), container("2")]})
    assert pod_requests(pod).cores == 3
    pod["spec"]["initContainers"] = [container("5"), container("1", restartPolicy="Always"), container("1")]
    result = pod_requests(pod)
    assert (result.cores, result.memory) == (5, 5 << 30)
    pod["spec"]["initContainers"] = [container("1", restartPolicy="Always"), container("4")]
    assert pod_requests(pod).cores == 5


def test_it_has_the_fleet_interface_of_the_verbs() -> None:
    names = [name for name, item in vars(Fleet).items() if not name.startswith("_") and callable(item)]
    assert len(names) > 10
    for name in names:
        assert inspect.signature(getattr(LocalFleet, name)) == inspect.signature(getattr(Fleet, name)), name
    fleet: Fleet = LocalFleet(Path("/none"))
    assert fleet.commands.flag == "" and fleet.namespace == "default" and fleet.place == "/none"


def test_selectors_are_labels() -> None:
    assert parse_selector("a=b, c==d,") == {"a": "b", "c": "d"}
    with pytest.raises(InvalidArgument, match="name=value"):
        parse_selector("a!=b")
