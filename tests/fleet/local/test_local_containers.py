# SPDX-License-Identifier: Apache-2.0
"""Pods of several containers: those that come first, those beside, each restarted and told for itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from local_site import LocalSite, document, runtime, said, service, until

from headrace.core.errors import NotFound
from headrace.fleet.words import Document, items
from headrace.launch.identity import stat_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.timeout(900),  # it starts many programs, one after the other
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    made = LocalSite(tmp_path_factory.mktemp("containers"), 14_100)
    made.up()
    made.apply(made.model, runtime())
    yield made
    made.close()


def python(name: str, line: str, **more: Any) -> dict[str, Any]:
    """A container of a line of Python."""
    return {"name": name, "image": "example/python:1", "command": ["python3", "-c", line], **more}


def many(name: str, **pod: Any) -> dict[str, Any]:
    """A runtime of the stub server with more in its pod."""
    made = runtime(name)
    made["spec"]["engineConfig"] |= pod
    return made


def told(site: LocalSite, name: str, place: str = "containerStatuses") -> dict[str, Document]:
    """By container: what the first pod of a service says of it."""
    return {each["name"]: each for pod in site.pods(name)[:1] for each in items(pod, "status", place)}


def pid_of(site: LocalSite, container: str) -> int:
    from headrace.fleet.local.store import read_json

    (path,) = site.root.glob(f"pods/*/containers/{container}/process.json")
    return int((read_json(path) or {})["pid"])


def test_first_ones_come_in_order_and_share_a_volume_with_the_main_one(site: LocalSite) -> None:
    mount = {"volumeMounts": [{"name": "notes", "mountPath": "/notes"}]}
    one = python("one", "open('/notes/said', 'w').write('one ')", **mount)
    two = python("two", "open('/notes/said', 'a').write('two'); print('two has written')", **mount)
    made = many("ordered", initContainers=[one, two], volumes=[{"name": "notes", "emptyDir": {}}])
    reads = "sys.argv.append('--text=' + open('/notes/said').read())"
    line = f"import sys, runpy; {reads}; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    runner = made["spec"]["engineConfig"]["runner"]
    runner |= {**mount, "args": [line, *runner["command"][1:], *runner["args"]], "command": ["python3", "-c"]}
    site.apply(made, service("ordered", "ordered"))
    url = site.ready("ordered")
    assert said(url).startswith("one two ")
    first = told(site, "ordered", "initContainerStatuses")
    assert [each["state"]["terminated"]["reason"] for each in first.values()] == ["Completed", "Completed"]
    assert [each["ready"] for each in first.values()] == [True, True]
    pod = site.pods("ordered")[0]
    assert {each["type"]: each["status"] for each in pod["status"]["conditions"]}["Initialized"] == "True"
    ((_, log),) = site.ask(lambda fleet: fleet.logs("default", "ordered", container="two"))
    assert log == "two has written"
    names = {
        name.rpartition("/")[2] for name, _ in site.ask(lambda fleet: fleet.logs("default", "ordered", every=True))
    }
    assert names == {"one", "two", "ome-container"}
    with pytest.raises(NotFound, match="has no container three; it has one, two, ome-container"):
        site.ask(lambda fleet: fleet.logs("default", "ordered", container="three"))
    site.delete("ordered")


def test_a_first_one_that_fails_is_told_and_tried_again_and_nothing_else_begins(site: LocalSite) -> None:
    line = "import os, sys; sys.exit('no tokenizer here') if not os.path.exists('/tmp/here') else None"
    folder = [{"name": "tmp", "mountPath": "/tmp"}]
    made = many(
        "failing",
        initContainers=[python("fetch", line, volumeMounts=folder)],
        volumes=[{"name": "tmp", "emptyDir": {}}],
    )
    site.apply(made, service("unfetched", "failing"), service("well"))
    url = site.ready("well")
    found = site.says("unfetched", "no tokenizer here")
    assert found["status"] == "False" and "container fetch ended with exit code 1" in found["message"]
    assert told(site, "unfetched")["ome-container"]["state"]["waiting"]["reason"] == "PodInitializing"
    assert said(url).startswith("well ")
    until(lambda: told(site, "unfetched", "initContainerStatuses")["fetch"]["restartCount"] > 1)
    (volume,) = site.root.glob("pods/*/volumes/tmp")
    (volume / "here").touch()
    site.ready("unfetched")
    site.delete("unfetched")
    site.delete("well")


def test_one_beside_is_restarted_alone_and_the_pod_is_ready_when_all_are(site: LocalSite) -> None:
    probe = {"exec": {"command": ["test", "-e", "/flag/up"]}, "periodSeconds": 1, "failureThreshold": 1}
    probe["timeoutSeconds"] = 30
    mount = [{"name": "flag", "mountPath": "/flag"}]
    beside = python("beside", "import time; print('beside', flush=True); time.sleep(3600)", volumeMounts=mount)
    site.apply(
        many("paired", containers=[{**beside, "readinessProbe": probe}], volumes=[{"name": "flag", "emptyDir": {}}]),
        service("paired", "paired"),
    )
    site.says("paired", "container beside runs and is not ready yet", "EngineReady")
    until(lambda: told(site, "paired")["ome-container"]["ready"])
    (volume,) = site.root.glob("pods/*/volumes/flag")
    (volume / "up").touch()
    url = site.ready("paired")
    main = int(said(url).split()[1])
    os.kill(pid_of(site, "beside"), signal.SIGKILL)
    until(lambda: told(site, "paired")["beside"]["restartCount"] == 1)
    site.ready("paired")
    found = told(site, "paired")
    assert found["beside"]["lastState"]["terminated"]["exitCode"] == 137
    assert found["beside"]["lastState"]["terminated"]["signal"] == 9
    assert found["ome-container"]["restartCount"] == 0 and int(said(url).split()[1]) == main
    # What runs is found again by another daemon, each container for itself.
    before = site.pids("paired")
    assert len(before) == 2
    site.kill()
    site.up()
    assert site.ready("paired") == url and site.pids("paired") == before
    site.delete("paired")
    assert not any((stat := stat_of(each)) is not None and stat.lives for each in before)


def test_a_sidecar_begins_before_the_others_and_ends_after_them(site: LocalSite) -> None:
    line = "import time; print('sidecar', flush=True); time.sleep(3600)"
    mount = [{"name": "flag", "mountPath": "/flag"}]
    probe = {"exec": {"command": ["test", "-e", "/flag/up"]}, "periodSeconds": 1, "failureThreshold": 600}
    probe["timeoutSeconds"] = 30
    sidecar = python("proxy", line, restartPolicy="Always", startupProbe=probe, volumeMounts=mount)
    site.apply(
        many("sided", initContainers=[sidecar], volumes=[{"name": "flag", "emptyDir": {}}]), service("sided", "sided")
    )
    until(lambda: "running" in told(site, "sided", "initContainerStatuses").get("proxy", {}).get("state", {}))
    assert told(site, "sided")["ome-container"]["state"]["waiting"]["reason"] == "PodInitializing"
    (volume,) = site.root.glob("pods/*/volumes/flag")
    (volume / "up").touch()
    site.ready("sided")
    victim = pid_of(site, "proxy")
    os.kill(victim, signal.SIGKILL)
    until(lambda: told(site, "sided", "initContainerStatuses")["proxy"]["restartCount"] == 1)
    site.ready("sided")
    assert told(site, "sided")["ome-container"]["restartCount"] == 0
    site.delete("sided")


def test_ports_of_containers_beside_are_given_for_each_replica(site: LocalSite) -> None:
    stub = runtime()["spec"]["engineConfig"]["runner"]
    beside = {
        "name": "metrics",
        "image": "example/stub:1",
        "command": [*stub["command"], "--port=9100", "--text=beside"],
        "ports": [{"name": "metrics", "containerPort": 9100}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "metrics"}, "periodSeconds": 1, "timeoutSeconds": 30},
    }
    site.apply(many("ported", containers=[beside]), service("ported", "ported", minReplicas=2))
    url = site.ready("ported", 2)
    assert said(url).startswith("ported ")
    logs = [log for _, log in site.ask(lambda fleet: fleet.logs("default", "ported", container="metrics"))]
    assert len(set(logs)) == 2 and not any("9100" in each for each in logs)
    site.delete("ported")


def test_a_group_begins_anew_when_any_container_of_it_ends(site: LocalSite) -> None:
    leader = runtime("grouped")
    config = leader["spec"]["engineConfig"]
    runner = config.pop("runner")
    worker = python("ome-container", "import time; time.sleep(3600)")
    beside = python("watcher", "import time; time.sleep(3600)")
    config |= {"leader": {"runner": runner, "containers": [beside]}, "worker": {"size": 1, "runner": worker}}
    site.apply(leader, service("grouped", "grouped", worker={"size": 1}))
    until(lambda: site.condition("grouped").get("status") == "True")
    assert len(site.pods("grouped")) == 2
    before = site.pids("grouped")
    assert len(before) == 3
    os.kill(pid_of(site, "watcher"), signal.SIGKILL)
    until(lambda: not site.pids("grouped") & before and len(site.pids("grouped")) == 3)
    until(lambda: site.condition("grouped").get("status") == "True")
    counts = [
        each["restartCount"] for pod in site.pods("grouped") for each in items(pod, "status", "containerStatuses")
    ]
    assert counts == [1, 1, 1]
    site.delete("grouped")


def test_a_pod_that_asks_for_too_much_together_is_told(site: LocalSite) -> None:
    asked = {"resources": {"requests": {"cpu": "2000"}}}
    site.apply(many("heavy", containers=[python("beside", "pass", **asked)]), service("heavy", "heavy"))
    found = site.says("heavy", "it asks for 2000 cores", "EngineReady")
    assert found["reason"] == "Unschedulable"
    site.delete("heavy")


def test_what_is_asked_for_is_that_of_the_largest_moment() -> None:
    from headrace.fleet.local.machine import asked_by

    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"name": "c", "resources": {"requests": {"cpu": cpu, "memory": f"{cpu}Gi"}}, **more}

    pod = document("Pod", "p", {"containers": [container("1"), container("2")]})
    assert asked_by(pod).cores == 3
    pod["spec"]["initContainers"] = [container("5"), container("1", restartPolicy="Always"), container("1")]
    found = asked_by(pod)
    assert (found.cores, found.memory) == (5, 5 << 30)
    pod["spec"]["initContainers"] = [container("1", restartPolicy="Always"), container("4")]
    assert asked_by(pod).cores == 5
