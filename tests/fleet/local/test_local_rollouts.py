# SPDX-License-Identifier: Apache-2.0
"""Rollouts by steps on this machine: real processes, real requests, every one of them counted."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from local_site import LocalSite, runtime, said, service, until
from rollout_traffic import Traffic

from headrace.core.errors import FailedPrecondition
from headrace.fleet.client.kinds import kind_named
from headrace.fleet.client.rollouts import promotion, resume, rollback
from headrace.fleet.words import Document, items, part, text

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.timeout(900),  # it starts many programs, one after the other
]

STEPS = {
    "ome.io/rollout-steps": "20,50",
    "ome.io/rollout-step-seconds": "1",
    "ome.io/rollout-min-requests": "20",
    "ome.io/rollout-max-latency-ratio": "0",
}
SERVICE = kind_named("InferenceService")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    made = LocalSite(tmp_path_factory.mktemp("rollouts"), 12_600)
    made.up()
    made.apply(made.model, runtime())
    yield made
    made.close()


def stepped(name: str, text: str, *args: str, steps: dict[str, str] | None = None, **engine: Any) -> dict[str, Any]:
    """A service whose pods answer with this text."""
    runner = {"name": "ome-container", "args": ["--host=0.0.0.0", "--port=8080", f"--text={text}", *args]}
    made = service(name, runner=runner, **engine)
    made["metadata"]["annotations"] = STEPS | (steps or {})
    return made


def engine_of(site: LocalSite, name: str) -> Document:
    return part(site.get(name), "status", "components", "engine")


def rollout_of(site: LocalSite, name: str) -> Document:
    return part(engine_of(site, name), "rollout")


def patched(site: LocalSite, name: str, change: Callable[[Document], Document]) -> None:
    """As the verbs of `headrace rollout` do."""
    made = change(site.get(name))
    site.ask(lambda fleet: fleet.patch(SERVICE, "default", name, made))


def told(site: LocalSite, name: str) -> list[str]:
    """The events of its rollouts, in words."""
    about = site.get(name)
    found = site.ask(lambda fleet: fleet.events([about]))
    return [text(each, "message") for each in found if text(each, "reason").startswith("Rollout")]


def in_phase(site: LocalSite, name: str, phase: str, seconds: float = 150.0) -> Document:
    return until(lambda: found if text(found := rollout_of(site, name), "phase") == phase else {}, seconds)


def test_a_good_revision_comes_by_steps_and_no_request_fails(site: LocalSite) -> None:
    site.apply(stepped("good", "old", minReplicas=2))
    url = site.ready("good", 2)
    with Traffic(url) as traffic:
        until(lambda: traffic.streams >= 4)
        site.apply(stepped("good", "new", minReplicas=2))
        in_phase(site, "good", "Promoted")
        site.ready("good", 2)
        before = traffic.total
        until(lambda: traffic.total >= max(before + 20, 200) and traffic.streams > 10)
    assert traffic.failures == []
    assert traffic.answers["old"] and traffic.answers["new"] and traffic.streams > 10
    assert traffic.total >= 200
    until(lambda: said(url).startswith("new"))
    started, first, ended = told(site, "good")
    assert started == "engine: a new revision gets 20 %, 50 %, then all requests"
    assert re.fullmatch(r"engine: step 20 %: \d+ requests, 0\.0 % errors; 50 % now", first)
    assert re.fullmatch(r"engine: promoted: step 50 %: \d+ requests, 0\.0 % errors", ended)
    assert site.condition("good", "EngineRolloutReady")["status"] == "True"
    site.delete("good")


def test_errors_take_a_revision_back_and_the_next_edit_begins_anew(site: LocalSite) -> None:
    site.apply(stepped("bad", "old"))
    url = site.ready("bad")
    with Traffic(url, clients=2) as traffic:
        site.apply(stepped("bad", "broken", "--status=500"))
        in_phase(site, "bad", "RolledBack")
        # All requests go to what ran before, and what was written stays.
        until(lambda: [each["percent"] for each in items(engine_of(site, "bad"), "traffic")] == [0, 100])
        until(lambda: len(site.pods("bad")) == 1)
    assert all(each.startswith("500") for each in traffic.failures), traffic.failures
    assert traffic.failures and traffic.answers["old"]
    assert {said(url).split()[0] for _ in range(20)} == {"old"}
    assert "--status=500" in site.get("bad")["spec"]["engine"]["runner"]["args"]
    found = site.condition("bad", "EngineRolloutReady")
    assert (found["status"], found["reason"]) == ("False", "RolledBack")
    assert re.fullmatch(r"rolled back: \d+\.\d % errors of \d+ requests at 20 %, 1 % allowed", found["message"])
    assert site.condition("bad")["status"] == "True"
    assert text(site.condition("bad", "LatestDeploymentReady"), "reason") == "RolledBack"
    site.apply(stepped("bad", "better", steps={"ome.io/rollout-min-requests": "0"}))
    in_phase(site, "bad", "Promoted")
    url = site.ready("bad")
    until(lambda: said(url).startswith("better"))
    site.delete("bad")


def test_a_slow_revision_is_taken_back(site: LocalSite) -> None:
    site.apply(stepped("slow", "old"))
    url = site.ready("slow")
    # So much slower that no machine is too slow to tell; some clients wait for the slow ones, and others go on.
    with Traffic(url, clients=8, streams=False) as traffic:
        site.apply(stepped("slow", "lame", "--delay=1.5", steps={"ome.io/rollout-max-latency-ratio": "3"}))
        found = in_phase(site, "slow", "RolledBack")
    assert traffic.failures == []
    assert "times as slow as before" in found["message"] and "3 times allowed" in found["message"]
    site.delete("slow")


def test_the_daemon_is_killed_in_a_step(site: LocalSite) -> None:
    site.apply(stepped("killed", "old"))
    url = site.ready("killed")
    with Traffic(url) as traffic:
        site.apply(stepped("killed", "new", steps={"ome.io/rollout-step-seconds": "2"}))
        begun = until(lambda: found if (found := in_phase(site, "killed", "Stepping"))["step"] == 2 else {})
        site.kill()
        site.up()
        # The step goes on from where it was.
        again = rollout_of(site, "killed")
        assert (again["step"], again["since"]) == (begun["step"], begun["since"]) or again["phase"] == "Promoted"
        in_phase(site, "killed", "Promoted")
        site.ready("killed")
    assert traffic.failures == []
    site.delete("killed")


def test_paused_resumed_undone_and_promoted_in_the_middle(site: LocalSite) -> None:
    calm = {"ome.io/rollout-min-requests": "0", "ome.io/rollout-paused": "true"}
    site.apply(stepped("moved", "old"))
    url = site.ready("moved")
    site.apply(stepped("moved", "new", steps=calm))
    until(lambda: "paused" in text(in_phase(site, "moved", "Stepping"), "message"))
    assert rollout_of(site, "moved")["step"] == 1
    patched(site, "moved", rollback)
    assert in_phase(site, "moved", "RolledBack")["message"] == "rolled back: by hand"
    with pytest.raises(FailedPrecondition, match="undone already"):
        rollback(site.get("moved"))
    patched(site, "moved", resume)
    in_phase(site, "moved", "Promoted")
    until(lambda: said(url).startswith("new"))
    site.apply(stepped("moved", "newest", steps=calm | {"ome.io/rollout-step-seconds": "3000"}))
    in_phase(site, "moved", "Stepping")
    patched(site, "moved", promotion)
    in_phase(site, "moved", "Promoted")
    until(lambda: said(url).startswith("newest"))
    site.delete("moved")


def test_an_old_pod_stays_until_it_has_answered(site: LocalSite) -> None:
    site.apply(stepped("long", "old"))
    url = site.ready("long")
    answers: list[str] = []
    # Far longer than the grace of its pod, which is 2 s.
    asking = threading.Thread(target=lambda: answers.append(said(url, "/stream?160", 60.0)))
    asking.start()
    site.apply(service("long", runner={"name": "ome-container", "args": ["--port=8080", "--text=new"]}))
    until(lambda: said(url).startswith("new"))
    asking.join(120)
    assert len(answers[0].splitlines()) == 160
    site.ready("long")
    site.delete("long")
