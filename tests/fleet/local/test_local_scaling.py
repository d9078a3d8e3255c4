# SPDX-License-Identifier: Apache-2.0
"""Services of this machine that are scaled by load, with real processes: up under load, down again after it, and why.

More of them: `test_simulated_scaling.py`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_site import LocalSite, fetch_text, runtime, service

from headrace.fleet.local.scaling_targets import PANIC_WINDOW, WINDOW

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.timeout(900),  # it starts many programs, one after the other
]
_SERVER = Path(__file__).with_name("metered_server.py")


@pytest.fixture(scope="module")
def number(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file whose number the replicas tell."""
    created = tmp_path_factory.mktemp("metered") / "number"
    created.write_text("0")
    return created


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, number: Path) -> Iterator[LocalSite]:
    site = LocalSite(tmp_path_factory.mktemp("scaling"))
    site.up()
    metered = {"command": ["python3", str(_SERVER)], "args": ["--port=8080", f"--file={number}"]}
    site.apply(site.model, runtime("metered", **metered))
    yield site
    site.close()


def scaled(name: str, **engine: Any) -> dict[str, Any]:
    """From one to three, with windows of seconds where the usual ones are a minute."""
    document = service(name, "metered", maxReplicas=3, **engine)
    document["metadata"]["annotations"] = {WINDOW: "3s", PANIC_WINDOW: "50"}
    return document


def rescales(site: LocalSite, name: str) -> list[str]:
    about = site.get(name)
    events = site.ask(lambda fleet: fleet.events([about]))
    return [event["message"] for event in events if event["reason"] == "SuccessfulRescale"]


class Load:
    """Threads that ask, one request after the other, until it is left."""

    def __init__(self, url: str, threads: int) -> None:
        self._over = threading.Event()
        self.bad: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(url,)) for _ in range(threads)]

    def _run(self, url: str) -> None:
        while not self._over.is_set():
            answer = fetch_text(url, "/slow?0.2")
            if not answer.strip().isdecimal():
                self.bad.append(answer)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def test_more_concurrent_requests_mean_more_replicas_and_none_is_lost(site: LocalSite) -> None:
    site.apply(scaled("busy", scaleMetric="concurrency", scaleTarget=2))
    url = site.ready("busy")
    with Load(url, 8) as load:
        assert site.ready("busy", 3) == url
        first = rescales(site, "busy")[0]
        assert first.startswith("concurrency ") and "target 2 at 70%: 1 -> " in first
        # Another daemon goes on with as many.
        site.kill()
        site.up()
        assert site.ready("busy", 3) == url
    assert not load.bad
    assert site.ready("busy", 1) == url
    reported = rescales(site, "busy")
    assert reported[-1].endswith("-> 1 replicas") and "over 3 s" in reported[-1]
    condition = site.condition("busy", "EngineScalingActive")
    assert (condition["status"], condition["message"]) == ("True", reported[-1])
    site.delete("busy")


def test_cores_of_the_replicas_processes(site: LocalSite) -> None:
    burning = "i=0; while :; do i=1; done & exec python3"
    container = {
        "name": "ome-container",
        "command": ["sh", "-c"],
        "args": [f"{burning} {_SERVER} --port=8080 --file=/dev/null"],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
    }
    created = scaled("burning", scaleMetric="cpu", scaleTarget=50, runner=container)
    created["spec"]["engine"]["maxReplicas"] = 2
    site.apply(created)
    site.ready("burning", 2)
    assert any(
        rescale.startswith("cpu ") and "target 0.05 per replica" in rescale for rescale in rescales(site, "burning")
    )
    # All of a replica's processes are gone with it.
    pids = site.pids("burning")
    site.delete("burning")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
