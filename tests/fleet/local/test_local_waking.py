# SPDX-License-Identifier: Apache-2.0
"""Services of this machine that sleep while nobody asks: woken by a request, which waits; no request is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from local_site import LocalSite, runtime, said, service, until

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    made = LocalSite(tmp_path_factory.mktemp("waking"), 14_300)
    made.up()
    made.apply(made.model, runtime())
    yield made
    made.close()


def sleeper(name: str) -> dict[str, Any]:
    made = service(name, minReplicas=0)
    made["metadata"]["annotations"] = {"ome.io/scale-to-zero-idle-seconds": "1"}
    return made


def test_it_sleeps_while_nobody_asks_and_each_request_wakes_it(site: LocalSite) -> None:
    site.apply(sleeper("sleeper"))
    url = site.ready("sleeper")
    seen: set[int] = set()
    for _ in range(3):
        until(lambda: not site.pids("sleeper"))
        pid = int(said(url).split()[1])
        assert pid not in seen
        seen.add(pid)
    # Many at once wake it once, and all of them are answered.
    until(lambda: not site.pids("sleeper"))
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(said(url))) for _ in range(12)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(answers) == 12 and len({each.split()[1] for each in answers}) == 1
    site.delete("sleeper")
    assert not list(site.root.glob("pods/*")) and not list(site.root.glob("routers/default/*"))


def test_the_daemon_may_die_while_it_sleeps(site: LocalSite) -> None:
    site.apply(sleeper("patient"))
    url = site.ready("patient")
    until(lambda: not site.pids("patient"))
    site.kill()
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(said(url)))
    waiting.start()
    site.up()
    waiting.join()
    assert answers[0].startswith("patient ")
    site.delete("patient")


def test_a_service_that_may_not_sleep_any_more_stays_up(site: LocalSite) -> None:
    site.apply(sleeper("awake"))
    url = site.ready("awake")
    until(lambda: not site.pids("awake"))
    site.apply(service("awake", minReplicas=1))
    assert site.ready("awake") == url
    assert said(url).startswith("awake ")
    site.delete("awake")
