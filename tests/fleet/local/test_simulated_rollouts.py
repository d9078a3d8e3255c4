# SPDX-License-Identifier: Apache-2.0
"""Rollouts by steps on a simulated machine: the order and length of steps, and every request counted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from local_site import service
from simulated_fleet import SERVICE, SimulatedFleet, Traffic

from headrace.core.errors import FailedPrecondition
from headrace.fleet.client.rollouts import promotion, resume, rollback
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str

STEPS = {
    "ome.io/rollout-steps": "20,50",
    "ome.io/rollout-step-seconds": "10",
    "ome.io/rollout-min-requests": "20",
    "ome.io/rollout-max-latency-ratio": "0",
}


def stepped(name: str, answer: str, *args: str, steps: dict[str, str] | None = None, **engine: Any) -> dict[str, Any]:
    """A service whose pods answer with this text."""
    runner = {"name": "ome-container", "args": ["--host=0.0.0.0", "--port=8080", f"--text={answer}", *args]}
    document = service(name, runner=runner, **engine)
    document["metadata"]["annotations"] = STEPS | (steps or {})
    return document


async def engine_of(fleet: SimulatedFleet, name: str) -> Document:
    return get_mapping(await fleet.get(name), "status", "components", "engine")


async def rollout_of(fleet: SimulatedFleet, name: str) -> Document:
    return get_mapping(await engine_of(fleet, name), "rollout")


async def patched(fleet: SimulatedFleet, name: str, change: Callable[[Document], Document]) -> None:
    """As the verbs of `headrace rollout` do."""
    await fleet.fleet.patch(SERVICE, "default", name, change(await fleet.get(name)))


async def told(fleet: SimulatedFleet, name: str) -> list[str]:
    """The events of its rollouts, in words."""
    events = await fleet.events(await fleet.get(name))
    return [get_str(event, "message") for event in events if get_str(event, "reason").startswith("Rollout")]


async def in_phase(fleet: SimulatedFleet, name: str, phase: str) -> Document:
    async def in_phase() -> Document:
        result = await rollout_of(fleet, name)
        return result if get_str(result, "phase") == phase else {}

    created: Document = await fleet.until(in_phase)
    return created


def share_of(traffic: Traffic, name: str, since: int) -> float:
    answers = [answer.by for answer in traffic.answers[since:]]
    return answers.count(name) / len(answers)


async def test_a_good_revision_is_promoted_by_steps_and_no_request_fails(fleet: SimulatedFleet) -> None:
    await fleet.apply(stepped("good", "old", minReplicas=2))
    url = await fleet.ready("good", 2)
    shares: dict[int, float] = {}
    async with Traffic(fleet, url, clients=6, path="/stream?4", pause=0.1) as traffic:
        await fleet.apply(stepped("good", "new", minReplicas=2))
        began = fleet.machine.loop.time()
        for step in (1, 2):
            await fleet.until(lambda step=step: _in_step(fleet, "good", step))  # type: ignore[misc]
            await asyncio.sleep(1)
            since = len(traffic.answers)
            await asyncio.sleep(7)
            shares[step] = share_of(traffic, "new", since)
        await in_phase(fleet, "good", "Promoted")
        seconds = fleet.machine.loop.time() - began
        await fleet.ready("good", 2)
        await traffic.more()
    assert traffic.failures == []
    assert all(len(answer.text.splitlines()) == 4 for answer in traffic.answers)
    assert shares == {1: pytest.approx(0.2, abs=0.03), 2: pytest.approx(0.5, abs=0.03)}
    assert 20 <= seconds <= 25, "two steps of ten seconds"
    assert {answer.by for answer in traffic.answers[-10:]} == {"new"}
    started, first, ended = await told(fleet, "good")
    assert started == "engine: a new revision gets 20 %, 50 %, then all requests"
    assert re.fullmatch(r"engine: step 20 %: \d+ requests, 0\.0 % errors; 50 % now", first)
    assert re.fullmatch(r"engine: promoted: step 50 %: \d+ requests, 0\.0 % errors", ended)
    assert (await fleet.condition("good", "EngineRolloutReady"))["status"] == "True"


async def _in_step(fleet: SimulatedFleet, name: str, step: int) -> bool:
    result = await rollout_of(fleet, name)
    return (result.get("phase"), result.get("step")) == ("Stepping", step)


async def test_errors_roll_a_revision_back_and_the_next_edit_starts_again(fleet: SimulatedFleet) -> None:
    await fleet.apply(stepped("bad", "old"))
    url = await fleet.ready("bad")
    async with Traffic(fleet, url, pause=0.1) as traffic:
        await fleet.apply(stepped("bad", "broken", "--status=500"))
        began = fleet.machine.loop.time()
        await in_phase(fleet, "bad", "RolledBack")
        assert fleet.machine.loop.time() - began < 10, "errors are not waited for until the end of a step"
        # All requests go to what ran before, and what was written stays.
        await fleet.until(lambda: _percents(fleet, "bad", [0, 100]))
        await fleet.until(lambda: len(fleet.processes("bad")) == 1)
    assert traffic.failures and all(failure.startswith("500") for failure in traffic.failures)
    assert {(await fleet.ask(url)).by for _ in range(20)} == {"old"}
    assert "--status=500" in (await fleet.get("bad"))["spec"]["engine"]["runner"]["args"]
    condition = await fleet.condition("bad", "EngineRolloutReady")
    assert (condition["status"], condition["reason"]) == ("False", "RolledBack")
    assert re.fullmatch(r"rolled back: \d+\.\d % errors of \d+ requests at 20 %, 1 % allowed", condition["message"])
    assert (await fleet.condition("bad"))["status"] == "True"
    assert get_str(await fleet.condition("bad", "LatestDeploymentReady"), "reason") == "RolledBack"
    await fleet.apply(stepped("bad", "better", steps={"ome.io/rollout-min-requests": "0"}))
    await in_phase(fleet, "bad", "Promoted")
    await fleet.ready("bad")
    await fleet.until(lambda: _answered_by(fleet, url, "better"))


async def _percents(fleet: SimulatedFleet, name: str, wanted: list[int]) -> bool:
    return [target["percent"] for target in get_list(await engine_of(fleet, name), "traffic")] == wanted


async def _answered_by(fleet: SimulatedFleet, url: str, name: str) -> bool:
    return (await fleet.ask(url)).by == name


async def test_a_slow_revision_is_rolled_back(fleet: SimulatedFleet) -> None:
    await fleet.apply(stepped("slow", "old", "--delay=0.02"))
    url = await fleet.ready("slow")
    async with Traffic(fleet, url, clients=6) as traffic:
        await fleet.apply(stepped("slow", "lame", "--delay=0.6", steps={"ome.io/rollout-max-latency-ratio": "3"}))
        result = await in_phase(fleet, "slow", "RolledBack")
    assert traffic.failures == []
    assert "times as slow as before" in result["message"] and "3 times allowed" in result["message"]


async def test_a_revision_that_is_a_little_slower_is_not(fleet: SimulatedFleet) -> None:
    await fleet.apply(stepped("fair", "old", "--delay=0.1"))
    url = await fleet.ready("fair")
    async with Traffic(fleet, url, clients=6, pause=0.2):
        await fleet.apply(stepped("fair", "new", "--delay=0.2", steps={"ome.io/rollout-max-latency-ratio": "3"}))
        await in_phase(fleet, "fair", "Promoted")


async def test_without_requests_a_step_does_not_end(fleet: SimulatedFleet) -> None:
    await fleet.apply(stepped("quiet", "old"))
    url = await fleet.ready("quiet")
    await fleet.apply(stepped("quiet", "new"))
    await in_phase(fleet, "quiet", "Stepping")
    await asyncio.sleep(40)
    assert (await rollout_of(fleet, "quiet"))["step"] == 1
    async with Traffic(fleet, url, pause=0.1):
        await in_phase(fleet, "quiet", "Promoted")


@pytest.mark.parametrize("again_after", [0.0, 20.0])
async def test_a_step_continues_after_the_daemon_is_killed(fleet: SimulatedFleet, again_after: float) -> None:
    await fleet.apply(stepped("killed", "old"))
    url = await fleet.ready("killed")
    async with Traffic(fleet, url, pause=0.2) as traffic:
        await fleet.apply(stepped("killed", "new"))
        await fleet.until(lambda: _in_step(fleet, "killed", 2))
        begun = await rollout_of(fleet, "killed")
        began = fleet.machine.loop.time()
        await asyncio.sleep(2)
        await fleet.kill()
        await asyncio.sleep(again_after)
        await fleet.up()
        again = await rollout_of(fleet, "killed")
        assert (again["step"], again["since"], again["phase"]) == (begun["step"], begun["since"], "Stepping")
        await in_phase(fleet, "killed", "Promoted")
        assert 9 <= fleet.machine.loop.time() - began <= again_after + 15
        await fleet.ready("killed")
    assert traffic.failures == []


async def test_paused_resumed_undone_and_promoted_in_the_middle(fleet: SimulatedFleet) -> None:
    calm = {"ome.io/rollout-min-requests": "0", "ome.io/rollout-paused": "true"}
    await fleet.apply(stepped("moved", "old"))
    url = await fleet.ready("moved")
    await fleet.apply(stepped("moved", "new", steps=calm))
    await in_phase(fleet, "moved", "Stepping")
    await asyncio.sleep(40)
    result = await rollout_of(fleet, "moved")
    assert result["step"] == 1 and "paused" in result["message"]
    await patched(fleet, "moved", rollback)
    assert (await in_phase(fleet, "moved", "RolledBack"))["message"] == "rolled back: by hand"
    with pytest.raises(FailedPrecondition, match="undone already"):
        rollback(await fleet.get("moved"))
    await patched(fleet, "moved", resume)
    await in_phase(fleet, "moved", "Promoted")
    await fleet.until(lambda: _answered_by(fleet, url, "new"))
    await fleet.apply(stepped("moved", "newest", steps=calm | {"ome.io/rollout-step-seconds": "3000"}))
    await in_phase(fleet, "moved", "Stepping")
    await patched(fleet, "moved", promotion)
    await in_phase(fleet, "moved", "Promoted")
    await fleet.until(lambda: _answered_by(fleet, url, "newest"))


async def test_an_old_pod_stays_until_it_has_answered(fleet: SimulatedFleet) -> None:
    await fleet.apply(stepped("long", "old"))
    url = await fleet.ready("long")
    old = fleet.process("long")
    # Far longer than the grace of its pod, which is 2 s.
    asking = asyncio.ensure_future(fleet.ask(url, "/stream?160"))
    await asyncio.sleep(0.1)
    await fleet.apply(service("long", runner={"name": "ome-container", "args": ["--port=8080", "--text=new"]}))
    await fleet.until(lambda: _answered_by(fleet, url, "new"))
    assert old.is_alive
    assert len((await asking).text.splitlines()) == 160
    await fleet.ready("long")
    await fleet.until(lambda: not old.is_alive)


@pytest.mark.parametrize("fleet", [{"drain_seconds": 20.0}], indirect=True)
async def test_an_answer_that_takes_for_ever_is_not_waited_for_for_ever(fleet: SimulatedFleet) -> None:
    await fleet.apply(stepped("endless", "old"))
    url = await fleet.ready("endless")
    old = fleet.process("endless")
    asking = asyncio.ensure_future(fleet.ask(url, "/slow?1e9"))
    await asyncio.sleep(0.1)
    before = fleet.machine.loop.time()
    await fleet.apply(service("endless", runner={"name": "ome-container", "args": ["--port=8080", "--text=new"]}))
    await fleet.until(lambda: not old.is_alive)
    assert 20 <= old.ended_at - before <= 25
    assert (await asking).status == 504, "it was tried again at the new one, which takes as long"
