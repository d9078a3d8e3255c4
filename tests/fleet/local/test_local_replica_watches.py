# SPDX-License-Identifier: Apache-2.0
"""Who waits for another number of replicas hears of it at once; events whose words differ are kept once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.core.errors import NotFound
from headrace.fleet.local.events import Events
from headrace.fleet.local.probes import Probe, wait_started
from headrace.fleet.local.replica_watches import ReplicaWatches
from headrace.platforms.kubernetes_client.objects import Document

SERVICE = ("default", "digits")


class Fleet:
    """How it stands, as the test says."""

    def __init__(self) -> None:
        self.now: Document | None = {"wanted": 0, "ready": 0}

    def __call__(self, service: tuple[str, str], component: str) -> Document:
        if self.now is None:
            raise NotFound("gone")
        return self.now


def test_current_state_is_sent_immediately_and_changes_when_they_happen() -> None:
    async def run() -> None:
        fleet = Fleet()
        watches = ReplicaWatches(fleet)
        assert await watches.wait(SERVICE, "engine", {"wanted": 1, "ready": 0}) == fleet.now
        waiting = asyncio.ensure_future(watches.wait(SERVICE, "engine", {"wanted": 0, "ready": 0}))
        await asyncio.sleep(0)
        watches.notify(SERVICE)
        fleet.now = {"wanted": 1, "ready": 1, "started": 5.0}
        watches.notify(("default", "other"))
        await asyncio.sleep(0)
        assert not waiting.done(), "nothing of it has changed"
        watches.notify(SERVICE)
        assert await waiting == fleet.now

    asyncio.run(run())


def test_a_removed_replica_or_a_stopping_daemon_leaves_no_caller_waiting() -> None:
    async def run() -> None:
        fleet = Fleet()
        watches = ReplicaWatches(fleet)
        known = {"wanted": 0, "ready": 0}
        waiting = asyncio.ensure_future(watches.wait(SERVICE, "engine", known))
        await asyncio.sleep(0)
        fleet.now = None
        watches.notify(SERVICE)
        assert not waiting.done()
        watches.close()
        assert await waiting == known
        with pytest.raises(NotFound):
            await watches.wait(SERVICE, "engine", known)

    asyncio.run(run())


def test_the_last_of_events_that_differ_is_kept_and_all_are_counted(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.json", 10)
    about = {"kind": "InferenceService", "metadata": {"name": "digits", "namespace": "default", "uid": "u"}}
    events.record(about, "Normal", "Other", "stays")
    for number in range(3):
        events.record(about, "Normal", "ColdStart", f"after {number} ms", latest=True)
    received = [(event["reason"], event["message"], event["count"]) for event in events.about({"u"})]
    assert received == [("Other", "stays", 1), ("ColdStart", "after 2 ms", 3)]


@pytest.mark.parametrize("cheap", [True, False])
def test_an_expensive_check_is_made_less_and_less_often(cheap: bool) -> None:
    """In 20 s, which pass in no time, a port is asked every 20 to 40 ms, a command once a second in the end."""
    looks: list[float] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        moved, real = [0.0], asyncio.sleep
        loop.time = lambda: moved[0]  # type: ignore[method-assign]

        async def check() -> bool:
            looks.append(moved[0])
            return moved[0] >= 20.0

        async def sleep(seconds: float) -> None:
            moved[0] += seconds
            await real(0)

        patch = pytest.MonkeyPatch()
        patch.setattr("headrace.fleet.local.probes.asyncio.sleep", sleep)
        try:
            await wait_started(Probe(check, 0.0, 10.0, 30, 1, cheap), 0.02)
        finally:
            patch.undo()

    asyncio.run(run())
    pauses = [later - sooner for sooner, later in zip(looks, looks[1:], strict=False)]
    assert max(pauses) <= (0.041 if cheap else 1.001)
    assert len(looks) > 400 if cheap else len(looks) < 50
