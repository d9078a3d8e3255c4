# SPDX-License-Identifier: Apache-2.0
"""BenchmarkJobs of a simulated machine: a process that runs once, its status and its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from local_site import document, service
from simulated_fleet import SimulatedFleet
from simulated_programs import SimulatedProcess

from headrace.fleet.client.contract import kind_named
from headrace.fleet.client.describe import describe
from headrace.platforms.kubernetes_client.objects import Document

KIND = kind_named("BenchmarkJob")
SOMEWHERE = {"endpoint": {"url": "http://127.0.0.1:9", "modelName": "m"}}


def benchmark(name: str, endpoint: dict[str, Any] | None = None, requests: int = 3, **spec: Any) -> dict[str, Any]:
    spec = {
        "endpoint": endpoint or SOMEWHERE,
        "task": "text-to-text",
        "trafficScenarios": ["D(20,4)"],
        "numConcurrency": [1, 2],
        "maxTimePerIteration": 1,
        "maxRequestsPerIteration": requests,
        "outputLocation": {"storageUri": "pvc://results/here"},
        **spec,
    }
    return document("BenchmarkJob", name, spec)


async def status(fleet: SimulatedFleet, name: str) -> Document:
    result = await fleet.fleet.get(KIND, "default", name)
    reported: Document = (result or {}).get("status", {})
    return reported


async def has(fleet: SimulatedFleet, name: str, state: str) -> Document:
    """Its status, once it has that state."""

    async def in_state() -> Document:
        reported = await status(fleet, name)
        return reported if reported.get("state") == state else {}

    created: Document = await fleet.until(in_state)
    return created


def process(fleet: SimulatedFleet) -> SimulatedProcess:
    """The one that was started last."""
    return fleet.machine.bench.started[-1]


async def remove(fleet: SimulatedFleet, name: str) -> None:
    await fleet.fleet.delete(document("BenchmarkJob", name, {}))
    await fleet.until(lambda: _gone(fleet, name))


async def _gone(fleet: SimulatedFleet, name: str) -> bool:
    return await fleet.fleet.get(KIND, "default", name) is None


async def test_it_runs_once_and_its_status_names_the_folder(fleet: SimulatedFleet) -> None:
    await fleet.apply(benchmark("load"))
    running = await has(fleet, "load", "Running")
    assert "completionTime" not in running
    reported = await has(fleet, "load", "Completed")
    assert reported["startTime"] and reported["completionTime"] and reported["observedGeneration"] == 1
    folder = Path(reported["details"].removeprefix("results are in "))
    assert folder == fleet.root / "claims" / "default" / "results" / "here" / "load"
    assert (folder / "results.json").exists()
    words = " ".join(process(fleet).words)
    assert "bench" in words and "D(20,4)" in words and str(folder) in words
    ((pod, log),) = await fleet.fleet.logs("default", "load", kind="BenchmarkJob")
    assert log == "D(20,4): 3 answered" and pod.startswith("load")
    result = await fleet.fleet.get(KIND, "default", "load")
    assert result is not None
    events = [event["reason"] for event in (await describe(fleet.fleet, result)).as_json()["events"]]
    assert "BenchmarkCompleted" in events
    await asyncio.sleep(300)
    assert len(fleet.machine.bench.started) == 1, "it is not repeated"
    await remove(fleet, "load")
    assert not (fleet.root / "benchmarks" / "default" / "load").exists() and folder.exists()


async def test_a_restarted_daemon_learns_how_a_benchmark_ended(fleet: SimulatedFleet) -> None:
    await fleet.apply(benchmark("survivor"))
    await has(fleet, "survivor", "Running")
    await fleet.kill()
    await fleet.until(lambda: not process(fleet).is_alive)
    await fleet.up()
    assert Path((await has(fleet, "survivor", "Completed"))["details"].removeprefix("results are in ")).is_dir()
    assert len(fleet.machine.bench.started) == 1, "it was not run twice"


async def test_what_runs_is_found_again_and_ended_by_its_deletion(fleet: SimulatedFleet) -> None:
    fleet.machine.bench.seconds = 1e9
    await fleet.apply(benchmark("endless"))
    await has(fleet, "endless", "Running")
    await fleet.kill()
    await fleet.up()
    assert process(fleet).is_alive and (await status(fleet, "endless"))["state"] == "Running"
    await remove(fleet, "endless")
    assert not process(fleet).is_alive and not fleet.living
    assert not list(fleet.root.glob("benchmarks/default/*"))


async def test_an_edit_stops_the_run_and_measures_again(fleet: SimulatedFleet) -> None:
    fleet.machine.bench.seconds = 1e9
    await fleet.apply(benchmark("edited"))
    await has(fleet, "edited", "Running")
    first = process(fleet)
    fleet.machine.bench.seconds = 1.0
    await fleet.apply(benchmark("edited", requests=2))
    reported = await has(fleet, "edited", "Completed")
    assert not first.is_alive and process(fleet) is not first and reported["observedGeneration"] == 2


async def test_it_waits_for_its_service_and_reports_failures(fleet: SimulatedFleet) -> None:
    fleet.machine.bench.code, fleet.machine.bench.text = 2, "there is no model to ask"
    await fleet.apply(benchmark("patient", {"inferenceService": {"name": "stub-load", "namespace": "default"}}))
    reported = await has(fleet, "patient", "Pending")
    assert "there is no InferenceService default/stub-load" in reported["details"]
    assert not fleet.machine.bench.started
    await fleet.apply(service("stub-load"))
    reported = await has(fleet, "patient", "Failed")
    url = await fleet.ready("stub-load")
    assert url in process(fleet).words
    assert "`headrace bench` ended with 2" in reported["failureMessage"] and "no model" in reported["failureMessage"]
    assert reported["completionTime"]


async def test_one_that_takes_too_long_is_ended(fleet: SimulatedFleet) -> None:
    fleet.machine.bench.seconds = 1e9
    await fleet.apply(benchmark("late"))
    await has(fleet, "late", "Running")
    began = fleet.machine.loop.time()
    await fleet.kill()
    await asyncio.sleep(5)
    await fleet.up()
    reported = await fleet.until(lambda: _failed(fleet, "late"), within=100_000)
    limit = int(reported["failureMessage"].partition("longer than ")[2].split()[0])
    assert "took longer than" in reported["failureMessage"] and not process(fleet).is_alive
    assert limit <= process(fleet).ended_at - began <= limit + 15, "by all the time that it ran"


async def _failed(fleet: SimulatedFleet, name: str) -> Document:
    reported = await status(fleet, name)
    return reported if reported.get("state") == "Failed" else {}


async def test_a_killed_benchmark_is_reported(fleet: SimulatedFleet) -> None:
    fleet.machine.bench.seconds = 1e9
    await fleet.apply(benchmark("killed"))
    await has(fleet, "killed", "Running")
    process(fleet).kill()
    reported = await has(fleet, "killed", "Failed")
    assert "it was killed, or the machine was restarted" in reported["failureMessage"]


@pytest.mark.parametrize(
    ("spec", "state", "says"),
    [
        ({"podOverride": {"image": "other/bench:1"}}, "Pending", "needs Docker"),
        ({"podOverride": {"resources": {"requests": {"cpu": "4096"}}}}, "Pending", "4096 cores"),
        ({"huggingFaceSecretReference": {"name": "none"}}, "Pending", "Secret none does not exist"),
        ({"dataset": {"storageUri": "pvc://nothing/here"}}, "Pending", "is not on this machine"),
        ({"trafficScenarios": ["E(10)"]}, "Failed", "is not for text-to-text"),
        ({}, "Failed", "`headrace bench` ended with 1"),
    ],
)
async def test_a_benchmark_that_cannot_run_states_the_reason(
    fleet: SimulatedFleet, spec: dict[str, Any], state: str, says: str
) -> None:
    fleet.machine.bench.code = 1
    await fleet.apply(benchmark("wrong", **spec))

    async def has_failed() -> bool:
        reported = await status(fleet, "wrong")
        return reported.get("state") == state and says in reported.get("details", "") + reported.get(
            "failureMessage", ""
        )

    await fleet.until(has_failed)
    await remove(fleet, "wrong")
    assert not list(fleet.root.glob("benchmarks/default/*"))
