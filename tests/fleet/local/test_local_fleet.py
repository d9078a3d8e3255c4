# SPDX-License-Identifier: Apache-2.0
"""Services as processes of this machine: the daemon and its pods are real, and killed as they would be.

The same and more, without processes: `test_simulated_services.py`, `test_simulated_restarts.py`, `test_simulated_daemon.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from local_site import LocalSite, fetch_text, runtime, service
from rollout_traffic import Traffic

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
    site = LocalSite(tmp_path_factory.mktemp("fleet"))
    site.up()
    site.apply(site.model, runtime())
    yield site
    site.close()


def alive(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.is_alive


def test_a_service_becomes_ready_answers_scales_and_leaves_nothing_behind(site: LocalSite) -> None:
    site.apply(service("first"))
    url = site.ready("first")
    assert fetch_text(url).startswith("first ")
    site.ask(lambda fleet: fleet.scale("default", "first", "engine", 2))
    assert site.ready("first", 2) == url
    answers = eventually(lambda: results if len(results := {fetch_text(url) for _ in range(8)}) == 2 else set())
    assert {int(answer.split()[1]) for answer in answers} == site.pids("first")
    assert any("first begins" in line for _, line in site.ask(lambda fleet: fleet.logs("default", "first")))
    processes = {*site.pids("first"), site.router("first")}
    site.delete("first")
    assert not any(alive(process) for process in processes)
    assert not list(site.root.glob("pods/*")) and not list(site.root.glob("routers/default/first*"))
    assert not list(site.root.glob("ports/*/[0-9]*"))
    with pytest.raises(OSError, match="refused"):
        fetch_text(url)


def test_the_daemon_is_killed_and_the_next_one_finds_everything(site: LocalSite) -> None:
    site.apply(service("kept", minReplicas=2))
    url = site.ready("kept", 2)
    before = {*site.pids("kept"), site.router("kept")}
    with Traffic(url) as traffic:
        site.kill()
        eventually(lambda: traffic.total > 50)
        site.up()
        assert site.ready("kept", 2) == url
        count = traffic.total
        eventually(lambda: traffic.total > count + 50)
    assert not traffic.failures
    assert {*site.pids("kept"), site.router("kept")} == before
    # It is followed as well: one that dies is replaced.
    victim = min(site.pids("kept"))
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: victim not in site.pids("kept"))
    assert site.ready("kept", 2) == url
    site.delete("kept")
    assert not any(alive(process) for process in before)


def test_a_killed_replica_is_restarted_and_the_other_answers_meanwhile(site: LocalSite) -> None:
    site.apply(service("pair", minReplicas=2))
    url = site.ready("pair", 2)
    victim = min(site.pids("pair"))
    with Traffic(url, streams=False) as traffic:  # a stream that has begun cannot be repeated
        eventually(lambda: traffic.total > 20)
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: victim not in site.pids("pair"))
        site.ready("pair", 2)
    # GETs that were under way at the victim are tried again at the other.
    assert not traffic.failures
    site.delete("pair")


def test_an_update_loses_no_request(site: LocalSite) -> None:
    site.apply(service("rolled", minReplicas=3))
    url = site.ready("rolled", 3)
    before = site.pids("rolled")
    with Traffic(url) as traffic:
        eventually(lambda: traffic.total > 20)
        newer = {"name": "ome-container", "args": ["--port=8080", "--text=newer"]}
        site.apply(service("rolled", minReplicas=3, runner=newer))
        assert site.ready("rolled", 3) == url
        eventually(lambda: traffic.answers["newer"])
    assert not traffic.failures
    eventually(lambda: not any(alive(process) for process in before) and not site.pids("rolled") & before)
    site.delete("rolled")


def _ready(service: Document) -> Document:
    return next(
        (condition for condition in get_list(service, "status", "conditions") if condition["type"] == "Ready"), {}
    )


def test_a_crashing_replica_states_the_reason_and_the_others_continue(site: LocalSite) -> None:
    site.apply(service("well"), service("ill", runner={"name": "ome-container", "args": ["--text=crash"]}))
    url = site.ready("well")
    # One document: the next may be of the moment when it has been started again.
    whole = eventually(
        lambda: result if "this one crashes" in _ready(result := site.get("ill")).get("message", "") else {}
    )
    assert _ready(whole)["status"] == "False" and "exit code 1" in _ready(whole)["message"]
    state = whole["status"]["modelStatus"]
    assert state["modelRevisionStates"]["targetModelState"] == "FailedToLoad"
    assert state["lastFailureInfo"]["exitCode"] == 1
    pods = site.pods("ill")
    eventually(lambda: "BackOff" in {event["reason"] for event in site.ask(lambda fleet: fleet.events(pods))})
    assert fetch_text(url).startswith("well ")
    # Put right, it comes without its back-off.
    site.apply(service("ill"))
    site.ready("ill")
    site.delete("ill")
    site.delete("well")
