# SPDX-License-Identifier: Apache-2.0
"""Services of a simulated machine that are scaled by load, with windows as long as real ones: up, down again, and why."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from local_site import runtime, service
from simulated_fleet import SimulatedFleet, Traffic

from headrace.fleet.local.scaling_targets import PANIC_WINDOW, WINDOW

SERVER = Path(__file__).with_name("metered_server.py")


@pytest.fixture
def number(tmp_path: Path) -> Path:
    """The file whose number the replicas tell."""
    created = tmp_path / "number"
    created.write_text("0")
    return created


def metered(number: Path, *args: str, **container: Any) -> dict[str, Any]:
    words = {"command": ["python3", str(SERVER)], "args": ["--port=8080", f"--file={number}", *args]}
    return runtime("metered", **words, **container)


def scaled(name: str, **engine: Any) -> dict[str, Any]:
    document = service(name, "metered", maxReplicas=3, **engine)
    document["metadata"]["annotations"] = {WINDOW: "20s", PANIC_WINDOW: "20"}
    return document


async def rescales(fleet: SimulatedFleet, name: str) -> list[str]:
    events = await fleet.events(await fleet.get(name))
    return [event["message"] for event in events if event["reason"] == "SuccessfulRescale"]


async def test_more_concurrent_requests_mean_more_replicas_and_none_is_lost(
    fleet: SimulatedFleet, number: Path
) -> None:
    await fleet.apply(metered(number), scaled("busy", scaleMetric="concurrency", scaleTarget=2))
    url = await fleet.ready("busy")
    async with Traffic(fleet, url, clients=8, path="/slow?0.5") as load:
        assert await fleet.ready("busy", 3) == url
        first = (await rescales(fleet, "busy"))[0]
        assert first.startswith("concurrency ") and "target 2 at 70%: 1 -> " in first
        # Another daemon goes on with as many.
        await fleet.kill()
        await fleet.up()
        await asyncio.sleep(10)
        assert await fleet.ready("busy", 3) == url
    assert load.failures == []
    quiet = fleet.machine.loop.time()
    assert await fleet.ready("busy", 1) == url
    assert fleet.machine.loop.time() - quiet >= 10, "replicas are not taken away before the window has seen it"
    reported = await rescales(fleet, "busy")
    assert reported[-1].endswith("-> 1 replicas") and "over 20 s" in reported[-1]
    condition = await fleet.condition("busy", "EngineScalingActive")
    assert (condition["status"], condition["message"]) == ("True", reported[-1])


async def test_requests_per_second(fleet: SimulatedFleet, number: Path) -> None:
    await fleet.apply(metered(number), scaled("rate", scaleMetric="rps", scaleTarget=5))
    url = await fleet.ready("rate")
    async with Traffic(fleet, url, clients=1, pause=0.1):
        await fleet.ready("rate", 3)
    assert (await rescales(fleet, "rate"))[0].startswith("requests/s ")
    await fleet.ready("rate", 1)


async def test_a_query_over_the_replicas_own_metrics(fleet: SimulatedFleet, number: Path) -> None:
    keda = {
        "enableKeda": True,
        "customPromQuery": 'max(waiting{queue="main",component="engine"}) * 2',
        "scalingThreshold": "5",
    }
    await fleet.apply(metered(number), scaled("asked", kedaConfig=keda))
    await fleet.ready("asked")
    number.write_text("5.5")
    await fleet.ready("asked", 3)
    assert any(
        rescale.startswith("query ") and "target 5: 1 -> " in rescale for rescale in await rescales(fleet, "asked")
    )
    # Somebody who is gone, or says nothing, is no reason to take replicas away.
    number.write_text("nothing")
    await fleet.wait_for_message("asked", "no replica exposes a metric", "EngineScalingActive")
    await asyncio.sleep(120)
    assert len(fleet.processes("asked")) == 3
    number.write_text("0")
    await fleet.ready("asked", 1)
    keda["customPromQuery"] = "histogram_quantile(0.9, sum(rate(waiting_bucket[1m])))"
    await fleet.apply(scaled("asked", kedaConfig=keda))
    reported = await fleet.wait_for_message("asked", "histogram_quantile()", "EngineScalingActive")
    assert (reported["status"], reported["reason"]) == ("False", "UnsupportedQuery")
    assert await fleet.ready("asked")


@pytest.mark.parametrize(
    ("metric", "target", "words"),
    [("cpu", 50, "target 0.05 per replica"), ("memory", 5, "target 3 MiB per replica")],
)
async def test_what_the_replicas_use(fleet: SimulatedFleet, number: Path, metric: str, target: int, words: str) -> None:
    body = {"resources": {"requests": {"cpu": "100m", "memory": "64Mi"}}}
    await fleet.apply(metered(number, "--cores=0.2", **body), scaled("used", scaleMetric=metric, scaleTarget=target))
    await fleet.ready("used", 3)
    first = (await rescales(fleet, "used"))[0]
    assert first.startswith(f"{metric} ") and words in first


async def test_requests_behind_a_router_component_are_counted(fleet: SimulatedFleet, number: Path) -> None:
    """By the router of the engine's Service, which the component sends them to."""
    created = scaled("behind", scaleMetric="concurrency", scaleTarget=2)
    created["spec"]["router"] = {"minReplicas": 1, "maxReplicas": 1, "config": {"routing_strategy": "round_robin"}}
    await fleet.apply(metered(number), created)
    url = await fleet.ready("behind", 2, engines=1)
    async with Traffic(fleet, url, clients=8, path="/slow?0.5") as load:
        await fleet.ready("behind", 4, engines=3)
    assert load.failures == []
