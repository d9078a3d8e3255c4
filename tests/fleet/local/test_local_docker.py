# SPDX-License-Identifier: Apache-2.0
"""`headrace up --driver docker`: pods are containers of a real engine, outlive the daemon, and are told as on Kubernetes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from local_site import STUB, LocalSite, fetch_text, runtime, service

from headrace.platforms.kubernetes_client.objects import Document, get_list
from support.waiting import eventually

if TYPE_CHECKING:
    from docker_platform import DockerEngine

pytestmark = [pytest.mark.platform, pytest.mark.worker("containers"), pytest.mark.timeout(600)]

MOUNT = {"name": "stub", "mountPath": "/stub", "readOnly": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[DockerEngine]:
    from docker_platform import docker_engine

    with docker_engine() as started, pytest.MonkeyPatch.context() as patched:
        patched.setenv("DOCKER_HOST", started.host)
        yield started


@pytest.fixture(scope="module")
def site(engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    site = LocalSite(tmp_path_factory.mktemp("docker"), 24_100, driver="docker", max_processes=200)
    site.up()
    site.apply(site.model, boxed())
    yield site
    site.close()
    assert not containers(engine)


def boxed(name: str = "boxed", **pod: Any) -> dict[str, Any]:
    """A runtime whose container is the stub server in an image that has Python and little else."""
    created = runtime(name, image="headrace-test/python:1", command=["python3", "/stub/stub_server.py"])
    config = created["spec"]["engineConfig"]
    config["runner"]["volumeMounts"] = [MOUNT]
    volumes = [{"name": "stub", "hostPath": {"path": str(STUB.parent)}}, *pod.pop("volumes", [])]
    config |= {**pod, "volumes": volumes}
    return created


def python(name: str, line: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "headrace-test/python:1", "command": ["python3", "-c", line], **more}


def containers(engine: DockerEngine, *more: str) -> list[str]:
    arguments = ("ps", "--all", "--no-trunc", "--quiet", "--filter", "label=headrace.fleet", *more)
    return sorted(engine.docker(*arguments).split())


def container_statuses(site: LocalSite, name: str) -> dict[str, Document]:
    return {
        status["name"]: status
        for pod in site.pods(name)[:1]
        for place in ("initContainerStatuses", "containerStatuses")
        for status in get_list(pod, "status", place)
    }


def test_a_service_of_several_containers_answers_scales_and_leaves_nothing(
    site: LocalSite, engine: DockerEngine
) -> None:
    notes = {"volumeMounts": [{"name": "notes", "mountPath": "/notes"}]}
    first = python("first", "open('/notes/said', 'w').write('hello'); print('first is done')", **notes)
    probe = {"exec": {"command": ["ls", "/notes/said"]}, "periodSeconds": 1, "timeoutSeconds": 20}
    line = "import os, time; print(open('/notes/said').read(), os.environ['KEY'], flush=True); time.sleep(3600)"
    beside = python("beside", line, readinessProbe=probe, **notes)
    beside["env"] = [{"name": "KEY", "value": "two\nlines"}]
    created = boxed("several", initContainers=[first], containers=[beside], volumes=[{"name": "notes", "emptyDir": {}}])
    site.apply(created, service("several", "several"))
    url = site.ready("several")
    assert fetch_text(url).startswith("several ")
    assert container_statuses(site, "several")["first"]["state"]["terminated"]["exitCode"] == 0
    logs = dict(site.ask(lambda fleet: fleet.logs("default", "several", every=True)))
    results = {name.rpartition("/")[2]: log for name, log in logs.items()}
    assert results["first"] == "first is done" and results["beside"] == "hello two\nlines"
    assert results["ome-container"].startswith("several begins on ") and "8080" not in results["ome-container"]
    site.ask(lambda fleet: fleet.scale("default", "several", "engine", 2))
    site.ready("several", 2)
    assert len(containers(engine)) == 4  # those that came first are gone
    shown = json.loads(engine.docker("inspect", *containers(engine)))
    assert all(document["HostConfig"]["PidsLimit"] == 200 for document in shown)
    site.delete("several")
    assert not containers(engine)


def test_the_daemon_is_killed_and_the_next_one_finds_its_containers(site: LocalSite, engine: DockerEngine) -> None:
    site.apply(service("kept", "boxed", minReplicas=2))
    url = site.ready("kept", 2)
    before = containers(engine)
    assert len(before) == 2
    site.kill()
    assert fetch_text(url).startswith("kept ")
    # One of a pod that is no more: its folder went, and the engine never heard of it.
    fleet = engine.docker("inspect", "--format", '{{index .Config.Labels "headrace.fleet"}}', before[0])
    labels = ("--label", f"headrace.fleet={fleet}", "--label", "headrace.pod=gone")
    engine.docker("run", "--detach", *labels, "headrace-test/python:1", "sleep", "3600")
    site.up()
    assert site.ready("kept", 2) == url
    eventually(lambda: containers(engine) == before)  # what is nobody's is removed beside all else
    # It is followed as well: one that dies is replaced, and how it ended is known.
    engine.docker("kill", before[0])
    eventually(lambda: before[0] not in containers(engine) and len(containers(engine)) == 2)
    assert site.ready("kept", 2) == url
    ends = [
        container_status["lastState"]["terminated"]
        for pod in site.pods("kept")
        for container_status in get_list(pod, "status", "containerStatuses")
        if container_status["lastState"]
    ]
    assert [end["exitCode"] for end in ends] == [137]
    # One ends while no daemon looks: its code is known all the same.
    site.kill()
    engine.docker("exec", before[1], "python3", "-c", "import os; os.kill(1, 15)")
    eventually(lambda: before[1] not in containers(engine, "--filter", "status=running"))
    site.up()
    eventually(lambda: before[1] not in containers(engine))
    assert site.ready("kept", 2) == url
    site.delete("kept")
    assert not containers(engine)


def test_one_that_leaks_is_ended_by_the_engine_and_others_serve(site: LocalSite, engine: DockerEngine) -> None:
    leaky = {"name": "ome-container", "resources": {"limits": {"memory": "96Mi", "cpu": "500m"}}}
    site.apply(service("leaky", "boxed", runner=leaky), service("well", "boxed"))
    url, other = site.ready("leaky"), site.ready("well")
    with contextlib.suppress(OSError):
        fetch_text(url, "/leak?200")
    result = eventually(lambda: container_statuses(site, "leaky")["ome-container"]["lastState"].get("terminated"))
    assert (result["reason"], result["exitCode"]) == ("OOMKilled", 137)
    assert fetch_text(other).startswith("well ")
    assert site.ready("leaky") == url
    ids = containers(engine, "--filter", "label=headrace.container=ome-container")
    shown = json.loads(engine.docker("inspect", *ids))
    assert {document["HostConfig"]["NanoCpus"] for document in shown} == {500_000_000, 0}
    site.delete("leaky")
    site.delete("well")


@pytest.mark.parametrize(
    ("name", "container", "reason", "words"),
    [
        ("nowhere", {"image": "127.0.0.1:1/none:1"}, "ErrImagePull", "cannot be pulled"),
        (
            "never",
            {"image": "headrace-test/none:1", "imagePullPolicy": "Never"},
            "ErrImageNeverPull",
            "load it with `docker load`",
        ),
        ("unnamed", {"image": "--privileged"}, "CreateContainerConfigError", "is not an image's name"),
        ("wrong", {"command": ["no-such-program"]}, "RunContainerError", "no-such-program"),
    ],
)
def test_a_pod_that_cannot_run_is_reported(
    site: LocalSite, engine: DockerEngine, name: str, container: dict[str, Any], reason: str, words: str
) -> None:
    site.apply(service(name, "boxed", runner={"name": "ome-container", **container}))
    result = site.wait_for_message(name, words)
    assert (result["status"], result["reason"]) == ("False", reason)
    site.delete(name)
    assert not containers(engine)


def test_a_crashing_container_states_the_reason(site: LocalSite) -> None:
    site.apply(service("ill", "boxed", runner={"name": "ome-container", "args": ["--text=crash"]}))
    result = site.wait_for_message("ill", "this one crashes at its start")
    assert "exit code 1" in result["message"]
    eventually(lambda: container_statuses(site, "ill")["ome-container"]["restartCount"] > 1)
    ((_, before),) = eventually(lambda: site.ask(lambda fleet: fleet.logs("default", "ill", previous=True)))
    assert before == "this one crashes at its start"
    site.apply(service("ill", "boxed"))
    site.ready("ill")
    site.delete("ill")


def test_a_stopped_container_has_its_grace_period(site: LocalSite, engine: DockerEngine) -> None:
    site.apply(service("slow", "boxed"))
    site.ready("slow")
    begun = time.time()
    site.delete("slow")
    reported = engine.docker(
        "events", "--since", f"{begun - 5:.0f}", "--until", f"{time.time() + 1:.0f}", "--filter", "event=die"
    )
    assert "exitCode=0" in reported


def test_another_driver_does_not_take_over(site: LocalSite, tmp_path: Path) -> None:
    site.apply(service("mine", "boxed"))
    site.ready("mine")
    site.kill()
    driver = site._settings.pop("driver")
    with pytest.raises(AssertionError, match="the daemon ended"):
        site.up()
    site._settings["driver"] = driver
    site.up()
    site.ready("mine")
    site.delete("mine")
