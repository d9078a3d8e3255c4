# SPDX-License-Identifier: Apache-2.0
"""Pods of several containers: those that come first, those beside, each restarted and told for itself.

More of them: `test_simulated_containers.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from local_site import LocalSite, fetch_text, runtime, service

from headrace.core.errors import NotFound
from headrace.platforms.kubernetes_client.objects import Document, get_list
from headrace.platforms.processes import read_stat
from support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.timeout(900),  # it starts many programs, one after the other
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    site = LocalSite(tmp_path_factory.mktemp("containers"))
    site.up()
    site.apply(site.model, runtime())
    yield site
    site.close()


def python(name: str, line: str, **more: Any) -> dict[str, Any]:
    """A container of a line of Python."""
    return {"name": name, "image": "example/python:1", "command": ["python3", "-c", line], **more}


def many(name: str, **pod: Any) -> dict[str, Any]:
    """A runtime of the stub server with more in its pod."""
    created = runtime(name)
    created["spec"]["engineConfig"] |= pod
    return created


def container_statuses(site: LocalSite, name: str, place: str = "containerStatuses") -> dict[str, Document]:
    """By container: what the first pod of a service says of it."""
    return {status["name"]: status for pod in site.pods(name)[:1] for status in get_list(pod, "status", place)}


def pid_of(site: LocalSite, container: str) -> int:
    from headrace.core.files import read_json

    (path,) = site.root.glob(f"pods/*/containers/{container}/process.json")
    return int((read_json(path) or {})["pid"])


def test_init_containers_run_in_order_and_share_a_volume_with_the_main_one(site: LocalSite) -> None:
    mount = {"volumeMounts": [{"name": "notes", "mountPath": "/notes"}]}
    one = python("one", "open('/notes/said', 'w').write('one ')", **mount)
    two = python("two", "open('/notes/said', 'a').write('two'); print('two has written')", **mount)
    created = many("ordered", initContainers=[one, two], volumes=[{"name": "notes", "emptyDir": {}}])
    reads = "sys.argv.append('--text=' + open('/notes/said').read())"
    line = f"import sys, runpy; {reads}; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    runner = created["spec"]["engineConfig"]["runner"]
    runner |= {**mount, "args": [line, *runner["command"][1:], *runner["args"]], "command": ["python3", "-c"]}
    site.apply(created, service("ordered", "ordered"))
    url = site.ready("ordered")
    assert fetch_text(url).startswith("one two ")
    first = container_statuses(site, "ordered", "initContainerStatuses")
    assert [item["state"]["terminated"]["reason"] for item in first.values()] == ["Completed", "Completed"]
    assert [item["ready"] for item in first.values()] == [True, True]
    pod = site.pods("ordered")[0]
    assert {condition["type"]: condition["status"] for condition in pod["status"]["conditions"]}[
        "Initialized"
    ] == "True"
    ((_, log),) = site.ask(lambda fleet: fleet.logs("default", "ordered", container="two"))
    assert log == "two has written"
    names = {
        name.rpartition("/")[2] for name, _ in site.ask(lambda fleet: fleet.logs("default", "ordered", every=True))
    }
    assert names == {"one", "two", "ome-container"}
    with pytest.raises(NotFound, match="has no container three; it has one, two, ome-container"):
        site.ask(lambda fleet: fleet.logs("default", "ordered", container="three"))
    site.delete("ordered")


def test_one_beside_is_restarted_alone_and_the_pod_is_ready_when_all_are(site: LocalSite) -> None:
    probe = {"exec": {"command": ["test", "-e", "/flag/up"]}, "periodSeconds": 1, "failureThreshold": 1}
    probe["timeoutSeconds"] = 30
    mount = [{"name": "flag", "mountPath": "/flag"}]
    beside = python("beside", "import time; print('beside', flush=True); time.sleep(3600)", volumeMounts=mount)
    site.apply(
        many("paired", containers=[{**beside, "readinessProbe": probe}], volumes=[{"name": "flag", "emptyDir": {}}]),
        service("paired", "paired"),
    )
    site.wait_for_message("paired", "container beside runs and is not ready yet", "EngineReady")
    eventually(lambda: container_statuses(site, "paired")["ome-container"]["ready"])
    (volume,) = site.root.glob("pods/*/volumes/flag")
    (volume / "up").touch()
    url = site.ready("paired")
    main = int(fetch_text(url).split()[1])
    os.kill(pid_of(site, "beside"), signal.SIGKILL)
    eventually(lambda: container_statuses(site, "paired")["beside"]["restartCount"] == 1)
    site.ready("paired")
    result = container_statuses(site, "paired")
    assert result["beside"]["lastState"]["terminated"]["exitCode"] == 137
    assert result["beside"]["lastState"]["terminated"]["signal"] == 9
    assert result["ome-container"]["restartCount"] == 0 and int(fetch_text(url).split()[1]) == main
    # What runs is found again by another daemon, each container for itself.
    before = site.pids("paired")
    assert len(before) == 2
    site.kill()
    site.up()
    assert site.ready("paired") == url and site.pids("paired") == before
    site.delete("paired")
    assert not any((stat := read_stat(process)) is not None and stat.is_alive for process in before)
