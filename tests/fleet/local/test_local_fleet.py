# SPDX-License-Identifier: Apache-2.0
"""Services as processes of this machine: the daemon and its pods are real, and killed as they would be."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_site import LocalSite, document, runtime, said, service, until
from support.ports import free_port

from headrace.core.errors import FailedPrecondition
from headrace.fleet.client.kinds import kind_named
from headrace.fleet.words import Document, items, text
from headrace.launch.identity import stat_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.timeout(900),  # it starts many programs, one after the other
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    made = LocalSite(tmp_path_factory.mktemp("fleet"), 12_100)
    made.up()
    made.apply(made.model, runtime())
    yield made
    made.close()


class Traffic:
    """Requests one after the other, in two threads, and what went wrong with any."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.wrong: list[str] = []
        self.answers: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]

    def __enter__(self) -> Traffic:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                answer = said(self._url, "/slow?0.005")
            except OSError as error:
                answer = repr(error)
            (self.wrong if answer.isdecimal() or "Error" in answer else self.answers).append(answer)


def alive(pid: int) -> bool:
    stat = stat_of(pid)
    return stat is not None and stat.lives


def test_a_service_becomes_ready_answers_scales_and_leaves_nothing_behind(site: LocalSite) -> None:
    site.apply(service("first"))
    url = site.ready("first")
    assert said(url).startswith("first ")
    site.ask(lambda fleet: fleet.scale("default", "first", "engine", 2))
    assert site.ready("first", 2) == url
    answers = until(lambda: found if len(found := {said(url) for _ in range(8)}) == 2 else set())
    assert {int(each.split()[1]) for each in answers} == site.pids("first")
    assert any("first begins" in line for _, line in site.ask(lambda fleet: fleet.logs("default", "first")))
    processes = {*site.pids("first"), site.router("first")}
    site.delete("first")
    assert not any(alive(each) for each in processes)
    assert not list(site.root.glob("pods/*")) and not list(site.root.glob("routers/default/first*"))
    assert not list(site.root.glob("ports/*/[0-9]*"))
    with pytest.raises(OSError, match="refused"):
        said(url)


def test_the_daemon_is_killed_and_the_next_one_finds_everything(site: LocalSite) -> None:
    site.apply(service("kept", minReplicas=2))
    url = site.ready("kept", 2)
    before = {*site.pids("kept"), site.router("kept")}
    with Traffic(url) as traffic:
        site.kill()
        until(lambda: len(traffic.answers) > 50)
        site.up()
        assert site.ready("kept", 2) == url
        count = len(traffic.answers)
        until(lambda: len(traffic.answers) > count + 50)
    assert not traffic.wrong
    assert {*site.pids("kept"), site.router("kept")} == before
    # It is followed as well: one that dies is replaced.
    victim = min(site.pids("kept"))
    os.kill(victim, signal.SIGKILL)
    until(lambda: victim not in site.pids("kept"))
    assert site.ready("kept", 2) == url
    site.delete("kept")
    assert not any(alive(each) for each in before)


def test_who_died_while_nobody_looked_is_started_again(site: LocalSite) -> None:
    site.apply(service("lost"))
    url = site.ready("lost")
    victim = site.pids("lost").pop()
    site.kill()
    os.kill(victim, signal.SIGKILL)
    site.up()
    until(lambda: site.pids("lost") != {victim})
    until(lambda: items(site.pods("lost")[0], "status", "containerStatuses")[0]["lastState"])
    assert site.ready("lost") == url
    told = items(site.pods("lost")[0], "status", "containerStatuses")[0]
    assert told["restartCount"] == 1 and told["lastState"]["terminated"]["reason"] == "ContainerStatusUnknown"
    site.delete("lost")


