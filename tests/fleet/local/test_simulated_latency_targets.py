# SPDX-License-Identifier: Apache-2.0
"""A service with latency targets on a simulated machine: a burst, the quiet after it, and streams that are open then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import simulated_fleet
from local_site import runtime, service
from simulated_engine import OpenLoop, engine, percentile
from simulated_fleet import SimulatedFleet

from headrace.fleet.local.scaling_targets import WINDOW

START_SECONDS = 20.0
"""Until an engine listens."""
DECISION_SECONDS = 10.0
"""Until a burst is known to be one, and a readiness probe has found the engine ready."""


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_fleet, "_PROGRAMS", {**simulated_fleet._PROGRAMS, "engine": engine})


def engine_runtime(start: float = START_SECONDS) -> dict[str, Any]:
    probe = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 5}
    return runtime("engine", command=["engine"], args=["--port=8080", f"--start={start}"], readinessProbe=probe)


def with_targets(name: str, most: int, window: str = "60s") -> dict[str, Any]:
    document = service(name, "engine", maxReplicas=most)
    document["spec"]["slo"] = {"ttftMilliseconds": 1000, "tpotMilliseconds": 60}
    document["metadata"]["annotations"] = {WINDOW: window}
    return document


async def rescales(fleet: SimulatedFleet, name: str) -> list[str]:
    events = await fleet.events(await fleet.get(name))
    return [event["message"] for event in events if event["reason"] == "SuccessfulRescale"]


async def test_the_targets_are_kept_in_a_burst_of_ten_times_the_load(fleet: SimulatedFleet) -> None:
    await fleet.apply(engine_runtime(), with_targets("chat", 12))
    load = OpenLoop(await fleet.ready("chat"), prompt_tokens=8192)
    await load.run(rate=1.0, seconds=60.0)
    burst_at = asyncio.get_running_loop().time()
    await load.run(rate=10.0, seconds=60.0)
    # Enough for the burst, and not simply all: a replica takes some two requests a second.
    most = len(fleet.processes("chat"))
    assert 5 <= most < 12
    await load.run(rate=1.0, seconds=120.0)
    await load.finish()
    assert {stream.status for stream in load.streams} == {200}
    assert all(stream.whole for stream in load.streams), "no stream was cut when replicas were removed"
    scaled_at = burst_at + START_SECONDS + DECISION_SECONDS
    for begin in range(0, 150, 10):
        asked = [stream for stream in load.streams if 0 <= stream.asked_at - scaled_at - begin < 10]
        assert percentile([stream.first for stream in asked], 95) < 1.0
        assert percentile([stream.per_token for stream in asked], 95) < 0.06
    assert len(fleet.processes("chat")) <= most - 3
    messages = await rescales(fleet, "chat")
    up = next(message for message in messages if "first token p95" in message and ": 1 -> " in message)
    assert " requests/s expected in " in up and "/s per replica" in up
    changes = [message.rpartition(": ")[2].split()[:3:2] for message in messages]
    assert all(int(after) >= int(before) - 1 for before, after in changes), "one replica at a time"
    condition = await fleet.condition("chat", "EngineScalingActive")
    assert (condition["status"], condition["message"]) == ("True", messages[-1])
    described = await fleet.described("chat")
    assert messages[-1] in str(described)


async def test_a_replica_is_removed_when_its_streams_have_ended(fleet: SimulatedFleet) -> None:
    await fleet.apply(engine_runtime(start=1.0), with_targets("long", 4, "20s"))
    load = OpenLoop(await fleet.ready("long"), prompt_tokens=8192)
    await load.run(rate=5.0, seconds=40.0)
    assert len(fleet.processes("long")) > 1
    long = OpenLoop(load.url, prompt_tokens=512, output_tokens=10_000)
    await long.run(rate=0.3, seconds=60.0)
    (scaled_down,) = {len([pod for pod in await fleet.pods("long") if "deletionTimestamp" not in pod["metadata"]])}
    assert scaled_down < 4
    assert len(fleet.processes("long")) > scaled_down, "one that has open streams stays until they have ended"
    await load.finish()
    await long.finish()
    assert all(stream.whole for stream in (*load.streams, *long.streams))
    await fleet.ready("long", 1)


async def test_prefill_and_decode_scale_apart(fleet: SimulatedFleet) -> None:
    """The router component answers here, and is too slow to the first token: more engines are added, and no decoder."""
    parts = engine_runtime(start=1.0)
    runner = parts["spec"]["engineConfig"]["runner"]
    stubs = runtime("pairs")
    stubs["spec"]["decoderConfig"] = stubs["spec"]["engineConfig"]
    stubs["spec"]["routerConfig"] = {"runner": {**runner, "name": "router"}}
    document = with_targets("pairs", 4, "20s")
    document["spec"]["slo"]["tpotMilliseconds"] = 500
    document["spec"] |= {"runtime": {"name": "pairs"}, "decoder": {"minReplicas": 1, "maxReplicas": 4}}
    document["spec"]["router"] = {"minReplicas": 1, "maxReplicas": 1}
    await fleet.apply(stubs, document)
    load = OpenLoop(await fleet.ready("pairs", 3, engines=1), prompt_tokens=8192)
    await load.run(rate=1.0, seconds=40.0)
    await load.run(rate=5.0, seconds=15.0)
    replicas = (await fleet.get("pairs"))["status"]["components"]
    await load.finish()
    assert replicas["engine"]["replicas"] > replicas["decoder"]["replicas"] == 1
    messages = await rescales(fleet, "pairs")
    assert any("first token p95" in message for message in messages)
    assert not any("per token" in message for message in messages)
