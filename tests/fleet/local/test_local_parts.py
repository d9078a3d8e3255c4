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
from headrace.fleet.local.client import LocalFleet
from headrace.fleet.local.control import selected
from headrace.fleet.local.events import Events
from headrace.fleet.local.machine import Machine, Placement, asked_by
from headrace.fleet.local.objects import Objects
from headrace.fleet.local.store import Store
from headrace.fleet.local.workloads import Unit, steps, wanted_of, workload_status
from headrace.fleet.words import Document
from headrace.platforms.ports import Ports


@given(wanted=st.integers(0, 6), old=st.lists(st.booleans(), max_size=6), fails=st.booleans())
def test_an_update_comes_to_its_end_without_fewer_that_answer(wanted: int, old: list[bool], fails: bool) -> None:
    """Each round: what `steps` says is done, and the new ones that were made become ready, unless they never do."""
    units = [Unit(f"old-{number}", "old", ready) for number, ready in enumerate(old)]
    least = min(wanted, sum(old))
    made = 0
    for _ in range(60):
        todo = steps(wanted, "new", units)
        units = [each for each in units if each.name not in todo.delete]
        assert sum(each.ready for each in units) >= least
        for _ in range(todo.create):
            made += 1
            units.append(Unit(f"new-{made}", "new", False, f"{made:03}"))
        assert len(units) <= max(wanted + -(-wanted // 4), len(old))
        if not todo.create and not todo.delete and (fails or all(each.ready for each in units)):
            break
        if not fails:
            units = [Unit(each.name, each.hash, True, each.created) for each in units]
    else:
        pytest.fail("it never came to its end")
    if not fails:
        assert [each.hash for each in units] == ["new"] * wanted


def test_recreate_waits_for_the_old_ones_to_be_gone() -> None:
    old = [Unit("a", "old", True)]
    assert steps(1, "new", old, recreate=True).delete == ("a",) and steps(1, "new", old, recreate=True).create == 0
    assert steps(1, "new", [], leaving=1, recreate=True).create == 0
    assert steps(1, "new", [], recreate=True).create == 1


def test_fewer_are_wanted_and_those_that_do_not_answer_go_first() -> None:
    units = [Unit("a", "h", True, "1"), Unit("b", "h", False, "2"), Unit("c", "h", True, "3")]
    assert steps(2, "h", units).delete == ("b",) and steps(1, "h", units).delete == ("b", "a")


def test_the_number_that_is_wanted_is_within_the_autoscalers_bounds() -> None:
    scaler = {"spec": {"minReplicas": 2, "maxReplicas": 4}}
    asked = [wanted_of({"spec": {"replicas": each}}, scaler) for each in (0, 1, 3, 9)]
    assert asked == [0, 2, 3, 4] and wanted_of({"spec": {}}, scaler) == 2 and wanted_of({"spec": {}}, None) == 1


def test_the_status_of_a_deployment() -> None:
    workload: Document = {"kind": "Deployment", "metadata": {"name": "d", "generation": 4}}
    told = workload_status(workload, 2, "n", [Unit("a", "n", True), Unit("b", "o", True), Unit("c", "n", False)])
    assert (told["replicas"], told["updatedReplicas"], told["readyReplicas"], told["observedGeneration"]) == (
        3,
        2,
        2,
        4,
    )
    assert [(each["type"], each["status"]) for each in told["conditions"]] == [
        ("Available", "True"),
        ("Progressing", "True"),
    ]


def test_documents_are_found_again(tmp_path: Path) -> None:
    seen: list[Document] = []
    store = Store(tmp_path)
    store.on_change = seen.append
    store.load()
    one = document("BaseModel", "m", {"modelFormat": {"name": "onnx"}})
    made, change = store.applied(one)
    assert change == "created" and made["metadata"]["generation"] == 1 and seen == [made]
    assert store.applied(one)[1] == "unchanged" and len(seen) == 1
    store.told({**made, "status": {"state": "Ready"}})
    after, change = store.applied({**one, "spec": {"modelFormat": {"name": "pytorch"}}})
    assert change == "configured" and after["metadata"]["generation"] == 2 and after["status"] == {"state": "Ready"}
    assert after["metadata"]["uid"] == made["metadata"]["uid"]
    (tmp_path / "BaseModel" / "default" / "broken.json").write_text("{")
    again = Store(tmp_path)
    again.load()
    assert again.all() == [after] and again.get("BaseModel", "default", "m") == after
    (path,) = tmp_path.glob("*/*/m.json")
    assert path.stat().st_mode & 0o777 == 0o600
    again.remove(after)
    assert not path.exists()


def test_only_what_a_user_wrote_makes_a_version_old(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one = document("BaseModel", "m", {"a": 1})
    seen = store.applied(one)[0]["metadata"]["resourceVersion"]
    store.told({**store.all()[0], "status": {"state": "Ready"}})
    assert not store.edited_since(one, seen), "the status is written all the time"
    store.applied({**one, "spec": {"a": 2}})
    assert store.edited_since(one, seen) and not store.edited_since(one, "")
    assert not store.edited_since(one, store.all()[0]["metadata"]["resourceVersion"])


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "A", "-a", "x" * 254])
def test_a_name_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="lower-case"):
        Store(tmp_path).applied(document("BaseModel", name, {}))
    with pytest.raises(InvalidArgument, match="lower-case"):
        Store(tmp_path).applied(document("BaseModel", "a", {}, namespace=name or "/"))