def test_a_killed_replica_comes_back_and_the_other_answers_meanwhile(site: LocalSite) -> None:
    site.apply(service("pair", minReplicas=2))
    url = site.ready("pair", 2)
    victim = min(site.pids("pair"))
    with Traffic(url) as traffic:
        until(lambda: len(traffic.answers) > 20)
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in site.pids("pair"))
        site.ready("pair", 2)
    # GETs that were under way at the victim are tried again at the other.
    assert not traffic.wrong
    site.delete("pair")


def _heard(url: str) -> str:
    try:
        return said(url)
    except OSError:
        return ""


def test_a_killed_router_comes_back_at_the_same_place(site: LocalSite) -> None:
    site.apply(service("way"))
    url = site.ready("way")
    before, pods = site.router("way"), site.pids("way")
    os.kill(before, signal.SIGKILL)
    until(lambda: site.router("way") != before)
    assert site.ready("way") == url
    until(lambda: _heard(url).startswith("way "))  # the new one may not listen yet
    assert site.pids("way") == pods
    site.delete("way")


def test_an_update_loses_no_request(site: LocalSite) -> None:
    site.apply(service("rolled", minReplicas=3))
    url = site.ready("rolled", 3)
    before = site.pids("rolled")
    with Traffic(url) as traffic:
        until(lambda: len(traffic.answers) > 20)
        newer = {"name": "ome-container", "args": ["--port=8080", "--text=newer"]}
        site.apply(service("rolled", minReplicas=3, runner=newer))
        assert site.ready("rolled", 3) == url
        until(lambda: traffic.answers[-1].startswith("newer"))
    assert not traffic.wrong
    until(lambda: not any(alive(each) for each in before) and not site.pids("rolled") & before)
    site.delete("rolled")


def _ready(service: Document) -> Document:
    return next((each for each in items(service, "status", "conditions") if each["type"] == "Ready"), {})


def test_one_that_crashes_says_why_and_the_others_go_on(site: LocalSite) -> None:
    site.apply(service("well"), service("ill", runner={"name": "ome-container", "args": ["--text=crash"]}))
    url = site.ready("well")
    # One document: the next may be of the moment when it has been started again.
    whole = until(lambda: found if "this one crashes" in _ready(found := site.get("ill")).get("message", "") else {})
    assert _ready(whole)["status"] == "False" and "exit code 1" in _ready(whole)["message"]
    state = whole["status"]["modelStatus"]
    assert state["modelRevisionStates"]["targetModelState"] == "FailedToLoad"
    assert state["lastFailureInfo"]["exitCode"] == 1
    pods = site.pods("ill")
    until(lambda: "BackOff" in {each["reason"] for each in site.ask(lambda fleet: fleet.events(pods))})
    assert said(url).startswith("well ")
    # Put right, it comes without its back-off.
    site.apply(service("ill"))
    site.ready("ill")
    site.delete("ill")
    site.delete("well")


def test_one_that_hangs_is_restarted_by_its_liveness_probe(site: LocalSite) -> None:
    probe = {"httpGet": {"path": "/ready", "port": 8080}, "periodSeconds": 1, "failureThreshold": 1}
    probe["timeoutSeconds"] = 5
    # As in a cluster: without it, one that takes longer to start than the first look is ended before it has begun.
    starts = {"httpGet": {"path": "/ready", "port": 8080}, "periodSeconds": 1, "failureThreshold": 600}
    starts["timeoutSeconds"] = 30
    site.apply(runtime("watched", livenessProbe=probe, startupProbe=starts), service("hung", "watched"))
    url = site.ready("hung")
    before = site.pids("hung")
    said(url, "/hang")
    until(lambda: site.pids("hung") != before)
    site.ready("hung")
    told = items(site.pods("hung")[0], "status", "containerStatuses")[0]
    assert "liveness probe failed" in told["lastState"]["terminated"]["message"]
    site.delete("hung")


