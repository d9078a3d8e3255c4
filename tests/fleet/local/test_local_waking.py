# SPDX-License-Identifier: Apache-2.0
"""Services of this machine that sleep while nobody asks: woken by a request, which waits; no request is lost."""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from local_site import LocalSite, runtime, said, service, until

from headrace.core.errors import NotFound
from headrace.fleet.client.describing import Description, describe
from headrace.fleet.client.kinds import kind_named
from headrace.fleet.local.client import LocalFleet
from headrace.fleet.words import Document
from headrace.router.waking.parts import PARTS

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.timeout(900),  # it starts many programs, one after the other
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    made = LocalSite(tmp_path_factory.mktemp("waking"), 14_300)
    made.up()
    made.apply(made.model, runtime())
    yield made
    made.close()


def sleeper(name: str, idle_seconds: int = 3600) -> dict[str, Any]:
    made = service(name, minReplicas=0)
    made["metadata"]["annotations"] = {"ome.io/scale-to-zero-idle-seconds": str(idle_seconds)}
    return made


def asleep(site: LocalSite, name: str) -> str:
    """Its URL, when it was put to sleep and has no process: not by time, which a busy machine has too little of."""
    url = site.url(name)
    until(lambda: site.ask(lambda fleet: scaled(fleet, name)))
    until(lambda: not site.pids(name))
    return url


async def scaled(fleet: LocalFleet, name: str) -> bool:
    try:
        await fleet.scale("default", name, "engine", 0)
    except NotFound:
        return False  # it has only just been applied
    return True


def answer(url: str) -> str:
    return said(url, seconds=120.0)


def test_it_sleeps_while_nobody_asks_and_each_request_wakes_it(site: LocalSite) -> None:
    site.apply(sleeper("sleeper", 1))
    url = site.url("sleeper")
    seen: set[int] = set()
    for _ in range(3):
        pid = int(answer(url).split()[1])
        assert pid not in seen
        seen.add(pid)
        until(lambda: not site.pids("sleeper"))
    site.delete("sleeper")
    assert not list(site.root.glob("pods/*")) and not list(site.root.glob("routers/default/*"))


def test_many_at_once_wake_it_once_and_all_are_answered(site: LocalSite) -> None:
    site.apply(sleeper("crowd"))
    url = asleep(site, "crowd")
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(answer(url))) for _ in range(12)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(answers) == 12 and len({each.split()[1] for each in answers}) == 1
    site.delete("crowd")


def test_a_cold_start_is_told_in_parts(site: LocalSite) -> None:
    site.apply(sleeper("told"))
    url = asleep(site, "told")
    assert answer(url).startswith("told ")

    def last_wake() -> dict[str, float]:
        with urllib.request.urlopen(f"{url}/router/status", timeout=60) as found:
            return dict(json.load(found)["waking"]["last_wake"] or {})

    parts = until(last_wake)
    assert tuple(parts) == PARTS and parts["loading"] > 0

    def event() -> Document | None:
        told = site.ask(lambda fleet: described(fleet, "told"))
        return next((each for each in told.as_json()["events"] if each["reason"] == "ColdStart"), None)

    message = (until(event) or {})["message"]
    assert message.startswith("first byte after ") and all(each.replace("_", " ") in message for each in PARTS)
    asleep(site, "told")
    answer(url)
    until(lambda: (event() or {})["count"] == 2)  # the last one is kept, and all are counted
    site.delete("told")


async def described(fleet: LocalFleet, name: str) -> Description:
    found = await fleet.get(kind_named("InferenceService"), "default", name)
    assert found is not None
    return await describe(fleet, found)


def test_the_daemon_may_die_while_it_sleeps(site: LocalSite) -> None:
    site.apply(sleeper("patient"))
    url = asleep(site, "patient")
    site.kill()
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(answer(url)))
    waiting.start()
    site.up()
    waiting.join()
    assert answers[0].startswith("patient ")
    site.delete("patient")


def test_a_service_that_may_not_sleep_any_more_stays_up(site: LocalSite) -> None:
    site.apply(sleeper("awake"))
    url = asleep(site, "awake")
    router = site.router("awake")
    site.apply(service("awake", minReplicas=1))
    assert site.ready("awake") == url
    assert answer(url).startswith("awake ")
    # And back: the same router hears of both.
    site.apply(sleeper("awake", 1))
    until(lambda: not site.pids("awake"))
    assert answer(url).startswith("awake ")
    assert site.router("awake") == router
    site.delete("awake")


def test_a_service_that_never_slept_may_sleep_from_now_on(site: LocalSite) -> None:
    site.apply(service("tired", minReplicas=1))
    url = site.ready("tired")
    router = site.router("tired")
    site.apply(sleeper("tired", 1))
    until(lambda: not site.pids("tired"))
    assert answer(url).startswith("tired ")
    assert site.router("tired") == router
    site.delete("tired")
