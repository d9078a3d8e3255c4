# SPDX-License-Identifier: Apache-2.0
"""Services of this machine that sleep while nobody asks: woken by a request, which waits; no request is lost.

More of them: `test_simulated_scale_to_zero.py`.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_site import LocalSite, fetch_text, runtime, service

from headrace.core.errors import NotFound
from headrace.fleet.local.api_client import LocalFleet
from support.waiting import eventually

FLOWERS = """backend: "pytorch"
input { name: "x" data_type: TYPE_FP32 dims: [ 1, 4 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1, 3 ] }
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.timeout(900),  # it starts many programs, one after the other
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    site = LocalSite(tmp_path_factory.mktemp("waking"))
    site.up()
    site.apply(site.model, runtime())
    yield site
    site.close()


def idle_service(name: str, idle_seconds: int = 3600) -> dict[str, Any]:
    document = service(name, minReplicas=0)
    document["metadata"]["annotations"] = {"ome.io/scale-to-zero-idle-seconds": str(idle_seconds)}
    return document


def asleep(site: LocalSite, name: str) -> str:
    """Its URL, when it was put to sleep and has no process: not by time, which a busy machine has too little of."""
    url = site.url(name)
    eventually(lambda: site.ask(lambda fleet: scaled(fleet, name)))
    eventually(lambda: not site.pids(name))
    return url


async def scaled(fleet: LocalFleet, name: str) -> bool:
    try:
        await fleet.scale("default", name, "engine", 0)
    except NotFound:
        return False  # it has only just been applied
    return True


def answer(url: str) -> str:
    return fetch_text(url, seconds=120.0)


def test_it_sleeps_when_idle_and_each_request_wakes_it(site: LocalSite) -> None:
    site.apply(idle_service("sleeper", 1))
    url = site.url("sleeper")
    seen: set[int] = set()
    for _ in range(3):
        pid = int(answer(url).split()[1])
        assert pid not in seen
        seen.add(pid)
        eventually(lambda: not site.pids("sleeper"))
    site.delete("sleeper")
    assert not list(site.root.glob("pods/*")) and not list(site.root.glob("routers/default/*"))


def test_the_daemon_may_die_while_it_sleeps(site: LocalSite) -> None:
    site.apply(idle_service("patient"))
    url = asleep(site, "patient")
    site.kill()
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(answer(url)))
    waiting.start()
    site.up()
    waiting.join()
    assert answers[0].startswith("patient ")
    site.delete("patient")


def test_models_sleep_in_a_process_that_stays(site: LocalSite, tmp_path: Path) -> None:
    import torch

    folder = tmp_path / "models" / "flowers"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(FLOWERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(torch.nn.Linear(4, 3).eval()).save(str(folder / "1" / "model.pt"))
    warm = runtime(
        "warm",
        image="headrace/headrace:latest",
        command=["headrace", "serve"],
        args=[str(folder.parent), "--http-port=8080"],
        readinessProbe={"httpGet": {"path": "/v2/health/ready", "port": "http"}, "periodSeconds": 1},
    )
    document = service("warm", uses="warm", minReplicas=0)
    document["metadata"]["annotations"] = {
        "ome.io/scale-to-zero-idle-seconds": "2",
        "ome.io/scale-to-zero-sleep-level": "2",
    }
    site.apply(warm, document)
    url, row = site.url("warm"), {"shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4], "name": "x"}

    def infer() -> list[float]:
        request = urllib.request.Request(f"{url}/v2/models/flowers/infer", json.dumps({"inputs": [row]}).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            numbers: list[float] = json.loads(answer.read())["outputs"][0]["data"]
        return numbers

    def asleep() -> bool:
        return json.loads(fetch_text(url, "/router/status"))["waking"]["models_asleep"] == ["flowers"]

    before, pids = infer(), site.pids("warm")
    for _ in range(2):
        eventually(asleep)
        assert site.pids("warm") == pids
        assert infer() == before
    site.delete("warm")