def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    before, _ = store.applied(document("BaseModel", "m", {"a": 1}))
    objects = Objects(tmp_path / "objects")

    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FailedPrecondition, match="No space left on device; make room on its disk"):
        store.applied(document("BaseModel", "m", {"a": 2}))
    assert store.all() == [before]
    store.told({**before, "status": {"state": "Ready"}})
    assert store.all()[0]["status"] == {"state": "Ready"}
    with pytest.raises(FailedPrecondition, match="make room"):
        objects.bring(("default", "s"), [document("Deployment", "d", {})])
    assert not objects.services() and not list(tmp_path.rglob("*.new"))


def test_events_are_counted_and_bounded(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.json", 3)
    about = document("InferenceService", "s", {}, uid="u")
    for number in (1, 1, 2, 3, 4):
        events.record(about, "Warning", "Bad", f"{number}")
    events.flush()
    again = Events(tmp_path / "events.json", 3)
    again.load()
    assert [(each["message"], each["count"]) for each in again.of({"u"})] == [("2", 1), ("3", 1), ("4", 1)]


def test_gpus_and_memory_are_given_to_one(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    machine = Machine(
        Ports(tmp_path / "ports", "127.0.0.1", 10_700, 10_799), environ={}, devices=tmp_path, cores=2, memory=14 << 30
    )
    asked = {"requests": {"memory": "4Gi"}, "limits": {"nvidia.com/gpu": "1"}}
    pod = {"spec": {"containers": [{"name": "ome-container", "command": ["x", "--port=8080"], "resources": asked}]}}
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


def test_what_is_asked_for_is_that_of_the_largest_moment() -> None:
    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"name": "c", "resources": {"requests": {"cpu": cpu, "memory": f"{cpu}Gi"}}, **more}

    pod = document("Pod", "p", {"containers": [container("1"), container("2")]})
    assert asked_by(pod).cores == 3
    pod["spec"]["initContainers"] = [container("5"), container("1", restartPolicy="Always"), container("1")]
    found = asked_by(pod)
    assert (found.cores, found.memory) == (5, 5 << 30)
    pod["spec"]["initContainers"] = [container("1", restartPolicy="Always"), container("4")]
    assert asked_by(pod).cores == 5


def test_it_is_a_fleet_as_the_verbs_know_them() -> None:
    names = [name for name, each in vars(Fleet).items() if not name.startswith("_") and callable(each)]
    assert len(names) > 10
    for name in names:
        assert inspect.signature(getattr(LocalFleet, name)) == inspect.signature(getattr(Fleet, name)), name
    found: Fleet = LocalFleet(Path("/none"))
    assert found.commands.flag == "" and found.namespace == "default" and found.place == "/none"


def test_selectors_are_labels() -> None:
    assert selected("a=b, c==d,") == {"a": "b", "c": "d"}
    with pytest.raises(InvalidArgument, match="name=value"):
        selected("a!=b")