def test_one_that_is_never_ready_says_so_and_gets_no_requests(site: LocalSite) -> None:
    probe = {"httpGet": {"path": "/never", "port": 8080}, "periodSeconds": 1}
    site.apply(runtime("unready", readinessProbe=probe), service("waits", "unready"))
    found = site.says("waits", "runs and is not ready yet", "EngineReady")
    assert found["reason"] == "ContainersNotReady"
    url = until(lambda: text(site.get("waits"), "status", "url"))
    assert said(url) == "503"
    site.delete("waits")


@pytest.mark.parametrize(
    ("name", "asked", "words"),
    [
        ("gpus", {"nvidia.com/gpu": "64"}, "it asks for 64 GPU(s)"),
        ("cores", {"cpu": "4096"}, "it asks for 4096 cores, and this machine has"),
        ("memory", {"memory": "900Ti"}, "of memory; of"),
    ],
)
def test_what_this_machine_does_not_have_is_told(site: LocalSite, name: str, asked: dict[str, str], words: str) -> None:
    site.apply(service(name, runner={"name": "ome-container", "resources": {"requests": asked, "limits": asked}}))
    found = site.says(name, words, "EngineReady")
    assert found["reason"] == "Unschedulable"
    site.delete(name)


def test_an_image_that_is_nowhere_here_is_told(site: LocalSite) -> None:
    foreign = runtime("foreign")
    del foreign["spec"]["engineConfig"]["runner"]["command"]
    site.apply(foreign, service("docker", "foreign"))
    found = site.says("docker", "image example/stub:1 needs Docker: run `headrace up --driver docker`")
    assert found["reason"] == "ErrImageNeverPull"
    site.delete("docker")


def test_a_port_that_cannot_be_changed_and_is_taken_is_told(site: LocalSite) -> None:
    port = free_port()  # and not one that somebody who connects may have next
    with socket.create_server(("127.0.0.1", port)):
        ports = [{"name": "http", "containerPort": port, "protocol": "TCP"}]
        site.apply(runtime("fixed", args=[f"--por={port}"], ports=ports), service("stuck", "fixed"))
        found = site.says("stuck", f"port {port} is in use on this machine", "EngineReady")
        assert found["reason"] == "Unschedulable"
    site.ready("stuck")
    site.delete("stuck")


def test_a_model_that_is_not_here_is_told_and_waited_for(site: LocalSite, tmp_path: Path) -> None:
    absent = tmp_path / "later"
    storage = {"storageUri": f"local://{absent}", "path": "/mnt/models/absent"}
    made = service("patient")
    made["spec"]["model"]["name"] = "absent"
    model = document("ClusterBaseModel", "absent", {"modelFormat": {"name": "stub"}, "storage": storage})
    site.apply(model, made)
    site.says("patient", "put the model's files there", "EngineReady")
    assert site.get("patient")["status"]["modelStatus"]["lastFailureInfo"]["reason"] == "BaseModelNotReady"
    absent.mkdir()
    site.ready("patient")
    site.delete("patient")


def test_a_group_is_a_leader_and_its_workers(site: LocalSite) -> None:
    leader = runtime("group")
    runner = leader["spec"]["engineConfig"].pop("runner")
    worker: dict[str, Any] = {"name": "ome-container", "image": "example/stub:1", "command": ["python3", "-c"]}
    joins = "print('joins', '$(LWS_LEADER_ADDRESS):8080', '$(LWS_GROUP_SIZE)', flush=True)"
    worker["args"] = [f"import time; {joins}; time.sleep(3600)"]
    leader["spec"]["engineConfig"] |= {"leader": {"runner": runner}, "worker": {"size": 2, "runner": worker}}
    site.apply(leader, service("many", "group", worker={"size": 2}))
    url = until(
        lambda: text(site.get("many"), "status", "url") if site.condition("many").get("status") == "True" else ""
    )
    assert said(url).startswith("many ") and said(url).endswith(" 0")
    assert len(site.pods("many")) == 3
    port = until(
        lambda: [line for _, line in site.ask(lambda fleet: fleet.logs("default", "many")) if line.startswith("joins")]
    )[0]
    assert port.startswith("joins 127.0.0.1:") and not port.startswith("joins 127.0.0.1:8080") and port.endswith(" 3")
    # One of them ends: all begin anew.
    before = site.pids("many")
    said_by = int(said(url).split()[1])
    os.kill(next(each for each in before if each != said_by), signal.SIGKILL)
    until(lambda: not site.pids("many") & before)
    until(lambda: site.condition("many").get("status") == "True")
    site.delete("many")


