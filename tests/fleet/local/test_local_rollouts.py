# SPDX-License-Identifier: Apache-2.0
"""A rollout by steps on this machine: real processes, real requests, every one of them counted.

More of them: `test_simulated_rollouts.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from local_site import LocalSite, fetch_text, runtime, service
from rollout_traffic import Traffic

from headrace.fleet.client.contract import kind_named
from headrace.platforms.kubernetes_client.objects import Document, get_mapping, get_str
from support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
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
    site = LocalSite(tmp_path_factory.mktemp("rollouts"))
    site.up()
    site.apply(site.model, runtime())
    yield site
    site.close()


def stepped(name: str, answer: str, *args: str, steps: dict[str, str] | None = None, **engine: Any) -> dict[str, Any]:
    """A service whose pods answer with this text."""
    runner = {"name": "ome-container", "args": ["--host=0.0.0.0", "--port=8080", f"--text={answer}", *args]}
    document = service(name, runner=runner, **engine)
    document["metadata"]["annotations"] = STEPS | (steps or {})
    return document


def rollout_of(site: LocalSite, name: str) -> Document:
    return get_mapping(site.get(name), "status", "components", "engine", "rollout")


def rollout_events(site: LocalSite, name: str) -> list[str]:
    """The events of its rollouts, in words."""
    about = site.get(name)
    answer = site.ask(lambda fleet: fleet.events([about]))
    return [get_str(item, "message") for item in answer if get_str(item, "reason").startswith("Rollout")]


def in_phase(site: LocalSite, name: str, phase: str) -> None:
    eventually(lambda: get_str(rollout_of(site, name), "phase") == phase, within=150)


def test_a_good_revision_is_promoted_by_steps_and_no_request_fails(site: LocalSite) -> None:
    site.apply(stepped("good", "old", minReplicas=2))
    url = site.ready("good", 2)
    with Traffic(url) as traffic:
        eventually(lambda: traffic.streams >= 4)
        site.apply(stepped("good", "new", minReplicas=2))
        in_phase(site, "good", "Promoted")
        site.ready("good", 2)
        before = traffic.total
        eventually(lambda: traffic.total >= max(before + 20, 200) and traffic.streams > 10)
    assert traffic.failures == []
    assert traffic.answers["old"] and traffic.answers["new"] and traffic.streams > 10
    assert traffic.total >= 200
    eventually(lambda: fetch_text(url).startswith("new"))
    started, first, ended = rollout_events(site, "good")
    assert started == "engine: a new revision gets 20 %, 50 %, then all requests"
    assert re.fullmatch(r"engine: step 20 %: \d+ requests, 0\.0 % errors; 50 % now", first)
    assert re.fullmatch(r"engine: promoted: step 50 %: \d+ requests, 0\.0 % errors", ended)
    assert site.condition("good", "EngineRolloutReady")["status"] == "True"
    site.delete("good")