def test_a_router_component_reaches_its_engines_by_their_service(site: LocalSite) -> None:
    made = service("routed", minReplicas=2)
    made["spec"]["router"] = {"minReplicas": 1, "config": {"routing_strategy": "round_robin"}}
    site.apply(made)
    url = site.ready("routed", 3, engines=2)
    assert site.condition("routed", "RouterReady")["status"] == "True"
    until(lambda: len({said(url) for _ in range(8)}) == 2)
    # The service, and the engines behind their own Service.
    assert {each.name for each in (site.root / "routers" / "default").iterdir()} >= {"routed", "routed-engine"}
    components = site.get("routed")["status"]["components"]
    assert components["router"]["url"] == url and components["engine"]["url"] != url
    site.delete("routed")
    assert not list((site.root / "routers" / "default").glob("routed*"))


def test_a_canary_gets_its_share(site: LocalSite) -> None:
    site.apply(service("birds"))
    url = site.ready("birds")
    newer = {"name": "ome-container", "args": ["--port=8080", "--text=canary"]}
    site.apply(service("birds", runner=newer, canaryTrafficPercent=25))

    def share() -> float:
        answers = [said(url) for _ in range(40)]
        return sum(each.startswith("canary") for each in answers) / len(answers)

    until(lambda: share() == pytest.approx(0.25, abs=0.1))
    # Undone, its pods go; the same revision once more has some again.
    site.apply(service("birds", runner=newer, canaryTrafficPercent=0))
    until(lambda: share() == 0.0 and len(site.pods("birds")) == 1)
    site.apply(service("birds", runner=newer, canaryTrafficPercent=50))
    until(lambda: share() == pytest.approx(0.5, abs=0.1))
    site.apply(service("birds", runner=newer, canaryTrafficPercent=100))
    until(lambda: share() == 1.0)
    site.ready("birds")
    site.delete("birds")


def test_a_change_of_what_was_looked_at_before_an_edit_is_refused(site: LocalSite) -> None:
    """Or `rollout promote` would promote what its user has not seen."""
    site.apply(service("edited"))
    site.ready("edited")
    change = {"metadata": dict(site.get("edited")["metadata"]), "spec": {"engine": {"canaryTrafficPercent": 100}}}
    site.apply(service("edited", maxReplicas=4))

    def patch() -> Document:
        kind = kind_named("InferenceService")
        return site.ask(lambda fleet: fleet.patch(kind, "default", "edited", change))

    with pytest.raises(FailedPrecondition, match="was changed meanwhile"):
        patch()
    change["metadata"] = dict(site.get("edited")["metadata"])
    assert patch()["spec"]["engine"] == {"minReplicas": 1, "maxReplicas": 4, "canaryTrafficPercent": 100}
    site.delete("edited")


def test_a_delete_goes_on_after_the_daemon_was_killed_in_it(site: LocalSite) -> None:
    site.apply(service("going", minReplicas=2))
    url = site.ready("going", 2)
    processes = {*site.pids("going"), site.router("going")}
    site.ask(lambda fleet: fleet.delete(service("going")))
    site.kill()
    site.up()
    until(lambda: not any(alive(each) for each in processes) and not site.pods("going"))
    site.delete("going")
    assert not list(site.root.glob("objects/default/going.json")) and not list(
        site.root.glob("documents/*/*/going.json")
    )
    with pytest.raises(OSError, match="refused"):
        said(url)
